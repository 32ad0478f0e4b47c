"""`qk_norm_rope` on a GPU, with and without a cache to write to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import DEVICE, DTYPES, Case, filled, large, randn, usual
from torch import Tensor

from fb_kernels import qk_norm_rope
from fb_kernels._runtime import backend

pytestmark = pytest.mark.gpu
SIZES = {"small": (5, 4, 2, 16), "decode": (16, 16, 8, 128), "real": (4096, 16, 8, 128), "odd": (77, 6, 3, 80)}
EPS, LENGTH = 1e-6, 512


def tables(head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(float(LENGTH)), 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)).repeat(1, 2)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def make(size: tuple[int, int, int, int], dtype: torch.dtype, device: str = DEVICE, *, norm: bool = True) -> Case:
    rows, heads, kv_heads, width = size
    positions = torch.arange(rows, device=device) % LENGTH
    cos, sin = tables(width, dtype, device)

    def op(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        q_weight, k_weight = weights or (None, None)
        wide = [x.to(torch.promote_types(x.dtype, qkv.dtype)) for x in (cos, sin)]
        return qk_norm_rope(qkv, q_weight, k_weight, *wide, positions, num_heads=heads, num_kv_heads=kv_heads, eps=EPS)

    def plain(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        *both, v = qkv.unflatten(-1, (-1, width)).split([heads, kv_heads, kv_heads], 1)
        out = []
        for index, x in enumerate(both):
            normed = F.rms_norm(x, (width,), weights[index], EPS) if weights else x
            first, second = normed.chunk(2, -1)
            rotated = torch.cat([-second, first], -1)
            out.append(normed * cos[positions][:, None] + rotated * sin[positions][:, None])
        return out[0], out[1], v.contiguous()

    qkv = randn(rows, (heads + 2 * kv_heads) * width, dtype=dtype, device=device)
    weights = [1 + randn(width, dtype=dtype, device=device, seed=seed) / 8 for seed in (1, 2)] if norm else []
    floats = (qkv, *weights)
    return Case(op, plain, floats, len(floats), 3, changes=[(positions, positions.flip(0).clone())])


def writes_its_slots(size: tuple[int, int, int, int], dtype: torch.dtype, device: str = DEVICE) -> None:
    """Every row with a slot is in the cache, and nothing else of the cache is touched."""
    rows, heads, kv_heads, width = size
    qkv = randn(rows, (heads + 2 * kv_heads) * width, dtype=dtype, device=device)
    weight = 1 + randn(width, dtype=dtype, device=device, seed=1) / 8
    positions = torch.arange(rows, device=device) % LENGTH
    slots = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(0))[:rows].to(device)
    slots[::3] = -1
    caches = [torch.full((2 * rows, kv_heads, width), 7.0, dtype=dtype, device=device) for _ in range(2)]
    arguments = (qkv, weight, weight, *tables(width, dtype, device), positions)
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": EPS}
    with torch.no_grad():
        _, k, v = qk_norm_rope(*arguments, **options, kv_out=(*caches, slots))
        plain = qk_norm_rope(*arguments, **options)[1:]
    kept = slots >= 0
    for cache, value, alone in zip(caches, (k, v), plain, strict=True):
        rounding = 4 * torch.finfo(dtype).eps * float(value.abs().max())  # products are fused or not, as it compiled
        torch.testing.assert_close(value, alone, rtol=0.0, atol=rounding)
        want = torch.full_like(cache, 7.0)
        want[slots[kept]] = value[kept]
        assert torch.equal(cache, want)


test_matches_the_reference, test_promises, test_another_device = usual(make, SIZES, "decode", norm=(True, False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_writes_its_slots(size: str, dtype: torch.dtype) -> None:
    writes_its_slots(SIZES[size], dtype)


def test_small_bad_positions_give_nan_rows() -> None:
    heads, kv_heads, width = 4, 2, 16
    qkv, (cos, sin) = randn(4, 8 * width), tables(width, torch.float32, DEVICE)
    options = {"num_heads": heads, "num_kv_heads": kv_heads}
    bad = torch.tensor([0, -1, LENGTH, 3], device=DEVICE)
    q, k, _ = qk_norm_rope(qkv, None, None, cos, sin, bad, **options)
    with backend.override("reference"):
        wants = qk_norm_rope(qkv, None, None, cos, sin, bad, **options)[:2]
    for got, want in zip((q, k), wants, strict=True):
        assert got[[1, 2]].isnan().all()
        torch.testing.assert_close(got, want, equal_nan=True)


def test_more_than_2_31_elements() -> None:
    with large(24):
        qkv, (cos, sin) = filled(530_000, 4096), tables(128, torch.bfloat16, DEVICE)
        positions = torch.arange(len(qkv), device=DEVICE) % LENGTH
        options = {"num_heads": 16, "num_kv_heads": 8}
        whole = qk_norm_rope(qkv, None, None, cos, sin, positions, **options)
        end = qk_norm_rope(qkv[-3:].clone(), None, None, cos, sin, positions[-3:], **options)
        assert all(torch.equal(a[-3:], b) for a, b in zip(whole, end, strict=True))
