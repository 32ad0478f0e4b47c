"""The paper's orderings: which of them a run confirms."""

from __future__ import annotations

import pytest
from report_runs import read, render, rows_of, section, tiny

from benchmarks.paper.orderings import ordering_lines, orderings
from benchmarks.paper.published import averages
from benchmarks.paper.rows import Result


def rows_read(rows: list[dict]) -> tuple[Result, ...]:
    return read({"name": "n", "results": rows}).results


def test_a_loss_is_told_where_a_win_would_be():
    def lines(shift: float) -> list[str]:
        return ordering_lines({"b": read(tiny(shift=shift)).results})

    counts, _, _, _, first, *_ = lines(0.6)
    assert counts.startswith("Verdicts: b: reversed ")
    assert first.startswith("| published recipe > takeover | +2.0 | -63.4 [")
    assert first.endswith("] reversed |")
    assert not [line for line in lines(0.0) if line.startswith("| published recipe > d") and "reversed" in line]


def test_orderings_are_the_papers_and_none_is_against_its_averages():
    """Its table of all methods, its ablations, horizons and futures, in percent."""
    paper = averages()
    main = ["published", "s2t", "takeover", "r2r", "s2t-local", "majority", "greedy"]
    assert [paper[key] for key in main] == [50.38, 49.14, 48.40, 47.70, 40.20, 38.40, 37.30]
    pools = ["pool-slm", "pool-llm", "pool-slm-wide", "direct", "distilled"]
    assert [paper[key] for key in pools] == [47.9, 48.3, 48.0, 47.2, 46.7]
    assert [paper[f"horizon-{length}"] for length in (16, 32, 64, 128)] == [47.7, 48.7, 50.38, 50.5]
    futures = ["verified", "greedy", "incorrect", "cross-state", "shuffled"]
    assert [paper[f"future-{kind}"] for kind in futures] == [50.38, 48.2, 46.1, 44.3, 43.2]
    lengths = [
        {"table": "horizons", "benchmark": "b", "key": key, "label": key, "x": x}
        for key, x in (("h16", 16), ("h32", 32), ("published", 64), ("h128", 128))
    ]
    found = {one.words: one.paper for one in orderings(rows_read(lengths))}
    assert all(difference > 0 for difference in found.values())
    wanted = {
        "published recipe > takeover": 1.98,
        "published recipe > R2R": 2.68,
        "published recipe > S2T": 1.24,
        "S2T > takeover": 0.74,
        "S2T > direct LLM score": 1.94,
        "takeover > R2R": 0.7,
        "takeover > direct LLM score": 1.2,
        "joint pool > SLM pool as large as both": 2.38,
        "LLM pool > SLM pool": 0.4,
        "incorrect sample > cross-state future": 1.8,
        "horizon 64 > horizon 32": 1.68,
        "horizon 128 ≥ horizon 64": 0.12,
    }
    assert {words: found[words] for words in wanted} == pytest.approx(wanted)
    assert not [words for words in found if words.startswith(("takeover > F", "takeover > S2T", "direct LLM score >"))]


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [([0.1, 0.01, 0.2], "holds"), ([-0.1, -0.2, -0.01], "reversed"), ([0.1, 0.0, 0.2], "not decided")],
)
def test_an_ordering_holds_where_its_interval_says_so(difference, verdict):
    row = {"table": "methods", "benchmark": "b", "key": "published", "label": "o", "minus": {"direct": difference}}
    found = {ordering.words: ordering for ordering in orderings(rows_read([row]))}
    assert found["published recipe > direct LLM score"].verdict() == verdict
    assert {o.verdict() for words, o in found.items() if words != "published recipe > direct LLM score"} == {
        "not measured"
    }
    assert "horizon > shorter horizons" in found
    assert "joint pool > LLM pool" in found


def test_orderings_are_turned_the_right_way_round():
    def row(table, key, difference, x=None, **minus):
        minus |= {"published": difference} if difference else {}
        return {"table": table, "benchmark": "b", "key": key, "label": key, "x": x, "minus": minus}

    rows = [
        row("pools", "published", None),
        row("pools", "pool-slm", [-0.2, -0.3, -0.1]),
        row("futures", "future-shuffled", [-0.2, -0.3, -0.1], verified=[0.2, 0.1, 0.4]),
        row("horizons", "h8", [-0.2, -0.3, 0.0], x=8),
        row("horizons", "h32", [-0.2, -0.3, -0.1], x=32),
        row("horizons", "h64", [0.1, 0.0, 0.2], x=64),
        row("horizons", "published", None, x=16),
        row("methods", "takeover", [0.2, 0.1, 0.3]),
        row("methods", "s2t", None, direct=[-0.2, -0.3, -0.1]),
    ]
    found = {o.words: (o.difference, o.verdict()) for o in orderings(rows_read(rows)) if o.difference}
    assert found == {
        "published recipe > takeover": ((-0.2, -0.3, -0.1), "reversed"),
        "S2T > direct LLM score": ((-0.2, -0.3, -0.1), "reversed"),
        "joint pool > SLM pool": ((0.2, 0.1, 0.3), "holds"),
        "verified future > shuffled future": ((-0.2, -0.4, -0.1), "reversed"),
        "horizon 16 > horizon 8": ((0.2, 0.0, 0.3), "not decided"),
        "horizon 32 ≥ horizon 16": ((-0.2, -0.3, -0.1), "reversed"),
        "horizon 64 ≥ horizon 16": ((0.1, 0.0, 0.2), "holds"),
    }


def test_rows_that_were_not_paired_are_compared_by_both_intervals():
    """Whatever the correlation, the two half-widths together are wide enough."""
    rows = [
        {"table": "methods", "benchmark": "b", "key": key, "label": key, "accuracy": accuracy}
        for key, accuracy in (("s2t", [0.7, 0.6, 0.75]), ("takeover", [0.9, 0.85, 0.99]))
    ]
    (found,) = [one for one in orderings(rows_read(rows)) if one.difference]
    assert (found.words, found.paired, found.verdict()) == ("S2T > takeover", False, "reversed")
    assert found.difference == pytest.approx((-0.2, -0.39, -0.1))
    assert found.shown == "-20.0 [-39.0, -10.0]†"


def test_a_wrong_sample_is_held_against_a_right_one():
    """A greedy future against a wrong sample would differ in how it was decoded too."""
    minus = {"verified": [0.1, 0.05, 0.2], "first correct sample": [-0.1, -0.2, -0.05]}
    rows = [
        {"table": "futures", "benchmark": "b", "key": "future-sampled", "label": "first correct sample"},
        {"table": "futures", "benchmark": "b", "key": "future-incorrect", "label": "first wrong one", "minus": minus},
    ]
    rows = [{**row, "accuracy": [0.5] * 3} for row in rows]
    found = {ordering.words: ordering for ordering in orderings(rows_read(rows))}
    assert found["first correct sample > incorrect sample"].difference == (0.1, 0.05, 0.2)
    assert found["first correct sample > incorrect sample"].paper == pytest.approx(50.38 - 46.1)
    assert "verified future > incorrect sample" not in found
    shown = rows_of(section(render({"name": "n", "results": rows}), "Futures"))
    assert shown[1]["minus first correct sample"] == "-0.1 [-0.2, -0.05]"
