"""A stage of a run: the same work on every shard, here, in threads or on Ray; it can be killed and resumed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast, get_args

from rich.progress import ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from fb_core.apps.pipeline.cluster import dismiss, work_on_ray
from fb_core.apps.pipeline.files import Artefact, Receipt, count_all
from fb_core.apps.pipeline.models import Models, models_of
from fb_core.apps.progress import Board
from fb_core.apps.settings.run import RunSettings, Slice, identity_of
from fb_core.verify.judges import FAULTS, Verdict, judge_of
from fb_core.verify.verifier import tally_words

SERVED_AT_ONCE = 4  # shards at once, so that a server stays busy while one shard's last continuations are written

Engine = Literal["local", "ray"]
Input = TypeVar("Input", bound="Stage")


class Output(NamedTuple):
    """The result of the work on one shard."""

    files: Mapping[str, bytes]  # by path inside the stage's folder; all begin with the shard's name
    counts: Mapping[str, int]
    seconds: float = 0.0  # work of earlier or other processes, added to this one's


class Stage(ABC):
    """One stage over one run's folder.

    A stage can read only its slice of the settings, and that slice is part of the identity of its files. `instead` maps
    stages to the variants of them that replace them as inputs.
    """

    name: ClassVar[str]  # of the stage and its folder
    command: ClassVar[str]  # the command that runs it
    # the settings that it reads, by section or key; all stages also read the models', but identify models by hashes
    slice: ClassVar[Sequence[str]] = ()
    reads: Sequence[type[Stage]] = ()  # the stages whose files it reads; may depend on the settings
    # roles whose identity its files depend on, among "slm", "llm", "tokenizer" and "valid_vocab"
    uses: ClassVar[Sequence[str]] = ("slm", "tokenizer")
    unit: ClassVar[str] = "problems"  # what its shards count
    parallel: ClassVar[bool] = True  # whether shards can be worked on in any order and on any worker
    loads: ClassVar[Sequence[str]] = ("slm",)  # the roles of the models in memory, unless a server has them
    decodes: ClassVar[bool] = True  # whether they decode, in batches of `models.batch_tokens`
    writer: ClassVar[Literal["slm", "llm"]] = "slm"  # the role of the model that works; "llm" may be on a server

    def __init__(
        self, settings: RunSettings, run: Path, instead: Mapping[type[Stage], type[Stage]] = MappingProxyType({})
    ) -> None:
        self.__whole = settings  # only to make its inputs, and itself in other processes
        self._instead = instead
        self.settings = cast(RunSettings, Slice(settings, (*self.slice, "models")))
        self.run = run
        self.folder = Artefact(run, self.name)
        self.on_progress: Callable[[int], None] = lambda done: None  # takes the finished units of the current shard
        self.is_main = True  # False in a process that only helps another one and writes nothing

    @property
    def served(self) -> bool:
        """Whether a server does the work."""
        return self.writer == "llm" and self.settings.models.llm_server is not None

    @property
    def models(self) -> Models:
        """The run's models, each loaded when first used."""
        return models_of(self.settings.models)

    @property
    def device(self) -> str:
        """The hardware that does the work, by name."""
        return "server" if self.served else self.models.device

    def input(self, kind: type[Input]) -> Input:
        """One of the stages whose files it reads, made with that stage's own slice of the settings."""
        assert kind in self.reads, f"{self.name} does not read {kind.name}"
        return cast(Input, self._instead.get(kind, kind)(self.__whole, self.run, self._instead))

    def worker(self) -> Callable[[], Callable[[str], Mapping[str, int]]]:
        """What makes, in another process, the function that computes and writes a shard of the same stage."""
        return partial(_make_worker, type(self), self.__whole, self.run.resolve(), self._instead)

    def data(self) -> dict[str, Any]:
        """Hashes of what its files depend on besides settings, inputs and models."""
        return {}

    @abstractmethod
    def shards(self) -> dict[str, int]:
        """The number of units of every shard, by name."""

    @abstractmethod
    def work(self, shard: str) -> Output:
        """Compute a shard without writing it."""

    def most_tokens(self) -> int:
        """The largest possible number of tokens of a unit, prompts and prefixes included; 0 where none are counted."""
        return 0

    def most(self) -> int:
        """The largest possible number of units, from the settings alone."""
        return sum(self.shards().values())

    def choose(self) -> dict[str, Any]:
        """Decisions for this machine, made when the stage begins and then kept."""
        return {}

    def summary(self) -> dict[str, Any]:
        """What the manifest holds about the finished shards besides their counts."""
        return {}

    def report(self, manifest: dict[str, Any]) -> str:
        """A report on the finished stage in Markdown."""
        counts, in_tally = manifest["counts"], {*get_args(Verdict), *FAULTS}
        words = [f"{count:,} {name}" for name, count in counts.items() if name not in in_tally]
        words += filter(None, [tally_words(counts)])
        return f"**{self.name}**: {', '.join(words)}; {clock(manifest['cost']['seconds'])} of work"

    def identity(self, models: bool = True) -> dict[str, Any]:
        """Everything that its files depend on; with `models` their hashes, for which they may have to be downloaded.

        ValueError if a stage that it reads is not finished, or was made with other settings or models.
        """
        inputs = {}
        for kind in self.reads:
            read = self.input(kind)
            manifest = read.folder.finished(f"run `{kind.command}` first")
            read.folder.check(manifest, read.identity(models))
            inputs[kind.name] = manifest["digest"]
        hashes: dict[str, Any] = {"models": self.models.hashes(*self.uses)} if models else {}
        if verify := getattr(self.settings, "verify", None):
            hashes |= judge_of(verify.judge, pattern=verify.pattern).source()
        return {"settings": identity_of(self.settings), "data": self.data(), "inputs": inputs, **hashes}


