"""`rms_norm` in plain PyTorch, on any device, and the normalisation that `qk_norm_rope` shares with it."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype


def normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms, 1 / rms) over the last dimension of x, in x's dtype; 1 / rms keeps that dimension."""
    inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * inverse, inverse


def normalize_backward(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Gradient to x of `normalize`, given the gradient to its first output and both outputs."""
    return inverse * (grad - unit * (grad * unit).mean(-1, keepdim=True))


def factors(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """Offset + weight, [D]; None for 1."""
    wide = weight if weight is None or weight.dtype == dtype else weight.to(dtype)
    return wide if wide is None or not offset else wide + offset


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(normed, residual sum); without a residual the second is empty."""
    dtype = accumulation_dtype(x.dtype)
    summed = x.new_empty(0) if residual is None else (x + residual).contiguous()
    wide = x if residual is None else summed
    wide = wide if wide.dtype == dtype else wide.to(dtype)
    normed = torch.nn.functional.rms_norm(wide, x.shape[-1:], factors(weight, offset, dtype), eps)
    return (normed if x.dtype == dtype else normed.to(x.dtype)).contiguous(), summed


def rms_norm_backward(
    grad_normed: Tensor,
    grad_sum: Tensor,
    summed: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients to the sum (x and residual alike) and weight; grad_sum is empty where there was no residual."""
    dtype = accumulation_dtype(summed.dtype)
    unit, inverse = normalize(summed.to(dtype), eps)
    grad = grad_normed.to(dtype)
    d_summed, d_weight = summed.new_empty(0), (summed if weight is None else weight).new_empty(0)
    if needs[0]:
        factor = factors(weight, offset, dtype)
        d_summed = normalize_backward(grad if factor is None else grad * factor, unit, inverse)
        if grad_sum.shape == summed.shape:
            d_summed = d_summed + grad_sum.to(dtype)
        d_summed = d_summed.to(summed.dtype).contiguous()
    if needs[1] and weight is not None:
        d_weight = (grad * unit).sum_to_size(weight.shape).to(weight.dtype)
    return d_summed, d_weight
