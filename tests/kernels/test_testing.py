from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fb_kernels.linear_logprob import linear_logprob
from fb_kernels.rms_norm import rms_norm
from fb_kernels.testing import (
    assert_close_to_reference,
    count_launches,
    count_syncs,
    largest_tensor,
    magnitude,
    poison_,
    poisoned_memory,
)


def triple(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(actual, reference, native) where native is off by 1e-3 in one place."""
    reference = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    native = reference.float()
    native[0, 0] += 1e-3
    return reference.float(), reference, native


def test_close_within_twice_the_native_error() -> None:
    actual, reference, native = triple()
    assert_close_to_reference(actual, reference, native)
    actual[2, 3] += 1.9e-3
    assert_close_to_reference(actual, reference, native)
    actual[2, 3] += 0.3e-3
    with pytest.raises(AssertionError, match=r"error 0.0022 at \[2, 3\] is above twice plain PyTorch's maximum 0.001 "):
        assert_close_to_reference(actual, reference, native)


def test_many_small_errors_fail_by_their_rms() -> None:
    actual, reference, native = triple()
    with pytest.raises(AssertionError, match="RMS error"):
        assert_close_to_reference(actual + 1e-3, reference, native)


def test_ulps_count_at_the_row_scale() -> None:
    reference = torch.tensor([[1000.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    native = reference.float()
    off = torch.zeros(2, 2)
    off[0, 1] = 3e-4
    assert_close_to_reference(native + off, reference, native)
    with pytest.raises(AssertionError, match=r"\[1, 1\]"):
        assert_close_to_reference(native + off.flip(0), reference, native)
    assert_close_to_reference(native + off.flip(0), reference, native, scale=1000.0)
    with pytest.raises(AssertionError):
        assert_close_to_reference(native + off, reference, native, ulps=1.0)


def test_a_scale_of_each_number() -> None:
    reference = torch.zeros(2, 2, dtype=torch.float64)
    off = torch.tensor([[3e-4, 0.0], [0.0, 0.0]])
    scale = torch.tensor([[1000.0, 1.0], [1.0, 1.0]])
    assert_close_to_reference(off, reference, reference.float(), scale=scale)
    assert_close_to_reference(off.flatten(), reference.flatten(), reference.float().flatten(), scale=scale.flatten())
    with pytest.raises(AssertionError, match=r"error 0.0003 at \[0, 1\] .* plus 4.77e-07"):
        assert_close_to_reference(off.flip(1), reference, reference.float(), scale=scale)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_strange_scale_excuses_nothing(value: float) -> None:
    actual, reference, native = triple()
    scale = torch.ones(4, 1)
    scale[2] = value
    with pytest.raises(AssertionError, match="the scale is NaN or infinite at numbers that are finite"):
        assert_close_to_reference(actual, reference, native, scale=scale)
    actual[2] = reference[2] = math.nan
    assert_close_to_reference(actual, reference, native, scale=scale)


def test_a_sum_that_cancels_has_the_magnitude_of_its_terms() -> None:
    terms = torch.tensor([[1.0, 1e-8, -1.0], [2.0, math.inf, math.nan]])
    assert magnitude(terms).dtype == torch.float64
    assert magnitude(terms).sum(-1).tolist() == [2.0 + float(terms[0, 1]), 2.0]
    ours, truth, native = torch.tensor([2e-7]), terms[0].double().sum()[None], terms[0, 1:2]
    assert_close_to_reference(ours, truth, native, scale=magnitude(terms[0]).sum())
    with pytest.raises(AssertionError):
        assert_close_to_reference(ours, truth, native)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_strange_values_must_agree(value: float) -> None:
    actual, reference, native = triple()
    for tensor, fits in ((actual, False), (reference, True)):
        tensor[1, 1] = value
        if fits:
            assert_close_to_reference(actual, reference, native)
        else:
            with pytest.raises(AssertionError, match=r"1 elements are NaN or infinite in one tensor only.*\[1, 1\]"):
                assert_close_to_reference(actual, reference, native)
    actual[1, 1] = 0.0
    with pytest.raises(AssertionError, match="infinite in one tensor only"):
        assert_close_to_reference(actual, reference, native)


def test_an_overflow_of_the_dtype_is_expected_and_a_strange_native_excuses_nothing() -> None:
    reference = torch.tensor([1e5, 1.0], dtype=torch.float64)
    assert_close_to_reference(reference.half(), reference, reference.half())
    native = torch.tensor([math.inf, math.nan])
    with pytest.raises(AssertionError):
        assert_close_to_reference(torch.tensor([1e5, 2.0]), reference, native)


def test_shapes() -> None:
    empty, scalar = torch.zeros(0, 3), torch.tensor(2.0)
    assert_close_to_reference(empty, empty.double(), empty)
    assert_close_to_reference(scalar, scalar.double(), scalar)
    with pytest.raises(AssertionError, match=r"shapes \[\(0, 3\), \(\), \(\)\] differ"):
        assert_close_to_reference(empty, scalar, scalar)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_poison(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    assert poison_(tensor[:, 1:]).dtype == dtype
    assert not tensor[:, 0].any()
    poisoned = tensor[:, 1:]
    if dtype.is_floating_point:
        assert poisoned.isnan().all()
    else:
        assert (poisoned == (True if dtype == torch.bool else torch.iinfo(dtype).max)).all()
    if dtype.is_floating_point:
        poison_(torch.zeros(1, dtype=dtype, requires_grad=True))


def test_poisoned_memory() -> None:
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        torch.testing.assert_close(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
    assert not torch.are_deterministic_algorithms_enabled()


def test_launches() -> None:
    x = torch.ones(4, 6)
    with count_launches() as launches:
        x.view(2, 12).T[1:].expand(3, 11, 2).detach()
        torch.empty(3)
        x.to(x.dtype).contiguous()
        assert launches.total == 0
        rms_norm(x, x[0], 1e-6)
        x.T.contiguous() @ x
    x.sum()
    assert launches.by_op == {"fb::rms_norm": 1, "aten::clone": 1, "aten::mm": 1}
    assert launches.total == 3


READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "range": lambda x: range(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "index": lambda x: x[x > 1],
    "index_put": lambda x: x.clone().__setitem__(x > 1, x[:2]),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_syncs(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.arange(4)
    with count_syncs() as syncs:
        read(x)
    read(x)
    assert syncs.total == 1


def test_what_is_no_sync() -> None:
    x = torch.arange(4)
    with count_syncs() as syncs:
        x[x], x.clone().index_put_((x,), x), torch.where(x > 1, x, 0), x.masked_fill(x > 1, 0), x.double(), len(x)
        linear_logprob(torch.ones(4, 2), torch.ones(4, 2), x)  # checks its ids, on the CPU only
    assert syncs.total == 0


def test_largest_tensor_looks_inside_ops_and_backward() -> None:
    hidden, weight = torch.ones(5, 2, dtype=torch.float64, requires_grad=True), torch.ones(30, 2, dtype=torch.float64)
    with largest_tensor() as largest:
        weight.view(60).expand(100, 60)
        assert largest.numel == 0
        out = linear_logprob(hidden, weight, torch.arange(5))
        assert (largest.numel, sorted(largest.shape), largest.op) == (150, [5, 30], "aten::mm")
        (out[:, None] * torch.ones(40)).sum().backward()
        assert (largest.numel, largest.op) == (200, "aten::mul")


def test_nested_contexts_and_errors_inside() -> None:
    x = torch.ones(3)
    with count_launches() as outer:
        with count_syncs() as syncs, largest_tensor() as largest, count_launches() as inner:
            rms_norm(x, x, 1e-6)
            with pytest.raises(RuntimeError):
                x + torch.ones(2)
        x.sum().item()
    assert inner.by_op["fb::rms_norm"] == outer.by_op["fb::rms_norm"] == 1
    assert outer.total == inner.total + 1
    assert (syncs.total, largest.numel) == (0, 3)
    with pytest.raises(ZeroDivisionError), count_launches():
        raise ZeroDivisionError
    with count_launches() as again:
        rms_norm(x, x, 1e-6)
    assert again.total == 1
    with pytest.raises(ValueError, match="target"), count_launches():
        linear_logprob(torch.ones(1, 2), torch.ones(4, 2), torch.tensor([9]))
    with count_syncs() as syncs:
        x[0].item()
    assert syncs.total == 1
