"""The paper's figures stand beside a run of its models, each in its own table, with a word on the setting."""

from __future__ import annotations

import pytest
from report_runs import read, rows_of

from benchmarks.paper.published import DEVICE, SLMS, Published
from benchmarks.paper.published import figures as all_figures
from benchmarks.paper.report import render
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import TABLES, Plan
from fb_core.apps.pipeline.scores import FILTERS
from fb_core.apps.settings.config import AVERAGE, ModelSettings, changed

LARGER, SMALLER = SLMS
UNSEEN = ("TaH", "TSD-KD", "Multiplex Thinking")


def settings(slm: str = LARGER, **changes) -> PaperSettings:
    return changed(PaperSettings(models=ModelSettings(slm=slm, llm="Qwen/Qwen3-32B")), changes)


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float | int) else []


def report(chosen: PaperSettings, tmp_path) -> str:
    """The page of a run of these settings in which nothing but the paper's figures is of interest."""
    paper, plan = Published(chosen), Plan(chosen, tmp_path, 64)
    rows = []
    for name in ("methods", "pools", "horizons", "futures"):
        listed = [(variant.key, variant.x) for variant in TABLES[name].rows(plan)]
        listed += [(peer, None) for peer in UNSEEN if name == "methods"]
        for key, x in listed:
            for benchmark in (*chosen.evaluate.benchmarks, AVERAGE):
                published = paper.accuracy(name, key, x, benchmark)
                about = {"table": name, "benchmark": benchmark, "key": key, "label": key, "x": x}
                rows.append(about | {"published": published, "accuracy": [0.5, 0.5, 0.5]})
    timed = [
        {"method": name, "key": name, "loop": "fast", "problems": 9, "calls": 9.0, "seconds": 9.0}
        | {"published": paper.row("deployment", name)}
        for name in ("greedy", "s2t", "published")
    ]
    wheres = ("validation", "gsm8k", "math-500", "olympiadbench")
    agreement = [
        {"where": where, "score": score, "kind": "all", "states": 9, "pairs": 9, "mixed_states": 9}
        | dict.fromkeys(("pairwise", "top1", "top1_mixed", "top1_minus_slm", "top1_minus_llm"))
        | {"published, %": paper.row("agreement", score).get("pairwise" if where == "validation" else where)}
        for where in wheres
        for score in ("SLM", "LLM", "Direct-B_64", "reranker")
    ]
    coverage = [
        {"where": where, "pool": pool, "states": 9, "mixed_states": 9, "mean_size": 9.0}
        | {"coverage": None, "coverage_mixed": None}
        | {"published": {"size": figure.get("size"), "coverage, %": figure.get(where)}}
        for where in wheres
        for pool in ("SLM", "LLM", "joint")
        for figure in [paper.row("coverage", pool)]
    ]
    filters = [{"condition": name, "states": 9, "published": paper.states(name)} for name in FILTERS]
    costs = {"units": 9, "unit": "problems", "seconds": 9.0, "gpu_hours": 9.0, "devices": [DEVICE]}
    offline = [
        {"stage": stage, **costs, "published": paper.hours(stage)}
        for stage in ("states", "futures", "scores", "training")
    ]
    parts = {"agreement": agreement, "coverage": coverage, "filter": filters, "offline": offline}
    run = {"name": "paper", "results": rows, "timed": timed, "parts": parts}
    return render([read(run)], {})


@pytest.mark.parametrize("slm", SLMS)
def test_every_figure_of_the_file_is_in_a_table(slm, tmp_path):
    page = report(settings(slm), tmp_path)
    shown = {cell for row in rows_of(page) for cell in row.values()}

    def missing(wanted: list[float]) -> list[str]:
        return [text for number in wanted if (text := f"{number:,.4f}".rstrip("0").rstrip(".")) not in shown]

    known, name = all_figures(), SLMS[slm]
    wanted = numbers(known["filter"][name]) + [number / 100 for number in numbers(known["accuracy"][name])]
    if slm == LARGER:
        stages = [hours for stage, hours in known["offline"].items() if stage != "total"]
        wanted += numbers([known[part] for part in ("agreement", "coverage", "deployment")]) + stages
        assert known["offline"]["total"] == pytest.approx(sum(stages))
    assert missing(wanted) == []
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
        ({}, (DEVICE,), "published"),
        ({}, ("NVIDIA H100",), "published, other setting"),
        ({"models": {"dtype": "float32"}}, (), "published, other setting"),
        ({"problems": {"certification": 750}}, (), "published, other setting"),
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
