"""Shapes of `rms_norm`: Qwen3-1.7B's residual stream over packed rows and over a decode step, and wider ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.aot.compiler import Case, Cost
from fb_kernels.rms_norm.triton import rms_norm, rms_norm_backward


def cases() -> Iterator[Case]:
    sizes = ((16, 2048), (4096, 2048), (4096, 8192))
    return (case(*size, with_residual) for size in sizes for with_residual in (False, True))


def case(rows: int, width: int, with_residual: bool) -> Case:
    dtype = torch.bfloat16
    x = torch.empty(rows, width, dtype=dtype, device="meta")
    weight = torch.empty(width, dtype=dtype, device="meta")
    residual = x if with_residual else None
    on_sum = x if with_residual else x.new_empty(0)
    return Case(
        "rms_norm",
        f"N={rows} D={width} {'residual ' if with_residual else ''}bf16",
        lambda: (
            rms_norm(x, weight, 1e-6, residual),
            rms_norm_backward(x, on_sum, x, weight, 1e-6, [True, True]),
        ),
        {
            "_rms_norm_fwd_kernel": Cost(x.numel() * 2 * (4 if with_residual else 2)),
            "_rms_norm_bwd_kernel": Cost(x.numel() * 2 * (4 if with_residual else 3)),
        },
    )
