"""Triton kernels of `branch_attention`: tiles of a group's rows, and for branches of one row a split over the prefix.

out = sum_j p_j v_j / sum_j p_j with p_j = exp(s_j - max s), lse = log sum_j exp(s_j), by the online softmax (Milakov &
Gimelshein 2018; FlashAttention, Dao et al. 2022). A packed row is one query head of a row: the query heads of a key
head are neighbours. A tile holds packed rows of one group.

Keys are read in blocks that begin at the slice's first key and at the first row of the row's own branch, never at a
place that depends on other rows, and a masked score leaves a row's state unchanged. So a row's bits depend on the keys
that it sees, on the kernel (the split if no branch is longer than a row), on `max_prefix_len` if it is too small, and
on alignment, but on no other row. In batch-invariant mode it does not matter either which keys are the slice's: all
rows take the tile kernel, whose blocks go on from the slice to the own keys. gluon.py has a tile kernel for Hopper
only; `tuning.branch_attention_form` chooses.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import precision, tuning
from fb_kernels.branch_attention import triton_layout as branch_layout
from fb_kernels.branch_attention.arguments import BranchAttention
from fb_kernels.branch_attention.triton_backward import branch_attention_backward as branch_attention_backward
from fb_kernels.branch_attention.triton_layout import prefix_slice, read_tile
from fb_kernels.triton import HAS_GLUON
from fb_kernels.triton.functions import tanh
from fb_kernels.triton.rows import are_aligned

SPLITS = 64  # most pieces of a prefix; a longer prefix has longer pieces
WORKSPACE = 1 << 28  # most float32 elements of partial results; a call that needs more takes the tile kernel
LOG2_E = math.log2(math.e)
LENGTHS = ["rows", "capacity", "pages", "window", "table_row"]


@triton.jit
def _capped(x, EXACT: tl.constexpr):
    """tanh(x / (2 log2(e))): with an absolute error of 1e-7 or, if EXACT, to 2 ulps."""
    if EXACT:
        return tanh(x * 0.34657359027997264)
    return 1 - 2 / (1 + tl.exp2(x))


@triton.jit
def _attend(
    state, q,  # (acc[M, E], top[M], total[M]), [M, E]
    keys, values, table,  # (pointer, row, page) twice, (table, column, start, page size)
    first, last,  # [M]: keys that each row sees
    low, high, size,  # key blocks, end of the keys
    multiplier, inner,  # of scores, in the soft-cap
    MASKED: tl.constexpr, BY_ROW: tl.constexpr, WINDOW: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr,
    SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, JOINT: tl.constexpr = False,
):  # fmt: skip
    """The state (acc[M, E], top[M], total[M]) after the key blocks low, low + BLOCK_N, ... below high.

    acc = sum p v, total = sum p, p = 2^(score multiplier - top), top = max(score multiplier), in units of log 2.
    Without MASKED a row sees all these keys, with MASKED those below `size`, with BY_ROW those from first to last[M].
    With JOINT (and both) keys from the slice's length on are a branch's own: of `keys` and `values` pointer and row
    follow, so that a key's number counts from the slice's first, and of `table` the length.
    """
    acc, top, total = state
    bound = size
    if JOINT:
        keys, key_row, key_page, own_keys, own_key_row = keys
        values, value_row, value_page, own_values, own_value_row = values
        table, table_column, start, page_size, bound = table
    else:
        keys, key_row, key_page = keys
        values, value_row, value_page = values
        table, table_column, start, page_size = table
    place, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E)  # [N], [E]
    stages: tl.constexpr = 1 if MASKED and BLOCK_N >= 64 else None  # masked blocks are few and short of registers
    all_finite = 1
    for n in tl.range(low, high, BLOCK_N, num_stages=stages):
        key = n + place  # [N]
        if PAGED:
            at = start + key  # [N], in the group's concatenated pages
            entry = table + tl.cast(at // page_size, tl.int64) * table_column
            page = (tl.load(entry, mask=key < bound, other=0) if MASKED else tl.load(entry)).to(tl.int64)
            slot = (at % page_size).to(tl.int64)
            key_at = (keys + page * key_page + slot * key_row)[:, None] + column[None, :]  # [N, E]
            value_at = (values + page * value_page + slot * value_row)[:, None] + column[None, :]
        else:
            # a 64-bit scalar and 32-bit offsets in the block: fewer registers than 64-bit offsets
            key_at = keys + tl.cast(n, tl.int64) * key_row + ((place * key_row)[:, None] + column[None, :])
            value_at = values + tl.cast(n, tl.int64) * value_row + ((place * value_row)[:, None] + column[None, :])
        if JOINT:
            mine, own = (key >= bound)[:, None], key.to(tl.int64)[:, None]
            key_at = tl.where(mine, own_keys + own * own_key_row + column[None, :], key_at)
            value_at = tl.where(mine, own_values + own * own_value_row + column[None, :], value_at)
        if ALIGNED:  # rows begin at multiples of 16 bytes
            key_at = tl.max_contiguous(tl.multiple_of(key_at, (1, 16)), (1, 8))
            value_at = tl.max_contiguous(tl.multiple_of(value_at, (1, 16)), (1, 8))
        if MASKED:
            inside = (key < size)[:, None] & (column < HEAD_DIM)[None, :]
            k, v = tl.load(key_at, mask=inside, other=0.0), tl.load(value_at, mask=inside, other=0.0)
        elif HEAD_DIM < BLOCK_E:
            inside = (column < HEAD_DIM)[None, :]
            k, v = tl.load(key_at, mask=inside, other=0.0), tl.load(value_at, mask=inside, other=0.0)
        else:
            k, v = tl.load(key_at), tl.load(value_at)  # [N, E]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        if SOFTCAP:
            scores = _capped(scores * inner, q.dtype == tl.float32)
        if BY_ROW:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])  # [M, N]
            scores = tl.where(seen, scores, float("-inf"))
        elif MASKED:
            scores = tl.where((key < size)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * multiplier)  # [M]
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key so far: -inf - -inf would be NaN
        p = tl.exp2(scores * multiplier - shift[:, None])  # [M, N]
        decay = tl.exp2(top - shift)  # [M]
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        top = new_top
        if BY_ROW:  # 0 times inf or NaN is NaN: an unseen value must not reach the sum
            finite = tl.abs(v.to(tl.float32)) < float("inf")  # [N, E]
            acc = tl.dot(p.to(v.dtype), tl.where(finite, v, tl.zeros_like(v)), acc, input_precision="ieee")
            all_finite = tl.minimum(all_finite, tl.min(tl.min(finite.to(tl.int32), 1), 0))
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            if WINDOW and not MASKED:  # uses the product here: if it ran on into the next loop, each there would wait
                acc = tl.where((total >= 0)[:, None], acc, total[:, None])
    if BY_ROW and all_finite == 0:  # add what rows do see that is not finite; in the loop above, products would wait
        for i in range(low, tl.minimum(high, size)):
            again = values
            if PAGED:
                entry = table + tl.cast((start + i) // page_size, tl.int64) * table_column
                again += tl.load(entry, mask=i < bound, other=0).to(tl.int64) * value_page
                again += tl.cast((start + i) % page_size, tl.int64) * value_row
            else:
                again += tl.cast(i, tl.int64) * value_row
            if JOINT:
                again = tl.where(i < bound, again, own_values + tl.cast(i, tl.int64) * own_value_row)
            value = tl.load(again + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
            strange = ((i >= first) & (i <= last))[:, None] & ~(tl.abs(value) < float("inf"))[None, :]  # [M, E]
            acc = tl.where(strange, acc + value[None, :], acc)
    return acc, top, total


@triton.jit
def _attend_whole_blocks(
    state, q,
    keys, values, table,  # as in _attend
    first, last,
    lowest, highest, begin, whole, size,  # bounds of the keys that some rows see, and that all rows see
    multiplier, inner,
    WINDOW: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The state after the keys from `begin`, the start of a block, to the end of the whole blocks; and that end.

    No row sees a key below `lowest`; every row sees the keys from `highest` below `whole`, whose blocks need no mask.
    """
    if WINDOW:
        begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
        full = tl.maximum(whole // BLOCK_N * BLOCK_N, begin)
        middle = tl.minimum(tl.maximum(tl.cdiv(highest, BLOCK_N) * BLOCK_N, begin), full)
        state = _attend(
            state, q, keys, values, table, first, last, begin, tl.minimum(middle, size), size, multiplier, inner,
            True, True, WINDOW, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
        )  # fmt: skip
    else:
        full = tl.maximum(whole // BLOCK_N * BLOCK_N, begin)
        middle = begin
    state = _attend(
        state, q, keys, values, table, first, last, middle, full, size, multiplier, inner,
        False, False, WINDOW, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
    )  # fmt: skip
    return state, full


@triton.jit
def _row_starts(branches, row, first_branch, last_branch):
    """First row[M] of each row's branch."""
    start = row
    for branch in range(first_branch, last_branch + 1):
        begin = tl.load(branches + branch)
        start = tl.where(row >= begin, begin, start)
    return start


@triton.jit
def _prefix_stretch(
    state, query,
    prefix_k, prefix_v, table,  # as in _attend
    row, valid, row_start,  # [M]
    length, begin, size,
    window,
    multiplier, inner,
    WINDOW: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The state after the keys from `begin` below `size` of a slice of `length` keys."""
    first = length + row - row_start + 1 - window  # [M]: the first key in each row's window
    lowest = tl.min(tl.where(valid, first, length), 0)
    highest = tl.max(tl.where(valid, first, -window), 0)
    last = tl.zeros_like(row) + (length - 1)
    state, full = _attend_whole_blocks(
        state, query, prefix_k, prefix_v, table, first, last, lowest, highest, begin, size, size, multiplier, inner,
        WINDOW, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
    )  # fmt: skip
    return _attend(
        state, query, prefix_k, prefix_v, table, first, last, full, size, size, multiplier, inner,
        True, WINDOW, WINDOW, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
    )  # fmt: skip


# Grid: tiles * Hkv; the key heads of a tile are neighbours.
# Program: BLOCK_M packed rows of one group, one key head.
# Loop: over the keys of the group's slice, BLOCK_N at a time; then over the own branches that the tile meets.
# Memory: keys and values [BLOCK_N, BLOCK_E] come in pipelined stages (num_stages of the launch); registers hold q and
#   acc [BLOCK_M, BLOCK_E] and scores [BLOCK_M, BLOCK_N], the last two in float32.
# Layout: q [T, Hq, E], k, v [T, Hkv, E], prefix_k, prefix_v [pages, page, Hkv, E] (one page if not PAGED), each with
#   the strides *_page, *_row, *_head, 1; block_table [G, n], strides table_row, table_column; tiles and branches of
#   `triton_layout.Tables`; prefix_start, prefix_len [G]; out [T, Hq, E], lse [Hq, T], dense.
@triton.jit(do_not_specialize=LENGTHS)
def _branch_attention_tile_kernel(
    q, k, v, prefix_k, prefix_v, out, lse,  # tensors
    tiles, branches, prefix_start, prefix_len, block_table,  # the layout
    rows, kv_heads, capacity, page_size, pages,  # sizes
    window, multiplier, inner,  # numbers
    q_row, q_head, k_row, k_head, v_row, v_head,  # strides
    prefix_k_page, prefix_k_row, prefix_k_head, prefix_v_page, prefix_v_row, prefix_v_head,
    table_row, table_column,
    OWN: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr,
    OFFSETS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    JOINT: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    column = tl.arange(0, BLOCK_E)
    group, place, group_row, group_end, first_branch, last_branch = read_tile(tiles, tile, COLUMNS)
    if group == -2:  # an invalid layout: NaN in the BLOCK_M packed rows that the tile would cover
        flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        flat_row, flat_head = (flat // REPEAT).to(tl.int64), kv_head.to(tl.int64) * REPEAT + flat % REPEAT
        flat_at = out + ((flat_row * (kv_heads * REPEAT) + flat_head) * HEAD_DIM)[:, None] + column[None, :]
        nothing = tl.full([BLOCK_M], float("nan"), tl.float32)
        exists = flat_row < rows
        spread = nothing[:, None] + tl.zeros([1, BLOCK_E], tl.float32)
        tl.store(flat_at, spread, mask=exists[:, None] & (column < HEAD_DIM)[None, :])
        tl.store(lse + flat_head * rows + flat_row, nothing, mask=exists)
        return
    if group < 0:
        return
    start, length, fits = prefix_slice(
        prefix_start, prefix_len, block_table, group, capacity, page_size, pages, table_row, table_column,
        PAGED, OFFSETS,
    )  # fmt: skip
    packed = place * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    row, head = group_row + packed // REPEAT, kv_head.to(tl.int64) * REPEAT + packed % REPEAT  # [M]
    valid = row < group_end
    first_row = group_row + place * BLOCK_M // REPEAT
    last_row = tl.minimum(group_row + (place * BLOCK_M + BLOCK_M - 1) // REPEAT, group_end - 1)
    inside = valid[:, None] & (column < HEAD_DIM)[None, :]  # [M, E]
    q_at = (q + row.to(tl.int64) * q_row + head * q_head)[:, None] + column[None, :]
    if ALIGNED:
        q_at = tl.max_contiguous(tl.multiple_of(q_at, (1, 16)), (1, 8))
    query = tl.load(q_at, mask=inside, other=0.0)  # [M, E]

    state = (
        tl.zeros([BLOCK_M, BLOCK_E], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    row_start = _row_starts(branches, row, first_branch, last_branch) if WINDOW else row
    prefix_k += kv_head.to(tl.int64) * prefix_k_head
    prefix_v += kv_head.to(tl.int64) * prefix_v_head
    if PAGED:
        block_table += tl.cast(group, tl.int64) * table_row
    else:
        prefix_k += start.to(tl.int64) * prefix_k_row
        prefix_v += start.to(tl.int64) * prefix_v_row
    before, shared, full = 0, length, 0  # first own key, end of the slice's blocks, begin of own ones
    if JOINT:  # keys of a branch are counted from the slice's first
        before, shared, full = length, length // BLOCK_N * BLOCK_N, tl.cdiv(length, BLOCK_N) * BLOCK_N
    state = _prefix_stretch(
        state, query, (prefix_k, prefix_k_row, prefix_k_page),
        (prefix_v, prefix_v_row, prefix_v_page), (block_table, table_column, start, page_size),
        row, valid, row_start, length, 0, shared, window, multiplier, inner,
        WINDOW, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
    )  # fmt: skip
    if OWN:
        k += kv_head.to(tl.int64) * k_head
        v += kv_head.to(tl.int64) * v_head
        if JOINT:  # the block with keys of the slice and of a branch
            for branch in range(first_branch, last_branch + 1):
                begin, end = tl.load(branches + branch), tl.load(branches + branch + 1)
                last = tl.where((row >= begin) & (row < end), before + row - begin, -1)
                size = before + tl.minimum(end, last_row + 1) - begin
                own_k, own_v = k + (begin - before).to(tl.int64) * k_row, v + (begin - before).to(tl.int64) * v_row
                state = _attend(
                    state, query, (prefix_k, prefix_k_row, prefix_k_page, own_k, k_row),
                    (prefix_v, prefix_v_row, prefix_v_page, own_v, v_row),
                    (block_table, table_column, start, page_size, length),
                    last + 1 - window, last, shared, full, size, multiplier, inner,
                    True, True, WINDOW, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N, True,
                )  # fmt: skip
        begin = tl.load(branches + first_branch) - before
        alone = first_branch == last_branch  # only then can all rows see the same keys
        size, after = tl.where(alone, last_row + 1 - begin, 0), full
        state, full = _attend_whole_blocks(
            state, query, (k + begin.to(tl.int64) * k_row, k_row, 0), (v + begin.to(tl.int64) * v_row, v_row, 0),
            (block_table, 0, 0, 1), row - begin + 1 - window, row - begin, first_row - begin + 1 - window,
            size - window, after, tl.where(alone, first_row + 1 - begin, 0), size, multiplier, inner,
            WINDOW, False, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
        )  # fmt: skip
        for branch in range(first_branch, last_branch + 1):
            begin, end = tl.load(branches + branch) - before, tl.load(branches + branch + 1)
            last = tl.where((row >= begin + before) & (row < end), row - begin, -1)
            size = tl.minimum(end, last_row + 1) - begin
            state = _attend(
                state, query, (k + begin.to(tl.int64) * k_row, k_row, 0), (v + begin.to(tl.int64) * v_row, v_row, 0),
                (block_table, 0, 0, 1), last + 1 - window, last, full, size, size, multiplier, inner,
                True, True, WINDOW, False, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
            )  # fmt: skip
            full = after  # `_attend_whole_blocks` has done keys of a single branch only

    acc, top, total = state
    total = tl.where(fits, total, float("nan"))
    empty = total == 0
    out_at = out + ((row.to(tl.int64) * (kv_heads * REPEAT) + head) * HEAD_DIM)[:, None] + column[None, :]
    if ALIGNED:
        out_at = tl.max_contiguous(tl.multiple_of(out_at, (1, 16)), (1, 8))
    tl.store(out_at, tl.where(empty[:, None], 0.0, acc / total[:, None]), mask=inside)
    score = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + head * rows + row, score, mask=valid)


# The state of packed rows after one piece of the prefix; own branches come later, and so does the division:
# partial_out = sum p v, partial_top = max of scores in units of log 2, partial_total = sum p.
# Grid: tiles * splits * Hkv; the key heads of a piece are neighbours.
# Program: BLOCK_M packed rows of one group, one key head, one piece; pieces are whole CHUNKs of keys.
# Loop: over the keys of the piece, BLOCK_N at a time.
# Memory: keys and values [BLOCK_N, BLOCK_E] come in pipelined stages (num_stages of the launch); registers hold q and
#   acc [BLOCK_M, BLOCK_E] and scores [BLOCK_M, BLOCK_N], the last two in float32.
# Layout: q, prefix_k, prefix_v and the layout's tables have the shapes and strides of the tile kernel's;
#   partial_out [splits, T, Hq, E], partial_top, partial_total [splits, T, Hq], float32, dense.
@triton.jit(do_not_specialize=[*LENGTHS, "splits"])
def _branch_attention_split_kernel(
    q, prefix_k, prefix_v, partial_out, partial_top, partial_total,  # tensors
    tiles, branches, prefix_start, prefix_len, block_table,  # the layout
    rows, kv_heads, splits, capacity, page_size, pages,  # sizes
    window, multiplier, inner,  # numbers
    q_row, q_head,  # strides
    prefix_k_page, prefix_k_row, prefix_k_head, prefix_v_page, prefix_v_row, prefix_v_head,
    table_row, table_column,
    PAGED: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, OFFSETS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads % splits
    tile = tl.program_id(0) // kv_heads // splits
    group, place, group_row, group_end, first_branch, last_branch = read_tile(tiles, tile, COLUMNS)
    if group < 0:
        return
    start, length, _ = prefix_slice(
        prefix_start, prefix_len, block_table, group, capacity, page_size, pages, table_row, table_column,
        PAGED, OFFSETS,
    )  # fmt: skip
    piece = tl.cdiv(tl.cdiv(length, CHUNK), splits) * CHUNK
    if split * piece >= length:  # a short slice has fewer pieces; the combine kernel reads no others
        return
    packed = place * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    row, head = group_row + packed // REPEAT, kv_head.to(tl.int64) * REPEAT + packed % REPEAT  # [M]
    valid = row < group_end
    row_start = row
    if WINDOW:
        row_start = _row_starts(branches, row, first_branch, last_branch)
    column = tl.arange(0, BLOCK_E)
    inside = valid[:, None] & (column < HEAD_DIM)[None, :]  # [M, E]
    q_at = (q + row.to(tl.int64) * q_row + head * q_head)[:, None] + column[None, :]
    if ALIGNED:
        q_at = tl.max_contiguous(tl.multiple_of(q_at, (1, 16)), (1, 8))
    query = tl.load(q_at, mask=inside, other=0.0)  # [M, E]
    state = (
        tl.zeros([BLOCK_M, BLOCK_E], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    prefix_k += kv_head.to(tl.int64) * prefix_k_head
    prefix_v += kv_head.to(tl.int64) * prefix_v_head
    if PAGED:
        block_table += tl.cast(group, tl.int64) * table_row
    else:
        prefix_k += start.to(tl.int64) * prefix_k_row
        prefix_v += start.to(tl.int64) * prefix_v_row
    acc, top, total = _prefix_stretch(
        state, query, (prefix_k, prefix_k_row, prefix_k_page),
        (prefix_v, prefix_v_row, prefix_v_page), (block_table, table_column, start, page_size),
        row, valid, row_start, length, split * piece, tl.minimum(split * piece + piece, length), window, multiplier,
        inner, WINDOW, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
    )  # fmt: skip
    at = (split.to(tl.int64) * rows + row) * (kv_heads * REPEAT) + head
    tl.store(partial_out + at[:, None] * HEAD_DIM + column[None, :], acc, mask=inside)
    tl.store(partial_top + at, top, mask=valid)
    tl.store(partial_total + at, total, mask=valid)


# Merges the pieces of the prefix in their order, then adds the row's own keys: the split's state (top, total, out) is
# scaled by 2^(top_i - max top) and added.
# Grid: T * Hq; the heads of a row are neighbours.
# Program: one row, one query head.
# Loop: over pieces, BLOCK_S at a time; then over the own keys that the row sees, one at a time.
# Memory: registers only: acc [BLOCK_E] and the outs of BLOCK_S pieces [BLOCK_S, BLOCK_E] in float32.
# Layout: partial_out [splits, T, Hq, E], partial_top, partial_total [splits, T, Hq], dense; q [T, Hq, E] and k, v
#   [T, Hkv, E] by their strides; each_row [T, 2] of `triton_layout.Tables`; out [T, Hq, E], lse [Hq, T], dense.
@triton.jit(do_not_specialize=[*LENGTHS, "splits"])
def _branch_attention_combine_kernel(
    q, k, v, partial_out, partial_top, partial_total, out, lse,  # tensors
    each_row, prefix_start, prefix_len, block_table,  # the layout
    rows, heads, splits, capacity, page_size, pages,  # sizes
    window, multiplier, inner,  # numbers
    q_row, q_head, k_row, k_head, v_row, v_head,  # strides
    table_row, table_column,
    OWN: tl.constexpr, PAGED: tl.constexpr, SOFTCAP: tl.constexpr, REPEAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, OFFSETS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    column = tl.arange(0, BLOCK_E)
    inside = column < HEAD_DIM
    acc = tl.zeros([BLOCK_E], tl.float32)  # [E]
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], float("nan"), tl.float32)  # of a row in an invalid layout
    each_row += 2 * row.to(tl.int64)
    group, begin = tl.load(each_row), tl.load(each_row + 1)
    if group >= 0:
        _, length, fits = prefix_slice(
            prefix_start, prefix_len, block_table, group, capacity, page_size, pages, table_row, table_column,
            PAGED, OFFSETS,
        )  # fmt: skip
        total = tl.where(fits, 0.0, float("nan"))
        pieces = tl.cdiv(length, tl.maximum(tl.cdiv(tl.cdiv(length, CHUNK), splits), 1) * CHUNK)
        for first in range(0, pieces, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)  # [S]
            used = split < pieces
            at = (split.to(tl.int64) * rows + row) * heads + head
            tops = tl.load(partial_top + at, mask=used, other=float("-inf"))
            totals = tl.load(partial_total + at, mask=used, other=0.0)
            outs = partial_out + at[:, None] * HEAD_DIM + column[None, :]
            outs = tl.load(outs, mask=used[:, None] & inside[None, :], other=0.0)  # [S, E]
            new_top = tl.maximum(top, tl.max(tops, 0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights, decay = tl.exp2(tops - shift), tl.exp2(top - shift)  # [S], []
            acc = acc * decay + tl.sum(outs * weights[:, None], 0)
            total = total * decay + tl.sum(totals * weights, 0)
            top = new_top
        if OWN:
            q_at = q + row.to(tl.int64) * q_row + head * q_head + column
            query = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)  # [E]
            for key in range(tl.maximum(begin, row + 1 - window), row + 1):
                at = tl.cast(key, tl.int64)
                k_at = k + at * k_row + head // REPEAT * k_head + column
                v_at = v + at * v_row + head // REPEAT * v_head + column
                score = tl.sum(query * tl.load(k_at, mask=inside, other=0.0).to(tl.float32), 0)
                if SOFTCAP:
                    score = _capped(score * inner, True)
                new_top = tl.maximum(top, score * multiplier)
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                p, decay = tl.exp2(score * multiplier - shift), tl.exp2(top - shift)
                acc = acc * decay + p * tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
                total = total * decay + p
                top = new_top
    empty = total == 0
    out_at = out + (row.to(tl.int64) * heads + head) * HEAD_DIM + column
    tl.store(out_at, tl.where(empty, 0.0, acc / total), mask=inside)
    score = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + head * rows + row, score)


def _for_gluon(repeat: int, q: Tensor, *others: Tensor | None) -> bool:
    """Whether gluon.py takes them: 16-bit floats, heads that do not overlap and that fill a tile, on a Hopper GPU."""
    width, half = q.shape[2], (torch.bfloat16, torch.float16)
    apart = all(x is None or min(x.stride()[:2]) >= width for x in (q, *others))
    fit = apart and q.dtype in half and 16 <= width <= 128 and width & (width - 1) == 0
    return fit and 64 % repeat == 0 and HAS_GLUON and tuning.hopper()


def branch_attention(call: BranchAttention) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]); branches of one row allocate the partial results of their splits."""
    q, k, v, prefix_k, prefix_v = call[:5]
    cu_branch, cu_group, prefix_start, prefix_len, block_table = indices = call.indices
    _, max_prefix_len, window, scale, softcap = call[10:]
    (rows, heads, width), kv_heads = q.shape, prefix_k.shape[-2]
    branches, groups = cu_branch.shape[0] - 1, cu_group.shape[0] - 1
    page_size, capacity = prefix_k.shape[0 if block_table is None else 1], call.capacity
    if q.dtype == torch.float64 or width > 256 or max(rows * heads, rows + capacity, branches, groups) >= 1 << 30:
        return NotImplemented
    out, lse = q.new_empty(q.shape), q.new_empty((heads, rows), dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    repeat, block_e = heads // kv_heads, max(16, tuning.next_power_of_2(width))
    # a window is one even if it covers all keys, so that a row's bits do not depend on that; with JOINT all have one:
    # without its masks each product would wait for the one before
    invariant = precision.batch_invariant()
    windowed, everything = invariant or window is not None, rows + capacity + 1
    window = everything if window is None else min(window, everything)
    table = cu_branch[None] if block_table is None else block_table
    prefix_k, prefix_v = (x[None] if block_table is None else x for x in (prefix_k, prefix_v))
    tensors = (q, q if k is None else k, q if v is None else v, prefix_k, prefix_v)
    q, own_k, own_v, prefix_k, prefix_v = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    if max(x.stride(-3) for x in (own_k, own_v, prefix_k, prefix_v)) >= 1 << 23:  # offsets in a block are 32-bit
        return NotImplemented
    slices = (prefix_start.contiguous(), prefix_len.contiguous(), table)
    sizes = (capacity, max(page_size, 1), prefix_k.shape[0])
    if softcap is None:
        numbers = (window, scale * LOG2_E, 0.0)
    else:
        numbers = (window, softcap * LOG2_E, scale / softcap * 2 * LOG2_E)
    constants = {
        "PAGED": block_table is not None,
        "SOFTCAP": softcap is not None,
        "REPEAT": repeat,
        "HEAD_DIM": width,
        "BLOCK_E": block_e,
        "OFFSETS": branch_layout.OFFSETS,
    }
    aligned = are_aligned(q, own_k, own_v, prefix_k, prefix_v, out)
    form = ("" if softcap is None else "capped") + ("window" if windowed else "")
    form = (form or "plain") if aligned else "unaligned"
    own = (*own_k.stride()[:2], *own_v.stride()[:2])
    prefix = (*prefix_k.stride()[:3], *prefix_v.stride()[:3])

    launch = tuning.branch_attention_split(q.dtype, width, repeat, form)
    bound = capacity if max_prefix_len is None else min(capacity, max_prefix_len)
    assert launch["CHUNK"] % launch["BLOCK_N"] == 0
    splits = min(max(1, triton.cdiv(bound, launch["CHUNK"])), SPLITS)
    short = rows == branches if call.max_branch_len is None else call.max_branch_len <= 1
    if short and not invariant and splits * rows * heads * width <= WORKSPACE:
        partial_out = q.new_empty((splits, rows, heads, width), dtype=torch.float32)
        partial_top, partial_total = q.new_empty((2, splits, rows, heads), dtype=torch.float32)
        partial = (partial_out, partial_top, partial_total)
        tiles, starts, each_row = branch_layout.tables(indices, rows, repeat, launch["BLOCK_M"], each_row=True)
        if capacity:
            _branch_attention_split_kernel[(len(tiles) * splits * kv_heads,)](
                q, prefix_k, prefix_v, *partial, tiles, starts, *slices, rows, kv_heads, splits, *sizes, *numbers,
                *q.stride()[:2], *prefix, *table.stride(), COLUMNS=branch_layout.COLUMNS, WINDOW=windowed,
                ALIGNED=aligned, **constants, **launch,
            )  # fmt: skip
        _branch_attention_combine_kernel[(rows * heads,)](
            q, own_k, own_v, *partial, out, lse, each_row, *slices, rows, heads, splits, *sizes, *numbers,
            *q.stride()[:2], *own, *table.stride(), OWN=k is not None, **constants, CHUNK=launch["CHUNK"],
            BLOCK_S=8, num_warps=4, maxnreg=128,
        )  # fmt: skip
        return out, lse
    flat = form == "plain" and block_table is None and (capacity or k is not None)
    if flat and tuning.branch_attention_form(q.dtype, width, repeat) == "gluon":
        tensors = (q, *((None, None) if k is None else (own_k, own_v)), prefix_k[0], prefix_v[0])
        if _for_gluon(repeat, *tensors):
            from fb_kernels.branch_attention import gluon  # experimental, and not in every Triton

            gluon.attend(*tensors, out, lse, indices, numbers[1])
            return out, lse
    launch = tuning.branch_attention(q.dtype, width, repeat, form)
    tiles, starts, _ = branch_layout.tables(indices, rows, repeat, launch["BLOCK_M"])
    _branch_attention_tile_kernel[(len(tiles) * kv_heads,)](
        q, own_k, own_v, prefix_k, prefix_v, out, lse, tiles, starts, *slices, rows, kv_heads, *sizes, *numbers,
        *q.stride()[:2], *own, *prefix, *table.stride(), COLUMNS=branch_layout.COLUMNS, OWN=k is not None,
        WINDOW=windowed, ALIGNED=aligned, JOINT=invariant and k is not None, **constants, **launch,
    )  # fmt: skip
    return out, lse
