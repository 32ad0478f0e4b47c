"""Triton kernels of `candidate_head`: one program per group, and a few more for the rows of no group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning
from fb_kernels.triton.rows import as_rows

REST = 128
"""Programs, at most, for the rows of no group."""


@triton.jit
def _in_order(offsets, count, limit, OFFSETS: tl.constexpr):
    """Whether offsets[0 .. count] begin with 0, never fall and end with at most `limit`."""
    falls = 0
    for first in range(0, count, OFFSETS):
        i = first + tl.arange(0, OFFSETS)
        low = tl.load(offsets + i, mask=i < count, other=0)
        high = tl.load(offsets + i + 1, mask=i < count, other=0)
        falls += tl.sum((low > high).to(tl.int32))
    return (falls == 0) & (tl.load(offsets) == 0) & (tl.load(offsets + count) <= limit)


@triton.jit
def _score(
    hidden, norm_weight, head_weight, head_bias, score, rows, inside, stride, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[ROWS] scores of `rows`, written where `inside`."""
    products, squares = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        real = columns < width
        tile = rows[:, None] * stride + columns[None, :]
        x = tl.load(hidden + tile, mask=inside[:, None] & real[None, :], other=0.0).to(tl.float32)
        w = tl.load(head_weight + columns, mask=real, other=0.0).to(tl.float32)
        if norm_weight is not None:
            w *= tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
            squares += x * x
        products += x * w[None, :]
    s = tl.sum(products, 1)
    if norm_weight is not None:
        s *= tl.rsqrt(tl.sum(squares, 1) / width + eps)
    if head_bias is not None:
        s += tl.load(head_bias).to(tl.float32)
    tl.store(score + rows, s, mask=inside)
    return s


@triton.jit
def _include(s, inside, offset, top, total, best, ROWS: tl.constexpr):
    """Extend (maximum, sum of exp(s - maximum), index of the first maximum) by scores whose first index is `offset`."""
    place = tl.arange(0, ROWS)
    highest = tl.max(tl.where(inside & (s == s), s, -float("inf")), 0)
    first = tl.min(tl.where(inside & (s == highest), place, ROWS), 0)
    found = (first < ROWS) & ((best < 0) | (highest > top))
    best = tl.where(found, offset + first, best)
    raised = tl.maximum(top, highest)
    shift = tl.where(raised == -float("inf"), 0.0, raised)
    total = total * tl.exp(top - shift) + tl.sum(tl.where(inside, tl.exp(s - shift), 0.0), 0)
    return raised, total, best


