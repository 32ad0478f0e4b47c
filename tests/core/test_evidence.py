"""The page of evidence counts its cells right: planted outcomes, and two real cells made, stopped and gone on with."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import settings

from benchmarks import evidence
from benchmarks.evidence import DIRECT, FORMS, GREEDY, PUBLISHED, TAKEOVER, Cells, clustered
from fb_core.config import RunSettings

N = 100


def row(right: int, tokens: float = 0.0) -> dict[str, Any]:
    """The first so many of N problems right."""
    return {"correct": "1" * right + "0" * (N - right), "calls": tokens, "llm_tokens": tokens}


def cell(seed: int, deployed: str, rights: dict[str, tuple[int, float]], world: str = "tiny") -> dict[str, Any]:
    rows = {name: row(*one) for name, one in rights.items()}
    about = {"world": world, "seed": seed, "quantile": 0.9, "threshold": 1.0, "words": "", "processor_seconds": 36.0}
    return {**about, "deployed": deployed, "tried": [FORMS[0].label], "rows": rows}


BASE = {GREEDY.label: (50, 0.0), DIRECT.label: (60, 3.0), TAKEOVER: (100, 50.0), PUBLISHED.label: (40, 3.0)}


@pytest.fixture
def cells() -> Cells:
    """The override is best in the first, and 5 points below the direct score, where that is deployed, in the second."""
    first = cell(1, FORMS[0].label, {**BASE, FORMS[0].label: (80, 3.0)})
    second = cell(2, DIRECT.label, {**BASE, FORMS[0].label: (55, 3.0)})
    third = cell(2, FORMS[0].label, {**BASE, FORMS[0].label: (55, 3.0)}, "tiny-control")
    return Cells([third, second, first])


def test_cells_below_are_counted_by_world(cells):
    assert evidence.below(cells, "tiny", "deployed", 0.02) == (2, 0, 0, 0.0)
    assert evidence.below(cells, "tiny", PUBLISHED.label, 0.02) == (2, 2, 2, pytest.approx(-0.2))
    assert evidence.below(cells, "tiny-control", "deployed", 0.02) == (1, 1, 0, pytest.approx(-0.05))
    assert evidence.below(cells, "tiny", TAKEOVER, 0.02).worst == pytest.approx(0.4)  # above both everywhere
    assert evidence.times_below(cells, "deployed", 0.02) == 1
    assert "| tiny-control | as deployed | 1 of 1 | 0 of 1 | -5.0 |" in evidence.page(cells)
    text = "\n".join(evidence.goals(cells, 0.02, 0.95))
    assert (
        "in 1 of 3 cells (33.3%; goal: at most 5%): **missed**. The difference is statistically significant in 0."
        in text
    )


def test_means_and_differences_by_hand(cells):
    assert cells.mean("tiny", "deployed", "llm_tokens") == 3.0
    found = cells.interval("tiny", lambda one: cells.correct(one, "deployed"))
    assert found.mean == pytest.approx((0.80 + 0.60) / 2)
    assert [evidence.best_in_hindsight(cells, one) for one in cells.of("tiny")] == [FORMS[0].label, DIRECT.label]
    above = evidence.above_the_line(cells, cells.of("tiny")[0])
    assert above.mean() == pytest.approx(0.80 - (0.50 + 3 / 50 * 0.50))


def test_intervals_hold_the_variance_of_training():
    """Seeds that differ make the interval wide, however many problems each has."""
    alike = clustered([np.full(1000, 0.5)] * 4)
    assert alike == (0.5, 0.5, 0.5)
    apart = clustered([np.full(1000, share) for share in (0.2, 0.8)])
    assert apart.mean == pytest.approx(0.5)
    assert apart.low == pytest.approx(0.2)
    assert apart.high == pytest.approx(0.8)


def test_the_page_shows_what_was_deployed_and_missed(cells):
    page = evidence.page(cells)
    assert "3 runs: worlds tiny, tiny-control, seeds 1, 2" in page
    assert "| part | tiny, of 2 | tiny-control, of 1 |" in page
    assert "it was deployed in 0 of these runs, which therefore say nothing about that case" in page
    assert "| scores: plain | 1 | 1 |\n| scores: direct LLM score | 1 | 0 |\n| override | 1 | 1 |" in page
    assert "| nothing added | 1 | 0 |" in page
    assert f"| tiny | {FORMS[0].label} | 2 | 67.5 | +5.0 | -5.0 | 3.00 |" in page


def test_the_report_is_written_from_the_cells(cells, tmp_path):
    evidence.report(cells.found, tmp_path)
    again = json.loads((tmp_path / "evidence" / "cells.json").read_text())
    assert again == cells.found
    assert (tmp_path / "evidence.md").read_text() == evidence.page(Cells(again))
    pictures = {name: (tmp_path / "evidence" / f"{name}.svg").read_text() for name in ("cells", "calls")}
    assert all(picture.startswith("<svg") for picture in pictures.values())
    evidence.report(again, tmp_path)
    for name, picture in pictures.items():
        assert (tmp_path / "evidence" / f"{name}.svg").read_text() == picture


def test_cells_are_made_once_over_one_set_of_trajectories(tmp_path, monkeypatch):
    """Two quantiles of a small run; a second call makes neither again."""

    def small(world: str, seed: int, quantile: float, problems: int) -> RunSettings:
        return settings(
            problems={"limit": 72, "certification": 24, "seed": seed},
            collect={"quantile": quantile},
            train={"seeds": [seed], "epochs": 1},
            choice={"trained": ["features"], "tried": 3, "tested": 1},
            evaluate={"limit": problems},
        )

    monkeypatch.setattr(evidence, "settings_of", small)
    (tmp_path / "cells").mkdir()
    begun = []
    watched = SimpleNamespace(rmtree=lambda run, **_: begun.append((run / "trajectories").is_symlink()))
    monkeypatch.setattr(evidence, "shutil", watched)
    evidence.make("tiny", 5, (0.9, 0.92), tmp_path, 8)
    assert begun == [False, True]
    found = sorted((tmp_path / "cells").glob("*.json"))
    assert [path.stem for path in found] == ["tiny-5-0.9", "tiny-5-0.92"]
    cells = [json.loads(path.read_text()) for path in found]
    for one in cells:
        assert {GREEDY.label, DIRECT.label, PUBLISHED.label, TAKEOVER, one["deployed"]} <= one["rows"].keys()
        assert all(len(row["correct"]) == 8 for row in one["rows"].values())
        assert set(one["tried"]) <= one["rows"].keys()
    assert cells[0]["rows"][GREEDY.label] == cells[1]["rows"][GREEDY.label]
    times = [path.stat().st_mtime_ns for path in found]
    evidence.make("tiny", 5, (0.9, 0.92), tmp_path, 8)
    assert [path.stat().st_mtime_ns for path in found] == times
    assert "2 runs" in evidence.page(Cells(cells))
