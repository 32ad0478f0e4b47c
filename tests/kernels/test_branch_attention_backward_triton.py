"""The Triton backward of `branch_attention` against the float64 definition, interpreted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_branch_attention import F64, Case, as_pages, cases, dense, make, scattered
from torch import Tensor

from fb_kernels import tuning
from fb_kernels.branch_attention import branch_attention, reference
from fb_kernels.branch_attention import triton_backward as kernels
from fb_kernels.branch_attention import triton_layout as branch_layout
from fb_kernels.layout import BranchLayout
from fb_kernels.testing import assert_close_to_reference, count_syncs, poison_

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="kernels run on a GPU here")
TINY = {"BLOCK_M": 16, "BLOCK_N": 16, "KEYS": 16, "KEY_ROWS": 16}
OPTIONS: list[dict[str, Any]] = [{}, {"window": 5}, {"softcap": 1.5}, {"window": 20, "softcap": 2.0, "scale": 0.7}]


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that tiny sizes cross several, pieces of one block."""
    monkeypatch.setattr(tuning, "branch_attention_backward", lambda *_: TINY)
    monkeypatch.setattr(tuning, "branch_attention", lambda *_: {"BLOCK_M": 16, "BLOCK_N": 16})
    monkeypatch.setattr(tuning, "branch_attention_split", lambda *_: {"BLOCK_M": 16, "BLOCK_N": 16, "CHUNK": 16})
    monkeypatch.setattr(kernels, "PIECE", 16)
    monkeypatch.setattr(branch_layout, "OFFSETS", 8)


def arguments(case: Case, **options: Any) -> tuple[tuple, tuple]:
    """Tensors before and arguments behind out and lse, as the operator takes them."""
    scale = options.get("scale") or case.q.shape[-1] ** -0.5
    hints = options.get("max_branch_len"), options.get("max_prefix_len")
    return case.tensors, (*case.layout.values(), *hints, options.get("window"), scale, options.get("softcap"))


