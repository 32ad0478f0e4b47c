"""The page of evidence counts its cells right: planted outcomes, and two real cells made, stopped and gone on with."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import settings

from benchmarks import evidence
from benchmarks.evidence import ALONE, FIFTH, FIVE, OWN, TAKEOVER, Cells, clustered

N = 100
BEFORE = [
    {"recipe": "as it was deployed", "world": "plans", "minus value": [-0.01, -0.02, 0.0]}
    | {"calls minus value": -0.5, "lowest minus greedy or direct": -0.09}
]


def row(right: int, tokens: float = 0.0) -> dict[str, Any]:
    """The first so many of N problems right."""
    return {"correct": "1" * right + "0" * (N - right), "calls": tokens, "llm_tokens": tokens}


def cell(seed: int, deployed: str, value: int, world: str = "plans") -> dict[str, Any]:
    rights = {"greedy": (50, 0.0), "direct": (60, 3.0), TAKEOVER: (100, 50.0), "published": (40, 3.0)}
    rights |= {"value": (value, 3.0), ALONE: (70, 3.0)}
    rights |= dict.fromkeys(OWN, (75, 0.0))
    about = {"world": world, "seed": seed, "quantile": 0.9, "threshold": 1.0, "words": "", "processor_seconds": 36.0}
    about |= {"deployed": deployed, FIVE: FIFTH if seed == 1 else deployed}
    return {**about, "rows": {name: row(*one) for name, one in rights.items()}}


@pytest.fixture
def cells() -> Cells:
    """The value is best in the first, and 5 points below the direct score, where that is deployed, in the second."""
    return Cells([cell(2, "value", 55, "control"), cell(2, "direct", 55), cell(1, "value", 80)])


def test_cells_below_are_counted_by_world(cells):
    assert evidence.below(cells, "plans", "deployed", 0.02) == (0, 0, 0.0)
    assert evidence.below(cells, "plans", "published", 0.02) == (2, 2, pytest.approx(-0.2))
    assert evidence.below(cells, "control", "deployed", 0.02) == (1, 0, pytest.approx(-0.05))
    assert evidence.below(cells, "plans", TAKEOVER, 0.02)[2] == pytest.approx(0.4)  # above both everywhere
    assert evidence.times_below(cells, "deployed", 0.02) == 1
    (row,) = (
        line
        for line in evidence.page(cells, BEFORE)
        if line.startswith("| control | **deployed recipe (certified)** |")
    )
    assert row.endswith("| 1 | 0 | -5.0 |")
    text = "\n".join(evidence.goals(cells, 0.02, 0.95))
    assert (
        "in 1 of 3 cells (33.3%; goal: at most 5%): **missed**. In 0 cells the difference is statistically significant."
        in text
    )


def test_means_and_differences_by_hand(cells):
    assert cells.mean("plans", "deployed", "llm_tokens") == 3.0
    found = cells.interval("plans", lambda one: cells.correct(one, "deployed"))
    assert found.mean == pytest.approx((0.80 + 0.60) / 2)
    assert [evidence.best_in_hindsight(cells, one) for one in cells.of("plans")] == ["value", "direct"]
    above = evidence.above_the_line(cells, cells.of("plans")[0])
    assert above.mean() == pytest.approx(0.80 - (0.50 + 3 / 50 * 0.50))


def test_intervals_hold_the_variance_of_training():
    """Seeds that differ make the interval wide, however many problems each has."""
    alike = clustered([np.full(1000, 0.5)] * 4)
    assert alike == (0.5, 0.5, 0.5)
    apart = clustered([np.full(1000, share) for share in (0.2, 0.8)])
    assert apart.mean == pytest.approx(0.5)
    assert apart.low == pytest.approx(0.2)
    assert apart.high == pytest.approx(0.8)


def test_the_page_shows_what_was_deployed_missed_and_dropped(cells):
    page = "\n".join(evidence.page(cells, BEFORE))
    assert "3 runs, called cells: one for each world (plans, control), each of 2 seeds (1 to 2) and" in page
    assert "In 0 cells no recipe passed, so these runs say nothing about that case" in page
    assert "One recipe deployed in all cells would be below in 2 for value" in page
    assert "1 of 2 seeds have such a cell; with 95% confidence, at most 97% of all seeds do." in page
    assert "How often each recipe was deployed: plans: value 1, direct 1; control: value 1." in page
    assert f"| plans | {ALONE} | -2.5 [" in page  # value minus the head without the reranker: (80 + 55) / 2 - 70
    assert "at most -1.0 points above the value head alone" in page


def test_what_five_recipes_deploy_is_shown_beside_the_rows_without_the_llm(cells):
    """In one of three cells it is another recipe, and 5 points below what four do."""
    page = "\n".join(evidence.page(cells, BEFORE))
    assert "| plans | 0.9 | 50.0 | 70.0 | 40.0 | 75.0 | 75.0 |" in page
    gaps = "-2.50 in plans, +0.00 in control"
    said = f"the SLM's own top 8 would be deployed in 1 of 3 runs; five recipes minus four, pp: {gaps}."
    assert f"{said} Five lose in plans, so `train` keeps four." in page


def test_committed_cells_are_not_made_again_and_new_ones_take_their_place(cells, tmp_path):
    file, out = tmp_path / "cells.json", tmp_path / "out"
    evidence.write_cells(cells.records, file)
    evidence.finished_cells(file, out)
    kept = sorted((out / "cells").glob("*.json"))
    assert [path.stem for path in kept] == ["control-2-0.9", "plans-1-0.9", "plans-2-0.9"]
    assert json.loads(kept[1].read_text()) == cells.records[0]
    again = cell(2, "published", 55)
    (out / "cells" / "plans-2-0.9.json").write_text(json.dumps(again))
    assert Cells(evidence.finished_cells(file, out)).records == [cells.records[0], again, cells.records[2]]


def test_cells_are_made_once_over_one_set_of_trajectories(tmp_path, monkeypatch):
    """Two quantiles of a small run; a second call makes neither again."""

    small = {
        quantile: settings(
            problems={"limit": 72, "certification": 24, "seed": 5},
            collect={"quantile": quantile},
            train={"seeds": [5], "epochs": 1},
            evaluate={"limit": 8},
        )
        for quantile in (0.9, 0.92)
    }
    (tmp_path / "cells").mkdir()
    begun = []
    watched = SimpleNamespace(rmtree=lambda run, **_: begun.append((run / "trajectories").is_symlink()))
    monkeypatch.setattr(evidence, "shutil", watched)
    evidence.make("plans", 5, small, tmp_path)
    assert begun == [False, True]
    found = sorted((tmp_path / "cells").glob("*.json"))
    assert [path.stem for path in found] == ["plans-5-0.9", "plans-5-0.92"]
    cells = [json.loads(path.read_text()) for path in found]
    for one in cells:
        assert one["rows"].keys() == {"greedy", "direct", "published", "value", TAKEOVER, ALONE, *OWN}
        assert all(one["rows"][name]["calls"] == one["rows"][name]["llm_tokens"] == 0 for name in OWN)
        assert one[FIVE] in one["rows"]
        assert one["deployed"] in one["rows"]
        assert all(len(row["correct"]) == 8 for row in one["rows"].values())
    assert cells[0]["rows"]["greedy"] == cells[1]["rows"]["greedy"]
    times = [path.stat().st_mtime_ns for path in found]
    evidence.make("plans", 5, small, tmp_path)
    assert [path.stat().st_mtime_ns for path in found] == times
    page = str(evidence.page(Cells(cells), BEFORE))
    assert "2 runs" in page
    assert "Five lose in " in page  # all cells are there, so that the rule can be applied
