"""The paper's figures stand beside a run of its models, each in its own table, with a word on the setting."""

from __future__ import annotations

import pytest

from benchmarks.paper.gather import OFFLINE
from benchmarks.paper.published import SLMS, Published
from benchmarks.paper.published import figures as all_figures
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import TABLES, Plan
from fb_core.apps.pipeline.scores import FILTERS
from fb_core.apps.settings.base import change
from fb_core.apps.settings.run import AVERAGE, ModelSettings

LARGER, SMALLER = SLMS
UNSEEN = ("TaH", "TSD-KD", "Multiplex Thinking")


def settings(slm: str = LARGER, **changes) -> PaperSettings:
    return change(PaperSettings(models=ModelSettings(slm=slm, llm="Qwen/Qwen3-32B")), changes)


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float | int) else []


def shown(chosen: PaperSettings, tmp_path) -> set[float | None]:
    """The paper's figures that stand beside a run of these settings."""
    paper, plan = Published(chosen), Plan(chosen, tmp_path, 64)
    found = {
        paper.accuracy(name, key, x, benchmark)
        for name in ("methods", "pools", "horizons", "futures")
        for key, x in [*((row.key, row.x) for row in TABLES[name].rows(plan)), *((peer, None) for peer in UNSEEN)]
        for benchmark in (*chosen.evaluate.benchmarks, AVERAGE)
    }
    rows = {"deployment": ("greedy", "s2t", "published"), "agreement": ("SLM", "LLM", "Direct-B_64", "reranker")}
    for part, keys in (rows | {"coverage": ("SLM", "LLM", "joint")}).items():
        found |= {figure for key in keys for figure in paper.row(part, key).values()}
    return found | {paper.states(name) for name in FILTERS} | {paper.hours(stage.name) for stage in OFFLINE}


@pytest.mark.parametrize("slm", SLMS)
def test_every_figure_of_the_file_is_beside_a_run(slm, tmp_path):
    known, name = all_figures(), SLMS[slm]
    wanted = numbers(known["filter"][name]) + [number / 100 for number in numbers(known["accuracy"][name])]
    if slm == LARGER:
        stages = [hours for stage, hours in known["offline"].items() if stage != "total"]
        wanted += numbers([known[part] for part in ("agreement", "coverage", "deployment")]) + stages
        assert known["offline"]["total"] == pytest.approx(sum(stages))
    assert set(wanted) <= shown(settings(slm), tmp_path)
    assert len(wanted) > 60


def test_other_models_have_no_figures():
    for models in (
        {"slm": "Qwen/Qwen3-4B", "llm": "Qwen/Qwen3-32B"},
        {"slm": LARGER, "llm": "Qwen/Qwen3-14B"},
        {"slm": "demo:plans", "llm": "demo:plans"},
    ):
        paper = Published(PaperSettings(models=ModelSettings(**models)))
        assert paper.accuracy("methods", "greedy", None, "gsm8k") is None
        assert (paper.row("deployment", "s2t"), paper.hours("scores"), paper.states("admitted")) == ({}, None, None)


@pytest.mark.parametrize(
    ("changes", "devices", "words"),
    [
        ({}, (), "published"),
        ({}, ("NVIDIA H100",), "published, other setting"),
        ({"evaluate": {"benchmarks": ["gsm8k"]}}, (), "published, other setting"),
    ],
)
def test_another_setting_is_said(changes, devices, words):
    assert Published(settings(**changes)).words(*devices) == words


def test_an_average_is_that_of_the_papers_benchmarks_alone():
    whole, one = Published(settings()), Published(settings(evaluate={"benchmarks": ["gsm8k", "math-500"]}))
    assert whole.accuracy("methods", "s2t", None, AVERAGE) == pytest.approx(0.4914)
    assert one.accuracy("methods", "s2t", None, AVERAGE) is None
    assert one.accuracy("methods", "s2t", None, "math-500") == pytest.approx(0.797)
    assert whole.accuracy("horizons", "published", 128.0, "gsm8k") == pytest.approx(0.969)
    assert whole.accuracy("futures", "published", None, "gsm8k") is None
    assert whole.accuracy("alpha", "distilled", 0.0, "gsm8k") is None
    assert whole.accuracy("methods", "majority", None, "my.jsonl") is None
