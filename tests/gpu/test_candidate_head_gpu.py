"""`candidate_head` on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import DEVICE, Case, filled, large, randn, usual
from torch import Tensor

from fb_kernels import candidate_head
from fb_kernels._runtime import backend

pytestmark = pytest.mark.gpu
SIZES = {
    "small": ([3, 0, 1, 5], 40),
    "event": ([13], 2048),
    "real": ([13] * 300, 2048),
    "ragged": ([1, 16, 0, 200, 7], 5120),
}
EPS = 1e-6


def make(size: tuple[list[int], int], dtype: torch.dtype, device: str = DEVICE, *, norm: bool = True) -> Case:
    lengths, width = size
    rows = sum(lengths) + 2  # the last two are of no group
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    shorter = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).sub(1).clamp(min=0).to(device)

    def op(hidden: Tensor, head: Tensor, bias: Tensor, *norm: Tensor) -> tuple[Tensor, ...]:
        weight = norm[0] if norm else None
        return candidate_head(hidden, weight, head, offsets, eps=EPS, head_bias=bias)

    hidden = randn(rows, width, dtype=dtype, device=device)
    head = randn(width, dtype=dtype, device=device, seed=1) / width**0.5
    bias = randn(1, dtype=dtype, device=device, seed=2)
    weights = (1 + randn(width, dtype=dtype, device=device, seed=3) / 8,) if norm else ()
    floats = (hidden, head, bias, *weights)
    return Case(op, None, floats, len(floats), 1, changes=[(offsets, shorter)], exact=(2,))


test_matches_the_reference, test_promises, test_another_device = usual(make, SIZES, "event", norm=(True, False))


def test_small_bad_offsets_give_nan_and_no_choice() -> None:
    hidden, head = randn(6, 32), randn(32, seed=1)
    for bad in ([0, 4, 2], [0, 3, 99], [-1, 3, 6]):
        _, prob, best = candidate_head(hidden, None, head, torch.tensor(bad, device=DEVICE), eps=EPS)
        assert prob.isnan().all()
        assert (best == -1).all()


def test_more_than_2_31_elements() -> None:
    rows = 1_100_008
    with large(24):
        hidden, head = filled(rows, 2048), filled(2048, seed=1)
        offsets = torch.tensor([0, rows - 16, rows], device=DEVICE)
        last = torch.tensor([0, 16], device=DEVICE)
        with backend.override("auto,candidate_head=triton"):  # few rows and many are not one kernel's
            score, _, best = candidate_head(hidden, None, head, offsets, eps=EPS)
            end, _, end_best = candidate_head(hidden[-16:].clone(), None, head, last, eps=EPS)
        assert torch.equal(score[-16:], end)
        assert best[1] == end_best[0]
        far = hidden[::68_750]  # 17 rows
        pair = [candidate_head(x, None, head, last, eps=EPS) for x in (far, far.clone())]
        assert all(map(torch.equal, *pair))
