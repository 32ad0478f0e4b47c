"""A stage of a run: the same work on every shard, in this process or under Ray; it can be killed and resumed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast

from fb_core.config import RunSettings, Slice, identity_of
from fb_core.stages.artefacts import Artefact
from fb_core.stages.inputs import Models, models_of

Engine = Literal["local", "ray"]
Input = TypeVar("Input", bound="Stage")


class Output(NamedTuple):
    """The result of the work on one shard."""

    files: Mapping[str, bytes]  # by path inside the stage's folder; all begin with the shard's name
    counts: Mapping[str, int]
    seconds: float = 0.0  # work of earlier or other processes, added to this one's


class Cost(NamedTuple):
    """An upper bound of the cost of one unit of a stage, known before anything is measured."""

    words: str
    tokens: int = 0  # that `role` processes, including prompts and prefixes
    role: str = "slm"
    llm_tokens: int = 0  # that the LLM processes as well, if both models take part


class Stage(ABC):
    """One stage over one run's folder.

    A stage can read only its slice of the settings, and that slice is part of the identity of its files.

    Args:
        settings: of the whole run.
        run: its folder.
        instead: stages that take the place of others under their names, as a variant's own scores.

    Attributes:
        name: of the stage and its folder.
        command: the command that runs it.
        slice: the settings that it reads, by section or key; all stages also read those of the models, but identify
            the models by hashes.
        reads: the stages whose files it reads; may depend on the settings.
        uses: roles whose identity its files depend on, among "slm", "llm", "tokenizer" and "valid_vocab".
        unit: what its shards count.
        parallel: whether shards can be worked on in any order and on any worker.
        writer: the role of the model that does the work; "llm" may be on a server.
        settings: its slice.
        is_main: False in a process that only helps another one and writes nothing.
        on_progress: called with the number of finished units of the current shard.
    """

    name: ClassVar[str]
    command: ClassVar[str]
    slice: ClassVar[Sequence[str]] = ()
    reads: Sequence[type[Stage]] = ()
    uses: ClassVar[Sequence[str]] = ("slm", "tokenizer")
    unit: ClassVar[str] = "problems"
    parallel: ClassVar[bool] = True
    writer: ClassVar[Literal["slm", "llm"]] = "slm"

    def __init__(
        self, settings: RunSettings, run: Path, instead: Mapping[type[Stage], type[Stage]] = MappingProxyType({})
    ) -> None:
        self.__whole = settings  # only to make its inputs, and itself in other processes
        self._instead = instead
        self.settings = cast(RunSettings, Slice(settings, (*self.slice, "models")))
        self.run = run
        self.folder = Artefact(run, self.name)
        self.on_progress: Callable[[int], None] = lambda done: None
        self.is_main = True

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

    def factory(self, run: Path) -> Callable[[], Stage]:
        """A function that makes the same stage in another process."""
        return partial(type(self), self.__whole, run, self._instead)

    def data(self) -> dict[str, Any]:
        """Hashes of everything else that its files depend on, besides settings, inputs and models."""
        return {}

    @abstractmethod
    def shards(self) -> dict[str, int]:
        """The number of units of every shard, by name."""

    @abstractmethod
    def work(self, shard: str) -> Output:
        """Compute a shard without writing it."""

    @abstractmethod
    def cost(self) -> Cost:
        """The cost of one unit."""

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
        counts = ", ".join(f"{count:,} {name}" for name, count in manifest["counts"].items())
        return f"**{self.name}**: {counts}; {clock(manifest['cost']['seconds'])} of work"

    def identity(self, models: bool = True) -> dict[str, Any]:
        """Everything that its files depend on.

        Args:
            models: whether to include the models' hashes, for which they may have to be downloaded.

        Raises:
            ValueError: a stage that it reads is not finished, or was made with other settings or models.
        """
        inputs = {}
        for kind in self.reads:
            read = self.input(kind)
            manifest = read.folder.manifest()
            if manifest is None or not manifest["complete"]:
                got = "none" if manifest is None else "a part"
                remedy = f"run `{kind.command}` first"
                raise ValueError(f"{self.name}: expected finished {kind.name} in {self.run}, got {got}; {remedy}")
            read.folder.check(manifest, read.identity(models))
            inputs[kind.name] = manifest["digest"]
        known = {"models": self.models.hashes(*self.uses)} if models else {}
        return {"settings": identity_of(self.settings), "data": self.data(), "inputs": inputs, **known}


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
