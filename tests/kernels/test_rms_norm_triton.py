"""The Triton kernels of `rms_norm` against the float64 definition, interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launches import count_kernels
from test_rms_norm import EPS, inputs, relaid
from torch import Tensor

from fb_kernels import backend, tuning
from fb_kernels.rms_norm import rms_norm
from fb_kernels.rms_norm import triton as kernels
from fb_kernels.rms_norm.naive import rms_norm as naive
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, magnitude, poison_

pytestmark = pytest.mark.usefixtures("triton_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks, and several rows a program, at sizes that are quick to interpret."""
    monkeypatch.setattr(tuning, "rms_norm", lambda *_: {"BLOCK": 8, "num_warps": 1})
    monkeypatch.setattr(tuning, "rms_norm_backward", lambda *_: {"BLOCK": 8, "ROWS": 3, "num_warps": 1})


def compare(values: list[Tensor | None]) -> None:
    """Results and gradients of x, weight, residual against float64 and plain PyTorch in the same dtype."""
    ours, plain, wide = (
        [None if v is None else change(v.detach()).requires_grad_() for v in values]
        for change in (lambda v: v, torch.clone, Tensor.double)
    )
    outputs = rms_norm(ours[0], ours[1], EPS, ours[2])
    truth, native = naive(wide[0], wide[1], EPS, wide[2]), naive(plain[0], plain[1], EPS, plain[2])
    grads = [torch.randn(values[0].shape, generator=torch.Generator().manual_seed(i)).to(ours[0].dtype) for i in (0, 1)]
    for results in (outputs, truth, native):
        sum((out * grad.to(out.dtype)).sum() for out, grad in zip(results, grads, strict=True)).backward()
    for mine, exact, other in zip(outputs, truth, native, strict=True):
        assert mine.dtype == ours[0].dtype
        assert_close_to_reference(mine, exact, other)
    for mine, exact, other, scale in zip(ours, wide, plain, gradient_scales(truth[1], wide[1], *grads), strict=True):
        if mine is not None:
            assert_close_to_reference(mine.grad, exact.grad, other.grad, scale=scale)


def gradient_scales(total: Tensor, weight: Tensor, g: Tensor, on_total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, weight and residual: the sums of |terms|, which may cancel."""
    x, weight, g, on_total = (magnitude(v) for v in (total, weight, g, on_total))
    root = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    x, pulled = x * root, weight * g
    terms = root * (pulled + x * (pulled * x).mean(-1, keepdim=True)) + on_total
    return terms, (g * x).sum_to_size(weight.shape), terms


@given(
    rows=st.lists(st.integers(0, 4), max_size=2),
    width=st.integers(0, 40),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    with_residual=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_matches_the_reference(
    rows: list[int], width: int, layout: str, with_residual: bool, dtype: torch.dtype, seed: int
) -> None:
    values = [relaid(value, layout) for value in inputs(tuple(rows), width, dtype, seed)]
    compare(values if with_residual else [*values[:2], None])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 9, 29])
@pytest.mark.parametrize("with_residual", [False, True])
def test_several_blocks_and_rows_a_program(dtype: torch.dtype, width: int, with_residual: bool) -> None:
    values = inputs((7,), width, dtype)
    compare(values if with_residual else [*values[:2], None])


def test_longer_than_the_longest_block() -> None:
    compare(inputs((2,), 8200, torch.float32))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("needs", [[True, False], [False, True]])
def test_one_gradient_alone_is_the_same(needs: list[bool]) -> None:
    x, weight, residual = inputs((7,), 20)
    op = torch.ops.fb.rms_norm_backward.default
    both, alone = (op(residual, x, x, weight, EPS, wanted) for wanted in ([True, True], needs))
    for need, one, other in zip(needs, alone, both, strict=True):
        assert torch.equal(one, other) if need else one.shape == (0,)


def test_the_sum_is_rounded_before_the_norm() -> None:
    x, weight, residual = inputs((16,), 24, torch.bfloat16)
    normed, total = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, EPS)[0])


@pytest.mark.usefixtures("small_blocks")
def test_hostile_rows_stay_alone() -> None:
    x, weight, residual = inputs((6,), 20)
    hostile = x.clone()
    hostile[1], hostile[2, 0], hostile[3, 0], hostile[4] = torch.nan, torch.inf, -torch.inf, -residual[4]
    grads, outputs = [], []
    for value in (x, hostile):
        value.requires_grad_()
        outputs.append(rms_norm(value, weight, EPS, residual)[0])
        outputs[-1].sum().backward()
        grads.append(value.grad)
    for clean, other in (outputs, grads):
        assert torch.equal(other[[0, 5]], clean[[0, 5]])
        assert other[1].isnan().all()
        assert other[2, 0].isnan()
    assert torch.equal(outputs[1][4], torch.zeros(20))


@pytest.mark.usefixtures("small_blocks")
def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    values = inputs((7,), 20)
    clean = rms_norm(*values[:2], EPS, values[2])
    arguments = values[2], values[0], values[0], values[1], EPS, [True, True]
    clean_grads = torch.ops.fb.rms_norm_backward(*arguments)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poison_(new_empty(*args, **options)))
    assert all(map(torch.equal, rms_norm(*values[:2], EPS, values[2]), clean))
    assert all(map(torch.equal, torch.ops.fb.rms_norm_backward(*arguments), clean_grads))


def test_repeats_are_bit_equal_with_one_kernel_and_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, residual = inputs((8,), 64, torch.bfloat16)
    first = rms_norm(x, weight, EPS, residual)
    calls = count_kernels(monkeypatch, kernels)
    with count_launches() as launches, count_syncs() as syncs:
        again = rms_norm(x, weight, EPS, residual)
    assert all(map(torch.equal, first, again))
    assert (launches.total, syncs.total, calls) == (1, 0, ["_rms_norm_fwd_kernel"])
    other = x.clone()
    other[1:] = 1e4
    assert torch.equal(rms_norm(other, weight, EPS, residual)[0][0], first[0][0])


def test_opcheck() -> None:
    x, weight, residual = (value.requires_grad_() for value in inputs(dtype=torch.bfloat16))
    for added in (None, residual):
        torch.library.opcheck(torch.ops.fb.rms_norm.default, (x, weight, EPS, added))


def test_float64_is_the_references() -> None:
    x, weight, residual = inputs(dtype=torch.float64)
    with pytest.raises(ValueError, match="rms_norm: expected arguments that the triton kernel takes"):
        rms_norm(x, weight, EPS, residual)
    with backend.override("triton,rms_norm=auto"):
        torch.testing.assert_close(rms_norm(x, weight, EPS, residual), naive(x, weight, EPS, residual))
