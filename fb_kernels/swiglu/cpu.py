"""The compiled kernel of `swiglu` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu

TAKES = "float32 and bfloat16"


def swiglu(gate_up: Tensor, up: Tensor | None) -> Tensor:
    """Compute silu(gate) * up."""
    library, dtype, size = cpu.library(), gate_up.dtype, gate_up.numel()
    if isinstance(library, str) or dtype not in cpu.STEP or not size or not gate_up.is_contiguous():
        return NotImplemented
    if up is not None and not up.is_contiguous():
        return NotImplemented
    *rows, stride = gate_up.shape
    width = stride // 2 if up is None else stride
    out, gate_at = gate_up.new_empty(*rows, width), gate_up.data_ptr()
    library.fbcpu_swiglu(
        gate=gate_at, up=gate_at + width * dtype.itemsize if up is None else up.data_ptr(), stride=stride,
        out=out.data_ptr(), rows=size // stride, width=width, threads=cpu.threads(cpu.ELEMENT * size),
        narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    return out
