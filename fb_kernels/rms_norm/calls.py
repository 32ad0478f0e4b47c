"""How `rms_norm` is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import EPS, Call, Calls, by_definition, randn
from fb_kernels.rms_norm import naive


def norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    summed = x if residual is None else x + residual
    return F.rms_norm(summed, x.shape[-1:], (weight + offset).to(x.dtype), eps), summed


def rms_norm(n: int = 4096, d: int = 2048, *, residual: bool = True, offset: float = 0.0) -> Call:
    """A call on [N, D]; with an offset of 1 the weight is in float32."""
    arguments = {"x": randn(n, d), "weight": 1 - offset + randn(d) / 8, "eps": EPS, "offset": offset}
    return Call(
        "rms_norm",
        arguments | ({"residual": randn(n, d, seed=1)} if residual else {}),
        gradients=("x", "weight", "residual")[: 2 + residual],
        outputs=(0, 1)[: 1 + residual],
        shape=f"N={n} D={d}{'' if residual else ', no residual'}",
        bytes=8.0 * n * d,
        least={"weight": torch.float32} if offset else {},
        plain={"torch eager": norm},
        launches={
            "_rms_norm_fwd_kernel": 4 * n * d * (1 + residual),
            "_rms_norm_bwd_kernel": 2 * n * d * (3 + residual),
        },
    )


def _checked(size: str) -> Iterator[Call]:
    dimensions = {"small": (5, 40), "checked": (33, 1000)}.get(size, ())
    yield from (rms_norm(*dimensions), rms_norm(*dimensions, residual=False, offset=1.0))


def compiled() -> Iterator[Call]:
    """The residual stream of Qwen3-1.7B over a decode step and packed rows, and a wider one."""
    for rows, width in ((16, 2048), (4096, 2048), (4096, 8192)):
        yield from (rms_norm(rows, width, residual=residual).cast(torch.bfloat16) for residual in (False, True))
    call = rms_norm(residual=False)
    yield replace(call, gradients=("x",), shape=f"{call.shape}, no weight").with_(weight=None).cast(torch.bfloat16)


OPS = (
    Calls(
        "rms_norm",
        rms_norm,
        by_definition(naive.rms_norm),
        checked=_checked,
        compiled=compiled,
        takes="x[..., D], (weight[D]), (residual[..., D])",
        gives="normed[..., D], sum[..., D]",
        cpu="fp32, bf16",
    ),
)
