"""Hopper's kernels against their definitions in any order of events, and mistakes that must be seen.

What every op promises is held in test_contract.py, for these kernels too.
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
from cases import branch_attention as branches
from cases import linear_logprob as heads
from cases.base import Case, ids
from cases.branch_attention import TILE, Groups
from cases.linear_logprob import FLOATS
from gluon_emulation import Changes, Deadlock, Hazard, emulated
from test_contract import check, same
from torch import Tensor

from fb_kernels._runtime import backend, tuning
from fb_kernels.triton import HAS_GLUON

pytestmark = [
    pytest.mark.skipif(not HAS_GLUON, reason="another Triton's Gluon"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="for machines without a GPU"),
]
SOURCES = {"branch_attention": branches, "linear_logprob": heads}
HALF = (torch.bfloat16, torch.float16)
STRANGE = (math.nan, math.inf, -math.inf)
OPTIONS = {"logit_scale": 0.7, "softcap": 5.0, "temperature": 0.8}
LAUNCHES = {
    "branch_attention": {"BLOCK_M": 8, "BLOCK_N": 4, "STAGES": 2},
    "linear_logprob": {"TILES": 2, "GROUP": 2, "BLOCK_M": 4, "BLOCK_V": 8, "BLOCK_K": 16, "STAGES": 3},
}
GROUPS: Groups = [([3, 1, 14], 0, 6), ([], 0, 2), ([6], 6, 0), ([1, 0, 1, 9], 5, 13), ([5], 3, 8)]
of_each_op = pytest.mark.parametrize("op", SOURCES)


@contextmanager
def gluon(
    op: str, seed: int = 0, changes: Changes | None = None, processors: int = 3, **launch: int
) -> Iterator[mock.Mock]:
    """The op's kernel on so many multiprocessors, in small tiles; counts the launches of Triton's in its place."""
    with (
        backend.override("triton"),
        SOURCES[op].small(),
        mock.patch.object(tuning, f"{op}_form", return_value="gluon"),
        mock.patch.object(tuning, f"{op}_gluon", return_value=LAUNCHES[op] | launch),
        mock.patch.object(tuning, "processors", return_value=processors),
        mock.patch.object(tuning, op, side_effect=getattr(tuning, op)) as triton,
        emulated(f"fb_kernels.{op}.gluon", seed, changes),
    ):
        yield triton


def attention(
    groups: Groups = GROUPS,
    heads: tuple[int, int] = (2, 1),
    width: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Case:
    """Tiles of four rows, over keys in blocks of four."""
    return branches.OP.cast(branches.make(groups, heads, width, longest=TILE, **more), dtype)


def head(rows: int = 9, dtype: torch.dtype = torch.bfloat16, vocabulary: int = 37, **options: Any) -> Case:
    """Five tiles in three splits, the last of them half a tile; three blocks of rows, the last of one row."""
    case = heads.OP.cast(heads.make((rows,), 40, vocabulary, padding=3, options=options), dtype)
    return case.with_(target=torch.arange(rows) * 5 % vocabulary)


def launched(case: Case, **options: Any) -> list[Tensor]:
    """Its results by Hopper's kernel and no other."""
    with gluon(case.op, **options) as triton:
        results = case.run()
    triton.assert_not_called()
    return results


def right(case: Case, results: list[Tensor]) -> None:
    check(SOURCES[case.op].OP, case, results, [])


ORDERS = [attention(heads=(4, 2)), head(), head(dtype=torch.float16, **OPTIONS), head().with_(bias=None)]


@pytest.mark.parametrize("case", ORDERS, ids=lambda case: case.op)
def test_no_order_of_events_shows(case: Case) -> None:
    found = [launched(case, seed=seed) for seed in range(5)]
    right(case, found[0])
    assert all(same(found[0], other) for other in found)


