"""The paper's figures (published.yaml): which of them stand beside a run's own, and under which words."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import PUBLISHED
from fb_core.apps.settings.run import AVERAGE, ModelSettings

LLM = "Qwen/Qwen3-32B"
SLMS = {"Qwen/Qwen3-1.7B": "qwen3-1.7b", "Qwen/Qwen3-0.6B": "qwen3-0.6b"}
LARGER = "qwen3-1.7b"  # whose figures the paper has for all tables
DEVICE = "NVIDIA H200"
TABLES = ("methods", "pools", "horizons", "futures")  # of accuracies


@cache
def figures() -> dict[str, Any]:
    """All figures, as the file has them."""
    text = (resources.files("benchmarks.paper") / "published.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def averages() -> dict[str, float]:
    """The average accuracies of Qwen3-1.7B in percent, by key of a row."""
    return {key: row[-1] for key, row in figures()["accuracy"][LARGER].items()}


def is_published(settings: PaperSettings) -> bool:
    """Whether models, data and settings are the paper's, for one of its two SLMs."""
    models = settings.models
    paper = PaperSettings(models=ModelSettings(slm=models.slm, llm=LLM))
    free = {"per_shard", "token_budget", "microbatches", "checkpoint_steps"}
    sections = ("problems", "collect", "futures", "score", "train", "evaluate")
    same = all(
        getattr(settings, name).model_dump(exclude=free) == getattr(paper, name).model_dump(exclude=free)
        for name in sections
    )
    return same and models.slm in SLMS and models.llm == LLM and models.dtype in ("auto", "bfloat16")


class Published:
    """The figures for one run; every lookup gives None where the paper has none for its models."""

    def __init__(self, settings: PaperSettings) -> None:
        self.settings = settings
        self.slm = SLMS.get(settings.models.slm) if settings.models.llm == LLM else None

    def words(self, *devices: str) -> str:
        """The head of a column; with devices, for a figure that depends on the hardware."""
        same = is_published(self.settings) and all(device == DEVICE for device in devices)
        return "published" if same else "published, other setting"

    def accuracy(self, table: str, key: str, x: float | None, benchmark: str) -> float | None:
        """The share of a row's problems that are right; the paper's average is over all of its benchmarks."""
        whole = set(figures()["benchmarks"]) - {AVERAGE}
        if self.slm is None or table not in TABLES or (benchmark == AVERAGE and set(self._benchmarks) != whole):
            return None
        if key == PUBLISHED and table in ("horizons", "futures"):
            key = f"horizon-{x:g}" if x is not None else ""  # what stands beside the futures is no row of the paper's
        row = dict(zip(figures()["benchmarks"], figures()["accuracy"][self.slm].get(key, ()), strict=False))
        percent = row.get(benchmark)
        return None if percent is None else percent / 100

    @property
    def _benchmarks(self) -> tuple[str, ...]:
        return self.settings.evaluate.benchmarks

    def row(self, table: str, key: str) -> Mapping[str, float]:
        """The figures of a row of "deployment", "agreement" or "coverage"; empty if there are none."""
        row: Mapping[str, float] = figures()[table].get(key, {}) if self.slm == LARGER else {}
        return row

    def hours(self, stage: str) -> float | None:
        """H200 hours of a stage."""
        hours: float | None = figures()["offline"].get(stage) if self.slm == LARGER else None
        return hours

    def states(self, condition: str) -> int | None:
        """The number of states left after a condition of the filter, as its count is called."""
        return None if self.slm is None else figures()["filter"][self.slm][condition]
