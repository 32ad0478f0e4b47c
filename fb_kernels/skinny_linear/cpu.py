"""The compiled kernel of `skinny_linear` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu, precision
from fb_kernels.skinny_linear.reference import linear
from fb_kernels.swiglu.cpu import swiglu as gates

ROWS = 96  # maximum in float32: above it oneDNN is as fast with AVX-512, and faster with AVX2
TAKES = f"float32 and bfloat16, up to {ROWS} rows; any number of bfloat16 with AVX2, or batch-invariant"


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    swiglu: bool,
    frozen: bool,
) -> Tensor:
    """[N, M], or [N, M / 2] where it is gated, with the bits of `swiglu`."""
    library, dtype, (rows, width), outputs = cpu.library(), x.dtype, x.shape, weight.shape[0]
    if isinstance(library, str) or not width:
        return NotImplemented
    narrow, threads = dtype is torch.bfloat16, cpu.threads(rows * width * outputs)
    if rows > ROWS and not (narrow and cpu.variant() != "plain") and not precision.batch_invariant():
        follows = swiglu and norm_weight is None and dtype in cpu.STEP  # its own kernel, for the bits of the op
        return gates(linear(x, weight, bias), None) if follows else NotImplemented
    (x_stride, x_step), (weight_stride, weight_step) = x.stride(), weight.stride()
    if dtype not in cpu.STEP or weight.dtype is not dtype or (width > 1 and not x_step == weight_step == 1):
        return NotImplemented
    bias_at, norm_at = cpu.address(bias, dtype), cpu.address(norm_weight, dtype)
    if bias_at < 0 or norm_at < 0:
        return NotImplemented
    residual_at = residual_stride = 0
    if residual is not None:
        residual_stride, residual_step = residual.stride()
        if residual.dtype is not dtype or swiglu or (residual_step != 1 and outputs > 1):
            return NotImplemented
        residual_at = residual.data_ptr()
    columns = outputs // 2 if swiglu else outputs
    out = x.new_empty(rows, columns)
    code = library.fbcpu_skinny_linear(
        x=x.data_ptr(), x_stride=x_stride, weight=weight.data_ptr(), weight_stride=weight_stride, bias=bias_at,
        norm_weight=norm_at, eps=eps, residual=residual_at, residual_stride=residual_stride, out=out.data_ptr(),
        out_stride=columns, rows=rows, width=width, outputs=outputs, swiglu=swiglu, threads=threads,
        narrow=narrow,
    )  # fmt: skip
    return NotImplemented if code else out