def state(case: Case, dtype: torch.dtype | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the reference's forward; it decides what a device's rows would be."""
    tensors, rest = arguments(case, **options)
    tensors = tuple(x if x is None else x.detach().to(dtype or x.dtype) for x in tensors)
    return reference.branch_attention(*tensors, *rest)


def gradient(case: Case, upstream: Tensor, out: Tensor, lse: Tensor, **options: Any) -> list[Tensor]:
    """dq, dk and dv of the kernel, into memory that was poisoned before."""
    tensors, rest = arguments(case, **options)
    with poisoned():
        return list(kernels.branch_attention_backward(upstream, *tensors, out, lse, *rest))


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN: what is left unwritten shows, and what is read unwritten does."""
    plain = Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", lambda *a, **k: poison_(plain(*a, **k)))
        yield


def random_like(x: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(x.dtype)


def check(case: Case, upstream: Tensor | None = None, *, strange: bool = False, **options: Any) -> list[Tensor]:
    """The kernel against the definition and the reference in the same dtype; returns the kernel's."""
    out, lse = state(case, **options)
    upstream = random_like(out) if upstream is None else upstream
    got = gradient(case, upstream, out, lse, **options)
    compare(case, upstream, got, strange=strange, **options)
    return got


def compare(case: Case, upstream: Tensor, got: list[Tensor], *, strange: bool = False, **options: Any) -> None:
    """dq, dk and dv against the definition's gradients and the reference in the same dtype.

    With strange values, whose gradients have rules of their own, against the reference in float64.
    """
    tensors, rest = arguments(case, **options)
    tensors = tuple(x if x is None else x.detach() for x in tensors)
    plain = reference.branch_attention_backward(upstream, *tensors, *state(case, case.q.dtype, **options), *rest)
    values = {name: value for name, value in options.items() if not name.startswith("max_")}
    if strange:
        wide = (x if x is None else x.double() for x in tensors)
        truth = [*reference.branch_attention_backward(upstream.double(), *wide, *state(case, F64, **options), *rest)]
    else:
        leaves, out, _ = case.naive(**values)
        truth = [*torch.autograd.grad(out, leaves, upstream.double(), materialize_grads=True)]
        truth += plain[len(truth) :]  # dk and dv of no keys
    # dout . v - dout . out may cancel to nothing: what counts is the scale of what is subtracted.
    scales = case.magnitudes(upstream, **values)[2:]
    scales += [torch.ones(())] * (len(got) - len(scales))  # dk and dv of no keys
    for actual, exact, native, scale in zip(got, truth, plain, scales, strict=True):
        assert actual.dtype == case.q.dtype
        assert_close_to_reference(actual, exact, native, scale=scale)


@settings(max_examples=12)
@given(
    case=cases(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    options=st.sampled_from(OPTIONS),
    laid=st.sampled_from(["plain", "scattered", "expanded"]),
)
def test_matches_the_reference(case: Case, dtype: torch.dtype, options: dict[str, Any], laid: str) -> None:
    alike = case.prefix_k is case.k  # the prefix is a view of the rows
    case.q, case.k, case.v = (None if x is None else x.to(dtype) for x in (case.q, case.k, case.v))
    if alike:
        case.prefix_k, case.prefix_v = case.k, case.v
    else:
        case.prefix_k, case.prefix_v = case.prefix_k.to(dtype), case.prefix_v.to(dtype)
    upstream = random_like(case.q)
    if laid == "scattered":
        upstream = scattered(upstream)
    elif laid == "expanded":
        upstream = torch.full((), 0.5, dtype=dtype).expand(case.q.shape)
    check(case, upstream, **options)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("dtype", "options"), [(torch.float16, {}), (torch.bfloat16, OPTIONS[3])])
def test_training_rows_over_pieces_of_the_prefix(
    dtype: torch.dtype, options: dict[str, Any], paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, grids = kernels._branch_attention_bwd_add_kernel, []

    class Spy:
        def __getitem__(self, grid: tuple[int]) -> Any:
            grids.append(grid)
            return add[grid]

    monkeypatch.setattr(kernels, "_branch_attention_bwd_add_kernel", Spy())
    case = make([[1] * 13, [1, 0, 1]], [(3, 38), (8, 32)], (2, 1), 16, dtype)
    case = as_pages(case, 16) if paged else case
    pieces = check(case, **options)
    assert len(grids) == 1
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    upstream, (out, lse) = random_like(case.q), state(case, **options)
    for whole, added in zip(gradient(case, upstream, out, lse, **options), pieces, strict=True):
        torch.testing.assert_close(whole, added, rtol=1e-2, atol=1e-2)
    assert len(grids) == 1


@pytest.mark.parametrize("options", OPTIONS)
def test_long_branches(options: dict[str, Any]) -> None:
    check(make([[19], [3, 0, 17]], [(0, 0), (2, 37)], (2, 1), 16, torch.bfloat16), **options)


@pytest.mark.parametrize(("heads", "width"), [((1, 1), 20), ((3, 1), 16), ((16, 1), 20), ((10, 2), 16)])
def test_heads(heads: tuple[int, int], width: int) -> None:
    check(make([[5, 1, 3]], [(1, 18)], heads, width, torch.float32))


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_head_dims(width: int) -> None:
    check(make([[2, 1]], [(1, 20)], (2, 1), width, torch.bfloat16))


@pytest.mark.parametrize("page", [1, 3, 16])
def test_pages(page: int) -> None:
    check(as_pages(make([[3, 2], [], [1, 1]], [(1, 26), (0, 3), (4, 19)], (2, 1), dtype=torch.float32), page))


def test_empty_sizes() -> None:
    for groups, slices in (
        ([], []),
        ([[]], [(0, 3)]),
        ([[0, 0], []], [(0, 3), (1, 0)]),
        ([[1, 0]], [(0, 0)]),
        ([[2], [0], [1]], [(3, 0), (0, 2), (0, 0)]),
    ):
        for own in (True, False):
            got = check(make(groups, slices, own=own, dtype=torch.float32))
            assert all(x.isfinite().all() for x in got)
            assert own or [x.shape for x in got[1:]] == [(0,), (0,)]
    no_heads = make([[2]], [(0, 3)], heads=(0, 1), dtype=torch.float32)
    dq, dk, dv = gradient(no_heads, no_heads.q, *state(no_heads))
    assert dq.shape == (2, 0, 8)
    assert not dk.any()
    assert not dv.any()


def test_rows_without_a_key_have_no_gradient() -> None:
    case = make([[2], [1]], [(0, 0), (0, 3)], own=False, dtype=torch.float32)
    dq = gradient(case, random_like(case.q), *state(case))[0]
    assert not dq[:2].any()
    assert dq[2].any()


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 4}])
def test_what_a_row_does_not_see_does_not_reach_it(options: dict[str, Any]) -> None:
    def run(strange: bool) -> list[Tensor]:
        case = make([[4, 1, 3], [2]], [(1, 6), (8, 3)], (2, 1), dtype=torch.float32)
        upstream = random_like(case.q)
        if strange:
            for x, value in zip((*case.leaves, upstream), (math.nan, math.inf, -math.inf, math.inf), strict=True):
                x[3] = value  # the last row of the first branch
                x[4] = value  # a branch of one row
            case.prefix_k[8:11], case.prefix_v[8:11] = math.nan, math.inf  # the second group's prefix
        return gradient(case, upstream, *state(case, **options), **options)

    want, got = run(False), run(True)
    assert torch.equal(got[0][[0, 1, 2, 5, 6, 7]], want[0][[0, 1, 2, 5, 6, 7]])
    assert got[0][[3, 4]].isnan().all()
    for actual, expected in zip(got[1:], want[1:], strict=True):  # row 3 sees all of its branch
        assert torch.equal(actual[[5, 6, 7]], expected[[5, 6, 7]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "prefix_k", "prefix_v", "upstream"])
