"""`swiglu` on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import DEVICE, Case, filled, large, randn, usual
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


test_matches_the_reference, test_promises, test_another_device = usual(make, SIZES, "decode")


def test_more_than_2_31_elements() -> None:
    with large(16):
        gate_up = filled(180_000, 2 * 6144)
        assert torch.equal(swiglu(gate_up)[-3:], swiglu(gate_up[-3:].clone()))
