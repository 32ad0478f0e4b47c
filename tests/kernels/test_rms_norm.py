from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.rms_norm import rms_norm
from fb_kernels.rms_norm.naive import rms_norm as naive
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs

EPS = 1e-6


def inputs(rows: tuple[int, ...] = (3, 4), width: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0) -> list:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(*rows, width, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    weight = torch.randn(width, generator=generator, dtype=torch.float64)
    return [value.to(dtype) for value in (x, weight, residual)]


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
    width=st.integers(0, 9),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    with_residual=st.booleans(),
    seed=st.integers(0, 99),
)
def test_matches_naive_float64(rows: list[int], width: int, layout: str, with_residual: bool, seed: int) -> None:
    x, weight, residual = (relaid(value, layout) for value in inputs(tuple(rows), width, torch.float64, seed))
    given = residual if with_residual else None
    before = [value.clone() for value in (x, weight, residual)]
    normed, total = rms_norm(x, weight, EPS, given)
    expected = naive(x, weight, EPS, given)
    torch.testing.assert_close((normed, total), expected, rtol=1e-12, atol=1e-12)
    assert normed.is_contiguous()
    assert (total is x) == (given is None)
    for value, copy in zip((x, weight, residual), before, strict=True):
        assert torch.equal(value, copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_low_precision(dtype: torch.dtype, with_residual: bool) -> None:
    values = inputs((64,), 256, dtype)
    if not with_residual:
        values[2] = None
    x, weight, residual = (None if v is None else v.requires_grad_() for v in values)
    wide = [None if v is None else v.detach().double().requires_grad_() for v in values]
    plain = [None if v is None else v.detach().clone().requires_grad_() for v in values]
    ours, truth = rms_norm(x, weight, EPS, residual), naive(wide[0], wide[1], EPS, wide[2])
    native = naive(plain[0], plain[1], EPS, plain[2])
    on_normed, on_total = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    for output in (ours, truth, native):
        (output[0] * on_normed.to(output[0].dtype) + output[1] * on_total.to(output[0].dtype)).sum().backward()
    assert ours[0].dtype == ours[1].dtype == dtype
    for index in range(2):
        assert_close_to_reference(ours[index], truth[index], native[index])
    for mine, reference, other in zip(values, wide, plain, strict=True):
        if mine is not None:
            assert_close_to_reference(mine.grad, reference.grad, other.grad)


def test_the_sum_is_rounded_before_the_norm() -> None:
    x, weight, residual = inputs(dtype=torch.bfloat16)
    normed, total = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, EPS)[0])


def test_hostile_rows_stay_alone() -> None:
    x, weight, residual = inputs((6,))
    clean = rms_norm(x, weight, EPS, residual)[0]
    hostile = x.clone()
    hostile[1], hostile[2, 0], hostile[3, 0], hostile[4] = torch.nan, torch.inf, -torch.inf, 0.0
    normed = rms_norm(hostile, weight, EPS, residual)[0]
    assert torch.equal(normed[[0, 5]], clean[[0, 5]])
    assert normed[1].isnan().all()
    assert normed[2, 0].isnan()
    assert torch.equal(rms_norm(torch.zeros(2, 16), weight, EPS)[0], torch.zeros(2, 16))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("output", [0, 1])
def test_gradcheck(with_residual: bool, output: int) -> None:
    x, weight, residual = (value.requires_grad_() for value in inputs((2, 2), 5, torch.float64))
    values = (x, weight, residual) if with_residual else (x, weight)
    assert torch.autograd.gradcheck(lambda x, weight, *rest: rms_norm(x, weight, EPS, *rest)[output], values)


@pytest.mark.parametrize(("rows", "width"), [((0,), 8), ((), 8), ((3,), 0), ((0, 2), 0)])
def test_gradients_of_empty_sizes(rows: tuple[int, ...], width: int) -> None:
    values = [value.requires_grad_() for value in inputs(rows, width)]
    sum(out.sum() for out in rms_norm(values[0], values[1], EPS, values[2])).backward()
    assert all(value.grad.shape == value.shape and not value.grad.isnan().any() for value in values)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_gradients_of_one_argument_alone(index: int) -> None:
    values = inputs(dtype=torch.float64)
    values[index].requires_grad_()
    torch.stack(rms_norm(values[0], values[1], EPS, values[2])).pow(2).sum().backward()
    wide = [value.detach().clone().requires_grad_() for value in values]
    torch.stack(naive(wide[0], wide[1], EPS, wide[2])).pow(2).sum().backward()
    torch.testing.assert_close(values[index].grad, wide[index].grad)


def test_opcheck() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, residual = (value.requires_grad_() for value in inputs(dtype=dtype))
        for added in (None, residual):
            torch.library.opcheck(torch.ops.fb.rms_norm.default, (x, weight, EPS, added))
    x, weight, residual = inputs((0,), 8)
    torch.library.opcheck(torch.ops.fb.rms_norm.default, (x, weight, EPS, residual))
    for needs in ([True, False], [False, True]):
        arguments = (residual.T.contiguous().T, residual, x, weight, EPS, needs)
        torch.library.opcheck(torch.ops.fb.rms_norm_backward.default, arguments)


def test_compile() -> None:
    def loss(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        normed, total = rms_norm(x, weight, EPS, residual)
        return (normed * total + rms_norm(x, weight, EPS)[0]).sum()

    values = [value.requires_grad_() for value in inputs()]
    eager = loss(*values)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*values)
    assert torch.equal(eager, compiled)
    for one, other in zip(torch.autograd.grad(eager, values), torch.autograd.grad(compiled, values), strict=True):
        assert torch.equal(one, other)


def test_repeats_and_rows_alone_are_bit_equal() -> None:
    x, weight, residual = inputs((8,), 64, torch.bfloat16)
    first, again = rms_norm(x, weight, EPS, residual), rms_norm(x, weight, EPS, residual)
    assert torch.equal(first[0], again[0])
    other = x.clone()
    other[1:] = 1e4
    assert torch.equal(rms_norm(other, weight, EPS, residual)[0][0], first[0][0])


def test_one_launch_and_no_sync() -> None:
    x, weight, residual = inputs()
    with count_launches() as launches, count_syncs() as syncs:
        rms_norm(x, weight, EPS, residual)
    assert (launches.total, syncs.total) == (1, 0)


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("x", {"x": [1.0]}, TypeError),
        ("x", {"x": torch.ones(3, 16, dtype=torch.int64)}, TypeError),
        ("x", {"x": torch.tensor(1.0)}, ValueError),
        ("weight", {"weight": torch.ones(15)}, ValueError),
        ("weight", {"weight": torch.ones(16, dtype=torch.float64)}, TypeError),
        ("weight", {"weight": torch.ones(16, device="meta")}, ValueError),
        ("residual", {"residual": torch.ones(16)}, ValueError),
        ("residual", {"residual": torch.ones(3, 4, 16, dtype=torch.float16)}, TypeError),
        ("eps", {"eps": 0.0}, ValueError),
        ("eps", {"eps": float("nan")}, ValueError),
        ("eps", {"eps": None}, TypeError),
    ],
)
def test_bad_arguments(argument: str, change: dict, error: type[Exception]) -> None:
    x, weight, residual = inputs()
    good = {"x": x, "weight": weight, "eps": EPS, "residual": residual}
    with pytest.raises(error, match=f"rms_norm: {argument}: expected .*, got .*; ") as raised:
        rms_norm(**(good | change))
    assert raised.type is error
    rms_norm(**good)