def _make_worker(kind: type[Stage], *arguments: Any) -> Callable[[str], Mapping[str, int]]:
    return partial(work_and_put, kind(*arguments))


def work_and_put(stage: Stage, shard: str) -> Mapping[str, int]:
    """Compute one shard and write it; returns its counts."""
    began = time.perf_counter()
    output = stage.work(shard)
    seconds = time.perf_counter() - began + output.seconds
    stage.folder.put(shard, output.files, output.counts, seconds, stage.device)
    return output.counts


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def run_stage(stage: Stage, engine: Engine = "local", *, is_main: bool = True) -> dict[str, Any]:
    """Do what is left of a stage and write its final manifest, which is returned; empty if not `is_main`.

    The engine "local" is this process, "ray" workers of a Ray cluster. ValueError if the stage was begun with other
    settings, models or inputs, or an input is bad; OSError without disk space or server. Finished work is kept.
    """
    identity, shards = stage.identity(), stage.shards()
    stage.is_main = is_main
    if not is_main:
        done = stage.folder.receipts(shards)
        for shard in [shard for shard in shards if shard not in done]:
            stage.work(shard)
        return {}
    with stage.folder.locked():
        begun = stage.folder.manifest()
        stage.folder.begin(identity, stage.choose() if begun is None or stage.folder.empty() else begun["chosen"])
        done = stage.folder.receipts(shards)
        pending = [shard for shard in shards if shard not in done]
        with Board(_Rate(stage.unit), TimeRemainingColumn()) as board:
            display = _Display(board, stage, shards, done)
            if engine == "ray" and not stage.parallel:
                dismiss()  # frees the GPU for this process
            if engine == "ray" and stage.parallel:
                say = partial(board.say, stage.name, always=True)
                work_on_ray(stage.worker(), pending, not stage.served, display.shard_done, say)
            elif stage.served:
                _work_in_threads(stage, pending, display.shard_done)
            else:
                stage.on_progress = display.within
                for shard in pending:
                    display.shard_done(shard, work_and_put(stage, shard))
        return stage.folder.complete(list(shards), stage.summary())


def _work_in_threads(stage: Stage, shards: Sequence[str], on_done: Callable[[str, Mapping[str, int]], None]) -> None:
    """Work on several shards at once in threads of this process, which wait for a server."""
    for shard in shards[:1]:  # alone, so that shared models are loaded once
        on_done(shard, work_and_put(stage, shard))
    threads = ThreadPoolExecutor(SERVED_AT_ONCE)
    try:
        under_way = {threads.submit(work_and_put, stage, shard): shard for shard in shards[1:]}
        for done in as_completed(under_way):
            on_done(under_way[done], done.result())
    finally:
        threads.shutdown(cancel_futures=True)