def test_strange_values_that_are_seen_are_as_in_the_reference(where: str, value: float) -> None:
    case = make([[3, 1], [2]], [(0, 34), (2, 3)], (2, 1), dtype=torch.float32)
    upstream = random_like(case.q)
    (upstream if where == "upstream" else getattr(case, where))[2, 0, 2] = value
    check(case, upstream, strange=True)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_keys_infinitely_far(options: dict[str, Any]) -> None:
    case = make([[1, 2]], [(0, 40)], (2, 1), 1, torch.float32)
    case.q.copy_(case.q.abs() + 0.1)
    case.prefix_k[[2, 20, 39]] = -math.inf  # scores of -inf, p 0: in unmasked blocks and in the last one
    got = check(case, strange=True, **options)
    assert got[0].isfinite().all()
    case.prefix_k[:40] = -math.inf
    check(case, strange=True, **options)


@pytest.mark.parametrize("own", [True, False])
def test_a_layout_that_does_not_fit_is_nan(own: bool) -> None:
    for change in (
        {"cu_branch": torch.tensor([0, 3, 2, 6])},
        {"cu_branch": torch.tensor([0, 3, 4, 1 << 40])},
        {"cu_branch": torch.tensor([1, 3, 4, 6])},
        {"cu_group": torch.tensor([0, 9, 3])},
        {"cu_group": torch.tensor([0, 2, 1])},
        {"prefix_start": torch.tensor([-1, 8])},
        {"prefix_len": torch.tensor([1 << 40, 3])},
    ):
        case = make([[3, 1], [2]], [(1, 6), (8, 3)], (2, 1), dtype=torch.float32, own=own)
        rest = list((case.layout | change).values())
        lse = state(case)[1]
        rows = slice(None) if change.keys() & {"cu_branch", "cu_group"} else slice(0, 4)
        lse[:, rows] = math.nan  # as the forward writes them
        options = (None, None, None, 0.3, None)
        with poisoned():
            got = kernels.branch_attention_backward(case.q, *case.tensors, case.q, lse, *rest, *options)
        for x in got[: 3 if own else 1]:
            assert x[rows].isnan().all()
            assert rows == slice(None) or x[4:].isfinite().all()


