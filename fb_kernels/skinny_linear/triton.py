"""`skinny_linear` from the kernels of its parts and a product: cuBLAS's or, in batch-invariant mode, one of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import precision, tuning
from fb_kernels.rms_norm.triton import rms_norm
from fb_kernels.skinny_linear.reference import linear
from fb_kernels.swiglu.triton import swiglu as gated
from fb_kernels.triton.rows import are_aligned

PIECE = 256  # columns whose products are summed before they are added to those before them
FEW = 32  # most rows whose pieces are programs of their own, where tiles leave multiprocessors idle


@triton.jit
def _store(total, bias, residual, out, row, output, rows, outputs, residual_stride):
    """Write total[N, M] with bias and residual, rounded once, for row[N] and output[M]."""
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    if residual is not None:
        behind = residual + row[:, None] * residual_stride + output[None, :]
        total += tl.load(behind, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * outputs + output[None, :], total, mask=inside)


# out = x weight^T + bias + residual; the sums of pieces of K are added in their order, whatever other rows there are.
# Grid: ceil(M / BLOCK_M) * ceil(N / BLOCK_N) times, if SPLIT, ceil(K / PIECE); rows vary fastest, so that the weight
#   streams from memory once.
# Program: BLOCK_M outputs of BLOCK_N rows; if SPLIT, one piece, whose sums are `out` [pieces, N, M] in float32.
# Loop: over the pieces; in one over its columns, BLOCK_K at a time.
# Memory: w [BLOCK_M, BLOCK_K] and y [BLOCK_N, BLOCK_K] come in pipelined stages (num_stages of the launch); registers
#   hold the sums of a piece and of all [BLOCK_M, BLOCK_N] in float32.
# Layout: x [N, K], weight [M, K], adjacent columns, K = row_vectors * VECTOR, rows x_vectors, weight_vectors * VECTOR
#   apart, at multiples of 16 bytes unless VECTOR is 1; residual [N, M] or None, adjacent columns, row stride
#   residual_stride; bias [M] or None; out [N, M], dense.
@triton.jit(do_not_specialize=["rows", "row_vectors", "x_vectors", "weight_vectors"])
def _skinny_linear_kernel(
    x, weight, bias, residual, out, rows, outputs, row_vectors, x_vectors, weight_vectors, residual_stride,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    width, x_stride, weight_stride = row_vectors * VECTOR, x_vectors * VECTOR, weight_vectors * VECTOR
    row_blocks, program, begin, end = tl.cdiv(rows, BLOCK_N), tl.program_id(0), 0, width
    if SPLIT:
        pieces = tl.cdiv(width, PIECE)
        begin, program = program % pieces * PIECE, program // pieces
        end = tl.minimum(begin + PIECE, width)
        out += tl.cast(begin // PIECE, tl.int64) * rows * outputs
    output = (program // row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # [M]
    row = (program % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # [N]
    w_row, x_row = weight + output[:, None] * weight_stride, x + row[:, None] * x_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, PIECE):
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(first, tl.minimum(first + PIECE, end), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            w_at, x_at = w_row + k, x_row + k
            if VECTOR > 1:
                w_at = tl.max_contiguous(tl.multiple_of(w_at, (1, 16)), (1, VECTOR))
                x_at = tl.max_contiguous(tl.multiple_of(x_at, (1, 16)), (1, VECTOR))
            w = tl.load(w_at, mask=(output < outputs)[:, None] & (k < width), other=0.0)
            y = tl.load(x_at, mask=(row < rows)[:, None] & (k < width), other=0.0)
            sums = tl.dot(w, tl.trans(y), sums, input_precision="ieee")
        total += sums
    _store(tl.trans(total), bias, residual, out, row, output, rows, outputs, residual_stride)


# out = the sum of sums [pieces, N, M], in the order of pieces, + bias + residual.
# Grid: N * ceil(M / BLOCK_M).
# Program: BLOCK_M outputs of one row.
# Loop: over the pieces.
# Memory: registers only: sums [BLOCK_M] in float32.
# Layout: as above.
@triton.jit(do_not_specialize=["pieces", "rows"])
def _add_pieces_kernel(sums, bias, residual, out, pieces, rows, outputs, residual_stride, BLOCK_M: tl.constexpr):
    blocks = tl.cdiv(outputs, BLOCK_M)
    row = (tl.program_id(0) // blocks + tl.arange(0, 1)).to(tl.int64)  # [1]
    output = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    place = sums + row[:, None] * outputs + output[None, :]
    total = tl.zeros((1, BLOCK_M), tl.float32)
    for _ in range(pieces):
        total += tl.load(place, mask=(output < outputs)[None, :], other=0.0)
        place += tl.cast(rows, tl.int64) * outputs
    _store(total, bias, residual, out, row, output, rows, outputs, residual_stride)


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
    """[N, M], or [N, M / 2] where it is gated."""
    if x.dtype == torch.float64:
        return NotImplemented
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps, None)[0]
    if precision.batch_invariant():
        y = _own_product(x, weight, bias, residual)
        return gated(y) if swiglu else y
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t())  # rounded once
    y = linear(x, weight, bias)
    if swiglu:
        return gated(y)
    return y if residual is None else y.add_(residual)


def _own_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    (rows, width), outputs = x.shape, len(weight)
    x, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (x, weight))
    vector = 16 // x.itemsize if are_aligned(x, weight) else 1
    launch = tuning.skinny_linear(x.dtype, "unaligned" if vector == 1 else "aligned")
    assert PIECE % launch["BLOCK_K"] == 0
    bias = None if bias is None else bias.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    out, step = x.new_empty(rows, outputs), 0 if residual is None else residual.stride(0)
    tiles = triton.cdiv(outputs, launch["BLOCK_M"]) * triton.cdiv(rows, launch["BLOCK_N"])
    split, pieces = rows <= FEW and width > PIECE and tiles <= tuning.processors(), triton.cdiv(width, PIECE)
    sums = x.new_empty(pieces, rows, outputs, dtype=torch.float32) if split else out
    if tiles:
        behind = (None, None) if split else (bias, residual)
        _skinny_linear_kernel[(tiles * pieces if split else tiles,)](
            x, weight, *behind, sums, rows, outputs, width // vector, x.stride(0) // vector,
            weight.stride(0) // vector, step, SPLIT=split, PIECE=PIECE, VECTOR=vector, **launch,
        )  # fmt: skip
    if tiles and split:
        _add_pieces_kernel[(rows * triton.cdiv(outputs, 256),)](
            sums, bias, residual, out, pieces, rows, outputs, step, BLOCK_M=256, num_warps=2
        )
    return out