@triton.jit(do_not_specialize=["rows", "groups", "rest"])
def _candidate_head_fwd_kernel(
    hidden, norm_weight, head_weight, head_bias, cu_group, score, prob, best, stride, rows, groups, rest, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    place = tl.arange(0, ROWS)
    sound = _in_order(cu_group, groups, rows, OFFSETS)
    if group < groups:
        start = tl.where(sound, tl.load(cu_group + group).to(tl.int64), 0)
        end = tl.where(sound, tl.load(cu_group + group + 1).to(tl.int64), 0)
        inside = start + place < end
        s = _score(
            hidden, norm_weight, head_weight, head_bias, score, start + place, inside, stride, width, eps, ROWS, BLOCK
        )
        top, total, winner = _include(
            s, inside, tl.zeros([], tl.int64), -float("inf"), 0.0, tl.full([], -1, tl.int64), ROWS
        )
        for first in range(start + ROWS, end, ROWS):
            more = first + place < end
            t = _score(
                hidden, norm_weight, head_weight, head_bias, score, first + place, more, stride, width, eps, ROWS, BLOCK
            )
            top, total, winner = _include(t, more, first - start, top, total, winner, ROWS)
        tl.store(best + group, winner)
        tl.store(prob + start + place, tl.exp(s - top) / total, mask=inside)
        for first in range(start + ROWS, end, ROWS):  # read again: other threads wrote the scores
            more = first + place < end
            t = _score(
                hidden, norm_weight, head_weight, head_bias, score, first + place, more, stride, width, eps, ROWS, BLOCK
            )
            tl.store(prob + first + place, tl.exp(t - top) / total, mask=more)
    else:
        start = tl.where(sound, tl.load(cu_group + groups).to(tl.int64), 0)
        for first in range(start + (group - groups) * ROWS, rows, rest * ROWS):
            row = tl.cast(first, tl.int64) + place
            _score(hidden, norm_weight, head_weight, head_bias, score, row, row < rows, stride, width, eps, ROWS, BLOCK)
            nothing = tl.zeros([ROWS], tl.float32)
            tl.store(prob + row, tl.where(sound, nothing, float("nan")), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _candidate_head_bwd_kernel(
    grad, hidden, norm_weight, head_weight, d_hidden, d_column, grad_stride, stride, rows, width, eps,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    w = _weight(norm_weight, head_weight, columns, inside)
    column_sum = tl.zeros([BLOCK], tl.float32)
    for each in range(chunk * ROWS, min(chunk * ROWS + ROWS, rows)):
        row = tl.cast(each, tl.int64)
        g = tl.load(grad + row * grad_stride + tl.arange(0, 1)).to(tl.float32)  # [1]
        used = g != 0  # other rows may hold NaN
        x_row = hidden + row * stride
        x = tl.load(x_row + columns, mask=inside & used, other=0.0).to(tl.float32)
        d = g * w
        if norm_weight is not None:
            squares = x * x
            for step in range(1, BLOCKS):
                others = (block + step) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
                other = tl.load(x_row + others, mask=(others < width) & used, other=0.0).to(tl.float32)
                squares += other * other
            inverse = tl.rsqrt(tl.sum(squares) / width + eps)
            x = tl.where(used, x * inverse, 0.0)
            products = d * x
            for step in range(1, BLOCKS):
                others = (block + step) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
                other = tl.load(x_row + others, mask=(others < width) & used, other=0.0).to(tl.float32)
                products += g * _weight(norm_weight, head_weight, others, others < width) * (other * inverse)
            d = tl.where(used, inverse * (d - x * (tl.sum(products) / width)), 0.0)
        column_sum += g * x
        if d_hidden is not None:
            tl.store(d_hidden + row * width + columns, d, mask=inside)
    if d_column is not None:
        tl.store(d_column + tl.cast(chunk, tl.int64) * width + columns, column_sum, mask=inside)


@triton.jit
def _weight(norm_weight, head_weight, columns, inside):
    """norm_weight * head_weight."""
    w = tl.load(head_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        w *= tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    return w


def candidate_head(
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    cu_group: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(score[N], prob[N], best[G])."""
    x, width, groups = as_rows(hidden), hidden.shape[1], cu_group.shape[0] - 1
    if hidden.dtype == torch.float64 or not width:
        return NotImplemented
    score, prob = (x.new_empty(len(x), dtype=torch.float32) for _ in range(2))
    best = cu_group.new_empty(groups, dtype=torch.int64)
    launch = tuning.candidate_head(hidden.dtype, width)
    rest = min(triton.cdiv(len(x), launch["ROWS"]), REST)
    grid = (groups + rest,)
    if grid[0]:
        _candidate_head_fwd_kernel[grid](
            x, None if norm_weight is None else norm_weight.contiguous(), head_weight.contiguous(), head_bias,
            cu_group.contiguous(), score, prob, best, x.stride(0), len(x), groups, rest, width, eps, **launch,
        )  # fmt: skip
    return score, prob, best


def candidate_head_backward(
    grad_score: Tensor,
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    eps: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to hidden, norm_weight, head_weight and head_bias; the weights' share one sum over rows, in order."""
    x, width = as_rows(hidden), hidden.shape[1]
    if hidden.dtype == torch.float64 or not width:
        return NotImplemented
    launch = tuning.candidate_head_backward(hidden.dtype, len(x), width)
    chunks, blocks = triton.cdiv(len(x), launch["ROWS"]), triton.cdiv(width, launch["BLOCK"])
    d_hidden = hidden.new_empty(hidden.shape if needs[0] else (0,))
    partials = hidden.new_empty((chunks, width), dtype=torch.float32) if needs[1] or needs[2] else None
    if len(x) and (needs[0] or partials is not None):
        _candidate_head_bwd_kernel[(chunks * blocks,)](
            grad_score, x, None if norm_weight is None else norm_weight.contiguous(), head_weight.contiguous(),
            d_hidden if needs[0] else None, partials, grad_score.stride(0), x.stride(0), len(x), width, eps,
            BLOCKS=blocks, **launch,
        )  # fmt: skip
    d_norm, d_head = hidden.new_empty(0), head_weight.new_empty(0)
    if partials is not None:
        column_sum = partials.sum(0)
        d_norm = (column_sum * head_weight).to(hidden.dtype) if needs[1] else d_norm
        if needs[2]:
            d_head = (column_sum if norm_weight is None else column_sum * norm_weight).to(head_weight.dtype)
    d_bias = hidden.new_empty(0) if head_bias is None else head_bias.new_empty(0)
    if needs[3] and head_bias is not None:
        d_bias = grad_score.sum().reshape(head_bias.shape).to(head_bias.dtype)
    return d_hidden, d_norm, d_head, d_bias
