"""Triton kernel of `topk_entropy` for many rows: a program reads its row once, then a few groups of it again.

Columns fall into groups. The K largest elements of a row lie in the K groups whose maxima are the largest, since each
of these maxima is larger than any element of another group. So the maxima are a first answer, and the other elements of
their groups correct it: few loads, no candidates to count, and nothing that could overflow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning
from fb_kernels.triton.rows import as_rows

LOW = tl.constexpr(0x7FFFFFFF)
NO_ORDER = tl.constexpr(-(2**31))
NO_KEY = tl.constexpr(-(2**63))
LARGEST_K = 128


@triton.jit
def _order(x, inside):
    """Int32 that rises with float32 x: one zero, one NaN above +inf; below all of these if not `inside`."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & LOW
    order = tl.where(bits < 0, -magnitude, magnitude)
    order = tl.where(magnitude > 0x7F800000, LOW, order)
    return tl.where(inside, order, NO_ORDER)


@triton.jit
def _key(order, column):
    """Int64 that rises with the order and falls with the column."""
    key = (order.to(tl.int64) << 32) | (column ^ LOW).to(tl.int64)
    return tl.where(order == NO_ORDER, NO_KEY, key)


@triton.jit
def _column(key):
    return (key & LOW).to(tl.int32) ^ LOW


@triton.jit
def _topk_entropy_kernel(
    logits, entropy, values, indices, row_stride, width, k,
    K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    place = tl.arange(0, BLOCK)
    highest, step_of = tl.full([BLOCK], NO_ORDER, tl.int32), tl.zeros([BLOCK], tl.int32)
    for step in range(tl.cdiv(width, BLOCK)):
        column = step * BLOCK + place
        x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        order = _order(x, column < width)
        higher = order > highest
        highest, step_of = tl.where(higher, order, highest), tl.where(higher, step, step_of)
    keys = tl.reshape(_key(highest, step_of * BLOCK + place), [BLOCK // GROUP, GROUP])
    maxima = tl.topk(tl.max(keys, 1), K)  # [K], falling
    group = _column(maxima) % BLOCK // GROUP

    best = maxima
    member = tl.arange(0, STEPS * GROUP)
    for first in range(0, tl.cdiv(width, BLOCK), STEPS):
        column = ((first + member // GROUP) * BLOCK + member % GROUP)[None, :] + (group * GROUP)[:, None]
        inside = (column < width) & (maxima > NO_KEY)[:, None]
        x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        key = _key(_order(x, inside), column)
        key = tl.where(key == maxima[:, None], NO_KEY, key)
        if tl.max(tl.reshape(key, [K * STEPS * GROUP]), 0) > tl.min(best, 0):
            new = tl.topk(tl.reshape(key, [K * STEPS * GROUP]), K)
            best = tl.topk(tl.reshape(tl.join(best, new), [2 * K]), K)

    rank = tl.arange(0, K)
    found, index = rank < k, _column(best)
    x = tl.load(logits + index, mask=found, other=0.0).to(tl.float32)
    shifted = x - tl.sum(tl.where(rank == 0, x, 0.0), 0)
    exponentials = tl.where(found, tl.exp(shifted), 0.0)
    total = tl.sum(exponentials, 0)
    weighted = tl.sum(tl.where(x > -float("inf"), exponentials * shifted, 0.0), 0)
    tl.store(entropy + row, tl.log(total) - weighted / total)
    tl.store(values + row * k + rank, x, mask=found)
    tl.store(indices + row * k + rank, index.to(tl.int64), mask=found)


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    if logits.dtype == torch.float64 or k > LARGEST_K:
        return NotImplemented
    x, shape = as_rows(logits), logits.shape[:-1]
    entropy = logits.new_empty(shape, dtype=torch.float32)
    values = logits.new_empty((*shape, k), dtype=torch.float32)
    indices = logits.new_empty((*shape, k), dtype=torch.int64)
    padded = max(tuning.next_power_of_2(k), 2)
    if len(x):
        _topk_entropy_kernel[(len(x),)](
            x, entropy, values, indices, x.stride(0), x.shape[1], k,
            K=padded, **tuning.topk_entropy(logits.dtype, x.shape[1], padded),
        )  # fmt: skip
    return entropy, values, indices
