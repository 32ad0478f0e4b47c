"""The compiled kernel of `rms_norm` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu

TAKES = "float32 and bfloat16"


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, offset: float
) -> tuple[Tensor, Tensor]:
    """(normed, residual sum); without a residual the second is empty."""
    library, dtype, size = cpu.library(), x.dtype, x.numel()
    if isinstance(library, str) or dtype not in cpu.STEP or not size or not x.is_contiguous():
        return NotImplemented
    normed, width = torch.empty_like(x), x.shape[-1]
    if weight is None:
        factor = x.new_ones(width, dtype=torch.float32)
    elif offset or weight.dtype is not dtype:
        factor = weight.to(torch.float32, memory_format=torch.contiguous_format) + offset
    elif weight.is_contiguous():
        factor = weight
    else:
        return NotImplemented
    residual_at = sum_at = 0
    if residual is None:
        summed = x.new_empty(0)
    elif residual.dtype is dtype and residual.is_contiguous():
        summed = torch.empty_like(x)
        residual_at, sum_at = residual.data_ptr(), summed.data_ptr()
    else:
        return NotImplemented
    library.fbcpu_rms_norm(
        x=x.data_ptr(), residual=residual_at, weight=factor.data_ptr(), eps=eps, out=normed.data_ptr(), sum=sum_at,
        rows=size // width, width=width, threads=cpu.threads(cpu.ELEMENT * size),
        wide_weight=factor.dtype is torch.float32, narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    return normed, summed
