"""`branch_attention` against its definition, and what it promises beyond the numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.branch_attention import branch_attention, reference
from fb_kernels.branch_attention.naive import branch_attention as naive
from fb_kernels.layout import BranchLayout
from fb_kernels.testing import assert_close_to_reference, count_syncs, largest_tensor, magnitude, poison_

F64 = torch.float64


@dataclass
class Case:
    """Tensors and layout of one call, the layout as lists."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    prefix_k: Tensor
    prefix_v: Tensor
    groups: list[list[int]]  # branch lengths
    slices: list[tuple[int, int]]  # start and length
    table: list[list[int]] | None = None
    index: torch.dtype = torch.int32

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        return self.q, self.k, self.v, self.prefix_k, self.prefix_v

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v) if x is not None]

    @property
    def layout(self) -> dict[str, Any]:
        def make(values: list) -> Tensor:
            return torch.tensor(values, dtype=self.index)

        return {
            "cu_branch": offsets([length for group in self.groups for length in group]).to(self.index),
            "cu_group": offsets([len(group) for group in self.groups]).to(self.index),
            "prefix_start": make([start for start, _ in self.slices]),
            "prefix_len": make([length for _, length in self.slices]),
            "block_table": None
            if self.table is None
            else make(self.table).reshape(len(self.table), len(self.table[0]) if self.table else 1),
        }

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        hints = {name: options.pop(name) for name in ("max_branch_len", "max_prefix_len") if name in options}
        return branch_attention(*self.tensors, BranchLayout(**self.layout, **hints), **options, return_lse=True)

    def prefix(self, group: int) -> tuple[Tensor, Tensor]:
        start, length = self.slices[group]
        both = self.prefix_k, self.prefix_v
        if self.table is not None:
            page = self.prefix_k.shape[1]
            places = [divmod(i, page) for i in range(start, start + length)]
            rows = [(self.table[group][i], j) for i, j in places]
            return tuple(torch.stack([x[i, j] for i, j in rows]) if rows else x[:0, :0].flatten(0, 1) for x in both)
        return tuple(x[start : start + length] for x in both)

    def rows(self, window: int | None = None) -> Iterator[tuple[int, Tensor, Tensor, list[int]]]:
        """(row, k[n, Hq, E], v, places in the packed rows of the last keys) of every row, of what it sees alone."""
        repeat, row = self.q.shape[1] // self.prefix_k.shape[-2], 0
        for g, lengths in enumerate(self.groups):
            prefix = [x.detach() for x in self.prefix(g)]
            for length in lengths:
                first = row
                for row in range(first, first + length):
                    own = [prefix[0][:0]] * 2 if self.k is None else [self.k[first : row + 1], self.v[first : row + 1]]
                    position = len(prefix[0]) + row - first
                    seen = [j for j in range(len(prefix[0]) + len(own[0])) if not window or position - j < window]
                    k, v = (torch.cat(x)[seen].repeat_interleave(repeat, 1) for x in zip(prefix, own, strict=True))
                    yield row, k, v, [first + j - len(prefix[0]) for j in seen if j >= len(prefix[0])]
                row = first + length

    def naive(self, dtype: torch.dtype = F64, **options: Any) -> tuple[list[Tensor], Tensor, Tensor]:
        """(leaves, out, lse) of the definition in a dtype."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.leaves]
        own = leaves[1:] or (None, None)
        prefix = (x.detach().to(dtype) for x in (self.prefix_k, self.prefix_v))
        return leaves, *naive(leaves[0], *own, *prefix, **self.layout, **options)

    def magnitudes(
        self,
        upstream: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> list[Tensor]:
        """Of out[T, Hq, 1], lse[Hq, T] and, with an upstream gradient, of rows of dq, dk and dv: the scale of rounding.

        A sum is rounded at the sum of its |terms|. A score is rounded at |q| |k| |scale|, in float32 whatever q's
        dtype, and all that its probability weighs moves by as much.
        """
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        eps = torch.finfo(torch.float32).eps / torch.finfo(self.q.dtype).eps
        q, own_k = magnitude(self.q), magnitude(self.q if self.k is None else self.k)
        g = torch.zeros_like(q) if upstream is None else magnitude(upstream)
        heads, repeat = own_k.shape[1], q.shape[1] // self.prefix_k.shape[-2]
        out, lse = torch.zeros_like(q), torch.zeros_like(q[..., 0])
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(own_k), torch.zeros_like(own_k)
        for row, key, value, places in self.rows(window):
            if not len(key):
                continue
            k, v = magnitude(key), magnitude(value)
            scores = torch.einsum("he,nhe->hn", self.q[row].detach().double(), key.detach().double()) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            p = scores.softmax(-1).nan_to_num(0.0)
            size = torch.einsum("he,nhe->hn", q[row], k).amax(-1) * abs(scale)
            moved = 1 + eps * size[:, None]
            lse[row] = 1 + size + math.log(len(k))
            out[row] = torch.einsum("hn,nhe->he", p, v) * moved
            dp = torch.einsum("he,nhe->hn", g[row], v)
            ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * scale * moved
            dq[row] = torch.einsum("hn,nhe->he", ds, k)
            if places:
                last = slice(len(k) - len(places), None)
                for total, weight, vector in ((dk, ds, q[row]), (dv, p * moved, g[row])):
                    terms = weight[:, last].T[..., None] * vector  # [n, Hq, E]
                    total[places] += terms.unflatten(1, (heads, repeat)).sum(2)
        grads = () if upstream is None else (dq,) if self.k is None else (dq, dk, dv)
        return [out.amax(-1, keepdim=True), lse.T, *(x.amax(-1, keepdim=True) for x in grads)]


def offsets(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def make(
    groups: list[list[int]],
    slices: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    width: int = 8,
    dtype: torch.dtype = F64,
    own: bool = True,
    seed: int = 0,
) -> Case:
    """Flat prefix whose unused slots are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, width, generator=generator, dtype=F64).to(dtype)

    rows = sum(map(sum, groups))
    size = max((start + length for start, length in slices), default=0) + 2
    prefix = [randn(size, heads[1]) for _ in range(2)]
    used = torch.zeros(size, dtype=torch.bool)
    for start, length in slices:
        used[start : start + length] = True
    for x in prefix:
        x[~used] = math.nan
    k, v = (randn(rows, heads[1]) if own else None for _ in range(2))
    return Case(randn(rows, heads[0]), k, v, *prefix, groups, slices)


