"""The compiled kernel of `merge_attention_states` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu

SIZE = 1 << 16  # maximum elements of a state: above it torch's threads are faster
TAKES = f"float32, states of up to {SIZE:,} elements"


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]); an empty state's out is never read."""
    library = cpu.library()
    if isinstance(library, str) or not (out_a.dtype is lse_a.dtype is out_b.dtype is lse_b.dtype is torch.float32):
        return NotImplemented
    if not (out_a.is_contiguous() and lse_a.is_contiguous() and out_b.is_contiguous() and lse_b.is_contiguous()):
        return NotImplemented
    if out_a.numel() > SIZE:
        return NotImplemented
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    rows, heads, width = out_a.shape
    library.fbcpu_merge_attention_states(
        out_a=out_a.data_ptr(), lse_a=lse_a.data_ptr(), out_b=out_b.data_ptr(), lse_b=lse_b.data_ptr(),
        out=out.data_ptr(), lse=lse.data_ptr(), rows=rows, heads=heads, width=width,
    )  # fmt: skip
    return out, lse
