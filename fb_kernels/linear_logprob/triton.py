"""Triton kernels of `linear_logprob`: statistics of vocabulary tiles, merged in a fixed order.

Two forms of the forward pass write the same statistics: "fused" keeps each tile of logits in registers; "chunked" has
cuBLAS write a chunk of logits that stays in the L2 cache, and reads it once. gluon.py has a third, for Hopper only.
`tuning.linear_logprob_form` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import precision, tuning
from fb_kernels.linear_logprob.options import Options
from fb_kernels.linear_logprob.reference import gradient, largest_of_rows, partials_gradient, to_logits
from fb_kernels.triton import HAS_GLUON
from fb_kernels.triton.functions import FAR_BELOW, LOG2_E, shift_of, tanh

LARGEST_ID = torch.iinfo(torch.int64).max
ROWS = 64  # whose launch takes any number of rows in batch-invariant mode


@triton.jit
def _logits(products, bias, inside, on_products, on_bias, on_cap, SOFTCAP: tl.constexpr):
    """(logits[M, V] of products[M, V] and the bias of these columns; the argument of the soft-cap's tanh)."""
    x = products * on_products
    if bias is not None:
        x += tl.load(bias + tl.arange(0, inside.shape[0]), mask=inside, other=0.0).to(tl.float32)[None, :] * on_bias
    ratio = x
    if SOFTCAP:
        x = tanh(ratio) * on_cap
    return x, ratio


@triton.jit
def _left(end, first, most: tl.constexpr):
    """The lesser of end - first and `most`, as an int32."""
    return tl.minimum(end - first, most).to(tl.int32)


@triton.jit
def _store_statistics(
    products, bias, target, statistics, picked, row, first, tile, rows, valid, vocab_start, tiles,
    on_products, on_bias, on_cap, SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write one tile's maximum, sum of exp, sum of (l - max) exp and, where the target is in it, the target's logit.

    products[M, TILE] are of the rows row[M] and the columns from `first` = TILE * tile on, of which those below `valid`
    count; `vocab_start` is the id of column 0. Writes statistics[3, tiles, rows] at `tile`, and picked[rows].
    """
    in_row, inside = row < rows, tl.arange(0, TILE) < _left(valid, first, TILE)
    bias = bias if bias is None else bias + first
    x, _ = _logits(products, bias, inside, on_products, on_bias, on_cap, SOFTCAP)
    local = tl.load(target + row, mask=in_row, other=0).to(tl.int64) - vocab_start - first
    found = in_row & (local >= 0) & (local < TILE)  # [M]
    if tl.max(found.to(tl.int32), 0):  # few tiles hold a target
        column = tl.where(found, local, -1).to(tl.int32)
        target_logit = tl.sum(tl.where(column[:, None] == tl.arange(0, TILE)[None, :], x, 0.0), 1)
        tl.store(picked + row, target_logit, mask=found)
    if first + TILE > valid:  # only the last tile
        x = tl.where((tl.arange(0, TILE) < _left(valid, first, TILE))[None, :], x, -float("inf"))
    top = tl.max(x, 1)
    fallen = tl.maximum(x - shift_of(top)[:, None], FAR_BELOW, propagate_nan=tl.PropagateNan.ALL)  # [M, TILE]
    exponentials = tl.exp2(fallen * LOG2_E)
    total = tl.sum(exponentials, 1)
    weighted = tl.sum(fallen * exponentials, 1)
    top = tl.where(total == total, top, float("nan"))  # tl.max skips NaN, the sum does not
    place = tl.cast(tile, tl.int64) * rows + row
    plane = tl.cast(tiles, tl.int64) * rows
    tl.store(statistics + place, top, mask=in_row)
    tl.store(statistics + plane + place, total, mask=in_row)
    tl.store(statistics + 2 * plane + place, weighted, mask=in_row)


# For each row and tile of TILE columns, of l = logits(hidden weight^T, bias): max, sum exp(l - max),
# sum (l - max) exp(l - max); and the logit of the row's target.
# Grid: ceil(V / BLOCK_V) * ceil(N / BLOCK_M); rows vary fastest, so that the weight streams from memory once.
# Program: BLOCK_M rows against BLOCK_V columns, one tile or two.
# Loop: over D, BLOCK_K columns at a time.
# Memory: x [BLOCK_M, BLOCK_K] and w [BLOCK_V, BLOCK_K] come in pipelined stages (num_stages of the launch); registers
#   hold the products [BLOCK_M, BLOCK_V] in float32. No logit is written.
# Layout: hidden [N, D], weight [V, D], adjacent columns, rows of row_vectors * 16 bytes that are hidden_vectors and
#   weight_vectors * 16 bytes apart; bias [V] or None; target, picked [N]; statistics [3, tiles, N], dense.
@triton.jit(
    do_not_specialize=["rows", "valid", "vocab_start", "tiles", "row_vectors", "hidden_vectors", "weight_vectors"]
)
def _linear_logprob_fwd_kernel(
    hidden, weight, bias, target, statistics, picked, rows, valid, vocab_start, tiles,
    row_vectors, hidden_vectors, weight_vectors, on_products, on_bias, on_cap,
    SOFTCAP: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0) // row_blocks
    first_row = tl.cast(tl.program_id(0) % row_blocks, tl.int64) * BLOCK_M
    first_column = tl.cast(tile, tl.int64) * BLOCK_V
    row = first_row + tl.arange(0, BLOCK_M)
    # multiples of VECTOR, which tells the compiler that loads of 16 bytes are aligned
    width, hidden_stride, weight_stride = row_vectors * VECTOR, hidden_vectors * VECTOR, weight_vectors * VECTOR
    x_pointer = tl.multiple_of(hidden + first_row * hidden_stride, 16)
    w_pointer = tl.multiple_of(weight + first_column * weight_stride, 16)
    k = tl.arange(0, BLOCK_K)
    x_row = tl.minimum(tl.arange(0, BLOCK_M), _left(rows, first_row, BLOCK_M) - 1)  # past the end, repeat the last row
    w_row = tl.minimum(tl.arange(0, BLOCK_V), _left(valid, first_column, BLOCK_V) - 1)
    x_offsets, w_offsets = x_row[:, None] * hidden_stride + k[None, :], w_row[:, None] * weight_stride + k[None, :]
    SWAP: tl.constexpr = BLOCK_M < 128  # the tensor cores' longer side belongs to the vocabulary
    products = tl.zeros((BLOCK_V, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_V), tl.float32)  # sums over D, in order
    for start in range(0, width, BLOCK_K):
        if EVEN:
            x, w = tl.load(x_pointer + x_offsets), tl.load(w_pointer + w_offsets)
        else:
            left = k[None, :] < width - start
            x = tl.load(x_pointer + x_offsets, mask=left, other=0.0)
            w = tl.load(w_pointer + w_offsets, mask=left, other=0.0)
        if SWAP:
            products = tl.dot(w, tl.trans(x), products, input_precision="ieee")
        else:
            products = tl.dot(x, tl.trans(w), products, input_precision="ieee")
        x_pointer += BLOCK_K
        w_pointer += BLOCK_K
    if SWAP:
        products = tl.trans(products)
    if BLOCK_V <= TILE:
        _store_statistics(
            products, bias, target, statistics, picked, row, first_column, tile, rows, valid, vocab_start, tiles,
            on_products, on_bias, on_cap, SOFTCAP, TILE,
        )  # fmt: skip
    else:  # one half after the other takes fewer registers
        left, right = tl.split(tl.permute(tl.reshape(products, (BLOCK_M, 2, TILE)), (0, 2, 1)))
        _store_statistics(
            left, bias, target, statistics, picked, row, first_column, 2 * tile, rows, valid, vocab_start, tiles,
            on_products, on_bias, on_cap, SOFTCAP, TILE,
        )  # fmt: skip
        _store_statistics(
            right, bias, target, statistics, picked, row, first_column + TILE, 2 * tile + 1, rows, valid, vocab_start,
            tiles, on_products, on_bias, on_cap, SOFTCAP, TILE,
        )  # fmt: skip


# The same statistics, from products that cuBLAS has written for a chunk: rows first_row to last_row - 1, columns of the
# vocabulary from `first` on.
# Grid: ceil(chunk columns / BLOCK_V) * ceil(chunk rows / BLOCK_M); rows vary fastest.
# Program: BLOCK_M rows against one tile of BLOCK_V columns.
# Loop: none.
# Memory: registers only: the tile [BLOCK_M, BLOCK_V] in float32, which is read once, from the L2 cache.
# Layout: products [last_row - first_row, chunk columns] float32, row stride `stride`; bias [V] or None; target, picked
#   [N]; statistics [3, tiles, N], dense.
@triton.jit(do_not_specialize=["rows", "first_row", "last_row", "valid", "vocab_start", "tiles", "first"])
def _chunk_statistics_kernel(
    products, bias, target, statistics, picked, rows, first_row, last_row, valid, vocab_start, tiles, first, stride,
    on_products, on_bias, on_cap, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(last_row - first_row, BLOCK_M)
    here_row = ((tl.program_id(0) % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # in the chunk
    row = first_row + here_row  # [M], in all rows
    start = (tl.program_id(0) // row_blocks) * BLOCK_V
    here, first = start + tl.arange(0, BLOCK_V), tl.cast(first, tl.int64) + start
    mask = (row < last_row)[:, None] & (tl.arange(0, BLOCK_V) < _left(valid, first, BLOCK_V))[None, :]
    x = tl.load(products + here_row[:, None] * stride + here[None, :], mask=mask, other=0.0)
    _store_statistics(
        x, bias, target, statistics, picked, row, first, first // BLOCK_V, rows, valid, vocab_start, tiles,
        on_products, on_bias, on_cap, SOFTCAP, BLOCK_V,
    )  # fmt: skip


# With m_t, s_t, w_t of tile t: m = max m_t, s = sum s_t exp(m_t - m), w = sum (w_t + s_t (m_t - m)) exp(m_t - m), in
# the order of tiles. lse = m + log s, log-prob = picked - lse, entropy = log s - w / s, largest log-prob = m - lse.
# Grid: ceil(N / BLOCK_M).
# Program: BLOCK_M rows, all tiles.
# Loop: over tiles, BLOCK_T at a time.
# Memory: registers only: the statistics of BLOCK_T tiles [BLOCK_T, BLOCK_M] and the running ones [BLOCK_M], in float32.
# Layout: statistics [3, tiles, N], picked, target [N], dense; the results [N]. Without largest_out they are a shard's
#   partials (max, sum of exp, target's logit) instead of (log-prob, lse, entropy). Ids from 0 to `last` are valid.
@triton.jit(do_not_specialize=["rows", "valid", "vocab_start", "tiles", "last", "ignore_index"])
def _merge_statistics_kernel(
    statistics, picked, target, first_out, second_out, third_out, largest_out, rows, valid, vocab_start, tiles, last,
    ignore_index, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    in_row = row < rows
    plane = tl.cast(tiles, tl.int64) * rows
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total, weighted = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        place = statistics + tile.to(tl.int64)[:, None] * rows + row[None, :]  # [T, M]
        mask = (tile < tiles)[:, None] & in_row[None, :]
        tops = tl.load(place, mask=mask, other=-float("inf"))
        totals = tl.load(place + plane, mask=mask, other=0.0)
        weights = tl.load(place + 2 * plane, mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        fall = tl.where(tops == -float("inf"), 0.0, tl.maximum(shift_of(tops) - shift_of(higher)[None, :], FAR_BELOW))
        fallen = tl.where(top == -float("inf"), 0.0, tl.maximum(shift_of(top) - shift_of(higher), FAR_BELOW))
        share, kept = tl.exp(fall), tl.exp(fallen)
        weighted = (weighted + total * fallen) * kept + tl.sum((weights + totals * fall) * share, 0)
        total = total * kept + tl.sum(totals * share, 0)
        top = higher
    top = tl.where(total == total, top, float("nan"))  # a NaN or +inf logit makes the row NaN
    total = tl.where(top == float("inf"), float("nan"), total)
    ids = tl.load(target + row, mask=in_row, other=0).to(tl.int64)
    local = ids - vocab_start
    here = in_row & (local >= 0) & (local < valid)
    target_logit = tl.load(picked + row, mask=here, other=-float("inf"))
    bad, ignored = (ids < 0) | (ids > last), ids == ignore_index
    if largest_out is not None:
        lse = top + tl.log(total)
        one = tl.where(ignored, 0.0, tl.where(bad, float("nan"), target_logit - lse))
        two = tl.where(ignored, 0.0, lse)
        three = tl.where(ignored, 0.0, tl.log(total) - weighted / total)
        tl.store(largest_out + row, tl.where(ignored, 0.0, top - lse), mask=in_row)
    else:
        one = tl.where(ignored, -float("inf"), top)
        # if all logits are -inf, exp(max - max) still counts 1; an empty shard counts 0
        sumexp = tl.where(top == -float("inf"), tl.where(valid > 0, 1.0, 0.0), total)
        two = tl.where(ignored, 0.0, sumexp)
        three = tl.where(ignored, -float("inf"), tl.where(bad, float("nan"), target_logit))
    tl.store(first_out + row, one, mask=in_row)
    tl.store(second_out + row, two, mask=in_row)
    tl.store(third_out + row, three, mask=in_row)


# d_l = e^f (on_exponential - on_entropy f) + on_target [column is the target] with f = l - shift;
# d_products = d_l dl/dproducts, d_bias = sum over BLOCK_M rows of d_l dl/dbias.
# Grid: ceil(chunk columns / BLOCK_V) * ceil(chunk rows / BLOCK_M); rows vary fastest.
# Program: BLOCK_M rows against BLOCK_V columns of a chunk.
# Loop: none.
# Memory: registers only: products and their gradient [BLOCK_M, BLOCK_V] in float32.
# Layout: products float32 and d_products [rows, chunk columns], row stride `stride`; d_bias [ceil(rows / BLOCK_M),
#   chunk columns], row stride `stride`, or None, added over blocks by the launcher; bias [V] or None; others [rows],
#   on_entropy or None.
@triton.jit(do_not_specialize=["rows", "valid", "vocab_start", "first"])
def _dlogits_kernel(
    products, d_products, d_bias, bias, target, on_target, on_exponential, on_entropy, shift,
    rows, valid, vocab_start, first, stride, on_products, on_bias, on_cap,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(rows, BLOCK_M)
    row_block = tl.program_id(0) % row_blocks
    row = (row_block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    start = (tl.program_id(0) // row_blocks) * BLOCK_V
    here, first_column = start + tl.arange(0, BLOCK_V), tl.cast(first, tl.int64) + start
    in_row, inside = row < rows, tl.arange(0, BLOCK_V) < _left(valid, first_column, BLOCK_V)
    mask = in_row[:, None] & inside[None, :]
    bias = bias if bias is None else bias + first_column
    place = row[:, None] * stride + here[None, :]
    x = tl.load(products + place, mask=mask, other=0.0)
    logits, ratio = _logits(x, bias, inside, on_products, on_bias, on_cap, SOFTCAP)
    local = tl.load(target + row, mask=in_row, other=0).to(tl.int64) - vocab_start
    picks = tl.load(on_target + row, mask=in_row, other=0.0)
    scale = tl.load(on_exponential + row, mask=in_row, other=0.0)
    used = (picks != 0) | (scale != 0)  # the logits of other rows may be inf or NaN
    fallen = logits - tl.load(shift + row, mask=in_row, other=0.0)[:, None]  # [M, V]
    if on_entropy is None:
        grad = tl.exp(fallen) * scale[:, None]
    else:
        slope = tl.load(on_entropy + row, mask=in_row, other=0.0)
        used |= slope != 0
        fallen = tl.maximum(fallen, FAR_BELOW, propagate_nan=tl.PropagateNan.ALL)
        grad = tl.exp(fallen) * (scale[:, None] - slope[:, None] * fallen)
    grad += tl.where(here[None, :] == (local - first)[:, None], picks[:, None], 0.0)
    if SOFTCAP:
        far = tl.exp(-2 * tl.abs(ratio))
        grad *= on_cap * (4 * far / ((1 + far) * (1 + far)))  # 1 - tanh^2 without cancellation
    grad = tl.where(used[:, None] & inside[None, :], grad, 0.0)
    if d_bias is not None:
        tl.store(d_bias + tl.cast(row_block, tl.int64) * stride + here, tl.sum(grad, 0) * on_bias, mask=inside)
    tl.store(d_products + place, grad * on_products, mask=mask)


# lse = m + log sum_s sumexp_s exp(top_s - m) with m = max_s top_s; log-prob = max_s target_logit_s - lse.
# Grid: ceil(N / BLOCK).
# Program: BLOCK rows, all shards.
# Loop: over shards in their order, once for the maxima and once for the sum.
# Memory: registers only, [BLOCK] float32.
# Layout: top, sumexp, target_logit [S, N], adjacent rows, shards *_stride apart; logprob_out, lse_out [N], dense.
@triton.jit(do_not_specialize=["shards", "rows"])
def _combine_logprob_partials_kernel(
    top, sumexp, target_logit, logprob_out, lse_out, shards, rows, top_stride, sumexp_stride, target_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    in_row = row < rows
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    picked = tl.full((BLOCK,), -float("inf"), tl.float32)
    for index in range(shards):
        shard = tl.cast(index, tl.int64)
        tops = tl.load(top + shard * top_stride + row, mask=in_row, other=0.0)
        picks = tl.load(target_logit + shard * target_stride + row, mask=in_row, other=0.0)
        highest = tl.maximum(highest, tops, propagate_nan=tl.PropagateNan.ALL)
        picked = tl.maximum(picked, picks, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    total, counts = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for index in range(shards):
        shard = tl.cast(index, tl.int64)
        tops = tl.load(top + shard * top_stride + row, mask=in_row, other=0.0)
        sums = tl.load(sumexp + shard * sumexp_stride + row, mask=in_row, other=0.0)
        total += sums * tl.exp(tops - shift)
        counts += sums
    lse = shift + tl.log(total)
    empty = (highest == -float("inf")) & (counts == 0)  # an ignored row, or shards without a column
    tl.store(logprob_out + row, tl.where(empty, 0.0, picked - lse), mask=in_row)
    tl.store(lse_out + row, tl.where(empty, 0.0, lse), mask=in_row)


def linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape."""
    return _forward(hidden, weight, target, 0, bias, Options(*options), whole=True)


def linear_logprob_frozen(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The same, then the gradient of lse to hidden [..., D], float32."""
    if hidden.dtype == torch.float64:
        return NotImplemented
    pull = torch.zeros_like(hidden, dtype=torch.float32, memory_format=torch.contiguous_format)
    weight, target, bias, *options = rest
    return *_forward(hidden, weight, target, 0, bias, Options(*options), whole=True, pull=pull), pull


def linear_top_k(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """(logits[..., k], ids[..., k])."""
    return NotImplemented if hidden.dtype == torch.float64 else largest_of_rows(_logits_of_rows, hidden, *rest)


def _logits_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
    _product(x, weight.T, logits)
    to_logits(logits, bias, options)
    return logits


def linear_logprob_partials(
    hidden: Tensor, weight_shard: Tensor, target: Tensor, vocab_start: int, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """(max, sumexp, target logit) of one shard."""
    return _forward(hidden, weight_shard, target, vocab_start, bias, Options(*options), whole=False)


def combine_logprob_partials(top: Tensor, sumexp: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob[N], lse[N]) of partials[S, N]."""
    if top.dtype == torch.float64:
        return NotImplemented
    shards, rows = top.shape
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in (top, sumexp, target_logit)]
    logprob, lse = top.new_empty(rows), top.new_empty(rows)
    launch = tuning.combine_logprob_partials()
    if rows:
        _combine_logprob_partials_kernel[(triton.cdiv(rows, launch["BLOCK"]),)](
            *parts, logprob, lse, shards, rows, *(part.stride(0) for part in parts), **launch
        )
    return logprob, lse


def linear_logprob_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias."""
    return gradient(_project_back, *arguments)


def linear_logprob_partials_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight_shard and bias."""
    return partials_gradient(_project_back, *arguments)


def _rows(hidden: Tensor, rows: int) -> Tensor:
    """[rows, D] with adjacent columns; a copy only if the rows have no common stride."""
    x = hidden.reshape(rows, hidden.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _vectors(*operands: Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time, at offsets of 32 bits inside a tile."""
    vector = 16 // operands[0].dtype.itemsize
    return all(
        x.stride(1) == 1 and x.stride(0) < 1 << 22 and not (x.shape[1] % vector or x.stride(0) % vector)
        and x.data_ptr() % 16 == 0
        for x in operands
    )  # fmt: skip


def _for_gluon(*operands: Tensor) -> bool:
    """Whether gluon.py takes them: 16-bit floats in rows that do not overlap, on a Hopper GPU."""
    half = (torch.bfloat16, torch.float16)
    fit = all(x.dtype in half and x.numel() and x.stride(0) >= x.shape[1] for x in operands)
    return fit and HAS_GLUON and tuning.hopper()


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write a @ b to out, or add it there, accumulated and kept in float32."""
    if a.device.type != "cuda" or a.dtype == torch.float32:  # only CUDA has products with wider results
        out.addmm_(a.float(), b.float(), beta=float(add))
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def _chunks(size: tuning.Launch, rows: int, valid: int) -> Iterator[tuple[slice, slice]]:
    """(columns, rows) of every chunk of logits, all rows of some columns before the next columns."""
    for first in range(0, valid, size["columns"]):
        for row in range(0, rows, size["rows"]):
            yield slice(first, min(first + size["columns"], valid)), slice(row, min(row + size["rows"], rows))


def _forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    bias: Tensor | None,
    options: Options,
    *,
    whole: bool,
    pull: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Statistics of all tiles, then their merge: if `whole` the results of the whole head, else a shard's partials.

    To `pull`, of hidden's shape and zero, the gradient of lse is written.
    """
    if hidden.dtype == torch.float64:
        return NotImplemented
    rows, (_, width), valid = target.numel(), weight.shape, options.rows(weight, vocab_start)
    last = valid - 1 if whole else LARGEST_ID if options.valid_vocab is None else options.valid_vocab - 1  # a valid id
    x, ids = _rows(hidden, rows), target.reshape(-1).contiguous()
    bias = None if bias is None else bias.contiguous()
    results = tuple(x.new_empty(target.shape, dtype=torch.float32) for _ in range(4 if whole else 3))
    if not rows:
        return results
    numbers, capped = options.multipliers(), options.softcap is not None
    picked = x.new_empty(rows, dtype=torch.float32)
    invariant, form = precision.batch_invariant(), "chunked"
    if pull is None and _vectors(x, weight):
        form = "fused" if invariant else tuning.linear_logprob_form(x.dtype, rows, valid, width)
    if form == "gluon" and _for_gluon(x, weight[:valid]):
        from fb_kernels.linear_logprob import gluon  # experimental, and not in every Triton

        statistics = gluon.statistics(x, weight[:valid], bias, ids, picked, vocab_start, options)
        tiles = statistics.shape[1]
    elif form in ("fused", "gluon"):
        launch = tuning.linear_logprob(x.dtype, ROWS if invariant else rows, valid, width, bias is not None)
        vector = 16 // x.dtype.itemsize
        tile = launch["BLOCK_V"] // (2 if launch["BLOCK_M"] * launch["BLOCK_V"] > 1 << 14 else 1)
        blocks = triton.cdiv(valid, launch["BLOCK_V"])
        tiles = blocks * (launch["BLOCK_V"] // tile)
        statistics = x.new_empty(3, tiles, rows, dtype=torch.float32)
        if tiles:
            _linear_logprob_fwd_kernel[(blocks * triton.cdiv(rows, launch["BLOCK_M"]),)](
                x, weight, bias, ids, statistics, picked, rows, valid, vocab_start, tiles,
                width // vector, x.stride(0) // vector, weight.stride(0) // vector, *numbers,
                SOFTCAP=capped, EVEN=width % launch["BLOCK_K"] == 0, VECTOR=vector, TILE=tile, **launch,
            )  # fmt: skip
    else:
        launch, chunk = tuning.linear_logprob_chunk(x.dtype), tuning.linear_logprob_chunk_size(x.dtype, rows)
        assert chunk["rows"] % launch["BLOCK_M"] == chunk["columns"] % launch["BLOCK_V"] == 0
        tiles = triton.cdiv(valid, launch["BLOCK_V"])
        statistics = x.new_empty(3, tiles, rows, dtype=torch.float32)
        logits = x.new_empty(min(chunk["rows"], rows), min(chunk["columns"], valid), dtype=torch.float32)
        if pull is not None:
            top, onto = x.new_full((rows,), -torch.inf, dtype=torch.float32), pull.view(rows, width)
            none, one, d_logits = torch.zeros_like(top), torch.ones_like(top), torch.empty_like(logits, dtype=x.dtype)
        for columns, part in _chunks(chunk, rows, valid):
            count, size = columns.stop - columns.start, part.stop - part.start
            products, grid = logits[:size, :count], triton.cdiv(count, launch["BLOCK_V"])
            _product(x[part], weight[columns].T, products)
            _chunk_statistics_kernel[(grid * triton.cdiv(size, launch["BLOCK_M"]),)](
                products, bias, ids, statistics, picked, rows, part.start, part.stop, valid, vocab_start, tiles,
                columns.start, products.stride(0), *numbers, SOFTCAP=capped, **launch,
            )  # fmt: skip
            if pull is None:
                continue
            first, before = columns.start // launch["BLOCK_V"], top[part].clone()
            top[part] = torch.maximum(before, statistics[0, first : first + grid, part].amax(0))
            shift = top[part].masked_fill(top[part] == -torch.inf, 0.0)
            _dlogits_kernel[(grid * triton.cdiv(size, launch["BLOCK_M"]),)](
                products, d_logits[:size, :count], None, bias, ids[part], none[part], one[part], None, shift,
                size, valid, vocab_start, columns.start, products.stride(0), *numbers, SOFTCAP=capped, **launch,
            )  # fmt: skip
            onto[part] *= (before - shift).exp()[:, None]
            _product(d_logits[:size, :count], weight[columns], onto[part], add=True)
    launch = tuning.linear_logprob_merge()
    _merge_statistics_kernel[(triton.cdiv(rows, launch["BLOCK_M"]),)](
        statistics, picked, ids, *results, *([] if whole else [None]), rows, valid, vocab_start, tiles, last,
        options.ignore_index, **launch,
    )  # fmt: skip
    if pull is not None:
        pull *= (top.view(target.shape) - results[1]).exp()[..., None]
    return results


def _project_back(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    bias: Tensor | None,
    on_target: Tensor,
    on_exponential: Tensor,
    on_entropy: Tensor | None,
    shift: Tensor,
    options: Options,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's, one chunk of logits after another."""
    if hidden.dtype == torch.float64:
        return NotImplemented
    rows, (vocab, width), valid = target.numel(), weight.shape, options.rows(weight, vocab_start)
    x, ids = _rows(hidden, rows), target.reshape(-1).contiguous()
    bias = None if bias is None else bias.contiguous()
    on_target, on_exponential, shift = (part.reshape(-1).contiguous() for part in (on_target, on_exponential, shift))
    need_hidden, need_weight, need_bias = needs
    d_hidden = x.new_zeros((rows if need_hidden else 0, width), dtype=torch.float32)
    d_weight = weight.new_empty(weight.shape if need_weight else (0,))
    d_bias = weight.new_empty(vocab if need_bias else 0)
    d_weight[valid if rows else 0 :].zero_()
    d_bias[valid if rows else 0 :].zero_()
    launch, chunk = tuning.linear_logprob_chunk(x.dtype), tuning.linear_logprob_chunk_size(x.dtype, rows)
    assert chunk["rows"] % launch["BLOCK_M"] == 0
    longest, widest = min(chunk["rows"], rows), min(chunk["columns"], valid)
    logits = x.new_empty(longest, widest, dtype=torch.float32)
    d_logits = torch.empty_like(logits, dtype=x.dtype)
    head = x.new_empty(widest if need_weight else 0, width, dtype=torch.float32)
    sums = x.new_empty(triton.cdiv(rows, launch["BLOCK_M"]), widest, dtype=torch.float32) if need_bias else None
    unused = (on_target == 0) & (on_exponential == 0)
    if on_entropy is not None:
        on_entropy = on_entropy.reshape(-1).contiguous()
        unused &= on_entropy == 0
    used = x.masked_fill(unused[:, None], 0.0) if need_weight else x
    for columns, part in _chunks(chunk, rows, valid):
        count, size = columns.stop - columns.start, part.stop - part.start
        products, d_products = logits[:size, :count], d_logits[:size, :count]
        _product(x[part], weight[columns].T, products)
        _dlogits_kernel[(triton.cdiv(count, launch["BLOCK_V"]) * triton.cdiv(size, launch["BLOCK_M"]),)](
            products, d_products, None if sums is None else sums[part.start // launch["BLOCK_M"] :], bias, ids[part],
            on_target[part], on_exponential[part], None if on_entropy is None else on_entropy[part], shift[part],
            size, valid, vocab_start, columns.start, products.stride(0), *options.multipliers(),
            SOFTCAP=options.softcap is not None, **launch,
        )  # fmt: skip
        if need_hidden:
            _product(d_products, weight[columns], d_hidden[part], add=True)
        if need_weight:
            _product(d_products.T, used[part], head[:count], add=part.start > 0)
        if part.stop == rows:
            if need_weight:
                d_weight[columns] = head[:count]
            if sums is not None:
                d_bias[columns] = sums[:, :count].sum(0)
    d_hidden = d_hidden.view(hidden.shape) if need_hidden else d_hidden.view(0)
    return d_hidden.to(hidden.dtype), d_weight, d_bias
