"""The compiled kernel of `swiglu` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu

SIZE = 1 << 16  # maximum elements: above it torch's threads are faster
TAKES = f"float32, up to {SIZE:,} elements"


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of gate_up[..., 2F]."""
    library, size = cpu.library(), gate_up.numel()
    if isinstance(library, str) or gate_up.dtype is not torch.float32 or not 0 < size <= SIZE:
        return NotImplemented
    if not gate_up.is_contiguous():
        return NotImplemented
    *rows, width = gate_up.shape
    out = gate_up.new_empty(*rows, width // 2)
    library.fbcpu_swiglu(gate_up=gate_up.data_ptr(), out=out.data_ptr(), rows=size // width, width=width // 2)
    return out
