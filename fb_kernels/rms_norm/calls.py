"""How `rms_norm` is called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import EPS, Call, Calls, by_definition, randn
from fb_kernels.rms_norm import naive


def norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    summed = x if residual is None else x + residual
    return F.rms_norm(summed, x.shape[-1:], weight, eps), summed


def rms_norm(n: int = 4096, d: int = 2048, *, residual: bool = True) -> Call:
    """A call on [N, D]."""
    arguments = {"x": randn(n, d), "weight": 1 + randn(d) / 8, "eps": EPS}
    return Call(
        "rms_norm",
        arguments | ({"residual": randn(n, d, seed=1)} if residual else {}),
        gradients=("x", "weight", "residual")[: 2 + residual],
        outputs=(0, 1)[: 1 + residual],
        shape=f"N={n} D={d}{'' if residual else ', no residual'}",
        bytes=8.0 * n * d,
        plain={"torch eager": norm},
        launches={
            "_rms_norm_fwd_kernel": 4 * n * d * (1 + residual),
            "_rms_norm_bwd_kernel": 2 * n * d * (3 + residual),
        },
    )


def compiled() -> Iterator[Call]:
    """The residual stream of Qwen3-1.7B over a decode step and packed rows, and a wider one."""
    for rows, width in ((16, 2048), (4096, 2048), (4096, 8192)):
        yield from (rms_norm(rows, width, residual=residual).cast(torch.bfloat16) for residual in (False, True))


OPS = (
    Calls(
        "rms_norm",
        rms_norm,
        by_definition(naive.rms_norm),
        sizes={"small": (5, 40), "checked": (33, 1000)},
        compiled=compiled,
        takes="x[..., D], weight[D], (residual[..., D])",
        gives="normed[..., D], sum[..., D]",
        cpu="fp32, bf16",
    ),
)
