"""A stage of a run: the same work on every shard, in this process or under Ray, begun, broken off and gone on with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast

from rich.progress import ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from fb_core.config import RunSettings, Slice, counted
from fb_core.progress import Board
from fb_core.stages.artefacts import Artefact, Receipt
from fb_core.stages.inputs import Models, models_of
from fb_core.verify import tally_words

Engine = Literal["local", "ray"]
Input = TypeVar("Input", bound="Stage")


class Output(NamedTuple):
    """What the work on one shard gives."""

    files: Mapping[str, bytes]  # by name inside the stage's folder, all beginning with the shard's
    counts: Mapping[str, int]
    seconds: float = 0.0  # of earlier processes, and of other ones


class Cost(NamedTuple):
    """What one unit of a stage takes, before anything is measured."""

    words: str
    tokens: int = 0  # at most, those of prompts and prefixes included
    role: str = "slm"  # of the model that they pass
    llm_tokens: int = 0  # likewise of the LLM, where both take part


class Stage(ABC):
    """One stage over one run's folder.

    Of the settings it is given its slice alone, which is also what identifies its files; another key cannot be read.

    Args:
        settings: of the whole run.
        run: its folder.

    Attributes:
        name: of the stage and its folder.
        command: that works through it.
        slice: the settings that it reads, by section or key; those of the models come to all stages, which identify
            the models by hashes.
        reads: the stages whose files it reads.
        uses: roles whose identity its files depend on, among "slm", "llm", "tokenizer" and "valid_vocab".
        unit: what its shards count.
        parallel: whether shards can be worked on in any order, anywhere.
        settings: its slice.
        leads: False in a process that only helps another one, and writes nothing.
        on_progress: told how many units of the shard at work are done.
    """

    name: ClassVar[str]
    command: ClassVar[str]
    slice: ClassVar[Sequence[str]] = ()
    reads: ClassVar[Sequence[type[Stage]]] = ()
    uses: ClassVar[Sequence[str]] = ("slm", "tokenizer")
    unit: ClassVar[str] = "problems"
    parallel: ClassVar[bool] = True

    def __init__(self, settings: RunSettings, run: Path) -> None:
        self.__whole = settings  # for its inputs and its like elsewhere alone
        self.settings = cast(RunSettings, Slice(settings, (*self.slice_in(settings), "models")))
        self.run = run
        self.folder = Artefact(run, self.name)
        self.on_progress: Callable[[int], None] = lambda done: None
        self.leads = True

    @classmethod
    def slice_in(cls, settings: RunSettings) -> Sequence[str]:
        """The slice under these settings."""
        return cls.slice

    @property
    def at_once(self) -> int:
        """How many shards one process works on together."""
        return 1

    @property
    def on_gpu(self) -> bool:
        """Whether its work needs a GPU, where there are any."""
        return True

    @property
    def models(self) -> Models:
        """The run's models, loaded when used."""
        return models_of(self.settings.models)

    @property
    def device(self) -> str:
        """Where the work is done, by the name of the hardware."""
        return self.models.device

    def inputs(self) -> Sequence[type[Stage]]:
        """The stages whose files it reads under its settings."""
        return self.reads

    def input(self, kind: type[Input]) -> Input:
        """One of the stages whose files it reads; it was made with that one's own slice, or this one will not begin."""
        assert kind in self.inputs(), f"{self.name} does not read {kind.name}"
        return kind(self.__whole, self.run)

    def elsewhere(self, run: Path) -> Callable[[], Stage]:
        """What makes the same stage in another process."""
        return partial(type(self), self.__whole, run)

    def data(self) -> dict[str, Any]:
        """Hashes of what its files depend on beside settings, inputs and models."""
        return {}

    @abstractmethod
    def shards(self) -> dict[str, int]:
        """Every shard with the number of its units."""

    @abstractmethod
    def work(self, shard: str) -> Output:
        """Compute a shard; nothing is written yet."""

    @abstractmethod
    def cost(self) -> Cost:
        """What one of its units takes."""

    def most(self) -> int:
        """Units at most, by the settings alone."""
        return sum(self.shards().values())

    def choose(self) -> dict[str, Any]:
        """What is decided for this machine when the stage begins, and then stays."""
        return {}

    def summary(self) -> dict[str, Any]:
        """What the manifest says of the finished shards, beside their counts."""
        return {}

    def units(self, manifest: dict[str, Any]) -> int:
        """How many units the finished stage worked on."""
        return sum(self.shards().values())

    def report(self, manifest: dict[str, Any]) -> str:
        """The finished stage in Markdown, for people."""
        counts = ", ".join(f"{count:,} {name}" for name, count in manifest["counts"].items())
        return f"**{self.name}**: {counts}; {_clock(manifest['cost']['seconds'])} of work"

    def identity(self, models: bool = True) -> dict[str, Any]:
        """Everything that its files depend on; without the models, whose hashes may want them downloaded, if so wished.

        Raises:
            ValueError: a stage that it reads is not finished, or was made with other settings or models.
        """
        inputs = {}
        for kind in self.inputs():
            read = self.input(kind)
            manifest = read.folder.manifest()
            if manifest is None or not manifest["complete"]:
                got = "none" if manifest is None else "a part"
                remedy = f"run `futurebridge {kind.command}` first"
                raise ValueError(f"{self.name}: expected finished {kind.name} in {self.run}, got {got}; {remedy}")
            read.folder.check(manifest, read.identity(models))
            inputs[kind.name] = manifest["digest"]
        known = {"models": self.models.hashes(*self.uses)} if models else {}
        return {"settings": counted(self.settings), "data": self.data(), "inputs": inputs, **known}


