"""Triton kernels of `swiglu`: one pass over gate and up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning
from fb_kernels.triton.rows import as_rows


# out = gate sigmoid(gate) up (Shazeer 2020, equation 6).
# Grid: N * ceil(F / BLOCK); the blocks of a row are neighbours.
# Program: BLOCK columns of one row.
# Loop: none.
# Memory: registers only, [BLOCK] float32; rounded once, at the store.
# Layout: gate, up [N, F], row strides gate_stride, up_stride; out [N, F], dense.
@triton.jit
def _swiglu_fwd_kernel(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # row * stride may exceed 32 bits
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width  # BLOCK is a power of two, F may be none
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, g * tl.sigmoid(g) * u, mask=inside)


# d_gate = grad up s (1 + gate (1 - s)), d_up = grad gate s, with s = sigmoid(gate).
# Grid: N * ceil(F / BLOCK); the blocks of a row are neighbours.
# Program: BLOCK columns of one row, of gate and of up.
# Loop: none.
# Memory: registers only, [BLOCK] float32.
# Layout: grad, gate, up [N, F], row strides grad_stride, gate_stride, up_stride; d_gate, d_up [N, F], both of
#   out_stride.
@triton.jit
def _swiglu_bwd_kernel(
    grad, gate, up, d_gate, d_up, grad_stride, gate_stride, up_stride, out_stride, width, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    d = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    tl.store(d_gate + row * out_stride + columns, d * u * sigmoid * (1 + g * (1 - sigmoid)), mask=inside)
    tl.store(d_up + row * out_stride + columns, d * g * sigmoid, mask=inside)


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """[..., F] from [..., 2F], or from two of [..., F]."""
    if gate_up.dtype == torch.float64:
        return NotImplemented
    gate, other = _halves(gate_up, up)
    width = gate.shape[1]
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    launch = tuning.swiglu(gate_up.dtype, width)
    grid = (len(gate) * triton.cdiv(width, launch["BLOCK"]),)
    if out.numel():
        _swiglu_fwd_kernel[grid](gate, other, out, gate.stride(0), other.stride(0), width, **launch)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients to gate_up and up; without up the second is empty."""
    if gate_up.dtype == torch.float64:
        return NotImplemented
    (gate, other), upstream = _halves(gate_up, up), as_rows(grad)
    width = gate.shape[1]
    on_gate, on_up = gate_up.new_empty(gate_up.shape), gate_up.new_empty(0 if up is None else up.shape)
    d_gate, d_up = _halves(on_gate, None if up is None else on_up)
    launch = tuning.swiglu(gate_up.dtype, width)
    grid = (len(gate) * triton.cdiv(width, launch["BLOCK"]),)
    if on_gate.numel():
        _swiglu_bwd_kernel[grid](
            upstream, gate, other, d_gate, d_up, upstream.stride(0), gate.stride(0), other.stride(0), d_gate.stride(0),
            width, **launch,
        )  # fmt: skip
    return on_gate, on_up


def _halves(gate_up: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as rows [N, F]."""
    rows = as_rows(gate_up)
    gate, up = rows.chunk(2, 1) if up is None else (rows, as_rows(up))
    return gate, up
