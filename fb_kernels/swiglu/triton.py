"""Triton kernels of `swiglu`: one pass over gate and up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning
from fb_kernels.triton.rows import as_rows


@triton.jit
def _swiglu_fwd_kernel(gate_up, out, row_stride, width, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_bwd_kernel(grad, gate_up, d_gate_up, grad_stride, row_stride, width, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    d = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(d_gate_up + row * 2 * width + columns, d * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(d_gate_up + row * 2 * width + width + columns, d * gate * sigmoid, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., F] from [..., 2F]."""
    if gate_up.dtype == torch.float64:
        return NotImplemented
    rows, width = as_rows(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    launch = tuning.swiglu(gate_up.dtype, width)
    grid = (len(rows) * triton.cdiv(width, launch["BLOCK"]),)
    if out.numel():
        _swiglu_fwd_kernel[grid](rows, out, rows.stride(0), width, **launch)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """[..., 2F] from the gradient [..., F]."""
    if gate_up.dtype == torch.float64:
        return NotImplemented
    rows, upstream, width = as_rows(gate_up), as_rows(grad), grad.shape[-1]
    out = gate_up.new_empty(gate_up.shape)
    launch = tuning.swiglu(gate_up.dtype, width)
    grid = (len(rows) * triton.cdiv(width, launch["BLOCK"]),)
    if out.numel():
        _swiglu_bwd_kernel[grid](upstream, rows, out, upstream.stride(0), rows.stride(0), width, **launch)
    return out
