"""Shapes of `qk_norm_rope`: the heads of Qwen3-1.7B over packed rows and over a decode step that fills a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.aot.compiler import Case, Cost
from fb_kernels.qk_norm_rope.triton import qk_norm_rope, qk_norm_rope_backward, qk_norm_rope_out


def cases() -> Iterator[Case]:
    return (case(rows, normed) for rows in (16, 4096) for normed in (True, False))


def case(rows: int, normed: bool) -> Case:
    heads, kv_heads, dim, length = 16, 8, 128, 4096
    qkv, q, k, cos, cache = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in (
            (rows, (heads + 2 * kv_heads) * dim),
            (rows, heads, dim),
            (rows, kv_heads, dim),
            (length, dim),
            (length, kv_heads, dim),
        )
    )
    weight = torch.empty(dim, dtype=torch.bfloat16, device="meta") if normed else None
    positions = torch.empty(rows, dtype=torch.int32, device="meta")
    inputs = (qkv, weight, weight, cos, cos, positions)
    options = (heads, kv_heads, 1e-6)
    return Case(
        "qk_norm_rope",
        f"T={rows} 16/8x128 {'normed ' if normed else ''}bf16",
        lambda: (
            qk_norm_rope(*inputs, *options),
            qk_norm_rope_out(*inputs, cache, cache, positions, *options),
            qk_norm_rope_backward(q, k, k, *inputs, *options, [True, normed, normed]),
        ),
        {
            "_qk_norm_rope_fwd_kernel": Cost(2 * (2 * qkv.numel() + 2 * rows * dim)),
            "_qk_norm_rope_bwd_kernel": Cost(2 * (3 * qkv.numel() + 2 * rows * dim)),
        },
    )