def plan(stage: Stage) -> str:
    """What `run_stage` would do, in a line: shards and units left, their most tokens and time at the rate so far."""
    try:
        identity, manifest = stage.identity(models=False), stage.folder.manifest()
        if manifest is not None:
            stage.folder.check(manifest, identity)
        shards = stage.shards()
    except (OSError, ValueError, ImportError) as problem:
        text = f"{stage.name}: cannot run yet: {str(problem).removeprefix(f'{stage.name}: ').rstrip('.')}"
        with suppress(OSError, ValueError, ImportError):  # the settings alone may not tell
            most = stage.most()
            text += f"; according to the settings, at most {most:,} {stage.unit}{_tokens(stage, most)}{_memory(stage)}"
        return text
    done = stage.folder.receipts(shards)
    units, finished = sum(shards.values()), sum(shards[shard] for shard in done)
    left = units - finished
    text = f"{stage.name}: {len(shards) - len(done)} of {len(shards)} shards, {left} of {units} {stage.unit} to do"
    text += _tokens(stage, left) + _memory(stage)
    if finished:
        seconds = sum(receipt.seconds for receipt in done.values())
        text += f", {clock(seconds / finished * left)} on one device at the rate so far"
    return text


def _tokens(stage: Stage, units: int) -> str:
    """The most tokens of so many units, as the end of a sentence; empty if the stage counts none."""
    if not (tokens := stage.most_tokens() * units):
        return ""
    prompts = "" if stage.models.tokenizer_here else " without the prompts, since the tokenizer is not on this machine"
    return f", at most {tokens:,} tokens{prompts}"


def _memory(stage: Stage) -> str:
    """The memory of the models that a stage loads, and whether it is free, as the end of a sentence."""
    if not stage.most_tokens():
        return ""
    models, words, wanted = stage.models, [], 0
    for role in stage.loads:
        if (found := models.memory(role)) is None:
            served = role == "llm" and models.settings.llm_server is not None
            words.append(f"{role} on its server" if served else f"{role} of unknown size, not on this machine")
            continue
        weights, keys = found
        wanted += weights + keys * stage.decodes
        cached = f" and at most {keys / 1e9:.3g} GB of keys and values" if stage.decodes else ""
        words.append(f"{role} with {weights / 1e9:.3g} GB of weights{cached}")
    text = f", {', '.join(words)}"
    if stage.served or wanted <= (free := models.free):
        return text
    return (
        f"{text}; **does not fit**: expected {wanted / 1e9:.3g} GB free on {models.device}, got {free / 1e9:.3g}; "
        "lower models.batch_tokens, give a server less of the GPU (vLLM takes 90% by default), or name another device"
    )


class _Display:
    """Shows the progress of one stage with rate and remaining time, and the verdicts so far if answers are judged."""

    def __init__(self, board: Board, stage: Stage, shards: Mapping[str, int], done: Mapping[str, Receipt]) -> None:
        self._board, self._stage, self._shards = board, stage, shards
        self._before = self._done = sum(shards[shard] for shard in done)
        self._of, self._counts = sum(shards.values()), count_all(done.values())
        self._began = time.perf_counter()
        board.show(stage.name, self._done, self._of)
        if self._done:
            board.say(stage.name, f"{self._done} of {self._of} {stage.unit} were already done")

    def within(self, done: int) -> None:
        """`done` units of the current shard are finished."""
        self._board.show(self._stage.name, self._done + done, self._of)

    def shard_done(self, shard: str, counts: Mapping[str, int]) -> None:
        """A shard is written; `counts` says what it holds."""
        self._done += self._shards[shard]
        self._counts.update(counts)
        verdicts = tally_words(self._counts)
        self._board.show(self._stage.name, self._done, self._of, verdicts)
        rate = (self._done - self._before) / max(time.perf_counter() - self._began, 1e-9)
        left = clock((self._of - self._done) / rate) if rate else "?"
        text = f"{shard} done, {self._done}/{self._of} {self._stage.unit}, {rate:.3g}/s, {left} left"
        self._board.say(self._stage.name, text + (f"; {verdicts}" if verdicts else ""))


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """Units per second; empty until known."""
        return Text(f"{task.speed:.3g} {self.unit}/s" if task.speed else "", style="progress.data.speed")
