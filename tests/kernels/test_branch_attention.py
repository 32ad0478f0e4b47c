"""What is peculiar to `branch_attention`: what rows see, layouts that do not fit, and a prefix that stays in place."""

from __future__ import annotations

import itertools
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import emulation
import pytest
import torch
from cases.base import Case, ids, randn, single
from cases.branch_attention import (
    BACKWARD_LAUNCH,
    LAUNCH,
    OP,
    OWN,
    SHARED,
    SPLIT,
    TILE,
    Groups,
    in_16_bits,
    keys_anywhere,
    make,
    one_row,
    small,
)
from launches import count_kernels
from layouts import LAYOUTS, laid
from test_contract import Seen, check, evaluate, made, same, upstream
from torch import Tensor
from ways import names, running

from fb_kernels import BranchLayout, branch_attention
from fb_kernels._runtime import backend, cuda, tuning
from fb_kernels.branch_attention import cuda as compiled
from fb_kernels.branch_attention import reference, triton, triton_backward, triton_layout
from fb_kernels.branch_attention.arguments import BranchAttention, BranchAttentionBackward
from fb_kernels.testing import assert_close_to_reference, largest_tensor

STRANGE = (math.nan, math.inf, -math.inf)
WAYS = [way for way in names(OP) if "=" not in way]  # Hopper's kernel: test_gluon.py
HINTS = {"triton": (TILE, SPLIT), "cuda": (SPLIT,)}
ALL = [(way, hint) for way in WAYS for hint in HINTS.get(way, (None,))]
NOT_READ = [(way, hint) for way, hint in ALL if way != "reference" and not way.startswith("cpu")]
CPU = [way for way, _ in ALL if way.startswith("cpu")]
FEW = (2, 1)  # heads: an interpreted program costs much


def kernels(pairs: list[tuple[str, int | None]], *options: dict[str, Any]) -> pytest.MarkDecorator:
    """Once for each kernel of each implementation, and with each of the options that it takes."""
    if not options:
        return pytest.mark.parametrize(("way", "longest"), pairs)
    chosen = [(*pair, each) for pair in pairs for each in options if pair[0] != "cuda" or not LEFT & each.keys()]
    return pytest.mark.parametrize(("way", "longest", "options"), chosen, ids=str)


LEFT = {"window", "softcap"}  # by the compiled kernel to others


def called(way: str, groups: Groups, width: int = 8, **sizes: Any) -> Case:
    """In a dtype and of a width that the implementation takes."""
    case = make(groups, FEW, 64 if way == "cuda" else width, **sizes)
    return OP.cast(case, torch.float16) if way == "cuda" else single(case)


def pulls(case: Case) -> list[Tensor]:
    """Gradients of out[T, Hq, E] and, if the call returns it, lse[Hq, T]."""
    q = case.arguments["q"]
    return upstream(case, [q, q[..., 0].T])


