"""`merge_attention_states` against a softmax over all keys at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.branch_attention import branch_attention
from fb_kernels.layout import BranchLayout
from fb_kernels.merge_attention_states import merge_attention_states
from fb_kernels.merge_attention_states.naive import merge_attention_states as naive
from fb_kernels.testing import assert_close_to_reference

F64 = torch.float64


def make(rows: int, heads: int, width: int, dtype: torch.dtype = F64, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    lse_dtype = F64 if dtype == F64 else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    a, b = ((randn(rows, heads, width).to(dtype), (3 * randn(heads, rows)).to(lse_dtype)) for _ in range(2))
    return *a, *b


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(0, 5),
    heads=st.integers(0, 4),
    width=st.integers(0, 9),
    seed=st.integers(0, 9),
    shift=st.sampled_from([0.0, 1e4, -1e4]),
    strided=st.booleans(),
)
def test_matches_one_softmax(rows: int, heads: int, width: int, seed: int, shift: float, strided: bool) -> None:
    out_a, lse_a, out_b, lse_b = make(rows, heads, width, seed=seed)
    lse_a, lse_b = lse_a + shift, lse_b + shift
    if strided:
        out_a, out_b = (x.new_empty(heads, width, rows + 1)[..., 1:].permute(2, 0, 1).copy_(x) for x in (out_a, out_b))
        lse_a, lse_b = (x.T.contiguous().T for x in (lse_a, lse_b))
    leaves = [x.detach().requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    got, want = merge_attention_states(*leaves), naive(*leaves)
    upstream = [torch.randn(x.shape, dtype=F64) for x in want]
    for actual, expected in zip(got, want, strict=True):
        assert actual.is_contiguous()
        close(actual, expected)
    for actual, expected in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        close(actual, expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    leaves = [x.requires_grad_() for x in make(40, 4, 64, dtype)]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    plain_leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    got, exact, plain = merge_attention_states(*leaves), naive(*exact_leaves), naive(*plain_leaves)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    upstream = torch.randn(40, 4, 64).to(dtype)
    results = [
        [*states, *torch.autograd.grad(states[0], inputs, upstream.to(states[0].dtype), retain_graph=True)]
        for states, inputs in ((got, leaves), (exact, exact_leaves), (plain, plain_leaves))
    ]
    for actual, expected, other in zip(*results, strict=True):
        assert_close_to_reference(actual, expected, other)


def test_branch_attention_in_two_parts() -> None:
    q, prefix, own = torch.randn(6, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 6, 2, 8)

    def run(own: Tensor | tuple[None, None], length: int) -> tuple[Tensor, Tensor]:
        return branch_attention(q, *own, *prefix, BranchLayout.of([[4, 2]], [(1, length)]), return_lse=True)

    merged = merge_attention_states(*run((None, None), 7), *run(own, 0))
    for actual, expected in zip(merged, run(own, 7), strict=True):
        close(actual, expected, 1e-5)


def test_an_empty_state_is_not_read() -> None:
    out_a, lse_a, out_b, lse_b = make(4, 2, 3)
    lse_a[:, :2] = -math.inf
    lse_b[:, 1:3] = -math.inf
    out_a[:2], out_b[1:3] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = merge_attention_states(*leaves)
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(lse[:, 0], lse_b[:, 0])
    assert torch.equal(out[2], out_a[2])
    assert torch.equal(lse[:, 2], lse_a[:, 2])
    assert not out[1].any()
    assert (lse[:, 1] == -math.inf).all()
    grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad[1].any() for grad in grads[::2])
    assert not any(grad[:, 1].any() for grad in grads[1::2])
    close(grads[2][0], torch.ones(2, 3, dtype=F64))
    close(grads[3][:, 0], torch.ones(2, dtype=F64))


def test_nan_spreads_to_its_row_only() -> None:
    inputs = make(3, 2, 4, torch.float32)
    want = merge_attention_states(*inputs)
    inputs[1][:, 0] = math.nan
    inputs[2][1, 0, 2] = math.nan
    out, lse = merge_attention_states(*inputs)
    assert out[0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert out[1].isnan().nonzero().tolist() == [[0, 2]]
    assert torch.equal(out[2], want[0][2])
    assert torch.equal(lse[:, 1:], want[1][:, 1:])


def test_inputs_unchanged_and_repeats_equal() -> None:
    inputs = make(5, 2, 4, torch.bfloat16)
    before = [x.clone() for x in inputs]
    runs = [merge_attention_states(*inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("rows", [0, 3])
def test_opcheck(rows: int, dtype: torch.dtype) -> None:
    inputs = make(rows, 2, 4, dtype)
    torch.library.opcheck(torch.ops.fb.merge_attention_states.default, inputs)
    torch.library.opcheck(torch.ops.fb.merge_attention_states.default, tuple(x.requires_grad_() for x in inputs))
    strided = inputs[0].mT.contiguous().mT, inputs[1], inputs[2], inputs[3].T.contiguous().T
    torch.library.opcheck(torch.ops.fb.merge_attention_states.default, strided)


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(merge_attention_states, [x.requires_grad_() for x in make(3, 2, 4)])


def test_compiles_without_breaks() -> None:
    results = []
    for function in (
        merge_attention_states,
        torch.compile(merge_attention_states, fullgraph=True, backend="aot_eager"),
    ):
        leaves = [x.requires_grad_() for x in make(3, 2, 4, torch.float32)]
        out, lse = function(*leaves)
        results.append([out, lse, *torch.autograd.grad((out * lse.T[..., None]).sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


OUT, LSE, _, _ = make(3, 2, 4, torch.float32)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: merge_attention_states(None, LSE, OUT, LSE), TypeError, "out_a"),
        (lambda: merge_attention_states(OUT.long(), LSE, OUT, LSE), TypeError, "out_a"),
        (lambda: merge_attention_states(OUT[0], LSE, OUT, LSE), ValueError, "out_a"),
        (lambda: merge_attention_states(OUT, LSE, OUT.half(), LSE), TypeError, "out_b"),
        (lambda: merge_attention_states(OUT, LSE, OUT[1:], LSE), ValueError, "out_b"),
        (lambda: merge_attention_states(OUT, LSE, OUT.to("meta"), LSE), ValueError, "out_b"),
        (lambda: merge_attention_states(OUT, LSE.double(), OUT, LSE), TypeError, "lse_a"),
        (lambda: merge_attention_states(OUT, LSE.T, OUT, LSE), ValueError, "lse_a"),
        (lambda: merge_attention_states(OUT, LSE, OUT, LSE[:1]), ValueError, "lse_b"),
        (lambda: merge_attention_states(OUT, LSE, OUT, 0.0), TypeError, "lse_b"),
        (lambda: merge_attention_states(OUT, LSE, OUT, LSE.to("meta")), ValueError, "lse_b"),
    ],
)
def test_bad_arguments(call: Callable[[], object], kind: type[Exception], argument: str) -> None:
    with pytest.raises(kind, match=rf"^merge_attention_states: {argument}: expected .*, got .*; .+") as caught:
        call()
    assert type(caught.value) is kind
    close(merge_attention_states(OUT, LSE, OUT, LSE)[0], OUT, 1e-6)