def as_pages(case: Case, page: int, seed: int = 0) -> Case:
    """The same slices, in shuffled pages; pages and slots that no slice uses are NaN."""
    counts = [-(-(start + length) // page) if length else 0 for start, length in case.slices]
    width = max(counts, default=0) + 1
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    prefix = [poison_(x.new_empty(len(order), page, *x.shape[1:])) for x in (case.prefix_k, case.prefix_v)]
    table = []
    for (start, length), count in zip(case.slices, counts, strict=True):
        pages = [order.pop() for _ in range(count)]
        for i in range(start, start + length):
            for paged, flat in zip(prefix, (case.prefix_k, case.prefix_v), strict=True):
                paged[pages[i // page], i % page] = flat[i]
        skipped = start // page if length else 0  # never read
        table.append([-1] * skipped + pages[skipped:] + [-1] * (width - count))
    return Case(case.q, case.k, case.v, *prefix, case.groups, case.slices, table)


def scattered(x: Tensor) -> Tensor:
    """The same values at other strides and an offset, NaN between them."""
    storage = poison_(x.new_empty(x.shape[1], x.shape[0] + 1, 2 * x.shape[2] + 1))
    return storage.transpose(0, 1)[1:, :, 1::2].copy_(x)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3))
    slices = [(draw(st.integers(0, 6)), draw(st.integers(0, 9))) for _ in groups]
    kv_heads, repeat, width = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4])), draw(st.integers(4, 16))
    kind = draw(st.sampled_from(["flat", "paged", "view", "alone"]))
    case = make(groups, slices, (kv_heads * repeat, kv_heads), width, own=kind != "alone", seed=draw(st.integers(0, 9)))
    if kind == "paged":
        case = as_pages(case, draw(st.integers(1, 4)))
    elif kind == "view" and case.k is not None:  # of the packed rows themselves
        rows = case.q.shape[0]
        case.slices = [(draw(st.integers(0, rows)), 0) for _ in groups]
        case.slices = [(start, draw(st.integers(0, rows - start))) for start, _ in case.slices]
        case.prefix_k, case.prefix_v = case.k, case.v
    if draw(st.booleans()):
        case.q, case.k, case.v = (None if x is None else scattered(x) for x in (case.q, case.k, case.v))
        if kind in ("flat", "alone"):
            case.prefix_k, case.prefix_v = scattered(case.prefix_k), scattered(case.prefix_v)
    case.index = draw(st.sampled_from([torch.int32, torch.int64]))
    return case


