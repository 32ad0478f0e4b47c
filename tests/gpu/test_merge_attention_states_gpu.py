"""`merge_attention_states` on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import DEVICE, DTYPES, Case, filled, large, randn, usual
from torch import Tensor

from fb_kernels import merge_attention_states

pytestmark = pytest.mark.gpu
SIZES = {"small": (5, 2, 8), "decode": (16, 16, 128), "real": (4096, 16, 128), "odd": (77, 3, 80)}


def plain(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    parts = [out * (own - lse).exp().T[..., None] for out, own in ((out_a, lse_a), (out_b, lse_b))]
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def make(size: tuple[int, int, int], dtype: torch.dtype, device: str = DEVICE) -> Case:
    rows, heads, width = size
    outs = [randn(rows, heads, width, dtype=dtype, device=device, seed=seed) for seed in (0, 1)]
    lses = [2 * randn(heads, rows, device=device, seed=seed) for seed in (2, 3)]
    floats = (outs[0], lses[0], outs[1], lses[1])
    return Case(merge_attention_states, plain, floats, trained=4, differentiable=2)


test_matches_the_reference, test_promises, test_another_device = usual(make, SIZES, "decode")


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_states_are_never_read(dtype: torch.dtype) -> None:
    out_a, lse_a, out_b, lse_b = make(SIZES["small"], dtype).floats
    out_b[:3], lse_b[:, :3] = torch.nan, -torch.inf
    out_a[:2], lse_a[:, :2] = torch.nan, -torch.inf
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    assert not out[:2].any()
    assert (lse[:, :2] == -torch.inf).all()
    torch.testing.assert_close(out[2], out_a[2])
    assert out.isfinite().all()


def test_more_than_2_31_elements() -> None:
    rows = 1_100_000
    with large(32):
        out_a, out_b = filled(rows, 16, 128), filled(rows, 16, 128, seed=1)
        lse_a, lse_b = (torch.randn(16, rows, device=DEVICE) for _ in range(2))
        out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
        end = [x[-3:].clone() if x.ndim == 3 else x[:, -3:].clone() for x in (out_a, lse_a, out_b, lse_b)]
        want, want_lse = merge_attention_states(*end)
        assert torch.equal(out[-3:], want)
        assert torch.equal(lse[:, -3:], want_lse)