def test_strided_indices() -> None:
    case = make([[3, 1], [2]], [(1, 6), (8, 3)], (2, 1), dtype=torch.float32)
    out, lse = state(case)
    options = (None, None, None, 0.3, None)
    layout = list(case.layout.values())[:4]
    want = kernels.branch_attention_backward(case.q, *case.tensors, out, lse, *layout, None, *options)
    strided = [torch.stack([x, poison_(x.clone())], 1)[:, 0] for x in layout]
    got = kernels.branch_attention_backward(case.q, *case.tensors, out, lse, *strided, None, *options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_groups_or_branches_for_rows() -> None:
    case = make([[2]], [(0, 3)], dtype=torch.float32)
    none, one = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lse = torch.full((4, 2), math.nan)
    for layout in ((one, one, none, none), (one, torch.tensor([0, 0]), one, one)):
        for x in kernels.branch_attention_backward(
            case.q, *case.tensors, case.q, lse, *layout, None, None, None, None, 0.3, None
        ):
            assert x.isnan().all()


def test_hints_cost_time_only() -> None:
    case = make([[1] * 3, [2]], [(1, 36), (0, 17)], (2, 1), dtype=torch.float32)
    for hint in (0, 20, 1 << 40):
        check(case, max_branch_len=hint, max_prefix_len=hint)


def test_repeats_are_bit_equal_without_a_sync() -> None:
    case = make([[1] * 5, [3, 6]], [(1, 36), (0, 17)], (2, 1), dtype=torch.bfloat16)
    before = [x.clone() for x in case.tensors if x is not None]
    upstream, (out, lse) = random_like(case.q), state(case)
    first = gradient(case, upstream, out, lse)
    tensors, rest = arguments(case)
    with count_syncs() as syncs:
        again = kernels.branch_attention_backward(upstream, *tensors, out, lse, *rest)
    assert syncs.total == 0
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    now = [x for x in case.tensors if x is not None]
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(now, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    case = make([[9], [1, 1, 17]], [(0, 0), (2, 40)], (2, 1), 32, dtype)
    upstream, (out, lse) = random_like(case.q), state(case)
    got = gradient(case, upstream, out, lse)
    leaves, exact, _ = case.naive()
    plain_leaves, plain, _ = dense(case, dtype)
    truth = torch.autograd.grad(exact, leaves, upstream.double())
    native = torch.autograd.grad(plain, plain_leaves, upstream)
    for triple in zip(got, truth, native, strict=True):
        assert_close_to_reference(*triple)


def test_what_it_was_not_made_for() -> None:
    for case in (make([[2]], [(0, 3)]), make([[2]], [(0, 3)], width=257, dtype=torch.float32)):
        tensors, rest = arguments(case)
        assert kernels.branch_attention_backward(case.q, *tensors, case.q, state(case)[1], *rest) is NotImplemented


@pytest.mark.parametrize("changed", [None, "q", "k", "prefix_v", "upstream", "odd width", "column", "expanded"])
def test_form_says_whether_rows_are_aligned(changed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []
    monkeypatch.setattr(tuning, "branch_attention_backward", lambda *a: forms.append(a[-1]) or TINY)
    case = make([[1]], [(0, 2)], (1, 1), 20 if changed == "odd width" else 16, torch.bfloat16)
    upstream = random_like(case.q)

    def shifted(x: Tensor) -> Tensor:
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)

    if changed == "upstream":
        upstream = shifted(upstream)
    elif changed == "expanded":  # has columns of stride 0
        upstream = upstream.new_ones(()).expand(upstream.shape)
    elif changed == "prefix_v":
        case.prefix_v = torch.empty(*case.prefix_v.shape[:2], 17, dtype=case.q.dtype)[..., :16].copy_(case.prefix_v)
    elif changed == "column":
        case.q = scattered(case.q)
    elif changed in ("q", "k"):
        setattr(case, changed, shifted(getattr(case, changed)))
    check(case, upstream)
    assert forms == ["aligned" if changed in (None, "column", "expanded") else "unaligned"]


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize(("lengths", "dtype"), [([1, 1, 1], torch.float32), ([2, 4, 0, 1], torch.bfloat16)])
@pytest.mark.parametrize("options", OPTIONS)
def test_through_autograd(lengths: list[int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make([lengths, [1]], [(1, 20), (0, 5)], (2, 1), dtype=dtype)
    for leaf in case.leaves:
        leaf.requires_grad_()
    out = branch_attention(*case.tensors, BranchLayout(**case.layout), **options)
    upstream = random_like(out)
    with poisoned():
        got = torch.autograd.grad(out, case.leaves, upstream)
    compare(case, upstream, list(got), **options)


@pytest.mark.usefixtures("triton_kernels")
def test_through_autograd_without_own_keys() -> None:
    case = make([[2, 1]], [(1, 20)], (2, 1), dtype=torch.float32, own=False)
    case.q.requires_grad_()
    out = branch_attention(*case.tensors, BranchLayout(**case.layout))
    (dq,) = torch.autograd.grad(out, case.leaves, torch.ones_like(out))
    compare(case, torch.ones_like(out), [dq, *dq.new_empty(2, 0)])


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("own", [True, False])
def test_opcheck(own: bool) -> None:
    case = make([[3, 1]], [(1, 6)], (2, 1), dtype=torch.float32, own=own)
    tensors, rest = arguments(case, max_prefix_len=7)
    tensors = tuple(x if x is None else x.nan_to_num(0.0) for x in tensors)
    given_ = (random_like(case.q), *tensors, *state(case), *rest)
    torch.library.opcheck(torch.ops.fb.branch_attention_backward.default, given_)


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("lengths", [[1, 1], [3, 1]])
def test_compiles_without_breaks(lengths: list[int]) -> None:
    case = make([lengths, [1]], [(1, 20), (0, 5)], (2, 1), dtype=torch.float32)
    layout = BranchLayout(**case.layout)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return branch_attention(q, k, v, case.prefix_k, case.prefix_v, layout).square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in case.leaves]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
