"""The compiled kernel of `rms_norm` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu

TAKES = "float32 and bfloat16"


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(normed, residual sum); without a residual the second is empty."""
    library, dtype, size = cpu.library(), x.dtype, x.numel()
    if isinstance(library, str) or dtype not in cpu.STEP or weight.dtype is not dtype or not size:
        return NotImplemented
    if not (x.is_contiguous() and weight.is_contiguous()):
        return NotImplemented
    normed, width = torch.empty_like(x), x.shape[-1]
    residual_at = sum_at = 0
    if residual is None:
        summed = x.new_empty(0)
    elif residual.dtype is dtype and residual.is_contiguous():
        summed = torch.empty_like(x)
        residual_at, sum_at = residual.data_ptr(), summed.data_ptr()
    else:
        return NotImplemented
    library.fbcpu_rms_norm(
        x=x.data_ptr(), residual=residual_at, weight=weight.data_ptr(), eps=eps, out=normed.data_ptr(), sum=sum_at,
        rows=size // width, width=width, threads=cpu.threads(cpu.ELEMENT * size),
        narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    return normed, summed
