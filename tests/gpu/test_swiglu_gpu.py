"""`swiglu` on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import DEVICE, DTYPES, PROMISES, Case, filled, large, matches_the_reference, randn, second_device
from torch import Tensor

from fb_kernels import swiglu

pytestmark = pytest.mark.gpu
SIZES = {"small": (5, 40), "decode": (16, 6144), "real": (4096, 6144), "odd": (1023, 2501)}


def make(size: tuple[int, int], dtype: torch.dtype, device: str = DEVICE) -> Case:
    rows, width = size

    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    return Case(swiglu, plain, (randn(rows, 2 * width, dtype=dtype, device=device),), trained=1, differentiable=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_reference(size: str, dtype: torch.dtype) -> None:
    matches_the_reference(make(SIZES[size], dtype))


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(promise: Callable[[Case], None]) -> None:
    promise(make(SIZES["decode"], torch.bfloat16))


def test_another_device() -> None:
    matches_the_reference(make(SIZES["small"], torch.bfloat16, second_device()))


def test_more_than_2_31_elements() -> None:
    with large(16):
        gate_up = filled(180_000, 2 * 6144)
        assert torch.equal(swiglu(gate_up)[-3:], swiglu(gate_up[-3:].clone()))
