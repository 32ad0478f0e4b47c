"""Hopper's kernel of `branch_attention` against the definition in any order of events, and mistakes that must be seen.

What every op promises is held in test_contract.py, for this kernel too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from cases.base import Case, ids
from cases.branch_attention import OP, TILE, Groups, make, small
from gluon_emulation import Changes, Deadlock, Hazard, emulated
from test_contract import check, same
from torch import Tensor

from fb_kernels._runtime import backend, tuning
from fb_kernels.triton import HAS_GLUON

pytestmark = [
    pytest.mark.skipif(not HAS_GLUON, reason="another Triton's Gluon"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="for machines without a GPU"),
]
ATTENTION = "fb_kernels.branch_attention.gluon"
HALF = (torch.bfloat16, torch.float16)
STRANGE = (math.nan, math.inf, -math.inf)
LAUNCH = {"BLOCK_M": 8, "BLOCK_N": 4, "STAGES": 2}
GROUPS: Groups = [([3, 1, 14], 0, 6), ([], 0, 2), ([6], 6, 0), ([1, 0, 1, 9], 5, 13), ([5], 3, 8)]


@contextmanager
def gluon(
    seed: int = 0, changes: Changes | None = None, processors: int = 3, launch: tuning.Launch = LAUNCH
) -> Iterator[None]:
    """The kernel on so many multiprocessors, in small tiles."""
    form = mock.patch.object(tuning, "branch_attention_form", return_value="gluon")
    launched = mock.patch.object(tuning, "branch_attention_gluon", return_value=launch)
    count = mock.patch.object(tuning, "processors", return_value=processors)
    with backend.override("triton"), small(), form, launched, count, emulated(ATTENTION, seed, changes):
        yield


def attention(
    groups: Groups = GROUPS,
    heads: tuple[int, int] = (2, 1),
    width: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Case:
    """Tiles of four rows, over keys in blocks of four."""
    return OP.cast(make(groups, heads, width, longest=TILE, **more), dtype)


def launched(case: Case, **options: Any) -> list[Tensor]:
    """Its results by this kernel and no other."""
    with gluon(**options), mock.patch.object(tuning, "branch_attention", side_effect=AssertionError):
        return case.run()


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (4, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_it_is_the_definition(dtype: torch.dtype, own: bool, heads: tuple[int, int]) -> None:
    case = attention(heads=heads, dtype=dtype, own=own)
    launch = LAUNCH | {"BLOCK_M": max(8, 2 * heads[0] // heads[1])}
    check(OP, case, launched(case, launch=launch), [])


def test_no_order_of_events_shows() -> None:
    case = attention(heads=(4, 2))
    found = [launched(case, seed=seed) for seed in range(12)]
    check(OP, case, found[0], [])
    assert all(same(found[0], other) for other in found)


@pytest.mark.parametrize(
    "changes",
    [{"STAGES": 3}, {"STAGES": 5}, {"BLOCK_N": 8}, {"BLOCK_N": 64}, {"BLOCK_M": 4}, {"BLOCK_M": 64, "STAGES": 4}],
    ids=str,
)
def test_every_launch_is_right(changes: dict[str, int]) -> None:
    for case, seed in product((attention(), attention([([9], 0, 40)]), attention([([40], 0, 0)])), range(2)):
        check(OP, case, launched(case, seed=seed, launch=LAUNCH | changes), [])


@pytest.mark.parametrize("width", [16, 64, 128])
def test_every_width_is_right(width: int) -> None:
    """Of columns that lie together in memory, and of those that lie in two panels."""
    case = attention([([40, 3], 1, 37)], width=width)
    launch = {"BLOCK_M": 16, "BLOCK_N": 32, "STAGES": 2}
    check(OP, case, launched(case, launch=launch), [])


def test_a_row_knows_neither_the_others_nor_the_multiprocessors() -> None:
    case = attention([([3, 9], 0, 6), ([6], 2, 11)])
    whole, (rows, branches) = launched(case), (slice(3, 12), [9])
    alone = attention([(branches, 0, 6)])
    own = {name: case.tensors[name][rows] for name in "qkv"}
    shared = {name: case.tensors[name] for name in ("prefix_k", "prefix_v")}
    for processors in (1, 2, 132):
        assert same(launched(case, processors=processors), whole)
        out, lse = launched(alone.with_(**own, **shared), processors=processors)
        assert same([out, lse], [whole[0][rows], whole[1][:, rows]])


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_a_row_does_not_see_does_not_reach_it(name: str, value: float) -> None:
    """A strange key or value of a branch reaches its later rows alone, of which all else has the same bits."""
    case = attention([([3, 14, 2], 0, 6), ([6], 2, 11)])
    clean = launched(case)
    for place in (0, 5, 9, 15, 16, 20):
        x = case.tensors[name].clone()
        x[place, :, 3] = value
        strange = case.with_(**{name: x})
        results = launched(strange, seed=place)
        check(OP, strange, results, [])
        ends = [3, 17, 19, 25]
        seeing = torch.arange(25).ge(place) & torch.arange(25).lt(min(end for end in ends if end > place))
        assert same([results[0][~seeing], results[1][:, ~seeing]], [clean[0][~seeing], clean[1][:, ~seeing]])
        if name == "v":
            others = torch.arange(16) != 3
            assert same([results[0][..., others], results[1]], [clean[0][..., others], clean[1]])
            assert not results[0][seeing][..., 3].isfinite().any()


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("name", ["q", "prefix_k", "prefix_v"])
def test_strange_values_that_are_seen_count_as_in_a_dense_softmax(name: str, value: float) -> None:
    case = attention([([3, 4], 0, 6), ([6], 7, 5)])
    for place in (0, 4, 5, 10):
        x = case.tensors[name].clone()
        x[place, 0, 1] = value
        strange = case.with_(**{name: x})
        check(OP, strange, launched(strange), [])


def test_scores_infinitely_low_and_no_keys_at_all() -> None:
    case = attention([([3, 9], 0, 6)])
    lowest = torch.full_like(case.tensors["prefix_k"], -math.inf)
    positive = case.with_(q=case.tensors["q"].abs() + 1)
    for low in (positive.with_(prefix_k=lowest), positive.with_(k=lowest[:1].expand(12, 1, 16).clone())):
        check(OP, low, launched(low), [])
    out, lse = launched(attention([([3], 0, 0), ([2], 1, 4)], own=False))
    assert (out[:3] == 0).all()
    assert (lse[:, :3] == -math.inf).all()
    assert lse[:, 3:].isfinite().all()
    out, lse = launched(attention([([], 0, 3), ([0], 1, 4)]))
    assert out.shape == (0, 2, 16)
    only = attention([([5], 0, 0)], spare=0)  # over a buffer without a row
    check(OP, only, launched(only), [])


BAD = [  # name, place, value, rows of NaN
    ("cu_branch", 0, 1, range(18)),
    ("cu_branch", 2, 99, range(18)),
    ("cu_branch", 3, -1, range(18)),
    ("cu_group", -1, 2, range(18)),
    ("prefix_start", 0, -1, range(12)),
    ("prefix_start", 1, 8, range(12, 18)),
    ("prefix_len", 0, -1, range(12)),
    ("prefix_len", 1, 1 << 30, range(12, 18)),
]


@pytest.mark.parametrize(("name", "place", "value", "wrong"), BAD)
def test_layouts_that_do_not_fit(name: str, place: int, value: int, wrong: range) -> None:
    """Rows that they concern are NaN, the others as they were; an access outside would be a `Hazard`."""
    case = attention([([3, 9], 0, 6), ([6], 2, 11)], spare=0)
    clean = launched(case)
    offsets = case.tensors[f"layout.{name}"].clone()
    offsets[place] = value
    out, lse = launched(case.with_(**{f"layout.{name}": offsets}))
    bad = torch.zeros(18, dtype=torch.bool)
    bad[list(wrong)] = True
    assert out[bad].isnan().all()
    assert lse[:, bad].isnan().all()
    assert same([out[~bad], lse[:, ~bad]], [clean[0][~bad], clean[1][:, ~bad]])


def test_rows_of_no_group_are_nan() -> None:
    case, none = attention([([5], 0, 3)]), ids()
    nobody = {"layout.cu_group": ids(0), "layout.prefix_start": none, "layout.prefix_len": none}
    for changes in (nobody, {"layout.cu_group": ids(0, 0), "layout.cu_branch": ids(0)}):
        assert all(x.isnan().all() for x in launched(case.with_(**changes)))


def test_the_halves_take_turns() -> None:
    """At the tensor cores, in each block but a tile's first."""
    order: list[int] = []
    passed = "mbarrier.arrive(turns.index(1 - WHICH))"
    with mock.patch(f"{ATTENTION}.order", order, create=True):
        launched(attention(), processors=1, changes={"_sweep": (passed, f"order.append(WHICH); {passed}")})
    assert order == [0, 1] * (len(order) // 2)
    assert len(order) > 40


def test_views_of_packed_rows_are_read_in_place() -> None:
    """Keys and values of one buffer, its first rows the prefix; and one whose heads lie outermost."""
    packed = torch.randn(20, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = packed.split([2, 1, 1], 1)
    case = attention([([5, 3], 4, 8), ([4], 0, 0)], spare=0).with_(q=q[8:], k=k[8:], v=v[8:], prefix_k=k, prefix_v=v)
    check(OP, case, launched(case), [])
    case = attention([([5, 3], 4, 8), ([4], 0, 0)], heads=(4, 2))
    across = {name: case.tensors[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("k", "prefix_v")}
    check(OP, case, launched(case.with_(**across)), [])


OTHERS = {
    "float32": lambda: attention(dtype=torch.float32),
    "a window": lambda: attention(window=3),
    "a cap": lambda: attention(softcap=2.0),
    "pages": lambda: attention(page=4),
    "three heads a key head": lambda: attention(heads=(3, 1)),
    "a width between powers of two": lambda: attention(width=24),
    "a narrow head": lambda: attention(width=8),
    "rows that share memory": lambda: expanded(attention([([2, 2], 0, 6)])),
    "one row a branch": lambda: attention([([1, 1], 0, 6)]).with_(**{"layout.max_branch_len": 1}),
    "no keys anywhere": lambda: attention([([2], 0, 0)], own=False, spare=0),
}


def expanded(case: Case) -> Case:
    return case.with_(prefix_v=case.tensors["prefix_v"][:1].expand(8, 1, 16))


@pytest.mark.parametrize("unfit", [*OTHERS, "another GPU"])
def test_what_it_was_not_made_for_is_left_to_triton(unfit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = OTHERS.get(unfit, attention)()
    monkeypatch.setattr(tuning, "hopper", lambda: unfit != "another GPU")
    with gluon(), mock.patch(f"{ATTENTION}.attend") as ran:
        check(OP, case, case.run(), [])
    ran.assert_not_called()


def test_it_runs_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, repeat in product(HALF, (1, 2, 8)):
        assert tuning.branch_attention_form(dtype, 128, repeat) == "tile"
    monkeypatch.setattr(tuning, "_tuned", lambda *given: given[-1] | {"gluon": 1})
    assert tuning.branch_attention_form(torch.bfloat16, 128, 2) == "gluon"


def test_a_ring_of_one_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^branch_attention: expected 2 stages or more, got 1; .+"):
        launched(attention(), launch=LAUNCH | {"STAGES": 1})


WRONG = {
    "a tail without its mask": ("_sweep", "if MASKED:", "if False:"),
    "a first block without its mask": ("_attend", "key[None, :] <= last[:, None]", "key[None, :] >= 0"),
    "a branch that sees what is to come": (
        "_attend", "row - begin, -1)\n                last", "size - 1, -1)\n                last",
    ),
    "a branch that sees the one before": (
        "_attend", "(row >= begin) & (row < begin + size), row - begin", "(row >= begin), row - begin",
    ),
    "a sum that is not rescaled": ("_softmax", "total * decay", "total"),
    "values that are not rescaled": ("_sweep", "acc = acc * ", "acc = acc + 0 * "),
    "rows of the other half": ("_attend", "WHICH * HALF", "(1 - WHICH) * HALF"),
    "values behind a slice": ("_check", "if row + ROWS > size:", "if False:"),
    "keys of another head": ("_load", "prefix_k, [begin + n, head, 0]", "prefix_k, [begin + n, 0, 0]"),
}  # fmt: skip
STALE = {
    "no wait for keys": ("_sweep", "mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)", "pass"),
    "no wait for values": ("_sweep", "mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)", "pass"),
    "no wait for scores": ("_sweep", "warpgroup_mma_wait(1", "warpgroup_mma_wait(2"),
    "no wait for the products of values": ("_sweep", "warpgroup_mma_wait(0", "warpgroup_mma_wait(1"),
    "values that are overwritten": (
        "_load", "mbarrier.wait(v_empty.index(stage), (step // STAGES + 1) & 1)", "pass",
    ),
    "queries that are overwritten": ("_load", "mbarrier.wait(q_empty, (turn + 1) & 1)", "pass"),
    "values that are checked before they land": (
        "_check", "mbarrier.wait(v_ready.index(STAGES + checked % STAGES), (checked // STAGES) & 1)", "pass",
    ),
    "values that are checked without a fence": ("_check", "fence_async_shared()", "pass"),
}  # fmt: skip
DEADLOCKS = {
    "checked values are kept": ("_check", "mbarrier.arrive(v_ready.index(stage))", "pass"),
    "queries are kept": ("_attend", "mbarrier.arrive(q_empty)", "pass"),
    "keys are kept": ("_sweep", "mbarrier.arrive(k_empty.index(stage))", "pass"),
    "the last values are kept": ("_attend", "mbarrier.arrive(v_empty.index(stage))", "pass"),
    "bytes that nobody copies": ("_load", "2 * q.block_type.nbytes", "3 * q.block_type.nbytes"),
    "a turn that is not passed on": ("_sweep", "mbarrier.arrive(turns.index(1 - WHICH))", "pass"),
    "a turn that nobody has": ("_sweep", "(turn + 1 - WHICH) & 1", "turn & 1"),
    "all blocks are to be checked": (
        "_load", "gl.where(n < whole, stage, STAGES + checked % STAGES)", "STAGES + stage",
    ),
}  # fmt: skip
UNSURE = {
    "no wait for queries": ("_attend", "mbarrier.wait(q_ready, tile_turn & 1)", "pass"),
    "keys that one half alone gives back": (
        "_branch_attention_gluon_kernel", "k_empty.index(stage), count=2", "k_empty.index(stage), count=1",
    ),
    "values given back twice": (
        "_sweep", "mbarrier.arrive(v_empty.index(before))", "mbarrier.arrive(v_empty.index(before), count=2)",
    ),
    "the keys before": (
        "_sweep", "k_ready.index(stage), (step // STAGES) & 1", "k_ready.index(stage), (step // STAGES + 1) & 1",
    ),
    "keys that are overwritten": (
        "_load", "mbarrier.wait(k_empty.index(stage), (step // STAGES + 1) & 1)", "pass",
    ),
}  # fmt: skip


def outcome(seed: int, function: str, old: str, new: str) -> str:
    """What becomes of a kernel with a mistake."""
    case = attention(heads=(4, 2))
    try:
        results = launched(case, seed=seed, changes={function: (old, new)})
    except (Deadlock, Hazard) as reason:
        return type(reason).__name__
    try:
        check(OP, case, results, [])
    except AssertionError:
        return "wrong"
    return "right"


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_number_is_seen(mistake: str) -> None:
    assert {outcome(seed, *WRONG[mistake]) for seed in range(2)} == {"wrong"}


@pytest.mark.parametrize("mistake", STALE)
def test_a_stale_read_is_seen(mistake: str) -> None:
    assert {outcome(seed, *STALE[mistake]) for seed in range(4)} <= {"wrong", "Hazard"}


@pytest.mark.parametrize("mistake", DEADLOCKS)
def test_a_deadlock_is_seen(mistake: str) -> None:
    assert {outcome(seed, *DEADLOCKS[mistake]) for seed in range(4)} == {"Deadlock"}


@pytest.mark.parametrize("mistake", UNSURE)
@pytest.mark.sweep(2)
def test_what_may_end_in_any_way_does_not_always_end_well(mistake: str) -> None:
    assert {outcome(seed, *UNSURE[mistake]) for seed in range(6)} != {"right"}


@pytest.mark.parametrize(
    "change", [("_check", '< float("inf")) == 0', "< 0) & False"), ("_attend", "if OWN and found != 0:", "if False:")]
)
def test_values_that_reach_rows_which_do_not_see_them_are_seen(change: tuple[str, str, str]) -> None:
    case = attention([([14], 0, 6)])
    case.tensors["v"][9, 0, 3] = math.nan
    results = launched(case, changes={change[0]: change[1:]})
    with pytest.raises(AssertionError):
        check(OP, case, results, [])
