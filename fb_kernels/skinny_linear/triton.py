"""`skinny_linear` from the kernels of its parts and cuBLAS's product, used if there is no compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels.rms_norm.triton import rms_norm
from fb_kernels.skinny_linear.reference import linear
from fb_kernels.swiglu.triton import swiglu as gated


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    swiglu: bool,
    frozen: bool,
) -> Tensor:
    """[N, M], or [N, M / 2] where it is gated."""
    if x.dtype == torch.float64:
        return NotImplemented
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps, None)[0]
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t())  # rounded once
    y = linear(x, weight, bias)
    if swiglu:
        return gated(y)
    return y if residual is None else y.add_(residual)