CHANGES = {
    "branch_attention": [
        {"STAGES": 3}, {"STAGES": 5}, {"BLOCK_N": 8}, {"BLOCK_N": 64}, {"BLOCK_M": 4}, {"BLOCK_M": 64, "STAGES": 4},
    ],
    "linear_logprob": [
        {"STAGES": 2}, {"STAGES": 5}, {"TILES": 1}, {"TILES": 32, "GROUP": 1}, {"BLOCK_K": 64},
        {"BLOCK_M": 16, "BLOCK_V": 64},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("op", "changes"), [(op, each) for op, some in CHANGES.items() for each in some], ids=str)
@pytest.mark.sweep(6)
def test_every_launch_is_right(op: str, changes: dict[str, int]) -> None:
    """Also of a tile or a block alone, of fewer blocks than one half is ahead, and with no last tile that is cut."""
    for case in {
        "branch_attention": (attention(), attention([([9], 0, 40)]), attention([([40], 0, 0)])),
        "linear_logprob": (head(), head(vocabulary=40), head(rows=1, vocabulary=5)),
    }[op]:
        right(case, launched(case, seed=len(case.tensors), **changes))


@pytest.mark.parametrize("heads", [(4, 1), (8, 1), (8, 2)])
def test_rows_of_several_heads_share_a_tile(heads: tuple[int, int]) -> None:
    case = attention(heads=heads)
    right(case, launched(case, BLOCK_M=max(8, 2 * heads[0] // heads[1])))


@pytest.mark.parametrize("width", [64, 128])
def test_every_width_is_right(width: int) -> None:
    """Of columns that lie together in memory, and of those that lie in two panels."""
    case = attention([([40, 3], 1, 37)], width=width)
    right(case, launched(case, BLOCK_M=16, BLOCK_N=32))


def test_a_row_of_attention_knows_neither_the_others_nor_the_multiprocessors() -> None:
    case = attention([([3, 9], 0, 6), ([6], 2, 11)])
    whole, (rows, lengths) = launched(case), (slice(3, 12), [9])
    alone = attention([(lengths, 0, 6)])
    own = {name: case.tensors[name][rows] for name in "qkv"}
    shared = {name: case.tensors[name] for name in ("prefix_k", "prefix_v")}
    for processors in (1, 2, 132):
        assert same(launched(case, processors=processors), whole)
        out, lse = launched(alone.with_(**own, **shared), processors=processors)
        assert same([out, lse], [whole[0][rows], whole[1][:, rows]])


def test_a_row_of_the_head_knows_neither_the_others_nor_the_multiprocessors() -> None:
    case = head(rows=23)
    whole = launched(case)
    for processors, rows in ((1, slice(0, 1)), (2, slice(3, 20)), (132, slice(0, 23))):
        part = case.with_(hidden=case.tensors["hidden"][rows], target=case.tensors["target"][rows])
        assert same([x[rows] for x in whole], launched(part, processors=processors))


@pytest.mark.parametrize("name", ["k", "v"])
def test_what_a_row_does_not_see_does_not_reach_it(name: str) -> None:
    """A strange key or value of a branch reaches its later rows alone, of which all else has the same bits."""
    case = attention([([3, 14, 2], 0, 6), ([6], 2, 11)])
    clean = launched(case)
    for place, value in zip((0, 5, 9, 15, 16, 20), 2 * STRANGE, strict=True):
        x = case.tensors[name].clone()
        x[place, :, 3] = value
        strange = case.with_(**{name: x})
        results = launched(strange, seed=place)
        right(strange, results)
        end = next(end for end in (3, 17, 19, 25) if end > place)
        seeing = torch.arange(25).ge(place) & torch.arange(25).lt(end)
        assert same([results[0][~seeing], results[1][:, ~seeing]], [clean[0][~seeing], clean[1][:, ~seeing]])
        if name == "v":
            others = torch.arange(16) != 3
            assert same([results[0][..., others], results[1]], [clean[0][..., others], clean[1]])
            assert not results[0][seeing][..., 3].isfinite().any()


@pytest.mark.parametrize("name", ["q", "prefix_k", "prefix_v"])
def test_strange_values_that_are_seen_count_as_in_a_dense_softmax(name: str) -> None:
    case = attention([([3, 4], 0, 6), ([6], 7, 5)])
    for place, value in zip((0, 4, 10), STRANGE, strict=True):
        x = case.tensors[name].clone()
        x[place, 0, 1] = value
        strange = case.with_(**{name: x})
        right(strange, launched(strange))


def test_scores_infinitely_low_and_no_keys_at_all() -> None:
    case = attention([([3, 9], 0, 6)])
    lowest = torch.full_like(case.tensors["prefix_k"], -math.inf)
    positive = case.with_(q=case.tensors["q"].abs() + 1)
    for low in (positive.with_(prefix_k=lowest), positive.with_(k=lowest[:1].expand(12, 1, 16).clone())):
        right(low, launched(low))
    out, lse = launched(attention([([3], 0, 0), ([2], 1, 4)], own=False))
    assert (out[:3] == 0).all()
    assert (lse[:, :3] == -math.inf).all()
    assert lse[:, 3:].isfinite().all()
    assert launched(attention([([], 0, 3), ([0], 1, 4)]))[0].shape == (0, 2, 16)
    only = attention([([5], 0, 0)], spare=0)  # over a buffer without a row
    right(only, launched(only))


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


def test_layouts_that_do_not_fit() -> None:
    """Rows that they concern are NaN, the others as they were; an access outside would be a `Hazard`."""
    case = attention([([3, 9], 0, 6), ([6], 2, 11)], spare=0)
    clean = launched(case)
    for name, place, value, wrong in BAD:
        offsets = case.tensors[f"layout.{name}"].clone()
        offsets[place] = value
        out, lse = launched(case.with_(**{f"layout.{name}": offsets}))
        bad = torch.zeros(18, dtype=torch.bool)
        bad[list(wrong)] = True
        assert out[bad].isnan().all(), name
        assert lse[:, bad].isnan().all(), name
        assert same([out[~bad], lse[:, ~bad]], [clean[0][~bad], clean[1][:, ~bad]]), name
    alone, none = attention([([5], 0, 3)]), ids()
    nobody = {"layout.cu_group": ids(0), "layout.prefix_start": none, "layout.prefix_len": none}
    for changes in (nobody, {"layout.cu_group": ids(0, 0), "layout.cu_branch": ids(0)}):  # rows of no group
        assert all(x.isnan().all() for x in launched(alone.with_(**changes)))


def test_the_halves_take_turns() -> None:
    """At the tensor cores, in each block but a tile's first."""
    order: list[int] = []
    passed = "mbarrier.arrive(turns.index(1 - WHICH))"
    with mock.patch("fb_kernels.branch_attention.gluon.order", order, create=True):
        launched(attention(), processors=1, changes={"_sweep": (passed, f"order.append(WHICH); {passed}")})
    assert order == [0, 1] * (len(order) // 2)
    assert len(order) > 40


def test_views_of_packed_rows_are_read_in_place() -> None:
    """Keys and values of one buffer, its first rows the prefix; and one whose heads lie outermost."""
    packed = torch.randn(20, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = packed.split([2, 1, 1], 1)
    case = attention([([5, 3], 4, 8), ([4], 0, 0)], spare=0).with_(q=q[8:], k=k[8:], v=v[8:], prefix_k=k, prefix_v=v)
    right(case, launched(case))
    case = attention([([5, 3], 4, 8), ([4], 0, 0)], heads=(4, 2))
    across = {name: case.tensors[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("k", "prefix_v")}
    right(case, launched(case.with_(**across)))


def test_a_log_prob_is_the_largest_exactly_where_it_is() -> None:
    """Every id is asked of every row; columns 9 and 30, in other splits, are twins and win in row 1."""
    case, vocabulary = head(rows=5, **OPTIONS), 37
    hidden, weight, bias = (case.tensors[name].clone() for name in FLOATS)
    hidden, weight = (hidden * 4).round() / 4, (weight * 4).round() / 4  # of exact products
    weight[[9, 30]], bias[[9, 30]] = hidden[1], 1.0
    case = case.with_(hidden=hidden, weight=weight, bias=bias)
    found = [launched(case.with_(target=torch.full((5,), one))) for one in range(vocabulary)]
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
    mine = launched(strange)
    right(strange, mine)
    assert mine[1].isfinite().tolist() == [True, False, False, False, True, True]
    assert (launched(case.with_(bias=torch.full_like(bias, -torch.inf)))[1] == -torch.inf).all()


OTHERS = {
    "float32": lambda: attention(dtype=torch.float32),
    "a window": lambda: attention(window=3),
    "a cap": lambda: attention(softcap=2.0),
    "pages": lambda: attention(page=4),
    "three heads a key head": lambda: attention(heads=(3, 1)),
    "a width between powers of two": lambda: attention(width=24),
    "a narrow head": lambda: attention(width=8),
    "rows that share memory": lambda: shared(attention([([2, 2], 0, 6)]), "prefix_v"),
    "one row a branch": lambda: attention([([1, 1], 0, 6)]).with_(**{"layout.max_branch_len": 1}),
    "no keys anywhere": lambda: attention([([2], 0, 0)], own=False, spare=0),
    "another GPU": attention,
    "logits in float32": lambda: head(dtype=torch.float32),
    "hidden rows that share memory": lambda: shared(head(), "hidden"),
    "a head on another GPU": head,
}


def shared(case: Case, name: str) -> Case:
    x = case.tensors[name]
    return case.with_(**{name: x[:1].expand_as(x)})


@pytest.mark.parametrize("unfit", OTHERS)
@pytest.mark.sweep(4)
def test_what_it_was_not_made_for_is_left_to_triton(unfit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = OTHERS[unfit]()
    monkeypatch.setattr(tuning, "hopper", lambda: "another GPU" not in unfit)
    function = "attend" if case.op == "branch_attention" else "statistics"
    with gluon(case.op), mock.patch(f"fb_kernels.{case.op}.gluon.{function}") as ran:
        right(case, case.run())
    ran.assert_not_called()


def test_it_runs_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = (tuning.branch_attention_form, tuning.linear_logprob_form)
    for dtype, size in product(HALF, (1, 2, 8)):
        assert "gluon" not in (forms[0](dtype, 128, size), forms[1](dtype, 1000 * size, 151_936, 2048))
    monkeypatch.setattr(tuning, "_tuned", lambda *given: given[-1] | {"gluon": 1})
    assert forms[0](torch.bfloat16, 128, 2) == forms[1](torch.bfloat16, 1664, 151_936, 2048) == "gluon"


def test_a_ring_of_one_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^branch_attention: expected 2 stages or more, got 1; .+"):
        launched(attention(), STAGES=1)


WRONG = {
    "branch_attention": {
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
    },
    "linear_logprob": {
        "a tail without its mask": ("_consume", "if first_column + BLOCK_V > valid", "if False"),
        "a sum that is not rescaled": ("_consume", "total = total * kept", "total = total"),
        "a target of the wrong tile": ("_consume", "mask=holder == tile - first_tile", "mask=found"),
        "rows of the other half": ("_consume", "WHICH * HALF", "(1 - WHICH) * HALF"),
    },
}  # fmt: skip
STALE = {
    "branch_attention": {
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
    },
    "linear_logprob": {
        "no wait for a stage": ("_consume", "mbarrier.wait(ready.index(stage), (step // STAGES) & 1)", "pass"),
        "the phase before": ("_consume", "(step // STAGES) & 1", "(step // STAGES + 1) & 1"),
        "no wait for the last product": ("_consume", "warpgroup_mma_wait(0", "warpgroup_mma_wait(1"),
        "a stage given back while it is read": ("_consume", "warpgroup_mma_wait(1", "warpgroup_mma_wait(2"),
        "a stage taken before it is given back": (
            "_produce", "mbarrier.wait(empty.index(half * STAGES + stage), (step // STAGES + 1) & 1)", "pass",
        ),
    },
}  # fmt: skip
DEADLOCKS = {
    "branch_attention": {
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
    },
    "linear_logprob": {
        "the last stage of a tile is kept": (
            "_consume", "mbarrier.arrive(empty.index(WHICH * STAGES + (step + STAGES - 1) % STAGES))", "pass",
        ),
        "bytes that nobody copies": ("_produce", "2 * hidden", "3 * hidden"),
        "a half that waits for itself to begin": (
            "_consume", "gl.minimum(LEAD, (width + BLOCK_K - 1) // BLOCK_K) - 1", "STAGES + LEAD - 1",
        ),
    },
}  # fmt: skip
UNSURE = {
    "branch_attention": {
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
    },
    "linear_logprob": {
        "a stage that one half alone gives back": ("_produce", "gl.static_range(2)", "gl.static_range(1)"),
        "a stage given back twice": ("_consume", "% STAGES), pred=k > 0", "% STAGES)"),
    },
}  # fmt: skip


def outcomes(op: str, mistake: tuple[str, str, str], seeds: int) -> set[str]:
    """What becomes of a kernel with a mistake, in so many orders."""
    case, (function, old, new) = attention(heads=(4, 2)) if op == "branch_attention" else head(), mistake
    found = set()
    for seed in range(seeds):
        try:
            right(case, launched(case, seed=seed, changes={function: (old, new)}))
            found.add("right")
        except (Deadlock, Hazard) as reason:
            found.add(type(reason).__name__)
        except AssertionError:
            found.add("wrong")
    return found


def mistakes(table: dict[str, dict[str, tuple[str, str, str]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("op", "mistake"), [(op, each) for op, some in table.items() for each in some])


@mistakes(WRONG)
@pytest.mark.sweep(6)
def test_a_wrong_number_is_seen(op: str, mistake: str) -> None:
    assert outcomes(op, WRONG[op][mistake], 2) == {"wrong"}


@mistakes(STALE)
@pytest.mark.sweep(3)
def test_a_stale_read_is_seen(op: str, mistake: str) -> None:
    assert outcomes(op, STALE[op][mistake], 2) <= {"wrong", "Hazard"}


@mistakes(DEADLOCKS)
@pytest.mark.sweep(3)
def test_a_deadlock_is_seen(op: str, mistake: str) -> None:
    assert outcomes(op, DEADLOCKS[op][mistake], 2) == {"Deadlock"}


@mistakes(UNSURE)
@pytest.mark.sweep(6)
def test_what_may_end_in_any_way_does_not_always_end_well(op: str, mistake: str) -> None:
    found = outcomes(op, UNSURE[op][mistake], 6)
    assert found != {"right"}
    assert op == "branch_attention" or "right" not in found


def test_a_deadlock_says_who_waits_where() -> None:
    changes = {"_produce": ("2 * hidden", "3 * hidden")}
    with pytest.raises(Deadlock, match=r"_consume\[0\] for phase 0 at line \d+.*_produce\[2\]"):
        launched(head(), changes=changes)


@pytest.mark.parametrize(
    "change", [("_check", '< float("inf")) == 0', "< 0) & False"), ("_attend", "if OWN and found != 0:", "if False:")]
)
def test_values_that_reach_rows_which_do_not_see_them_are_seen(change: tuple[str, str, str]) -> None:
    case = attention([([14], 0, 6)])
    case.tensors["v"][9, 0, 3] = math.nan
    results = launched(case, changes={change[0]: change[1:]})
    with pytest.raises(AssertionError):
        right(case, results)