def run_stage(stage: Stage, engine: Engine = "local", *, leads: bool = True) -> dict[str, Any]:
    """Do what is left of a stage and close it.

    Args:
        stage: the work.
        engine: "local" for this process, "ray" for workers of a Ray cluster.
        leads: False in a process that only helps another one, and writes nothing.

    Returns:
        the manifest.

    Raises:
        ValueError: the folder was begun with other settings, models or inputs, or an input is missing or damaged.
        OSError: no room, or no server; what is finished is kept.
    """
    identity = stage.identity()
    shards = stage.shards()
    stage.leads = leads
    if not leads:
        done = stage.folder.receipts(shards)
        for shard in shards:
            if shard not in done:
                stage.work(shard)
        return {}
    with stage.folder.held():
        begun = stage.folder.manifest()
        stage.folder.begin(identity, stage.choose() if begun is None else begun["chosen"])
        done = stage.folder.receipts(shards)
        pending = [shard for shard in shards if shard not in done]
        with Board(_Rate(stage.unit), TimeRemainingColumn()) as board:
            told = _Told(board, stage, shards, done)
            if engine == "ray":
                from fb_core.stages.cluster import dismiss, work_on_ray

                if stage.on_gpu and not stage.parallel:
                    dismiss()  # the GPU is this process's now
            if engine == "ray" and stage.parallel:
                work_on_ray(stage, pending, told.shard_done)
            elif stage.at_once > 1:
                _work_in_threads(stage, pending, told.shard_done)
            else:
                stage.on_progress = told.within
                for shard in pending:
                    told.shard_done(shard, work_and_put(stage, shard))
        return stage.folder.complete(list(shards), stage.summary())


def _work_in_threads(stage: Stage, shards: Sequence[str], on_done: Callable[[str, Mapping[str, int]], None]) -> None:
    """Several shards at once in this process, whose threads wait for a server."""
    for shard in shards[:1]:  # alone: what all of them use is loaded once
        on_done(shard, work_and_put(stage, shard))
    threads = ThreadPoolExecutor(stage.at_once)
    try:
        under_way = {threads.submit(work_and_put, stage, shard): shard for shard in shards[1:]}
        for done in as_completed(under_way):
            on_done(under_way[done], done.result())
    finally:
        threads.shutdown(cancel_futures=True)


def work_and_put(stage: Stage, shard: str) -> Mapping[str, int]:
    """Compute one shard and write it; what it holds, by name."""
    began = time.perf_counter()
    output = stage.work(shard)
    seconds = time.perf_counter() - began + output.seconds
    stage.folder.put(shard, output.files, output.counts, seconds, stage.device)
    return output.counts


