"""The methods, ours and peers': one file (or folder) each, named for the method, whose `METHOD` describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline import models
from fb_core.apps.pipeline.models import LABELS, Generate
from fb_core.decode.decoder import Generation, Usage


class Context(models.Context):
    """What a run offers a method: as `fb_core.apps.pipeline.models.Context`, with the settings of the comparison.

    Without `max_length` everything decodes in the plain loop.
    """

    def __init__(
        self, method: str, settings: PaperSettings, run: Path, max_length: int | None = None, max_batch: int = 1
    ) -> None:
        super().__init__(settings, run, max_length, max_batch)
        self.method, self.compare = method, settings.compare


@dataclass
class CountedGeneration(Generation):
    """A generation of a method that counts itself what it asked of the LLM."""

    counted: Usage

    @property
    def usage(self) -> Usage:
        return self.counted


@dataclass(frozen=True)
class Method:
    """How prompts are decoded."""

    name: str  # the file's, with dashes
    label: str  # in tables; {votes} and {name} are filled in
    # maps a run's context and a seed (None if not seeded) to the function that decodes
    decode: Callable[[Context, Any], Generate]
    source: str = ""  # the paper and software that it is from
    seeded: bool = False  # whether it runs once per seed
    routed: bool = False  # whether it needs trained routers
    # the loops in which it is timed against "greedy". In the fast one the decoders of the context run on buffers, one
    # prompt at a time
    timed: tuple[Literal["fast", "plain"], ...] = ()

    @classmethod
    def named(cls, name: str, **options: Any) -> Method:
        """A method that the package has under this name."""
        return cls(name, LABELS[name], lambda run, seed: run.decoder_named(name, seed).generate_many, **options)


def method(name: str) -> Method:
    """The method of a name; a checkpoint's name begins with `settings.EXTERNAL`."""
    stem = name.partition(":")[0].replace("-", "_")
    return cast(Method, import_module(f"{__name__}.{stem}").METHOD)


def generator(
    name: str, settings: PaperSettings, run: Path, seed: int | None, max_length: int | None = None, max_batch: int = 1
) -> Generate:
    """The function that decodes prompts with a method; the seed is None unless the method runs once per seed."""
    return method(name).decode(Context(name, settings, run, max_length, max_batch), seed)


def seed_of(name: str, settings: PaperSettings) -> int | None:
    """The run's first seed for a method that runs once per seed, else None."""
    return settings.train.seeds[0] if method(name).seeded else None


def label_of(name: str, settings: PaperSettings) -> str:
    """A method's label in tables."""
    return method(name).label.format(name=name, votes=settings.compare.votes)
