"""Hopper's kernels against their definitions in any order of events, and mistakes that must be seen.

What every op promises is held in test_contract.py, for these kernels too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from cases.base import Case, ids
from cases.linear_logprob import FLOATS, HALF, OP, make, small
from gluon_emulation import Changes, Deadlock, Hazard, emulated
from torch import Tensor

from fb_kernels._runtime import backend, tuning
from fb_kernels.linear_logprob.triton import HAS_GLUON

pytestmark = [
    pytest.mark.skipif(not HAS_GLUON, reason="another Triton's Gluon"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="for machines without a GPU"),
]
HEAD = "fb_kernels.linear_logprob.gluon"
OPTIONS = {"logit_scale": 0.7, "softcap": 5.0, "temperature": 0.8}


@contextmanager
def gluon(seed: int = 0, changes: Changes | None = None, processors: int = 3) -> Iterator[None]:
    """The head's kernel on so many multiprocessors, in small tiles."""
    form = mock.patch.object(tuning, "linear_logprob_form", return_value="gluon")
    count = mock.patch.object(tuning, "processors", return_value=processors)
    with backend.override("triton"), small(), form, count, emulated(HEAD, seed, changes):
        yield


def head(rows: int = 9, dtype: torch.dtype = torch.bfloat16, vocabulary: int = 37, **options: Any) -> Case:
    """Five tiles in three splits, the last of them half a tile; three blocks of rows, the last of one row."""
    case = OP.cast(make((rows,), 40, vocabulary, padding=3, options=options), dtype)
    return case.with_(target=torch.arange(rows) * 5 % vocabulary)