def plan(stage: Stage) -> str:
    """What `run_stage` would do: shards and units left, what they cost at most, and their time at the rate so far."""
    try:
        identity, manifest = stage.identity(models=False), stage.folder.manifest()
        if manifest is not None:
            stage.folder.check(manifest, identity)
        shards = stage.shards()
    except (OSError, ValueError) as problem:
        lines = [f"{stage.name}: cannot run yet: {str(problem).removeprefix(f'{stage.name}: ')}"]
        with suppress(OSError, ValueError):  # what the settings themselves do not tell
            most = stage.most()
            lines += [f"  by the settings alone, at most {most:,} {stage.unit}", _price(stage, most)]
        return "\n".join(lines)
    done = stage.folder.receipts(shards)
    units, finished = sum(shards.values()), sum(shards[shard] for shard in done)
    left = units - finished
    lines = [f"{stage.name}: {len(shards) - len(done)} of {len(shards)} shards, {left} of {units} {stage.unit} to do"]
    lines.append(_price(stage, left))
    if finished:
        seconds = sum(receipt.seconds for receipt in done.values())
        devices = ", ".join(sorted({receipt.device for receipt in done.values()}))
        rate = f"{finished / max(seconds, 1e-9):.3g} {stage.unit} a second on {devices}"
        lines.append(f"  measured: {rate}, {_clock(seconds / finished * left)} left on one")
    return "\n".join(lines)


def _price(stage: Stage, units: int) -> str:
    """What so many units cost at most, in words."""
    cost = stage.cost()
    if not cost.tokens or (work := _work(stage, cost.role, cost.tokens * units)) is None:
        return f"  {cost.words}"
    text = f"  at most {cost.tokens * units:,} tokens {cost.words}, {work}"
    if read := cost.llm_tokens * units:
        text += ", ".join(filter(None, (f", and {read:,} tokens read once by the LLM", _work(stage, "llm", read))))
    return text + ("" if stage.models.tokenizer_here else ", prompts not counted: the tokenizer is not on this machine")


def _work(stage: Stage, role: str, tokens: int) -> str | None:
    """What so many tokens are for a model, None where its size is not known."""
    size = stage.models.parameters(role)
    return None if size is None else f"{2e-12 * size * tokens:,.3g} TFLOP by {size / 1e9:.3g}B weights"


class _Told:
    """Progress of one stage, with rate and remaining time; where answers are judged, what became of them so far."""

    def __init__(self, board: Board, stage: Stage, shards: Mapping[str, int], done: Mapping[str, Receipt]) -> None:
        self._board, self._stage, self._shards = board, stage, shards
        self._before = self._done = sum(shards[shard] for shard in done)
        self._of = sum(shards.values())
        self._counts: Counter[str] = Counter()
        for receipt in done.values():
            self._counts.update(receipt.counts)
        self._began = time.perf_counter()
        board.show(stage.name, self._done, self._of)
        if self._done:
            board.say(stage.name, f"{self._done} of {self._of} {stage.unit} were done before")

    def within(self, done: int) -> None:
        """So many units of the shard at work are done."""
        self._board.show(self._stage.name, self._done + done, self._of)

    def shard_done(self, shard: str, counts: Mapping[str, int]) -> None:
        """A shard is written; `counts` are what it holds."""
        self._done += self._shards[shard]
        self._counts.update(counts)
        verdicts = tally_words(self._counts)
        self._board.show(self._stage.name, self._done, self._of, verdicts)
        rate = (self._done - self._before) / max(time.perf_counter() - self._began, 1e-9)
        left = _clock((self._of - self._done) / rate) if rate else "?"
        text = f"{shard} done, {self._done}/{self._of} {self._stage.unit}, {rate:.3g}/s, {left} left"
        self._board.say(self._stage.name, text + (f"; {verdicts}" if verdicts else ""))


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """Units a second, as far as known."""
        return Text(f"{task.speed:.3g} {self.unit}/s" if task.speed else "", style="progress.data.speed")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