def outcome(case: Case, way: str, pulled: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Results and the gradients of an implementation that has its own."""
    with blocks(way):
        return (case.run(), []) if way == "cuda" else evaluate(case, pulled=pulled)


@contextmanager
def blocks(way: str) -> Iterator[None]:
    """Small ones; what a CPU kernel does not take is left to the reference."""
    kind = way.partition(" ")[0]
    with running(way), OP.ways[kind].small(), backend.override("auto") if kind == "cpu" else nullcontext():
        yield


def like_the_reference(case: Case, way: str, pulled: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Results are checked against the definition; gradients, which have rules of their own, against the reference."""
    pulled = pulled or pulls(case)
    results, grads = outcome(case, way, pulled)
    check(OP, case, results, [])
    with running("reference"):
        expected = evaluate(OP.cast(case, torch.float64), pulled=pulled)[1]
    for mine, exact in zip(grads, expected, strict=bool(grads)):
        torch.testing.assert_close(mine, exact.float(), rtol=1e-4, atol=1e-5, equal_nan=True)
    return results, grads


@kernels(ALL, {}, {"softcap": 2.0}, {"window": 4})
@pytest.mark.sweep(3)
def test_what_a_row_does_not_see_does_not_reach_it(options: dict[str, Any], way: str, longest: int | None) -> None:
    outcomes = []
    for dirty in (False, True):
        case = called(way, [([4, 1, 3], 1, 9), ([2], 11, 3)], longest=longest, **options)
        pulled = pulls(case)
        if dirty:
            tensors = case.tensors
            rows = (*(tensors[name] for name in "qkv"), pulled[0], pulled[1].T)
            for x, value in zip(rows, (*STRANGE, math.inf, math.nan), strict=True):
                x[3:5] = value  # the last row of the first branch, and a branch of one row
            tensors["prefix_k"][11:14], tensors["prefix_v"][11:14] = math.nan, math.inf  # the second group's
        (out, lse), grads = outcome(case, way, pulled)
        outcomes.append([out, lse.T, *grads])
    clean, got = outcomes
    unseen = [0, 1, 2, 5, 6, 7]
    assert same([x[unseen] for x in got[:3]], [x[unseen] for x in clean[:3]])
    assert same([x[5:8] for x in got[3:5]], [x[5:8] for x in clean[3:5]])  # row 3 sees all of its branch
    for x in got[5:]:  # of the prefix
        assert not x[[0, 10, 14, 15]].any()
        assert x[11:14].isnan().all()
    assert all(x[[3, 4]].isnan().all() for x in (got[0], *got[2:3]))
    assert got[0][[8, 9]].isnan().all()


@kernels(ALL, {}, {"page": 5}, {"window": 3, "softcap": 2.0, "page": 5})
@pytest.mark.parametrize("where", ["q", "k", "v", "prefix_k", "prefix_v", "upstream", "upstream of lse"])
@pytest.mark.sweep(10)
def test_strange_values_that_are_seen_count_as_in_a_dense_softmax(
    where: str, options: dict[str, Any], way: str, longest: int | None
) -> None:
    case = called(way, [([1, 2], 5 * group, 5) for group in range(3)], spare=0, longest=longest, **options)
    pulled = pulls(case)
    for group, value in enumerate(STRANGE):
        if where == "upstream of lse":
            pulled[1][0, 3 * group + 1] = value
            continue
        x = pulled[0] if where == "upstream" else case.tensors[where]
        x.flatten(0, -3)[3 * group + 1 if len(x) == 9 else 5 * group + 3, 0, 2] = value
    like_the_reference(case, way, pulled)


@kernels(ALL, {}, {"softcap": 2.0})
@pytest.mark.parametrize("lowest", [[2, 20, 39], range(40)], ids=["some", "all"])
@pytest.mark.sweep(5)
def test_scores_infinitely_low(lowest: Sequence[int], options: dict[str, Any], way: str, longest: int | None) -> None:
    """Their keys count nothing, and where all are there is none."""
    every = len(lowest) == 40
    case = called(way, [([1, 2], 0, 40)], 1, spare=0, longest=longest, **options)
    case.arguments["q"].abs_().add_(0.1)
    case.arguments["prefix_k"][list(lowest)] = -math.inf
    if every:
        case.arguments["k"].fill_(-math.inf)
    (out, lse), grads = like_the_reference(case, way)
    assert every or all(dq.isfinite().all() for dq in grads[:1])
    if every and not options:
        assert not out.any()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("way", ["reference", "device"])
def test_long_runs_of_nan_are_not_dropped(way: str) -> None:
    clean = single(make([([1, 2], 0, 1100)]))
    with running(way):
        for place in (slice(0, 600), slice(512, 1024), slice(1099, 1100)):
            keys = clean.arguments["prefix_k"].clone()
            keys[place] = math.nan
            assert clean.run(prefix_k=keys)[0].isnan().all()
        assert clean.run()[0].isfinite().all()


@pytest.mark.parametrize("options", [{"window": 2}, {"window": 5, "page": 3}], ids=str)
@pytest.mark.parametrize("longest", [TILE, SPLIT])
def test_windows_over_branches_of_many_blocks(longest: int, options: dict[str, Any]) -> None:
    """Also where the hint says one row."""
    groups: Groups = [([17], 0, 0), ([3, 0, 15], 2, 35)] if longest == TILE else [([7, 3], 2, 9)]
    case = single(make(groups, FEW, 16, longest=longest, **options))
    with blocks("triton"):
        check(OP, case, case.run(), [])


@kernels(ALL, {"softcap": 1000.0})
def test_a_large_soft_cap_of_small_scores_does_not_cancel(
    way: str, longest: int | None, options: dict[str, Any]
) -> None:
    case = single(make([([2], 0, 9)], FEW, longest=longest, **options))
    with blocks(way):
        check(OP, case, *evaluate(case))


@kernels(ALL)
def test_large_float16_values_are_finite(way: str, longest: int | None) -> None:
    case = OP.cast(called(way, [([2, 1], 0, 40)], spare=0, longest=longest), torch.float16)
    case.arguments["prefix_v"].fill_(6e4)
    case.arguments["v"].fill_(6e4)
    with blocks(way):
        out = case.run()[0]
        torch.testing.assert_close(out, torch.full_like(out, 6e4), rtol=1e-3, atol=0)


@kernels(ALL)
def test_no_keys_at_all(way: str, longest: int | None) -> None:
    case = called(way, [([2], 0, 0)], own=False, longest=longest)
    paged = replace(case.with_(**{"layout.block_table": ids(-1)[None]}), gradients=("q",))
    shapes: list[tuple[Case, tuple[int, ...]]] = [(case, (0,)), (paged, (0, 4)), (paged, (3, 0))]
    shapes.append((paged.with_(**{"layout.block_table": ids()[None]}), (3, 4)))
    for each, shape in shapes:
        prefix = case.arguments["q"].new_zeros(*shape, 1, case.arguments["q"].shape[2])
        (out, lse), grads = outcome(each.with_(prefix_k=prefix, prefix_v=prefix), way)
        assert not any(x.any() for x in (out, *grads))
        assert (lse == -math.inf).all()


def part(case: Case, rows: slice, groups: Groups) -> Case:
    """Some rows alone, over the same prefix."""
    lengths, slices = [list(g[0]) for g in groups], [g[1:] for g in groups]
    layout = replace(BranchLayout.of(lengths, slices), max_branch_len=case.arguments["layout"].max_branch_len)
    return case.with_(**{name: case.arguments[name][rows] for name in "qkv"}, layout=layout)


ALIKE = [(*pair, {}) for pair in ALL if pair[0] != "device"]
ALIKE += [("reference", None, {"softcap": 2.0}), ("triton", TILE, {"window": 7}), ("triton", SPLIT, {"window": 7})]
ALIKE += [("triton invariant", None, {"window": 7})]


@pytest.mark.parametrize(("way", "longest", "options"), ALIKE, ids=str)
@pytest.mark.sweep(3)
def test_bits_are_the_same_in_every_batch(way: str, longest: int | None, options: dict[str, Any]) -> None:
    """Of a group, and in Triton's kernels of a branch; tiles hold 4 rows, so they lie in others and beside others."""
    groups: Groups = [([9], 0, 0), ([3, 1, 0, 2], 3, 17), ([1, 1], 10, 13)]
    if longest == SPLIT:
        groups = [([1] * len(lengths), start, length) for lengths, start, length in groups]
    if way == "cuda":  # tiles of 32 packed rows, and a few chunks
        groups = [([1] * rows, start, length) for rows, start, length in ((20, 0, 300), (41, 3, 1), (2, 10, 190))]
    if way.startswith(("triton", "cuda")):
        pieces: list[Groups] = [[([rows], *at)] for lengths, *at in groups for rows in lengths]
    else:
        pieces = [[group] for group in groups]
    case = replace(called(way, groups, longest=longest, **options), gradients=OWN)
    pulled, first = pulls(case), 0
    (out, lse), grads = outcome(case, way, pulled)
    for piece in pieces:
        rows = slice(first, first + sum(piece[0][0]))
        first = rows.stop
        alone, own = outcome(part(case, rows, piece), way, [pulled[0][rows], pulled[1][:, rows]])
        assert same(alone, [out[rows], lse[:, rows]])
        if way in CPU:
            assert same(own, [grad[rows] for grad in grads])


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_where_keys_lie(dtype: torch.dtype, options: dict[str, Any]) -> None:
    with blocks("triton invariant"):
        keys_anywhere(dtype, 27, (0, 1, 7, 8, 15, 16, 26), **options)


@pytest.mark.parametrize("others", [[[1, 2]], [[0, 1]], [[0]], [[3], [1, 0, 1]]], ids=str)
@pytest.mark.parametrize("way", CPU)
@pytest.mark.sweep(3)
def test_a_group_beside_others(way: str, others: list[list[int]]) -> None:
    """The same bits beside groups of other branches, beside long prefixes and beside what is not finite."""
    groups: Groups = [([1, 1], 0, 5), *((lengths, 1, 3) for lengths in others), ([1], 2, 2200), ([1], 6, 2)]
    case = single(make(groups, width=16))
    for name in ("prefix_k", "prefix_v"):
        case.arguments[name][7] = math.inf  # of the last two groups
    results, grads = like_the_reference(case, way)
    pulled = pulls(case)
    with blocks(way):
        (out, lse), own = evaluate(part(case, slice(0, 2), groups[:1]), pulled=[pulled[0][:2], pulled[1][:, :2]])
    assert same([out, lse.T, *own[:3]], [x[:2] for x in (results[0], results[1].T, *grads[:3])])


OFFSETS = [
    *(("cu_branch", place, value, range(6)) for place, value in ((0, 1), (1, 5), (-1, 5), (-1, 1 << 40))),
    *(("cu_group", place, value, range(6)) for place, value in ((0, -1), (1, -5), (1, 9), (2, 1))),
]
SLICES = [
    ("prefix_start", 0, -1, range(4)),
    *(("prefix_start", 1, value, (4, 5)) for value in (1 << 50, (1 << 31) - 1)),
    *(("prefix_len", 1, value, (4, 5)) for value in (-3, 9, (1 << 31) - 1, (1 << 63) - 1)),
]
PAGES = [
    *(("block_table", (0, 0), value, range(4)) for value in (-1, 99)),
    *(("block_table", (1, -1), value, (4, 5)) for value in (-7, 5)),
]
BAD = [(*pair, None, *bad) for pair in ALL for bad in (*OFFSETS, *SLICES)]
BAD += [(*pair, 4, *bad) for pair in ALL for bad in PAGES]


@pytest.mark.parametrize(("way", "longest", "page", "name", "place", "value", "wrong"), BAD)
@pytest.mark.sweep(7)
def test_layouts_that_do_not_fit(
    way: str, longest: int | None, page: int | None, name: str, place: Any, value: int, wrong: Sequence[int]
) -> None:
    """Errors where the host reads them, elsewhere NaN in the rows that they concern."""
    groups: Groups = [([3, 1], 1, 6), ([1, 1], 8, 3)]
    case = called(way, groups, page=page, spare=0, index=torch.int64, longest=longest)
    case.tensors[f"layout.{name}"][place] = value
    if not way.startswith(("device", "triton", "cuda")):
        with blocks(way):
            with pytest.raises(ValueError, match=rf"^BranchLayout: ({name}|prefix_len): expected .*, got .*; .+"):
                case.run()
            return
    (out, lse), grads = outcome(case, way)
    bad = torch.zeros(6, dtype=torch.bool)
    bad[list(wrong)] = True
    for x in (out, lse.T, *grads[: 3 if way.startswith("triton") else 1]):
        assert x[bad].isnan().all()
        assert x[~bad].isfinite().all()
    for x in grads[3:]:  # to which what does not fit adds nothing
        assert x.isfinite().all()
        assert x[8:].any() == (5 not in wrong)


@kernels(NOT_READ)
def test_rows_of_no_group_are_nan(way: str, longest: int | None) -> None:
    case, none = called(way, [([2], 0, 3)], longest=longest), ids()
    for changes in (
        {"cu_group": ids(0), "prefix_start": none, "prefix_len": none},
        {"cu_group": ids(0, 0), "cu_branch": ids(0)},
    ):
        layout = replace(case.arguments["layout"], **changes)
        results, grads = outcome(case.with_(layout=layout), way)
        assert all(x.isnan().all() for x in (*results, *grads[:1]))


def operators(case: Case, window: int | None = None) -> BranchAttention:
    """Its arguments, as the operator takes them."""
    tensors = (case.arguments[name] for name in ("q", "k", "v", "prefix_k", "prefix_v"))
    return BranchAttention(*tensors, *case.arguments["layout"].indices, None, None, window, 0.3, None)


def test_batched_cache_is_read_in_place() -> None:
    groups: Groups = [([2, 1], 17, 300), ([1], 0, 0), ([3], 399, 1)]  # left padding and length
    case = make(groups, page=400, heads_first=True, spare=0)
    with largest_tensor() as largest, backend.override("reference"):
        results = case.run()
    assert largest.numel <= results[0].numel(), largest
    check(OP, case, results, [])


def test_prefix_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    case, prefix = single(make([([4] * 13, 1, 512)], width=16)), 512 * 2 * 16
    with backend.override("reference"):
        with largest_tensor() as largest:
            case.run()
        assert largest.numel < prefix, largest  # not even once
        monkeypatch.setattr(reference, "SCORES", prefix)
        for options in ({}, {"softcap": 5.0}, {"window": 100}):
            with largest_tensor() as largest:
                evaluate(case.with_(**options))
            assert largest.numel <= case.arguments["prefix_k"].numel(), (options, largest)  # its gradient


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_pages_are_frozen_under_transforms_too() -> None:
    case = make([([2, 2], 0, 3)], page=2)

    def loss(pages: Tensor) -> Tensor:
        return case.run(prefix_k=pages)[0].sum()

    stacked = case.arguments["prefix_k"][None].repeat(2, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"^branch_attention: prefix_k: .* frozen pages"):
        torch.func.grad(lambda pages: torch.func.vmap(loss)(pages).sum())(stacked)


class Sequences:
    """A trajectory of T rows and K branches after each of its states, as one packed forward and as full sequences."""

    rows, states, lengths, options = 24, (5, 17, 17), (4, 1, 7), {"scale": 0.4}

    def __init__(self, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        case = make([([self.rows], 0, 0), *((self.lengths, 0, p) for p in self.states)], (6, 3), 8, **options)
        case = OP.cast(case, dtype)
        self.options = self.options | options
        self.layout = case.arguments["layout"]
        self.leaves = [case.arguments[name].requires_grad_() for name in OWN]
        self.pulled = pulls(case)[0]

    def packed(self) -> list[Tensor]:
        """[out, dq, dk, dv], the prefixes being views of k and v."""
        q, k, v = leaves = [x.detach().requires_grad_() for x in self.leaves]
        out = branch_attention(q, k, v, k[: self.rows], v[: self.rows], self.layout, **self.options)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.pulled)]

    def apart(self, dtype: torch.dtype) -> list[Tensor]:
        """The same of sequences that are run one after the other."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.leaves]
        first, outs = self.rows, [self.full(*(x[: self.rows] for x in leaves))]
        for p in self.states:
            for length in self.lengths:
                sequence = (torch.cat([x[:p], x[first : first + length]]) for x in leaves)
                outs.append(self.full(*sequence)[p:])
                first += length
        out = torch.cat(outs)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.pulled.to(dtype))]

    def full(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores, apart = torch.einsum("ihe,jhe->hij", q, k) * self.options["scale"], torch.arange(len(q))
        apart = apart[:, None] - apart
        if cap := self.options.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        hidden = (apart < 0) | (apart >= self.options.get("window", len(q)))
        return torch.einsum("hij,jhe->ihe", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


PACKED = [(way, torch.float64) for way in ("reference", "device")]
PACKED += [
    ("reference", torch.float32),
    *((w, t) for w in ("device", "triton") for t in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize(("way", "dtype"), PACKED)
@pytest.mark.sweep(7)
def test_one_packed_forward_is_full_sequences(way: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Keys that many branches read are rows of the trajectory; their gradients are those of the sequences, summed."""
    sequences = Sequences(dtype, **options)
    with blocks(way):
        mine = sequences.packed()
    for got, exact, plain in zip(mine, sequences.apart(torch.float64), sequences.apart(dtype), strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)
        else:
            assert_close_to_reference(got, exact, plain, scale=exact.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("way", [way for way in names(OP) if way != "cuda"])
def test_an_lse_that_no_loss_uses_costs_nothing(way: str) -> None:
    """Its gradient is None where the backward gets it, and the bits are those of zeros."""
    case = made(OP, way, OP.way(way).dtypes[0])
    pulled = pulls(case)
    with running(way):
        with Seen() as seen:
            unused = evaluate(replace(case, outputs=(0,)), pulled=pulled[:1])[1]
        zeros = evaluate(case, pulled=[pulled[0], torch.zeros_like(pulled[1])])[1]
    assert [given[1] for operator, given in seen.calls if "backward" in operator.name()] == [None]
    assert same(unused, zeros)


def test_a_sink_is_one_more_column_of_the_softmax() -> None:
    """By the formula of the docstring, with its gradients."""
    case = make([([4], 0, 3)], spare=0)
    leaves = [*(case.arguments[name] for name in (*OWN, *SHARED)), torch.randn(4, dtype=torch.float64)]
    q, k, v, prefix_k, prefix_v, sink = (x.requires_grad_() for x in leaves)
    out, lse = branch_attention(q, k, v, prefix_k, prefix_v, case.arguments["layout"], return_lse=True)
    mine = out * torch.sigmoid(lse.T - sink)[..., None]
    keys, values = (torch.cat(pair).repeat_interleave(2, 1) for pair in ((prefix_k, k), (prefix_v, v)))
    scores = torch.einsum("ihe,jhe->hij", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(4, 7, dtype=torch.bool).triu(4), -math.inf)
    p = torch.cat([scores, sink[:, None, None].expand(4, 4, 1)], -1).softmax(-1)
    dense = torch.einsum("hij,jhe->ihe", p[..., :-1], values)
    pulled = pulls(case)[0]
    for got, expected in zip(*(torch.autograd.grad(x, leaves, pulled) for x in (mine, dense)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("trained", [("q",), OWN, ("prefix_k",), ("prefix_v",), (*OWN, *SHARED)], ids=str)
def test_a_frozen_prefix_launches_nothing_more(trained: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(single(make([([2, 1], 0, 9), ([1], 3, 5)], FEW, 16)), gradients=trained)
    with blocks("triton"):
        launched = count_kernels(monkeypatch, triton_backward)
        evaluate(case)
    kinds = [name.removeprefix("_branch_attention_bwd_").removesuffix("kernel") for name in launched]
    assert kinds == ["", *(["state_", "prefix_"] if set(trained) & set(SHARED) else [])]


@pytest.mark.parametrize("groups", [1, 9])
def test_slots_of_no_slice_get_zeros(groups: int) -> None:
    """Also where there are more groups than a program looks at together, and slices that overlap within a tile."""
    slices: Groups = [([2, 1], 20 + 3 * g, 5 + g) for g in range(groups)]
    case = single(make(slices, FEW, 16, spare=70))
    for way in ("reference", "device", "triton"):
        with blocks(way):
            results, grads = evaluate(case)
            check(OP, case, results, grads)
            assert same(evaluate(case)[1], grads)
        for x in grads[3:]:
            used = torch.zeros(len(x), dtype=torch.bool)
            used[20 : max(start + length for _, start, length in slices)] = True
            assert not x[~used].any()
            assert x[used].flatten(1).any(1).all()


def test_changing_integers_compile_once() -> None:
    case = single(make([([3, 1], 1, 3), ([2], 0, 3)]))
    given = case.arguments["layout"].indices

    def run(q: Tensor, k: Tensor, v: Tensor, longest: int, window: int) -> Tensor:
        layout = BranchLayout(*given, max_branch_len=longest, max_prefix_len=2 * longest)
        return branch_attention(q, k, v, k.detach(), v.detach(), layout, window=window)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number in range(3, 15):  # more than torch compiles one function
        leaves = [case.arguments[name].requires_grad_() for name in "qkv"]
        outs = [function(*leaves, number, number + 1) for function in (compiled, run)]
        assert torch.equal(*outs)
        assert same(*(torch.autograd.grad(out.square().sum(), leaves) for out in outs))


def test_offsets_are_searched_once_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    for longest in (TILE, SPLIT):
        case = single(make([([1, 1], 1, 6), ([1], 8, 3)], FEW, longest=longest, return_lse=False))
        layout = case.arguments["layout"]
        with blocks("triton"), monkeypatch.context() as patch:
            searches = count_kernels(patch, triton_layout)
            first, second = case.run(), case.run()
            assert same(first, second)
            assert len(searches) == 1
            for name, values in (("cu_group", ids(0, 1, 3)), ("cu_branch", ids(0, 0, 1, 3))):
                getattr(layout, name).copy_(values)
                alike = BranchLayout(*(x.clone() for x in layout.indices[:4]), max_branch_len=longest)
                assert same(case.run(), case.run(layout=alike))
            assert len(searches) == 5


def test_the_launch_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that no row of a small batch fills takes the kernel that it takes in a large one."""
    forms = []
    with blocks("triton"), monkeypatch.context() as patch:
        patch.setattr(tuning, "branch_attention", lambda *given: forms.append(given) or LAUNCH)
        for length in (2, 40):
            OP.cast(make([([2], 0, length)], FEW, window=9, longest=TILE), torch.bfloat16).run()
    assert forms[0] == forms[1]


def test_too_large_a_workspace_takes_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    case, launched = one_row((3, 0, 40), heads=FEW), count_kernels(monkeypatch, triton)
    with blocks("triton"):
        split, tiles = case.run(), case.run(**{"layout.max_branch_len": TILE})
        assert not same(split, tiles)
        monkeypatch.setattr(triton, "WORKSPACE", 0)
        assert same(case.run(), tiles)
    kinds = [name.removeprefix("_branch_attention_").removesuffix("_kernel") for name in launched]
    assert kinds == ["split", "combine", "tile", "tile"]


@pytest.mark.parametrize("options", [{}, {"page": 16, "window": 20, "softcap": 2.0, "scale": 0.7}], ids=str)
def test_training_rows_over_pieces_of_the_prefix(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = make([([1] * 13, 3, 38), ([1, 0, 1], 8, 32)], FEW, 16, **options)
    case = OP.cast(made, torch.bfloat16 if options else torch.float16)
    with small(), running("triton"):
        launched = count_kernels(monkeypatch, triton_backward)
        results, pieces = evaluate(case)
        check(OP, case, results, pieces)
        assert "_branch_attention_bwd_add_kernel" in launched
        launched.clear()
        monkeypatch.setattr(triton_backward, "PROGRAMS", 1)
        for whole, added in zip(evaluate(case)[1], pieces, strict=True):
            torch.testing.assert_close(whole, added, rtol=1e-2, atol=1e-2)
    assert "_branch_attention_bwd_add_kernel" not in launched


def test_gradients_of_wide_heads_are_left_to_others() -> None:
    for case in (make([([2], 0, 3)]), single(make([([2], 0, 3)], width=257))):
        given = operators(case)
        out, lse = reference.branch_attention(given)
        for wanted in (False, True):
            backward = BranchAttentionBackward(out, lse, out, lse, given, wanted)
            assert triton.branch_attention_backward(backward) is NotImplemented


@pytest.mark.parametrize("changed", [None, "q", "k", "prefix_v", "upstream", "odd width", "column", "expanded"])
def test_form_says_whether_rows_are_aligned(changed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []
    case = OP.cast(make([([1], 0, 2)], (1, 1), 20 if changed == "odd width" else 16), torch.bfloat16)
    pulled, dlse = pulls(case)
    if changed == "upstream":
        pulled = laid(pulled)  # from an odd address on
    elif changed == "expanded":  # has columns of stride 0
        pulled = pulled.new_ones(()).expand(pulled.shape)
    elif changed == "column":
        case = case.with_(q=LAYOUTS["steps of 2"](case.arguments["q"]))
    elif changed in ("q", "k", "prefix_v"):
        case = case.with_(**{changed: LAYOUTS["rows apart"](case.arguments[changed])})
    with small(), running("triton"), monkeypatch.context() as patch:
        patch.setattr(tuning, "branch_attention_backward", lambda *a: forms.append(a[-1]) or BACKWARD_LAUNCH)
        check(OP, case, *evaluate(case, pulled=[pulled, dlse]), [pulled, dlse])
    assert forms == ["aligned" if changed in (None, "column", "expanded") else "unaligned"]


@pytest.mark.parametrize("length", [1, 3])
def test_a_branch_whose_every_score_is_minus_infinity_leaves_the_prefix(length: int) -> None:
    """Finite q and k whose product overflows: torch's flash attention says log-sum-exp 0 of such rows."""
    layout = BranchLayout.of([[2], [length]], [(0, 0), (0, 2)])
    q = torch.full((2 + length, 2, 8), 1e30)
    k, v = torch.full((2 + length, 1, 8), 1e-32), torch.randn(2 + length, 1, 8)
    k[2:] = -1e30
    out = branch_attention(q, k, v, k, v, layout)
    torch.testing.assert_close(out[2:], v[:2].mean(0).expand(length, 2, 8))


def test_a_compiled_launch_has_no_more_memory_than_it_may() -> None:
    """Rows of no memory of their own stand for many."""
    many = 1 << 22
    q, prefix = torch.empty(1, 1, 64).half().expand(many, 1, 64), torch.empty(4, 1, 64).half()
    layout = BranchLayout(torch.arange(many + 1), ids(0, many).long(), ids(0).long(), ids(4).long())
    given = BranchAttention(q, None, None, prefix, prefix, *layout.indices, None, None, None, 0.3, None)
    with running("cuda"):
        assert compiled.branch_attention(given) is NotImplemented


def test_one_compiled_group_has_no_block_without_rows() -> None:
    """Of several groups there may be one tile more for each. A tile of 32 packed rows has two words beside parts."""
    kv_heads, width = 8, 128
    for rows, repeat, groups in itertools.product((1, 2, 13, 16, 32), (1, 2, 8, 16), (1, 5)):
        floats = emulation.library().fb_branch_attention_workspace(
            rows=rows, heads=repeat * kv_heads, kv_heads=kv_heads, head_dim=width, groups=groups, most_keys=1024
        )
        tiles, left = divmod(floats - rows * repeat * kv_heads * (8 + 1) * (width + 2), 2 * kv_heads)
        assert (tiles, left) == (-(-rows * repeat // 32) + groups - 1, 0)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("page", [None, 4])
def test_a_compiled_slice_ends_with_the_prefix(page: int | None, beyond: int) -> None:
    """Even where the memory and pages after it could be read."""
    case = in_16_bits([([1, 1], 3, 5), ([1], 0, 2)], heads=FEW, page=page, spare=0)
    names, along = (SHARED, 0) if page is None else (("layout.block_table",), 1)
    wider = {name: torch.cat([case.tensors[name]] * 2, along) for name in names}
    views = {name: x.narrow(along, 0, x.shape[along] // 2) for name, x in wider.items()}
    case.tensors["layout.prefix_len"][0] += beyond
    with running("cuda"):
        assert case.run(**views)[0][:2].isnan().all() == bool(beyond)


@pytest.mark.parametrize("wrong", [-1, 9])
@pytest.mark.parametrize("column", [0, 40, 74])
def test_a_page_that_is_not_there_is_noticed_in_every_chunk(column: int, wrong: int) -> None:
    """75 pages, which two blocks of a tile take chunk by chunk."""
    case = in_16_bits([([1, 1], 0, 300), ([1], 0, 300)], heads=FEW, page=4, longest_prefix=128, spare=0)
    case.tensors["layout.block_table"][0, column] = wrong if wrong < 0 else 1 << 20
    with running("cuda"):
        out, lse = case.run()
    assert out[:2].isnan().all()
    assert lse[:, :2].isnan().all()
    assert out[2].isfinite().all()


def test_compiled_rows_may_lie_apart() -> None:
    """Heads of one projection, pages among others, a table of wider rows; unused memory is NaN."""
    case = in_16_bits([([1] * 5, 3, 200), ([1], 0, 70)], heads=(4, 2), page=16)
    wide = {name: torch.nn.functional.pad(case.tensors[name], (0, 8, 0, 3), value=math.nan) for name in (*OWN, *SHARED)}
    heads = {name: case.tensors[name].shape[-2] for name in wide}
    views = {name: x[..., : heads[name], :64] for name, x in wide.items()}
    table = torch.nn.functional.pad(case.tensors["layout.block_table"], (0, 3), value=-9)[:, :-3]
    with running("cuda"):
        check(OP, case, case.run(**views, **{"layout.block_table": table}), [])
        check(OP, case, case.run(v=views["v"]), [])  # copied


@pytest.mark.parametrize("stream", [1, 2])  # on a host 1 stands for one that captures
@pytest.mark.skipif(torch.cuda.is_available(), reason="its library takes host pointers")
def test_a_compiled_launch_leaves_kept_counters_as_it_found_them(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = in_16_bits([([1] * 5, 0, 300), ([1], 0, 9)], heads=FEW)

    class OnStream:
        def __getattr__(self, name: str) -> Any:
            found = getattr(emulation.library(), name)
            return (lambda **given: found(**given | {"stream": stream})) if name == "fb_branch_attention" else found

    with running("cuda"):
        want = case.run()
        monkeypatch.setattr(cuda, "library", OnStream)
        for _ in range(3):
            assert same(case.run(), want)


def far_apart(x: Tensor) -> Tensor:
    """The same rows 2 GB from each other, in memory of which only they are touched."""
    step, kept = 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # which reserves none
    memory = torch.frombuffer(mmap.mmap(-1, len(x) * step * x.itemsize, kept), dtype=x.dtype)
    return memory.as_strided(x.shape, (step, *x.stride()[1:])).copy_(x)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory that is not reserved")
@pytest.mark.parametrize("page", [None, 1])
def test_compiled_offsets_beyond_2_31(page: int | None) -> None:
    case = in_16_bits([([1, 1, 1], 1, 4)], heads=FEW, page=page)
    far = {name: far_apart(case.tensors[name]) for name in (*OWN, *SHARED)}
    with running("cuda"):
        assert same(case.run(**far), case.run())


@pytest.mark.parametrize("shared", [0, 5])
@pytest.mark.parametrize("branches", [[4], [1, 1]])
@pytest.mark.parametrize("place", ["prefix", "own"])
@pytest.mark.parametrize("way", [way for way in WAYS if torch.float32 in OP.way(way).dtypes])
@pytest.mark.sweep(3)
def test_a_score_that_overflows_shows(way: str, place: str, branches: list[int], shared: int) -> None:
    """Though no argument is infinite: +inf would mark a state without keys where parts of the keys are merged."""
    rows = sum(branches)
    q, k, v = (randn(rows, 2, 8, seed=seed) for seed in range(3))
    prefix_k, prefix_v = (randn(5, 2, 8, seed=seed) for seed in (3, 4))
    q[0, 0, 0] = 1e30
    (prefix_k if place == "prefix" else k)[0, 0, 0] = 1e30
    with running(way):
        layout = BranchLayout.of([branches], [(0, shared)])
        out, lse = branch_attention(q, k, v, prefix_k, prefix_v, layout, return_lse=True)
    seen = place == "own" or shared > 0
    assert out[0, 0].isnan().all() == lse[0, 0].isnan() == seen
    assert out[0, 1].isfinite().all()
    assert out[1:].isfinite().all()