@settings(deadline=None, max_examples=60)
@given(
    case=cases(),
    window=st.sampled_from([None, None, 1, 2, 5, 12]),
    softcap=st.sampled_from([None, None, 1.5]),
    scale=st.sampled_from([None, 0.9]),
    device=st.booleans(),
)
def test_matches_naive_float64(
    case: Case, window: int | None, softcap: float | None, scale: float | None, device: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_host_reads", lambda _: not device)
        for leaf in case.leaves:
            leaf.requires_grad_()
        case.prefix_k, case.prefix_v = case.prefix_k.detach(), case.prefix_v.detach()
        options = {"window": window, "softcap": softcap, "scale": scale}
        out, lse = case.run(**options)
        leaves, want, want_lse = case.naive(**options)
        assert out.dtype == lse.dtype == F64
        assert lse.shape == (case.q.shape[1], case.q.shape[0])
        assert not lse.requires_grad
        close(lse, want_lse)
        close(out, want)
        upstream = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad(out, case.leaves, upstream)
        want_grads = torch.autograd.grad(want, leaves, upstream, materialize_grads=True)
        for grad, expected in zip(grads, want_grads, strict=True):
            close(grad, expected, 1e-11)


def dense(case: Case, dtype: torch.dtype, softcap: float | None = None) -> Any:
    """(leaves, out, lse) of plain PyTorch in `dtype`, all branches of all groups against one mask."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    q, k, v = leaves
    prefix_k, prefix_v = (x.nan_to_num(0.0).to(dtype) for x in (case.prefix_k, case.prefix_v))
    row, size = 0, len(prefix_k)
    visible = torch.zeros(len(q), size + len(q), dtype=torch.bool)
    for (start, length), lengths in zip(case.slices, case.groups, strict=True):
        for branch in lengths:
            for i in range(branch):
                visible[row + i, start : start + length] = True
                visible[row + i, size + row : size + row + i + 1] = True
            row += branch
    repeat = q.shape[1] // k.shape[1]
    keys, values = (
        torch.cat(x).repeat_interleave(repeat, 1).transpose(0, 1) for x in ((prefix_k, k), (prefix_v, v))
    )  # [Hq, n, E]
    scores = q.transpose(0, 1) @ keys.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    return leaves, (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 2.0), (150, None)])
def test_sizes_that_span_blocks(
    window: int | None, softcap: float | None, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_host_reads", lambda _: not device)
    monkeypatch.setattr(reference, "SCORES", 1 << 16)
    case = make([[70], [130, 1, 1, 40, 40]], [(3, 0), (5, 1100)], (2, 1))
    leaves, want, want_lse = case.naive(window=window, softcap=softcap)
    for leaf in case.leaves:
        leaf.requires_grad_()
    out, lse = case.run(window=window, softcap=softcap)
    close(out, want)
    close(lse, want_lse)
    upstream = torch.randn_like(out)
    for grad, expected in zip(
        torch.autograd.grad(out, case.leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        close(grad, expected, 1e-11)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_within_twice_plain_pytorch(dtype: torch.dtype, softcap: float | None) -> None:
    case = make([[90], [17, 17, 1, 1, 17]], [(0, 0), (2, 600)], width=64, dtype=dtype)
    for leaf in case.leaves:
        leaf.requires_grad_()
    out, lse = case.run(softcap=softcap)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact_leaves, exact, exact_lse = case.naive(softcap=softcap)
    plain_leaves, plain, plain_lse = dense(case, dtype, softcap)
    assert_close_to_reference(out, exact, plain)
    assert_close_to_reference(lse, exact_lse, plain_lse)
    upstream = torch.randn(out.shape).to(dtype)
    for grad, expected, other in zip(
        torch.autograd.grad(out, case.leaves, upstream),
        torch.autograd.grad(exact, exact_leaves, upstream.double()),
        torch.autograd.grad(plain, plain_leaves, upstream),
        strict=True,
    ):
        assert grad.dtype == dtype
        assert_close_to_reference(grad, expected, other)


def test_batched_cache_is_read_in_place() -> None:
    rows, kv_heads, size, width = 3, 2, 400, 8
    cache_k, cache_v = (poison_(torch.empty(rows, kv_heads, size, width, dtype=F64)) for _ in range(2))
    slices = [(17, 300), (0, 0), (399, 1)]  # left padding and length
    for row, (start, length) in enumerate(slices):
        for cache in (cache_k, cache_v):
            cache[row, :, start : start + length] = torch.randn(kv_heads, length, width, dtype=F64)
    flat = make([[2, 1], [1], [3]], [])
    views = cache_k.transpose(1, 2), cache_v.transpose(1, 2)
    case = Case(flat.q, flat.k, flat.v, *views, flat.groups, slices, [[0], [1], [2]])
    with largest_tensor() as largest:
        out, lse = case.run()
    assert largest.numel <= out.numel(), largest
    _, want, want_lse = case.naive()
    close(out, want)
    close(lse, want_lse)


def test_prefix_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([[4] * 13], [(1, 512)], (4, 2), 16, torch.float32)
    prefix = 512 * 2 * 16
    with largest_tensor() as largest:
        case.run()
    assert largest.numel < prefix, largest  # not even once
    for leaf in case.leaves:
        leaf.requires_grad_()
    monkeypatch.setattr(reference, "SCORES", prefix)
    for options in ({}, {"softcap": 5.0}, {"window": 100}):
        with largest_tensor() as largest:
            case.run(**options)[0].sum().backward()
        assert largest.numel <= prefix, (options, largest)


def test_hints_cost_time_only() -> None:
    case = make([[3, 2]], [(1, 6)])
    want = case.run()
    for hint in (0, 1, 5, 1 << 40):
        got = case.run(max_branch_len=hint, max_prefix_len=hint)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_page_sizes_agree() -> None:
    case = make([[3, 2], [], [1, 1]], [(1, 6), (0, 3), (4, 9)])
    want = case.run()
    for page in (1, 2, 3, 16):
        for got, expected in zip(as_pages(case, page).run(), want, strict=True):
            close(got, expected)


@pytest.mark.parametrize("device", [False, True])
def test_empty_sizes(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_host_reads", lambda _: not device)
    for groups, slices in (
        ([], []),
        ([[]], [(0, 3)]),
        ([[0, 0], []], [(0, 3), (1, 0)]),
        ([[1, 0]], [(0, 0)]),
        ([[2], [0], [1]], [(3, 0), (0, 2), (0, 0)]),
    ):
        for own in (True, False):
            for options in ({}, {"window": 2}):
                case = make(groups, slices, own=own)
                for leaf in case.leaves:
                    leaf.requires_grad_()
                out, lse = case.run(**options)
                _, want, want_lse = case.naive(**options)
                close(lse, want_lse)
                close(out, want)
                out.sum().backward()
                assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in case.leaves)
    nothing = make([[2]], [(0, 0)], own=False)
    nothing.prefix_k = nothing.prefix_v = torch.zeros(0, 2, 8, dtype=F64)
    out, lse = nothing.run()
    assert not out.any()
    assert (lse == -math.inf).all()
    for shape in ((0, 4, 2, 8), (3, 0, 2, 8)):  # no pages, no slots
        nothing.prefix_k = nothing.prefix_v = torch.zeros(shape, dtype=F64)
        nothing.table = [[-1]]
        assert (nothing.run()[1] == -math.inf).all()
    nothing.table = [[]]
    assert (nothing.run()[1] == -math.inf).all()
    no_heads = make([[2]], [(0, 3)], heads=(0, 1)).run()
    assert [x.shape for x in no_heads] == [(2, 0, 8), (0, 2)]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 4}])
@pytest.mark.parametrize("device", [False, True])
def test_what_a_row_does_not_see_does_not_reach_it(
    options: dict[str, Any], device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_host_reads", lambda _: not device)
    clean = make([[4, 1, 3], [2]], [(1, 6), (8, 3)], dtype=torch.float32)
    upstream = torch.randn(10, 4, 8)

    def run(case: Case) -> list[Tensor]:
        for leaf in case.leaves:
            leaf.requires_grad_()
        out, lse = case.run(**options)
        return [out, lse.T, *torch.autograd.grad(out, case.leaves, upstream)]

    want = run(clean)
    dirty = make([[4, 1, 3], [2]], [(1, 6), (8, 3)], dtype=torch.float32)
    strange = [math.nan, math.inf, -math.inf]
    for x, value in zip(dirty.leaves, strange, strict=True):
        x[3] = value  # the last row of the first branch
        x[4] = value  # a branch of one row
    dirty.prefix_k[8:11], dirty.prefix_v[8:11] = math.nan, math.inf  # the second group's prefix
    got = run(dirty)
    unseen = [0, 1, 2, 5, 6, 7]
    for actual, expected in zip(got[:3], want[:3], strict=True):
        assert torch.equal(actual[unseen], expected[unseen])
    for actual, expected in zip(got[3:], want[3:], strict=True):  # row 3 sees all of its branch
        assert torch.equal(actual[[5, 6, 7]], expected[[5, 6, 7]])
    assert got[0][[3, 4]].isnan().all()
    assert got[0][[8, 9]].isnan().all() or options == {"window": 4}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "prefix_k", "prefix_v"])
def test_strange_values_that_are_seen_count_as_in_a_dense_softmax(
    where: str, value: float, softcap: float | None
) -> None:
    case = make([[3, 1], [2, 2]], [(0, 5), (2, 4)])
    getattr(case, where)[3, 1, 2] = value
    out, lse = case.run(softcap=softcap)
    _, want, want_lse = case.naive(softcap=softcap)
    close(out, want)
    close(lse, want_lse)


def test_long_runs_of_nan_are_not_dropped() -> None:
    case = make([[1, 2]], [(0, 1100)], dtype=torch.float32)
    for place in (slice(0, 600), slice(512, 1024), slice(1099, 1100)):
        dirty = make([[1, 2]], [(0, 1100)], dtype=torch.float32)
        dirty.prefix_k[place] = math.nan
        assert dirty.run()[0].isnan().all()
    assert case.run()[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_all_scores_infinitely_low_is_empty(options: dict[str, float]) -> None:
    case = make([[2]], [(0, 3)], (1, 1), 1)
    case.q[:] = 1.0
    case.prefix_k[:] = -math.inf
    case.k[:] = -math.inf
    out, lse = case.run(**options)
    if not options:
        assert (lse == -math.inf).all()
        assert not out.any()
    else:
        close(lse[0], torch.tensor([4.0, 5.0], dtype=F64).log() - 2.0)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_a_group_alone_has_the_same_bits(options: dict[str, float]) -> None:
    groups, slices = [[40], [9, 1, 9, 9], [1] * 13, [5, 2]], [(0, 0), (3, 70), (10, 600), (0, 33)]
    together = make(groups, slices, dtype=torch.float32)
    out, lse = together.run(**options)
    first = 0
    for group, piece in zip(groups, slices, strict=True):
        rows = slice(first, first + sum(group))
        first = rows.stop
        alone = [x[rows] for x in together.leaves]
        got, got_lse = Case(*alone, together.prefix_k, together.prefix_v, [group], [piece]).run(**options)
        assert torch.equal(got, out[rows])
        assert torch.equal(got_lse, lse[:, rows])


def test_large_float16_values_are_finite() -> None:
    case = make([[2, 1]], [(0, 40)], dtype=torch.float16)
    case.prefix_v.fill_(60000.0)
    case.v.fill_(60000.0)
    assert (case.run()[0] == 60000.0).all()


def test_zero_queries_average() -> None:
    case = make([[1, 2]], [(0, 1)])
    case.q.zero_()
    out, lse = case.run()
    close(lse[0], torch.tensor([2.0, 2.0, 3.0], dtype=F64).log())
    close(out, case.naive()[1])


def test_inputs_unchanged_and_repeats_equal() -> None:
    case = make([[3, 1], [2]], [(1, 6), (8, 3)], dtype=torch.float32)
    layout = case.layout
    before = [x.clone() for x in (*case.tensors, *(x for x in layout.values() if x is not None))]
    for leaf in case.leaves:
        leaf.requires_grad_()
    runs = []
    for _ in range(2):
        out, lse = branch_attention(*case.tensors, BranchLayout(**layout), return_lse=True)
        runs.append([out, lse, *torch.autograd.grad(out.square().sum(), case.leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    after = (*case.tensors, *(x for x in layout.values() if x is not None))
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(after, before, strict=True))


def test_prefix_is_frozen() -> None:
    case = make([[5], [2, 2]], [(0, 0), (0, 3)])
    for leaf in case.leaves:
        leaf.requires_grad_()
    case.prefix_k, case.prefix_v = case.k, case.v
    with pytest.raises(ValueError, match=r"^branch_attention: prefix_k: .*\.detach\(\)"):
        case.run()
    with torch.no_grad():
        plain = case.run()[0]
    case.prefix_k, case.prefix_v = case.k.detach(), case.v.detach()
    out, lse = case.run()
    assert torch.equal(out, plain)
    assert not lse.requires_grad
    out[5:].sum().backward()  # the second group
    assert not case.k.grad[:5].any()
    case.prefix_v = case.v
    with pytest.raises(ValueError, match=r"^branch_attention: prefix_v: .*\.detach\(\)"):
        case.run()


def test_gradient_of_each_input_alone() -> None:
    case = make([[3, 2]], [(1, 4)], dtype=torch.float32)

    def grads(wanted: set[int]) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(case.leaves)]
        branch_attention(*leaves, case.prefix_k, case.prefix_v, BranchLayout(**case.layout)).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    every = grads({0, 1, 2})
    for i in range(3):
        alone = grads({i})
        assert torch.equal(alone[i], every[i])
        assert all(grad is None for j, grad in enumerate(alone) if j != i)


@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 1.5, "scale": 0.7}])
@pytest.mark.parametrize("own", [True, False])
def test_gradcheck(own: bool, options: dict[str, Any]) -> None:
    case = make([[2, 1], [0, 3]], [(1, 3), (2, 2)], (2, 1), 3, own=own)

    def out(*leaves: Tensor) -> Tensor:
        k, v = leaves[1:] if own else (None, None)
        return branch_attention(leaves[0], k, v, case.prefix_k, case.prefix_v, BranchLayout(**case.layout), **options)

    assert torch.autograd.gradcheck(out, [x.requires_grad_() for x in case.leaves])


def _arguments(case: Case, *, window: int | None = None, softcap: float | None = None) -> tuple:
    layout = case.layout
    return (*case.tensors, *layout.values(), None, 7, window, 0.3, softcap)


def _grad(case: Case) -> Case:
    for leaf in case.leaves:
        leaf.requires_grad_()
    return case


OPCHECK = [
    lambda: _arguments(_grad(make([[3, 1], [2]], [(1, 6), (8, 3)], dtype=torch.float32))),
    lambda: _arguments(_grad(make([[3, 1], []], [(1, 6), (8, 0)], dtype=torch.float32)), window=3, softcap=2.0),
    lambda: _arguments(_grad(make([[3, 1]], [(1, 6)], dtype=torch.float32, own=False))),
    lambda: _arguments(as_pages(make([[3, 1], [2]], [(1, 6), (8, 3)], dtype=torch.bfloat16), 2)),
    lambda: _arguments(make([], [])),
]


@pytest.mark.parametrize("arguments", OPCHECK)
def test_opcheck(arguments: Callable[[], tuple]) -> None:
    given_ = tuple(x.nan_to_num(0.0) if isinstance(x, Tensor) and not x.requires_grad else x for x in arguments())
    torch.library.opcheck(torch.ops.fb.branch_attention.default, given_)
    q, *rest = (x.detach() if isinstance(x, Tensor) else x for x in given_)
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=F64 if q.dtype == F64 else torch.float32)
    backward = torch.ops.fb.branch_attention_backward.default
    torch.library.opcheck(backward, (torch.ones_like(q), q, *rest[:4], torch.zeros_like(q), lse, *rest[4:]))


@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 2.0}])
def test_compiles_without_breaks(options: dict[str, Any]) -> None:
    case = make([[3, 1], [2]], [(1, 6), (8, 3)], dtype=torch.float32)
    slices = {"prefix_start": torch.tensor([0, 1]), "prefix_len": torch.tensor([2, 3])}
    layout = BranchLayout(**case.layout | slices)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = branch_attention(q, k, v, k.detach(), v.detach(), layout, **options, return_lse=True)
        return (out * lse.T[..., None].exp()).sum(), lse

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in case.leaves]
        value, lse = function(*leaves)
        results.append([value, lse, *torch.autograd.grad(value, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_sync_where_the_host_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_host_reads", lambda _: False)
    for case in (make([[3, 1], [2]], [(1, 6), (8, 3)]), as_pages(make([[3, 1], [2]], [(1, 6), (8, 3)]), 2)):
        arguments = _arguments(case, window=4)
        with count_syncs() as syncs:
            out, lse = reference.branch_attention(*arguments)
            reference.branch_attention_backward(torch.ones_like(out), *arguments[:5], out, lse, *arguments[5:])
        assert syncs.total == 0, syncs
    with count_syncs() as syncs:
        case.run()
    assert syncs.total == 0, syncs


@pytest.mark.parametrize(
    ("name", "bad", "poisoned"),
    [
        ("cu_branch", [1, 3, 4, 6], range(6)),
        ("cu_branch", [0, 4, 3, 6], range(6)),
        ("cu_branch", [0, 3, 4, 1 << 40], range(6)),
        ("cu_group", [0, 1, 2], range(6)),
        ("cu_group", [0, -5, 3], range(6)),
        ("prefix_start", [-1, 8], range(4)),
        ("prefix_start", [1, 1 << 50], [4, 5]),
        ("prefix_len", [6, -3], [4, 5]),
        ("prefix_len", [6, (1 << 63) - 1], [4, 5]),
        ("block_table", [[0, -1, 2, 3], [-7, 99, 3, 9]], range(4)),
        ("block_table", [[0, 1, -1, -1], [0, 0, 4, 0]], [4, 5]),
    ],
)
@pytest.mark.parametrize("device", [False, True])
def test_bad_layouts(
    name: str, bad: list, poisoned: range | list[int], device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make([[3, 1], [2]], [(1, 6), (8, 3)])
    if name == "block_table":
        pages = [poison_(torch.empty(4, 4, 2, 8, dtype=F64)).nan_to_num(0.5) for _ in range(2)]
        case = Case(case.q, case.k, case.v, *pages, case.groups, [(1, 6), (8, 3)], [[0, 1, 2, -1], [-1, -1, 3, -1]])
    layout = case.layout | {name: torch.tensor(bad)}
    if not device:
        argument = "prefix_len" if bad == [1, 1 << 50] else name
        with pytest.raises(ValueError, match=rf"^BranchLayout: {argument}: expected .*, got .*; .+"):
            branch_attention(*case.tensors, BranchLayout(**layout))
        close(case.run()[0], case.naive()[1])
        return
    monkeypatch.setattr(reference, "_host_reads", lambda _: False)
    q = case.q.requires_grad_()
    out, lse = branch_attention(*case.tensors, BranchLayout(**layout), return_lse=True)
    wrong = torch.zeros(6, dtype=torch.bool)
    wrong[list(poisoned)] = True
    grad = torch.autograd.grad(out.sum(), q)[0]
    for result in (out, lse.T, grad):
        assert result[wrong].isnan().all()
        assert result[~wrong].isfinite().all()


def test_changing_integers_compile_once() -> None:
    case = make([[3, 1], [2]], [(1, 6), (8, 3)], dtype=torch.float32)

    def run(longest: int, window: int) -> Tensor:
        layout = BranchLayout(**case.layout, max_branch_len=longest, max_prefix_len=2 * longest)
        return branch_attention(*case.tensors, layout, window=window)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number in range(3, 15):  # more than torch compiles one function
        assert torch.equal(compiled(number, number + 1), run(number, number + 1))


def test_second_derivatives_are_refused() -> None:
    case = _grad(make([[3, 1]], [(1, 6)], dtype=torch.float32))
    assert case.k is not None
    grad = torch.autograd.grad(case.run()[0].square().sum(), case.q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="branch_attention: only first derivatives exist"):
        torch.autograd.grad(grad.sum(), case.k)


GOOD = make([[3, 1], [2]], [(1, 6), (8, 3)], dtype=torch.float32)
Q, K, V, PK, PV = GOOD.tensors
assert K is not None
assert V is not None
PAGES = PK[:12].nan_to_num(0.0).view(3, 4, 2, 8)
TABLE = torch.tensor([[0, 1, -1], [0, 1, 2]])


@pytest.mark.parametrize(
    ("change", "kind", "argument"),
    [
        ({"q": [1.0]}, TypeError, "q"),
        ({"q": Q.long()}, TypeError, "q"),
        ({"q": Q[0]}, ValueError, "q"),
        ({"q": Q[..., :0]}, ValueError, "q"),
        ({"k": K.double()}, TypeError, "k"),
        ({"k": K[:3]}, ValueError, "k"),
        ({"k": K[:, :1]}, ValueError, "k"),
        ({"k": None}, ValueError, "k"),
        ({"v": None}, ValueError, "v"),
        ({"v": V[..., :4]}, ValueError, "v"),
        ({"v": V.to("meta")}, ValueError, "v"),
        ({"prefix_k": None}, TypeError, "prefix_k"),
        ({"prefix_k": PK.bfloat16()}, TypeError, "prefix_k"),
        ({"prefix_k": PK.to(torch.float8_e4m3fn)}, TypeError, "prefix_k"),
        ({"prefix_k": PK[..., :4]}, ValueError, "prefix_k"),
        ({"prefix_k": PK[:, :0]}, ValueError, "prefix_k"),
        ({"prefix_k": PK.repeat(1, 2, 1)[:, :3]}, ValueError, "prefix_k"),
        ({"prefix_k": PAGES}, ValueError, "prefix_k"),
        ({"prefix_k": PK.clone().requires_grad_()}, ValueError, "prefix_k"),
        ({"prefix_v": PV[1:]}, ValueError, "prefix_v"),
        ({"prefix_v": PV.half()}, TypeError, "prefix_v"),
        ({"cu_branch": [0, 6]}, TypeError, "cu_branch"),
        ({"cu_branch": torch.tensor([0.0, 6.0])}, TypeError, "cu_branch"),
        ({"cu_branch": torch.tensor([[0, 6]])}, ValueError, "cu_branch"),
        ({"cu_group": torch.tensor([], dtype=torch.int32)}, ValueError, "cu_group"),
        ({"prefix_start": torch.tensor([0])}, ValueError, "prefix_start"),
        ({"prefix_start": torch.tensor([0, 0], dtype=torch.int16)}, TypeError, "prefix_start"),
        ({"prefix_len": torch.tensor(0)}, ValueError, "prefix_len"),
        ({"block_table": TABLE}, ValueError, "prefix_k"),
        ({"block_table": TABLE[:1], "prefix_k": PAGES, "prefix_v": PAGES}, ValueError, "block_table"),
        ({"block_table": TABLE.float(), "prefix_k": PAGES, "prefix_v": PAGES}, TypeError, "block_table"),
        ({"window": 0}, ValueError, "window"),
        ({"window": 2.5}, TypeError, "window"),
        ({"window": True}, TypeError, "window"),
        ({"max_branch_len": -1}, ValueError, "max_branch_len"),
        ({"max_prefix_len": "8"}, TypeError, "max_prefix_len"),
        ({"scale": 0.0}, ValueError, "scale"),
        ({"scale": math.nan}, ValueError, "scale"),
        ({"scale": "1"}, TypeError, "scale"),
        ({"q": Q.to_sparse()}, ValueError, "q"),
        ({"softcap": -1.0}, ValueError, "softcap"),
    ],
)
def test_bad_arguments(change: dict[str, Any], kind: type[Exception], argument: str) -> None:
    def run(**given: Any) -> Tensor:
        options = {name: given.pop(name) for name in ("window", "scale", "softcap") if name in given}
        tensors = [given.pop(name) for name in ("q", "k", "v", "prefix_k", "prefix_v")]
        return branch_attention(*tensors, BranchLayout(**given), **options)

    good = dict(zip(("q", "k", "v", "prefix_k", "prefix_v"), GOOD.tensors, strict=True)) | GOOD.layout
    op = "BranchLayout" if argument in inspect.signature(BranchLayout).parameters else "branch_attention"
    with pytest.raises(kind, match=rf"^{op}: {argument}: expected .*, got .*; .+") as caught:
        run(**good | change)
    assert type(caught.value) is kind
    close(run(**good), GOOD.naive(torch.float32)[1], 1e-5)
