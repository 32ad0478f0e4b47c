"""`rms_norm` on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import DEVICE, Case, filled, large, randn, usual
from torch import Tensor

from fb_kernels import rms_norm

pytestmark = pytest.mark.gpu
SIZES = {"small": (5, 40), "decode": (16, 2048), "real": (4096, 2048), "wide": (33, 12_289)}
EPS = 1e-6


def make(size: tuple[int, int], dtype: torch.dtype, device: str = DEVICE, *, residual: bool = True) -> Case:
    rows, width = size

    def plain(x: Tensor, weight: Tensor, *added: Tensor) -> tuple[Tensor, ...]:
        summed = x + added[0] if added else x
        normed = F.rms_norm(summed, (x.shape[-1],), weight, EPS)
        return (normed, summed) if added else (normed,)

    def op(x: Tensor, weight: Tensor, *added: Tensor) -> tuple[Tensor, ...]:
        return rms_norm(x, weight, EPS, *added)[: 1 + len(added)]

    x, added = (randn(rows, width, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = 1 + randn(width, dtype=dtype, device=device, seed=2) / 8
    if residual:  # on a grid that the sum does not leave, since float64 does not round it to x's dtype
        x, added = ((value.float() * 4).round().clamp(-15, 15) / 4 for value in (x, added))
        floats = (x.to(dtype), weight, added.to(dtype))
        return Case(op, plain, floats, trained=3, differentiable=2)
    return Case(op, plain, (x, weight), trained=2, differentiable=1)


test_matches_the_reference, test_promises, test_another_device = usual(make, SIZES, "decode", residual=(True, False))


def test_more_than_2_31_elements() -> None:
    with large(20):
        x, weight = filled(1_100_000, 2048), filled(2048, seed=1)
        assert torch.equal(rms_norm(x, weight, EPS)[0][-3:], rms_norm(x[-3:].clone(), weight, EPS)[0])
