from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.swiglu import swiglu
from fb_kernels.swiglu.naive import swiglu as naive
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs


def inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3).to(dtype)


def relaid(x: Tensor, layout: str) -> Tensor:
    if layout == "strided":
        return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    if layout == "offset":
        return torch.cat((torch.full_like(x[..., :1], torch.nan), x), -1)[..., 1:]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


@given(
    rows=st.lists(st.integers(0, 4), max_size=2),
    half=st.integers(0, 7),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    seed=st.integers(0, 99),
)
def test_matches_naive_float64(rows: list[int], half: int, layout: str, seed: int) -> None:
    x = relaid(inputs(*rows, 2 * half, dtype=torch.float64, seed=seed), layout)
    before = x.clone()
    out = swiglu(x)
    torch.testing.assert_close(out, naive(x), rtol=1e-13, atol=1e-13)
    assert out.is_contiguous()
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    ours, plain = (inputs(32, 256, dtype=dtype).requires_grad_() for _ in range(2))
    wide = ours.detach().double().requires_grad_()
    grad = inputs(32, 128, dtype=dtype, seed=1)
    mine, truth = swiglu(ours), naive(wide)
    native = torch.nn.functional.silu(plain[:, :128]) * plain[:, 128:]
    for output in (mine, truth, native):
        output.backward(grad.to(output.dtype))
    assert mine.dtype == dtype
    assert_close_to_reference(mine, truth, native)
    assert_close_to_reference(ours.grad, wide.grad, plain.grad)


def test_hostile_values_stay_alone() -> None:
    x = inputs(5, 8)
    clean = swiglu(x)
    hostile = x.clone()
    hostile[1], hostile[2, 0], hostile[3, :4] = torch.nan, torch.inf, -1e4
    out = swiglu(hostile)
    assert torch.equal(out[[0, 4]], clean[[0, 4]])
    assert torch.equal(out[2, 1:], clean[2, 1:])
    assert out[1].isnan().all()
    assert out[2, 0].isinf()
    assert torch.equal(out[3], torch.zeros(4))


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(swiglu, inputs(3, 2, 6, dtype=torch.float64).requires_grad_())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (8,)])
def test_gradients_of_empty_sizes(shape: tuple[int, ...]) -> None:
    x = inputs(*shape).requires_grad_()
    swiglu(x).sum().backward()
    assert x.grad.shape == x.shape


def test_opcheck() -> None:
    for x in (inputs(3, 8), inputs(2, 3, 8, dtype=torch.bfloat16), inputs(8, 6).T, inputs(0, 8)):
        torch.library.opcheck(torch.ops.fb.swiglu.default, (x.detach().requires_grad_(),))
    torch.library.opcheck(torch.ops.fb.swiglu_backward.default, (inputs(4, 3).T, inputs(8, 3).T))


def test_compile() -> None:
    x = inputs(4, 8).requires_grad_()
    eager, compiled = swiglu(x), torch.compile(swiglu, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(eager, compiled)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (eager, compiled)]
    assert torch.equal(*grads)


def test_repeats_are_bit_equal_with_one_launch_and_no_sync() -> None:
    x = inputs(16, 64, dtype=torch.bfloat16)
    first = swiglu(x)
    with count_launches() as launches, count_syncs() as syncs:
        again = swiglu(x)
    assert torch.equal(first, again)
    assert (launches.total, syncs.total) == (1, 0)


@pytest.mark.parametrize(
    ("gate_up", "error"),
    [
        ([1.0, 2.0], TypeError),
        (torch.ones(2, 4, dtype=torch.int32), TypeError),
        (torch.tensor(1.0), ValueError),
        (torch.ones(2, 5), ValueError),
    ],
)
def test_bad_arguments(gate_up: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"swiglu: gate_up: expected .*, got .*; ") as raised:
        swiglu(gate_up)
    assert raised.type is error
    swiglu(inputs(2, 4))
