"""The compiled kernel of `topk_entropy` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu

K = 64  # maximum
TAKES = f"float32 and bfloat16, k up to {K}"


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    library, shape = cpu.library(), logits.shape
    width, leading = shape[-1], shape[:-1]
    rows = leading.numel()
    if isinstance(library, str) or logits.dtype not in cpu.STEP or not rows or k > K:
        return NotImplemented
    x = logits if logits.ndim == 2 else logits.reshape(rows, width)
    if x.stride(1) != 1 and width > 1:
        return NotImplemented
    values = x.new_empty(*leading, k, dtype=torch.float32)
    indices = torch.empty_like(values, dtype=torch.int64)  # faster than from a shape
    entropy = values.new_empty(*leading) if leading else values.new_empty(())
    library.fbcpu_topk_entropy(
        logits=x.data_ptr(), stride=x.stride(0), rows=rows, width=width, k=k, entropy=entropy.data_ptr(),
        values=values.data_ptr(), indices=indices.data_ptr(), threads=min(rows, cpu.threads(cpu.ELEMENT * x.numel())),
        narrow=x.dtype is torch.bfloat16,
    )  # fmt: skip
    return entropy, values, indices
