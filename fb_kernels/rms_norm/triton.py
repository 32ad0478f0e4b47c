"""Triton kernels of `rms_norm`: a row is one block, or several programs that each sum all squares of the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning
from fb_kernels.triton.rows import as_rows


@triton.jit
def _load_sum(x, residual, columns, inside):
    """Add the residual to x, rounded to x's dtype, as float32."""
    s = tl.load(x + columns, mask=inside, other=0.0)
    if residual is not None:
        s = (s.to(tl.float32) + tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)).to(s.dtype)
    return s.to(tl.float32)


@triton.jit
def _load_factor(weight, columns, inside, offset):
    """Weight + offset as float32; without a weight 1."""
    factor = tl.full(columns.shape, 1.0, tl.float32)
    if weight is not None:
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    return factor


# normed = s rsqrt(mean(s^2) + eps) (weight + offset), summed = s = x + residual (Zhang & Sennrich 2019, equation 4).
# Grid: N * BLOCKS; the blocks of a row are neighbours.
# Program: BLOCK columns of one row; it reads the other blocks of the row too, for the mean square.
# Loop: over the other BLOCKS - 1 blocks of the row.
# Memory: registers only: s and squares [BLOCK] in float32.
# Layout: x, residual [N, D], row strides x_stride, residual_stride; weight [D] or None; normed, summed [N, D], dense.
@triton.jit
def _rms_norm_fwd_kernel(
    x, residual, weight, normed, summed, x_stride, residual_stride, width, eps, offset,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    x += row * x_stride
    if residual is not None:
        residual += row * residual_stride
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    s = _load_sum(x, residual, columns, inside)  # [BLOCK]
    squares = s * s
    for step in range(1, BLOCKS):  # [BLOCK] partial sums: one reduction at the end
        others = (block + step) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        other = _load_sum(x, residual, others, others < width)
        squares += other * other
    inverse = tl.rsqrt(tl.sum(squares) / width + eps)
    w = _load_factor(weight, columns, inside, offset)
    tl.store(normed + row * width + columns, s * inverse * w, mask=inside)
    if residual is not None:  # without one s is x itself
        tl.store(summed + row * width + columns, s, mask=inside)


# d_summed = r (g w - u mean(g w u)) + grad_sum, d_weight = sum_rows g u, with u = r s, r = rsqrt(mean(s^2) + eps),
#   w = weight + offset.
# Grid: ceil(N / ROWS) * BLOCKS; the blocks of a chunk of rows are neighbours.
# Program: BLOCK columns of ROWS rows; it reads the rows' other blocks too, for the two means.
# Loop: over rows; inside, twice over the other BLOCKS - 1 blocks of the row.
# Memory: registers only: s, g, u and the weight's sum [BLOCK] in float32.
# Layout: grad_normed, grad_sum, summed [N, D], row strides grad_stride, grad_sum_stride, stride; weight [D];
#   d_summed [N, D] and d_weight [chunks, D], dense, each None if it is not needed; the launcher adds the chunks.
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_bwd_kernel(
    grad_normed, grad_sum, summed, weight, d_summed, d_weight, grad_stride, grad_sum_stride, stride, rows, width, eps,
    offset, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    w = _load_factor(weight, columns, inside, offset)
    on_weight = tl.zeros([BLOCK], tl.float32)  # rows are added in order
    for index in range(chunk * ROWS, min(chunk * ROWS + ROWS, rows)):
        row = tl.cast(index, tl.int64)
        s_row = summed + row * stride
        g_row = grad_normed + row * grad_stride
        s = tl.load(s_row + columns, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_row + columns, mask=inside, other=0.0).to(tl.float32)
        squares = s * s
        for step in range(1, BLOCKS):
            others = (block + step) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
            other = tl.load(s_row + others, mask=others < width, other=0.0).to(tl.float32)
            squares += other * other
        inverse = tl.rsqrt(tl.sum(squares) / width + eps)
        unit = s * inverse
        on_weight += g * unit
        if d_summed is not None:
            on_unit = g * w
            products = on_unit * unit  # [BLOCK]
            for step in range(1, BLOCKS):
                others = (block + step) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
                other = tl.load(s_row + others, mask=others < width, other=0.0).to(tl.float32)
                other_g = tl.load(g_row + others, mask=others < width, other=0.0).to(tl.float32)
                other_w = _load_factor(weight, others, others < width, offset)
                products += other_g * other_w * (other * inverse)
            d = inverse * (on_unit - unit * (tl.sum(products) / width))
            if grad_sum is not None:
                d += tl.load(grad_sum + row * grad_sum_stride + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_summed + row * width + columns, d, mask=inside)
    if d_weight is not None:
        tl.store(d_weight + tl.cast(chunk, tl.int64) * width + columns, on_weight, mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(normed, residual sum); without a residual the second is empty."""
    if x.dtype == torch.float64:
        return NotImplemented
    rows, width = as_rows(x), x.shape[-1]
    addend = None if residual is None else as_rows(residual)
    normed, summed = x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)
    launch = tuning.rms_norm(x.dtype, width)
    blocks = triton.cdiv(width, launch["BLOCK"])
    if normed.numel():
        _rms_norm_fwd_kernel[(len(rows) * blocks,)](
            rows, addend, None if weight is None else weight.contiguous(), normed, summed,
            rows.stride(0), 0 if addend is None else addend.stride(0), width, eps, offset, BLOCKS=blocks, **launch,
        )  # fmt: skip
    return normed, summed


def rms_norm_backward(
    grad_normed: Tensor,
    grad_sum: Tensor,
    summed: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients to the sum and weight; each program sums the weight's over its rows; sums are added in order."""
    if summed.dtype == torch.float64:
        return NotImplemented
    rows, upstream, width = as_rows(summed), as_rows(grad_normed), summed.shape[-1]
    on_sum = as_rows(grad_sum) if grad_sum.shape == summed.shape else None
    launch = tuning.rms_norm_backward(summed.dtype, len(rows), width)
    chunks, blocks = triton.cdiv(len(rows), launch["ROWS"]), triton.cdiv(width, launch["BLOCK"])
    d_summed = summed.new_empty(summed.shape if needs[0] else (0,))
    partials = summed.new_empty((chunks, width), dtype=torch.float32) if needs[1] else None
    if summed.numel():
        _rms_norm_bwd_kernel[(chunks * blocks,)](
            upstream, on_sum, rows, None if weight is None else weight.contiguous(), d_summed if needs[0] else None,
            partials, upstream.stride(0), 0 if on_sum is None else on_sum.stride(0), rows.stride(0), len(rows), width,
            eps, offset, BLOCKS=blocks, **launch,
        )  # fmt: skip
    if weight is None or partials is None:
        return d_summed, (summed if weight is None else weight).new_empty(0)
    return d_summed, partials.sum(0).to(weight.dtype)