def right(results: list[Tensor], case: Case) -> bool:
    truth = OP.truth(OP.cast(case, torch.float64), results)
    return all(torch.allclose(x.double(), want, rtol=1e-5, atol=1e-4) for x, want in zip(results, truth, strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_no_order_of_events_shows(dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = head(dtype=dtype, **options).with_(**({} if options else {"bias": None}))
    found = []
    for seed in range(12):
        with gluon(seed):
            found.append(case.run())
    assert right(found[0], case)
    assert all(torch.equal(x, y) for other in found for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"STAGES": 2},
        {"STAGES": 5},
        {"TILES": 1},
        {"TILES": 32, "GROUP": 1},
        {"BLOCK_K": 64},
        {"BLOCK_M": 16, "BLOCK_V": 64},
    ],
    ids=str,
)
def test_every_launch_is_right(changes: dict[str, int]) -> None:
    """Also of fewer blocks in all than the first half of the rows is ahead, and with no last tile that is cut."""
    for case, seed in product((head(), head(vocabulary=40), head(rows=1, vocabulary=5)), range(3)):
        with gluon(seed):
            launch = tuning.linear_logprob_gluon(torch.bfloat16, 37, 40) | changes
            with mock.patch.object(tuning, "linear_logprob_gluon", return_value=launch):
                assert right(case.run(), case)


def test_a_row_knows_neither_the_others_nor_the_multiprocessors() -> None:
    case = head(rows=23)
    with gluon():
        whole = case.run()
    for processors, rows in product((1, 2, 132), (slice(0, 1), slice(3, 20), slice(0, 23))):
        with gluon(processors=processors):
            part = case.run(hidden=case.tensors["hidden"][rows], target=case.tensors["target"][rows])
        assert all(torch.equal(x[rows], y) for x, y in zip(whole, part, strict=True))


def test_a_log_prob_is_the_largest_exactly_where_it_is() -> None:
    """Every id is asked of every row; columns 9 and 30, in other splits, are twins and win in row 1."""
    case, vocabulary = head(rows=5, **OPTIONS), 37
    hidden, weight, bias = (case.tensors[name].clone() for name in FLOATS)
    hidden, weight = (hidden * 4).round() / 4, (weight * 4).round() / 4  # of exact products
    weight[[9, 30]], bias[[9, 30]] = hidden[1], 1.0
    found = []
    with gluon():
        for one in range(vocabulary):
            found.append(case.run(hidden=hidden, weight=weight, bias=bias, target=torch.full((5,), one)))
    logprob, largest = (torch.stack([results[place] for results in found], 1) for place in (0, 3))
    assert torch.equal(largest, logprob.amax(1, keepdim=True).expand_as(largest))
    assert (logprob == largest)[1].nonzero()[:, 0].tolist() == [9, 30]


def test_strange_rows_and_ids() -> None:
    """A row of NaN, one of +inf, one without a finite logit, and logits too large for a shift that is rounded."""
    case = head(rows=6)
    hidden, weight, bias = (case.tensors[name].clone() for name in FLOATS)
    hidden[1, 2], hidden[2] = torch.nan, torch.inf
    hidden[3], weight[:37, 0] = 0.0, weight[:37, 0].abs() + 1
    hidden[3, 0], hidden[4] = -torch.inf, hidden[4] * 1e20
    strange = case.with_(hidden=hidden, weight=weight, bias=None, target=ids(3, 3, 3, 3, 3, -100))
    with gluon():
        mine = strange.run()
        banned = case.run(bias=torch.full_like(bias, -torch.inf))
    truth = OP.truth(OP.cast(strange, torch.float64), mine)
    for x, want in zip(mine, truth, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert mine[1].isfinite().tolist() == [True, False, False, False, True, True]
    assert (banned[1] == -torch.inf).all()


def test_rows_that_share_memory_are_left_to_triton() -> None:
    case = head(rows=4).with_(hidden=head(rows=1).tensors["hidden"].expand(4, 40))
    with gluon(), mock.patch(f"{HEAD}.statistics") as launched:
        assert right(case.run(), case)
    launched.assert_not_called()


WRONG = {
    "a tail without its mask": ("_consume", "if first_column + BLOCK_V > valid", "if False"),
    "a sum that is not rescaled": ("_consume", "total = total * kept", "total = total"),
    "a target of the wrong tile": ("_consume", "mask=holder == tile - first_tile", "mask=found"),
    "rows of the other half": ("_consume", "WHICH * HALF", "(1 - WHICH) * HALF"),
}  # fmt: skip
STALE = {
    "no wait for a stage": ("_consume", "mbarrier.wait(ready.index(stage), (step // STAGES) & 1)", "pass"),
    "the phase before": ("_consume", "(step // STAGES) & 1", "(step // STAGES + 1) & 1"),
    "no wait for the last product": ("_consume", "warpgroup_mma_wait(0", "warpgroup_mma_wait(1"),
    "a stage given back while it is read": ("_consume", "warpgroup_mma_wait(1", "warpgroup_mma_wait(2"),
    "a stage taken before it is given back": (
        "_produce", "mbarrier.wait(empty.index(half * STAGES + stage), (step // STAGES + 1) & 1)", "pass",
    ),
}  # fmt: skip
DEADLOCKS = {
    "the last stage of a tile is kept": (
        "_consume", "mbarrier.arrive(empty.index(WHICH * STAGES + (step + STAGES - 1) % STAGES))", "pass",
    ),
    "bytes that nobody copies": ("_produce", "2 * hidden", "3 * hidden"),
    "a half that waits for itself to begin": (
        "_consume", "gl.minimum(LEAD, (width + BLOCK_K - 1) // BLOCK_K) - 1", "STAGES + LEAD - 1",
    ),
}  # fmt: skip


UNSURE = {
    "a stage that one half alone gives back": ("_produce", "gl.static_range(2)", "gl.static_range(1)"),
    "a stage given back twice": ("_consume", "% STAGES), pred=k > 0", "% STAGES)"),
}


def outcome(seed: int, function: str, old: str, new: str) -> str:
    """What becomes of a kernel with a mistake."""
    case = head()
    try:
        with gluon(seed, {function: (old, new)}):
            results = case.run()
    except (Deadlock, Hazard) as reason:
        return type(reason).__name__
    return "right" if right(results, case) else "wrong"


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_number_is_seen(mistake: str) -> None:
    assert {outcome(seed, *WRONG[mistake]) for seed in range(4)} == {"wrong"}


@pytest.mark.parametrize("mistake", STALE)
def test_a_stale_read_is_seen(mistake: str) -> None:
    assert {outcome(seed, *STALE[mistake]) for seed in range(4)} <= {"wrong", "Hazard"}


@pytest.mark.parametrize("mistake", UNSURE)
def test_what_may_end_in_any_way_does_not_end_well(mistake: str) -> None:
    assert "right" not in {outcome(seed, *UNSURE[mistake]) for seed in range(4)}


@pytest.mark.parametrize("mistake", DEADLOCKS)
def test_a_deadlock_is_seen(mistake: str) -> None:
    assert {outcome(seed, *DEADLOCKS[mistake]) for seed in range(4)} == {"Deadlock"}


def test_a_deadlock_says_who_waits_where() -> None:
    changes = {"_produce": ("2 * hidden", "3 * hidden")}
    with gluon(0, changes), pytest.raises(Deadlock, match=r"_consume\[0\] for phase 0 at line \d+.*_produce\[2\]"):
        head().run()


def test_it_runs_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, rows in product(HALF, (13, 1664, 8192)):
        assert tuning.linear_logprob_form(dtype, rows, 151_936, 2048) != "gluon"
    monkeypatch.setattr(tuning, "_tuned", lambda *given: given[-1] | {"gluon": 1})
    assert tuning.linear_logprob_form(torch.bfloat16, 1664, 151_936, 2048) == "gluon"


@pytest.mark.parametrize("unfit", ["float32", "another GPU"])
def test_what_it_was_not_made_for_is_left_to_triton(unfit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = head(dtype=torch.float32 if unfit == "float32" else torch.bfloat16)
    monkeypatch.setattr(tuning, "hopper", lambda: unfit != "another GPU")
    with gluon(), mock.patch(f"{HEAD}.statistics") as launched:
        assert right(case.run(), case)
    launched.assert_not_called()
