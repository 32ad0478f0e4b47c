"""The Triton kernels of `swiglu` against the float64 definition, interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_swiglu import inputs, relaid

from fb_kernels import backend
from fb_kernels.swiglu import swiglu
from fb_kernels.swiglu.naive import swiglu as naive
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs

pytestmark = pytest.mark.usefixtures("triton_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def compare(gate_up: torch.Tensor) -> None:
    """Result and gradient against float64 and plain PyTorch in the same dtype."""
    wide, plain, ours = gate_up.double().requires_grad_(), gate_up.clone().requires_grad_(), gate_up.requires_grad_()
    out, truth = swiglu(ours), naive(wide)
    half = plain.shape[-1] // 2
    native = torch.nn.functional.silu(plain[..., :half]) * plain[..., half:]
    grad = inputs(*truth.shape, dtype=gate_up.dtype, seed=7)
    for output in (out, truth, native):
        output.backward(grad.to(output.dtype))
    assert out.dtype == gate_up.dtype
    assert_close_to_reference(out, truth, native)
    assert_close_to_reference(ours.grad, wide.grad, plain.grad)


@given(
    rows=st.lists(st.integers(0, 4), max_size=2),
    half=st.integers(0, 40),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_matches_the_reference(rows: list[int], half: int, layout: str, dtype: torch.dtype, seed: int) -> None:
    compare(relaid(inputs(*rows, 2 * half, dtype=dtype, seed=seed), layout).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_one_block(dtype: torch.dtype) -> None:
    compare(inputs(3, 2 * 2500, dtype=dtype))


def test_hostile_values_stay_alone() -> None:
    x = inputs(5, 8)
    clean = swiglu(x)
    x[1], x[2, 0], x[3, :4] = torch.nan, torch.inf, -1e4
    out = swiglu(x)
    assert torch.equal(out[[0, 4]], clean[[0, 4]])
    assert torch.equal(out[2, 1:], clean[2, 1:])
    assert out[1].isnan().all()
    assert out[2, 0].isinf()
    assert torch.equal(out[3], torch.zeros(4))


def test_repeats_are_bit_equal_without_a_sync() -> None:
    x = inputs(16, 64, dtype=torch.bfloat16)
    first = swiglu(x)
    with count_launches() as launches, count_syncs() as syncs:
        again = swiglu(x)
    assert torch.equal(first, again)
    assert (launches.total, syncs.total) == (1, 0)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.fb.swiglu.default, (inputs(3, 8).requires_grad_(),))


def test_float64_is_the_references() -> None:
    x = inputs(2, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="swiglu: expected arguments that the triton kernel takes"):
        swiglu(x)
    with backend.override("triton,swiglu=auto"):
        torch.testing.assert_close(swiglu(x), naive(x))
