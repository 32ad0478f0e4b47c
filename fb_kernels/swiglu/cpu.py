"""The compiled kernel of `swiglu` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu

TAKES = "float32 and bfloat16"


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of gate_up[..., 2F]."""
    library, size = cpu.library(), gate_up.numel()
    if isinstance(library, str) or gate_up.dtype not in cpu.STEP or not size or not gate_up.is_contiguous():
        return NotImplemented
    *rows, width = gate_up.shape
    out = gate_up.new_empty(*rows, width // 2)
    library.fbcpu_swiglu(
        gate_up=gate_up.data_ptr(), out=out.data_ptr(), rows=size // width, width=width // 2,
        threads=cpu.threads(cpu.ELEMENT * size), narrow=gate_up.dtype is torch.bfloat16,
    )  # fmt: skip
    return out
