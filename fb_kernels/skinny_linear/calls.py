"""How `skinny_linear` is called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import EPS, Call, Calls, by_definition, randn
from fb_kernels.skinny_linear import naive
from fb_kernels.swiglu.calls import gated as activated


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = EPS,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """Plain torch."""
    if norm_weight is not None:
        x = F.rms_norm(x, x.shape[-1:], norm_weight, eps)
    out = F.linear(x, weight, bias)
    if swiglu:
        out = activated(out)
    return out if residual is None else out + residual


def skinny_linear(n: int = 1, k: int = 2048, m: int = 12_288, *, gated: bool = True) -> Call:
    """Normed and gated, or with a bias and a residual."""
    if gated:
        rest = {"norm_weight": 1 + randn(k) / 8, "eps": EPS, "swiglu": True}
    else:
        rest = {"bias": randn(m), "residual": randn(n, m)}
    return Call(
        "skinny_linear",
        {"x": randn(n, k), "weight": randn(m, k, seed=1) / k**0.5} | rest,
        shape=f"N={n} K={k} M={m}{', gated' if gated else ', residual'}",
        flops=2.0 * n * m * k,
        bytes=2.0 * m * k,
        launches={"_skinny_linear_kernel": 2 * m * k, "_add_pieces_kernel": 4 * n * m * -(-k // 256)},
        plain={"torch eager": plain},
    )


def _checked(size: str) -> Iterator[Call]:
    width, outputs = {"small": (40, 24), "checked": (1000, 520), "timed": (2048, 6144)}[size]
    for rows in (1, 16):
        for gated in (True, False):
            yield skinny_linear(rows, width, outputs * (1 + gated), gated=gated)


OPS = (
    Calls(
        "skinny_linear",
        skinny_linear,
        by_definition(naive.skinny_linear),
        checked=_checked,
        compiled=lambda: [
            skinny_linear(rows, width, gated=False).cast(torch.bfloat16)
            for rows, width in ((1, 2048), (1664, 2048), (13, 2049))
        ],
        takes="x[N, K], weight[M, K], (bias[M]), (norm_weight[K]), (residual[N, M])",
        gives="[N, M], with swiglu [N, M / 2]",
        cpu="fp32, bf16",
        cuda="bf16, fp16",
    ),
)
