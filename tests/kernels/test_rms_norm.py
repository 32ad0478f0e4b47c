"""What is peculiar to `rms_norm`: its sum."""

from __future__ import annotations

import pytest
import torch
from cases.rms_norm import EPS, OP, make
from ways import names, running

from fb_kernels import rms_norm


@pytest.mark.parametrize("way", names(OP))
def test_the_sum_is_rounded_before_the_norm(way: str) -> None:
    dtype = torch.float32 if way.startswith("cpu") else torch.bfloat16
    x, weight, _, residual, _ = OP.cast(make((16,), 24), dtype).arguments.values()
    with running(way):
        normed, total = rms_norm(x, weight, EPS, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, rms_norm(total, weight, EPS)[0])


def test_without_a_residual_the_sum_is_x() -> None:
    x = torch.zeros(2, 16)
    normed, total = rms_norm(x, torch.ones(16), EPS)
    assert total is x
    assert torch.equal(normed, x)
