"""The compiled kernel of `topk_entropy` for CPU tensors: float32, a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels import cpu

ROWS, K = 8, 64  # the most


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    found, shape = cpu.library(), logits.shape
    width, leading = shape[-1], shape[:-1]
    rows = leading.numel()
    if isinstance(found, str) or logits.dtype is not torch.float32 or not 0 < rows <= ROWS or k > K:
        return NotImplemented
    x = logits if logits.ndim == 2 else logits.reshape(rows, width)
    if x.stride(1) != 1 and width > 1:
        return NotImplemented
    values = x.new_empty(*leading, k)
    indices = torch.empty_like(values, dtype=torch.int64)  # quicker than from a shape
    entropy = x.new_empty(*leading) if leading else x.new_empty(())
    found.fbcpu_topk_entropy(
        x.data_ptr(), x.stride(0), rows, width, k, entropy.data_ptr(), values.data_ptr(), indices.data_ptr()
    )
    return entropy, values, indices
