"""Triton kernels of `branch_attention`'s backward: dq over the prefix and the own branch, dk and dv of the branches.

p = exp(s - lse), ds = p (dout . v - delta), delta = dout . out - dlse; dq = scale ds k, dk = scale ds^T q, dv = p^T
dout (FlashAttention, Dao et al. 2022, appendix B).

One launch holds two independent kinds of programs. Query programs own a tile of packed rows (rows times the query heads
of one key head) and read a piece of the prefix. Key programs own a tile of the branches' keys and read the rows that
see them. If dq has several pieces, a second launch adds them in order. If the prefix needs gradients, one more launch
writes lse and delta of all rows, and another has programs that own a tile of the prefix and read, group after group,
the rows that see it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning
from fb_kernels.branch_attention import triton_layout as branch_layout
from fb_kernels.branch_attention.arguments import BranchAttentionBackward
from fb_kernels.branch_attention.triton_layout import prefix_slice, read_tile
from fb_kernels.triton.functions import tanh
from fb_kernels.triton.rows import are_aligned

PROGRAMS = 128  # the prefix is cut into pieces up to so many query programs, about one a multiprocessor
PIECE = 128  # least keys of a piece
LOG2_E = math.log2(math.e)


@triton.jit
def _finite(x):
    """x[..] with 0 in place of inf and NaN: 0 times those is NaN, and an unseen value must not reach a sum."""
    wide = x.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(x.dtype)


@triton.jit
def _weights(scores, products, lse, delta, multiplier, inner, SOFTCAP: tl.constexpr):
    """(p, ds without the scale) from q . k, dout . v, lse in units of log 2 and delta."""
    slope = 1.0  # of the soft-cap: 1 - tanh^2
    if SOFTCAP:
        scores = tanh(scores * inner)
        slope = 1 - scores * scores
    p = tl.exp2(scores * multiplier - lse)
    return p, p * (products - delta) * slope


@triton.jit
def _places(base, offset, ALIGNED: tl.constexpr, BLOCK_E: tl.constexpr):
    """Addresses[M, E] of rows at offsets[M] from the base; each is at a multiple of 16 bytes if ALIGNED."""
    at = base + (offset[:, None] + tl.arange(0, BLOCK_E)[None, :])
    if ALIGNED:
        at = tl.multiple_of(at, (1, 16))
    return at


@triton.jit
def _load_rows(
    q, grad, out, lse, row, head, valid, ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr
):
    """(q[M, E], dout[M, E], lse[M], delta[M]) of packed rows; lse in units of log 2, NaN where dout is not finite."""
    q, q_row, q_head = q
    row = row.to(tl.int64)
    inside = valid[:, None] & (tl.arange(0, BLOCK_E) < HEAD_DIM)[None, :]
    query = tl.load(_places(q, row * q_row + head * q_head, ALIGNED, BLOCK_E), mask=inside, other=0.0)
    upstream, total, delta = _load_upstream(grad, out, lse, row, head, valid, ALIGNED, HEAD_DIM, BLOCK_E)
    return query, upstream, total, delta


@triton.jit
def _load_upstream(
    grad, out, lse, row, head, valid, ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr
):
    """(dout[M, E], lse[M], delta[M]) of packed rows; lse in units of log 2, NaN where dout is not finite."""
    grad, grad_row, grad_head = grad
    out, out_row, out_head = out
    lse, grad_lse, lse_head, lse_row = lse
    inside = valid[:, None] & (tl.arange(0, BLOCK_E) < HEAD_DIM)[None, :]
    grad_at = _places(grad, row * grad_row + head * grad_head, ALIGNED, BLOCK_E)
    out_at = _places(out, row * out_row + head * out_head, ALIGNED, BLOCK_E)
    upstream = tl.load(grad_at, mask=inside, other=0.0)
    wide = upstream.to(tl.float32)
    delta = tl.sum(wide * tl.load(out_at, mask=inside, other=0.0).to(tl.float32), 1)
    total = tl.load(lse + row * lse_row + head * lse_head, mask=valid, other=0.0)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + row * lse_row + head * lse_head, mask=valid, other=0.0)
    total = tl.where(total == float("-inf"), 0.0, total * 1.4426950408889634)
    bad = tl.sum((~(tl.abs(wide) < float("inf"))).to(tl.int32), 1) > 0
    return upstream, tl.where(bad, float("nan"), total), delta


@triton.jit
def _add_keys(
    acc, state,  # dq[M, E], (q[M, E], dout[M, E], lse[M], delta[M])
    keys, values, table,  # (pointer, page, row) twice, (table, column, start, page size)
    first, last,  # [M]: keys that each row sees
    low, high, gap, skip, size,  # key blocks, end of the keys
    multiplier, inner,  # of scores, in the soft-cap
    MASKED: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc[M, E] + ds . k over the key blocks from `low` below `high`; blocks from `gap` on lie `skip` keys further.

    Without MASKED every row sees all these keys, and they are finite; with MASKED a row sees those from first[M] to
    last[M], all below `size`.
    """
    query, upstream, lse, delta = state
    keys, key_page, key_row = keys
    values, value_page, value_row = values
    table, table_column, start, page_size = table
    column = tl.arange(0, BLOCK_E)
    for n in range(low, high, BLOCK_N):
        if MASKED:
            n += tl.where(n >= gap, skip, 0)
        key = n + tl.arange(0, BLOCK_N)  # [N]
        if PAGED:
            place = start + key
            entry = table + tl.cast(place // page_size, tl.int64) * table_column
            page = (tl.load(entry, mask=key < size, other=0) if MASKED else tl.load(entry)).to(tl.int64)
            slot = (place % page_size).to(tl.int64)
            key_at = _places(keys, page * key_page + slot * key_row, ALIGNED, BLOCK_E)
            value_at = _places(values, page * value_page + slot * value_row, ALIGNED, BLOCK_E)
        else:
            key_at = keys + tl.cast(n, tl.int64) * key_row
            value_at = values + tl.cast(n, tl.int64) * value_row
            key_at = _places(key_at, tl.arange(0, BLOCK_N) * key_row, ALIGNED, BLOCK_E)
            value_at = _places(value_at, tl.arange(0, BLOCK_N) * value_row, ALIGNED, BLOCK_E)
        if MASKED:
            inside = (key < size)[:, None] & (column < HEAD_DIM)[None, :]
            k, v = tl.load(key_at, mask=inside, other=0.0), tl.load(value_at, mask=inside, other=0.0)
        elif HEAD_DIM < BLOCK_E:
            inside = (column < HEAD_DIM)[None, :]
            k, v = tl.load(key_at, mask=inside, other=0.0), tl.load(value_at, mask=inside, other=0.0)
        else:
            k, v = tl.load(key_at), tl.load(value_at)  # [N, E]
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")  # [M, N]
        products = tl.dot(upstream, tl.trans(v), input_precision="ieee")  # [M, N]
        _p, ds = _weights(scores, products, lse[:, None], delta[:, None], multiplier, inner, SOFTCAP)
        if MASKED:
            ds = tl.where((key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None]), ds, 0.0)
            k = _finite(k)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    return acc


@triton.jit
def _branch_bounds(branches, row, first, last, last_row):
    """(first row, end)[M] of each row's branch, one of the branches `first` to `last`; rows end with last_row."""
    row = tl.minimum(row, last_row)[:, None]
    begin = tl.zeros_like(row)
    end = tl.zeros_like(row) + 0x7FFFFFFF
    for branch in range(first, last + 1, 32):
        branch = branch + tl.arange(0, 32)
        begins = tl.load(branches + branch, mask=branch <= last, other=0)[None, :]
        ends = tl.load(branches + branch + 1, mask=branch <= last, other=0)[None, :]
        begin = tl.maximum(begin, tl.max(tl.where(begins <= row, begins, 0), 1)[:, None])
        end = tl.minimum(end, tl.min(tl.where(ends > row, ends, 0x7FFFFFFF), 1)[:, None])
    return tl.max(begin, 1), tl.max(end, 1)


@triton.jit
def _find_rows(table, rows, tile, COLUMNS: tl.constexpr):
    """Whether the layout is valid, then `read_tile`'s results; in an invalid layout all rows are one group."""
    group, place, first_row, end_row, first, last = read_tile(table, tile, COLUMNS)
    sound = group != -2
    place, first_row = tl.where(sound, place, tile), tl.where(sound, first_row, 0)
    return sound, group, place, first_row, tl.where(sound, end_row, rows), first, last


@triton.jit
def _query_program(
    tensors, layout, slices, numbers,
    tile, kv_head, kv_heads, split, splits,
    OWN: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr,
    OFFSETS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq[T, Hq, E] of a tile and a key head over a piece of the prefix; the last piece includes the own branch."""
    dq, q, grad, out, lse, own_k, own_v, prefix_k, prefix_v = tensors
    tile_table, branches, rows = layout
    prefix_start, prefix_len, block_table, capacity, page_size, pages, table_row, table_column = slices
    window, scale, multiplier, inner = numbers
    column = tl.arange(0, BLOCK_E)
    sound, group, place, group_row, end_row, first_branch, last_branch = _find_rows(tile_table, rows, tile, COLUMNS)
    packed = place * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    row, head = group_row + packed // REPEAT, kv_head.to(tl.int64) * REPEAT + packed % REPEAT
    valid = row < end_row
    offset = (row.to(tl.int64) * (kv_heads * REPEAT) + head) * HEAD_DIM
    inside = valid[:, None] & (column < HEAD_DIM)[None, :]  # [M, E]
    if not sound:
        nothing = tl.full([BLOCK_M, BLOCK_E], float("nan"), tl.float32)
        tl.store(_places(dq, offset, ALIGNED, BLOCK_E), nothing, mask=inside)
    elif group >= 0:
        last_row = tl.minimum(group_row + (place * BLOCK_M + BLOCK_M - 1) // REPEAT, end_row - 1)
        begin, _end = _branch_bounds(branches, row, first_branch, last_branch, last_row)
        start, length, fits = prefix_slice(
            prefix_start, prefix_len, block_table, group, capacity, page_size, pages, table_row, table_column,
            PAGED, OFFSETS,
        )  # fmt: skip
        state = _load_rows(q, grad, out, lse, row, head, valid, ALIGNED, HEAD_DIM, BLOCK_E)

        # The piece is the blocks from lowest to highest; every row sees all keys of those from middle to full.
        first, last = tl.zeros_like(row), tl.zeros_like(row) + (length - 1)
        lowest, middle, highest = 0, 0, tl.cdiv(length, BLOCK_N)
        if WINDOW:
            first = tl.maximum(length + row - begin + 1 - window, 0)
            lowest = tl.minimum(tl.min(tl.where(valid, first, length), 0) // BLOCK_N, highest)
            middle = tl.cdiv(tl.max(tl.where(valid, first, 0), 0), BLOCK_N)
        piece = tl.cdiv(highest - lowest, splits)
        lowest = tl.minimum(lowest + split * piece, highest)
        highest = tl.minimum(lowest + piece, highest)
        full = tl.maximum(tl.minimum(length // BLOCK_N, highest), lowest)
        middle = tl.minimum(tl.maximum(middle, lowest), full)
        keys, key_page, key_row, key_head = prefix_k
        values, value_page, value_row, value_head = prefix_v
        keys += kv_head.to(tl.int64) * key_head
        values += kv_head.to(tl.int64) * value_head
        if PAGED:
            block_table += tl.cast(group, tl.int64) * table_row
        else:
            keys += start.to(tl.int64) * key_row
            values += start.to(tl.int64) * value_row
        keys, values = (keys, key_page, key_row), (values, value_page, value_row)
        table = (block_table, table_column, start, page_size)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)  # dq[M, E]
        acc = _add_keys(
            acc, state, keys, values, table, first, last, middle * BLOCK_N, full * BLOCK_N, 0, 0, length,
            multiplier, inner, False, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
        )  # fmt: skip
        strange = ~(tl.abs(acc) < float("inf")) & (valid & (state[2] == state[2]))[:, None]
        if tl.max(strange.to(tl.int32)) > 0:  # a key is not finite: compute all again, masked
            acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)  # dq[M, E]
            full = middle
        acc = _add_keys(
            acc, state, keys, values, table, first, last, lowest * BLOCK_N, (highest - full + middle) * BLOCK_N,
            middle * BLOCK_N, (full - middle) * BLOCK_N, length,
            multiplier, inner, True, PAGED, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
        )  # fmt: skip
        if OWN:
            keys, key_row, key_head = own_k
            values, value_row, value_head = own_v
            if WINDOW:
                begin = tl.maximum(begin, row + 1 - window)
            own = tl.min(tl.where(valid, begin, last_row), 0)
            size = last_row + 1 - own
            keys += kv_head.to(tl.int64) * key_head + own.to(tl.int64) * key_row
            values += kv_head.to(tl.int64) * value_head + own.to(tl.int64) * value_row
            acc = _add_keys(
                acc, state, (keys, 0, key_row), (values, 0, value_row), table,
                begin - own, row - own, 0, tl.where(split == splits - 1, size, 0), 0, 0, size,
                multiplier, inner, True, False, ALIGNED, SOFTCAP, HEAD_DIM, BLOCK_E, BLOCK_N,
            )  # fmt: skip
        dq_at = _places(dq, offset, ALIGNED, BLOCK_E)
        tl.store(dq_at, tl.where(fits, acc * scale, float("nan")), mask=inside)


@triton.jit
def _key_program(
    tensors, layout, numbers,
    tile, kv_head, kv_heads,
    ALIGNED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, REPEAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
):  # fmt: skip
    """The dk and dv[T, Hkv, E] of a tile of keys and a key head; its query heads are added in order."""
    dk, dv, q, grad, out, lse, own_k, own_v = tensors
    tile_table, branches, rows = layout
    window, scale, multiplier, inner = numbers
    column = tl.arange(0, BLOCK_E)
    sound, group, place, group_row, end_row, first_branch, last_branch = _find_rows(tile_table, rows, tile, COLUMNS)
    first_key = group_row + place * KEYS
    key = first_key + tl.arange(0, KEYS)  # [KEYS]
    offset = (key.to(tl.int64) * kv_heads + kv_head) * HEAD_DIM
    inside = (key < end_row)[:, None] & (column < HEAD_DIM)[None, :]
    if not sound:
        nothing = tl.full([KEYS, BLOCK_E], float("nan"), tl.float32)
        tl.store(_places(dk, offset, ALIGNED, BLOCK_E), nothing, mask=inside)
        tl.store(_places(dv, offset, ALIGNED, BLOCK_E), nothing, mask=inside)
    elif group >= 0:
        last_key = tl.minimum(first_key + KEYS, end_row) - 1
        _begin, end = _branch_bounds(branches, key, first_branch, last_branch, last_key)
        if WINDOW:
            end = tl.minimum(end, key + window)
        stop = tl.max(tl.where(key < end_row, end, 0), 0)
        k, k_row, k_head = own_k
        v, v_row, v_head = own_v
        k_at = _places(k + kv_head.to(tl.int64) * k_head, key.to(tl.int64) * k_row, ALIGNED, BLOCK_E)
        v_at = _places(v + kv_head.to(tl.int64) * v_head, key.to(tl.int64) * v_row, ALIGNED, BLOCK_E)
        k, v = tl.load(k_at, mask=inside, other=0.0), tl.load(v_at, mask=inside, other=0.0)  # [KEYS, E]
        k_acc, v_acc = tl.zeros([KEYS, BLOCK_E], tl.float32), tl.zeros([KEYS, BLOCK_E], tl.float32)
        for m in range(0, (stop - first_key) * REPEAT, KEY_ROWS):
            packed = m + tl.arange(0, KEY_ROWS)  # [M]
            row, head = first_key + packed // REPEAT, kv_head.to(tl.int64) * REPEAT + packed % REPEAT
            query, upstream, total, delta = _load_rows(
                q, grad, out, lse, row, head, row < stop, ALIGNED, HEAD_DIM, BLOCK_E
            )
            scores = tl.dot(k, tl.trans(query), input_precision="ieee")  # [KEYS, M]
            products = tl.dot(v, tl.trans(upstream), input_precision="ieee")  # [KEYS, M]
            p, ds = _weights(scores, products, total[None, :], delta[None, :], multiplier, inner, SOFTCAP)
            seen = (row[None, :] >= key[:, None]) & (row[None, :] < end[:, None])
            p, ds = tl.where(seen, p, 0.0).to(query.dtype), tl.where(seen, ds, 0.0).to(query.dtype)
            v_acc = tl.dot(p, _finite(upstream), v_acc, input_precision="ieee")
            k_acc = tl.dot(ds, _finite(query), k_acc, input_precision="ieee")
        tl.store(_places(dk, offset, ALIGNED, BLOCK_E), k_acc * scale, mask=inside)
        tl.store(_places(dv, offset, ALIGNED, BLOCK_E), v_acc, mask=inside)


# dq of tiles of packed rows, dk and dv of tiles of the branches' keys.
# Grid: (tiles * splits + key tiles) * Hkv; the key heads of a tile are neighbours.
# Program: first those of `_query_program`: BLOCK_M packed rows, one key head, one piece of the prefix (the last piece
#   also has the own branch). Then those of `_key_program`: KEYS keys of the branches and one key head.
# Loop: over the piece's keys, BLOCK_N at a time; or over the packed rows that see the keys, KEY_ROWS at a time.
# Memory: tiles of the loop come in pipelined stages (num_stages of the launch); registers hold q, dout and dq
#   [BLOCK_M, BLOCK_E] with scores [BLOCK_M, BLOCK_N], or k, v, dk, dv [KEYS, BLOCK_E] with scores [KEYS, KEY_ROWS].
# Layout: grad, q, out [T, Hq, E], k, v [T, Hkv, E], prefix_k, prefix_v [pages, page, Hkv, E] by the strides *_page,
#   *_row, *_head, 1; lse, grad_lse [Hq, T], strides lse_head, lse_row; table, key_table, branches of
#   `triton_layout.Tables`; dq [splits, T, Hq, E], dk, dv [T, Hkv, E], dense.
@triton.jit(do_not_specialize=["rows", "tiles", "splits", "capacity", "pages", "window", "lse_head", "table_row"])
def _branch_attention_bwd_kernel(
    grad, q, k, v, prefix_k, prefix_v, out, lse, grad_lse,  # tensors
    dq, dk, dv,  # results
    table, key_table, branches, prefix_start, prefix_len, block_table,  # the layout
    rows, kv_heads, tiles, splits, capacity, page_size, pages,  # sizes
    window, scale, multiplier, inner,  # numbers
    grad_row, grad_head, q_row, q_head, k_row, k_head, v_row, v_head,  # strides
    prefix_k_page, prefix_k_row, prefix_k_head, prefix_v_page, prefix_v_row, prefix_v_head,
    out_row, out_head, lse_head, lse_row, table_row, table_column,
    OWN: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr,
    OFFSETS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr, KEY_ROWS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % kv_heads
    numbers = (window, scale, multiplier, inner)
    q, grad = (q, q_row, q_head), (grad, grad_row, grad_head)
    out, lse = (out, out_row, out_head), (lse, grad_lse, lse_head, lse_row)
    k, v = (k, k_row, k_head), (v, v_row, v_head)
    prefix_k = (prefix_k, prefix_k_page, prefix_k_row, prefix_k_head)
    prefix_v = (prefix_v, prefix_v_page, prefix_v_row, prefix_v_head)
    slices = (prefix_start, prefix_len, block_table, capacity, page_size, pages, table_row, table_column)
    if tl.program_id(0) < tiles * splits * kv_heads:
        split, tile = tl.program_id(0) // kv_heads % splits, tl.program_id(0) // kv_heads // splits
        dq += split.to(tl.int64) * rows * (kv_heads * REPEAT) * HEAD_DIM
        _query_program(
            (dq, q, grad, out, lse, k, v, prefix_k, prefix_v), (table, branches, rows), slices, numbers, tile, kv_head,
            kv_heads, split, splits, OWN, PAGED, ALIGNED, WINDOW, SOFTCAP, REPEAT, HEAD_DIM, BLOCK_E, OFFSETS, COLUMNS,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
    elif OWN:
        _key_program(
            (dk, dv, q, grad, out, lse, k, v), (key_table, branches, rows), numbers,
            tl.program_id(0) // kv_heads - tiles * splits, kv_head, kv_heads, ALIGNED, WINDOW, SOFTCAP, REPEAT,
            HEAD_DIM, BLOCK_E, COLUMNS, KEYS, KEY_ROWS,
        )  # fmt: skip


# dq = sum of the pieces, in their order.
# Grid: ceil(size / BLOCK).
# Program: BLOCK elements of dq, of any rows.
# Loop: over pieces.
# Memory: registers only, [BLOCK] float32.
# Layout: partial [splits, size] float32 and dq [size], dense.
@triton.jit(do_not_specialize=["size", "splits"])
def _branch_attention_bwd_add_kernel(partial, dq, size, splits, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial + tl.cast(split, tl.int64) * size + i, mask=i < size, other=0.0)
    tl.store(dq + i, total, mask=i < size)


# state = lse (in units of log 2, NaN where dout is not finite) and delta of all heads of all rows.
# Grid: ceil(T Hq / ROWS).
# Program: ROWS heads, which may be of several rows; number = row * Hq + head.
# Loop: none.
# Memory: registers only: dout and out [ROWS, BLOCK_E].
# Layout: grad, out [T, Hq, E], strides *_row, *_head, 1; lse, grad_lse [Hq, T], strides lse_head, lse_row;
#   state [2, T, Hq] float32, dense.
@triton.jit(do_not_specialize=["rows", "lse_head"])
def _branch_attention_bwd_state_kernel(
    grad, out, lse, grad_lse, state, rows, heads, grad_row, grad_head, out_row, out_head, lse_head, lse_row,
    ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    size = rows.to(tl.int64) * heads
    grad, out, lse = (grad, grad_row, grad_head), (out, out_row, out_head), (lse, grad_lse, lse_head, lse_row)
    _upstream, total, delta = _load_upstream(
        grad, out, lse, i // heads, i % heads, i < size, ALIGNED, HEAD_DIM, BLOCK_E
    )
    tl.store(state + i, total, mask=i < size)
    tl.store(state + size + i, delta, mask=i < size)


@triton.jit
def _covering(prefix_start, prefix_len, groups, capacity, low, high, OFFSETS: tl.constexpr):
    """The first and last group with keys in [low, high); (groups, -1) if there is none."""
    first, last = groups, -1
    for g in range(0, groups, OFFSETS):
        g = g + tl.arange(0, OFFSETS)
        start = tl.load(prefix_start + g, mask=g < groups, other=0).to(tl.int64)
        length = tl.load(prefix_len + g, mask=g < groups, other=0).to(tl.int64)
        fits = (start >= 0) & (start < high) & (length > 0) & (length <= capacity - start)  # [OFFSETS]
        covers = fits & (start + length > low)
        first = tl.minimum(first, tl.min(tl.where(covers, g, groups), 0))
        last = tl.maximum(last, tl.max(tl.where(covers, g, -1), 0))
    return first, last


@triton.jit
def _add_rows(
    k_acc, v_acc, k, v, slot, start, end,  # [KEYS, E] four times, [KEYS], the slice
    q, grad, state, branches, kv_head, heads, rows,
    first_row, last_row, first_branch, last_branch, low, high,
    window, multiplier, inner,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, REPEAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, KEY_ROWS: tl.constexpr,
):  # fmt: skip
    """(k_acc + ds q, v_acc + p dout) over packed rows in [low, high), counted from a group's first row.

    Without MASKED each of these rows sees all keys of the tile.
    """
    q, q_row, q_head = q
    grad, grad_row, grad_head = grad
    column = tl.arange(0, BLOCK_E)
    for m in tl.range(low, high, KEY_ROWS, num_stages=1 if MASKED else None):
        packed = m + tl.arange(0, KEY_ROWS)  # [M]
        row, head = (first_row + packed // REPEAT).to(tl.int64), kv_head.to(tl.int64) * REPEAT + packed % REPEAT
        q_at = _places(q, row * q_row + head * q_head, ALIGNED, BLOCK_E)
        grad_at = _places(grad, row * grad_row + head * grad_head, ALIGNED, BLOCK_E)
        state_at = state + (row * heads + head)
        if MASKED:
            valid = packed < high
            inside = valid[:, None] & (column < HEAD_DIM)[None, :]
            query, upstream = tl.load(q_at, mask=inside, other=0.0), tl.load(grad_at, mask=inside, other=0.0)
            total = tl.load(state_at, mask=valid, other=0.0)
            delta = tl.load(state_at + rows.to(tl.int64) * heads, mask=valid, other=0.0)
        elif HEAD_DIM < BLOCK_E:
            inside = (column < HEAD_DIM)[None, :]
            query, upstream = tl.load(q_at, mask=inside, other=0.0), tl.load(grad_at, mask=inside, other=0.0)
            total, delta = tl.load(state_at), tl.load(state_at + rows.to(tl.int64) * heads)
        else:
            query, upstream = tl.load(q_at), tl.load(grad_at)  # [M, E]
            total, delta = tl.load(state_at), tl.load(state_at + rows.to(tl.int64) * heads)
        scores = tl.dot(k, tl.trans(query), input_precision="ieee")  # [KEYS, M]
        products = tl.dot(v, tl.trans(upstream), input_precision="ieee")  # [KEYS, M]
        p, ds = _weights(scores, products, total[None, :], delta[None, :], multiplier, inner, SOFTCAP)
        if MASKED:
            seen = ((slot >= start) & (slot < end))[:, None] & valid[None, :]
            if WINDOW:
                begin, _end = _branch_bounds(branches, row.to(tl.int32), first_branch, last_branch, last_row)
                seen = seen & (slot[:, None] > (end + row - begin - window)[None, :])
            p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
            query, upstream = _finite(query), _finite(upstream)
        v_acc = tl.dot(p.to(query.dtype), upstream, v_acc, input_precision="ieee")
        k_acc = tl.dot(ds.to(query.dtype), query, k_acc, input_precision="ieee")
    return k_acc, v_acc


@triton.jit
def _add_groups(
    k_acc, v_acc, k, v, slot, low, high,  # [KEYS, E] four times, [KEYS], the tile
    q, grad, state, layout, slices, numbers, kv_head, heads, first, last, careful,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, REPEAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, OFFSETS: tl.constexpr, KEY_ROWS: tl.constexpr,
    FULL_ROWS: tl.constexpr,
):  # fmt: skip
    """`_add_rows` for groups `first` to `last`: whole blocks of rows that see the whole tile or, if MASKED, the rest.

    If `careful`, all rows are masked.
    """
    branches, groups, rows = layout
    prefix_start, prefix_len, capacity = slices
    window, multiplier, inner = numbers
    for g in range(first, last + 1):
        start, length, _fits = prefix_slice(
            prefix_start, prefix_len, prefix_len, g, capacity, 1, 0, 0, 0, False, OFFSETS
        )  # fmt: skip
        first_branch, end_branch = tl.load(groups + g).to(tl.int32), tl.load(groups + g + 1).to(tl.int32)
        first_row, end_row = tl.load(branches + first_branch), tl.load(branches + end_branch)
        end, reached = start + length, start
        if WINDOW:
            reached = tl.maximum(end + 1 - window, start)
        count = tl.where((reached < high) & (end > low), (end_row - first_row) * REPEAT, 0)
        full = 0
        if not WINDOW:
            full = tl.where((start <= low) & (end >= high) & (careful == 0), count // FULL_ROWS * FULL_ROWS, 0)
        k_acc, v_acc = _add_rows(
            k_acc, v_acc, k, v, slot, start, end, q, grad, state, branches, kv_head, heads, rows,
            first_row, end_row - 1, first_branch, end_branch - 1,
            full if MASKED else 0, count if MASKED else full, window, multiplier, inner,
            MASKED, ALIGNED, WINDOW, SOFTCAP, REPEAT, HEAD_DIM, BLOCK_E, KEY_ROWS,
        )  # fmt: skip
    return k_acc, v_acc


# dprefix_k = scale sum ds q, dprefix_v = sum p dout over the rows whose slice has the key; 0 outside all valid slices.
# Grid: ceil(capacity / KEYS) * Hkv; the key heads of a tile are neighbours.
# Program: KEYS keys of the prefix, one key head.
# Loop: over the groups whose slice meets the tile, in their order; inside over their packed rows, KEY_ROWS at a time.
# Memory: q and dout [KEY_ROWS, BLOCK_E] come in pipelined stages (num_stages of the launch); registers hold k, v and
#   their gradients [KEYS, BLOCK_E] and scores [KEYS, KEY_ROWS].
# Layout: grad, q [T, Hq, E], prefix_k, prefix_v [capacity, Hkv, E] by the strides *_row, *_head, 1; state [2, T, Hq];
#   table, branches of `triton_layout.Tables`; groups_of = cu_group [G + 1]; prefix_start, prefix_len [G];
#   dprefix_k, dprefix_v [capacity, Hkv, E], dense.
@triton.jit(do_not_specialize=["rows", "groups", "capacity", "window"])
def _branch_attention_bwd_prefix_kernel(
    grad, q, prefix_k, prefix_v, state, dprefix_k, dprefix_v,  # tensors, results
    table, branches, groups_of, prefix_start, prefix_len,  # the layout
    rows, kv_heads, groups, capacity,  # sizes
    window, scale, multiplier, inner,  # numbers
    grad_row, grad_head, q_row, q_head, k_row, k_head, v_row, v_head,  # strides
    ALIGNED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, REPEAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, OFFSETS: tl.constexpr,
    KEYS: tl.constexpr, KEY_ROWS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % kv_heads
    low = tl.program_id(0) // kv_heads * KEYS
    high = tl.minimum(low + KEYS, capacity)
    slot = low + tl.arange(0, KEYS)  # [KEYS]
    inside = (slot < capacity)[:, None] & (tl.arange(0, BLOCK_E) < HEAD_DIM)[None, :]
    sound = tl.load(table) != -2  # group -2 of the first tile: the layout is invalid
    first, last = _covering(prefix_start, prefix_len, tl.where(sound, groups, 0), capacity, low, high, OFFSETS)
    k_at = _places(prefix_k + kv_head.to(tl.int64) * k_head, slot.to(tl.int64) * k_row, ALIGNED, BLOCK_E)
    v_at = _places(prefix_v + kv_head.to(tl.int64) * v_head, slot.to(tl.int64) * v_row, ALIGNED, BLOCK_E)
    k, v = tl.load(k_at, mask=inside, other=0.0), tl.load(v_at, mask=inside, other=0.0)  # [KEYS, E]
    q, grad = (q, q_row, q_head), (grad, grad_row, grad_head)
    layout, slices = (branches, groups_of, rows), (prefix_start, prefix_len, capacity)
    numbers, heads = (window, multiplier, inner), kv_heads * REPEAT
    k_acc, v_acc = tl.zeros([KEYS, BLOCK_E], tl.float32), tl.zeros([KEYS, BLOCK_E], tl.float32)
    careful = 0
    if not WINDOW:
        k_acc, v_acc = _add_groups(
            k_acc, v_acc, k, v, slot, low, high, q, grad, state, layout, slices, numbers, kv_head, heads, first, last,
            0, False, ALIGNED, WINDOW, SOFTCAP, REPEAT, HEAD_DIM, BLOCK_E, OFFSETS, KEY_ROWS, KEY_ROWS,
        )  # fmt: skip
        careful = tl.max((k_acc * 0.0 + v_acc * 0.0 != 0.0).to(tl.int32))  # 0 * inf and 0 * NaN are NaN
        if careful > 0:  # a query is not finite: compute all again, masked
            k_acc, v_acc = tl.zeros([KEYS, BLOCK_E], tl.float32), tl.zeros([KEYS, BLOCK_E], tl.float32)
    k_acc, v_acc = _add_groups(
        k_acc, v_acc, k, v, slot, low, high, q, grad, state, layout, slices, numbers, kv_head, heads, first, last,
        careful, True, ALIGNED, WINDOW, SOFTCAP, REPEAT, HEAD_DIM, BLOCK_E, OFFSETS, 16, KEY_ROWS,
    )  # fmt: skip
    offset = (slot.to(tl.int64) * kv_heads + kv_head) * HEAD_DIM
    tl.store(_places(dprefix_k, offset, ALIGNED, BLOCK_E), k_acc * scale, mask=inside)
    tl.store(_places(dprefix_v, offset, ALIGNED, BLOCK_E), v_acc, mask=inside)


def branch_attention_backward(call: BranchAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dprefix_k, dprefix_v), empty where there is none. Few rows allocate float32 pieces of dq.

    The bits depend on values, shapes, alignment and max_prefix_len. A layout that does not fit gives NaN, as does an
    lse of NaN.
    """
    grad_out, grad_lse, out, lse, forward, prefix_grads = call
    q, k, v, prefix_k, prefix_v = forward[:5]
    cu_branch, cu_group, prefix_start, prefix_len, block_table = indices = forward.indices
    _, max_prefix_len, window, scale, softcap = forward[10:]
    (rows, heads, width), kv_heads = q.shape, prefix_k.shape[-2]
    branches, groups = cu_branch.shape[0] - 1, cu_group.shape[0] - 1
    page_size, capacity = prefix_k.shape[0 if block_table is None else 1], forward.capacity
    if q.dtype == torch.float64 or width > 256 or max(rows * heads, rows + capacity, branches, groups) >= 1 << 30:
        return NotImplemented
    dq = q.new_empty(q.shape)
    dk, dv = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (k, v))
    dprefix_k, dprefix_v = (q.new_empty(x.shape if prefix_grads else 0) for x in (prefix_k, prefix_v))
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dprefix_k.zero_(), dprefix_v.zero_()
    repeat, filled = heads // kv_heads, max(1, min(groups, rows))
    windowed, everything = window is not None, rows + capacity + 1
    window = everything if window is None else min(window, everything)
    table = cu_branch[None] if block_table is None else block_table
    prefix_k, prefix_v = (x[None] if block_table is None else x for x in (prefix_k, prefix_v))
    tensors = [grad_out, q, q if k is None else k, q if v is None else v, prefix_k, prefix_v, out]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    if max(x.stride(-3) for x in tensors) >= 1 << 23:  # offsets in a block of keys are 32-bit
        return NotImplemented
    if grad_lse is not None:  # they share their strides
        lse, grad_lse = lse.contiguous(), grad_lse.contiguous()
    aligned, block_e = are_aligned(*tensors), max(16, tuning.next_power_of_2(width))
    form = "aligned" if aligned else "unaligned"
    launch = tuning.branch_attention_backward(q.dtype, width, repeat, triton.cdiv(rows, filled), form)
    tiles, starts, _ = branch_layout.tables(indices, rows, repeat, launch["BLOCK_M"])
    key_tiles = tiles[:0] if k is None else branch_layout.tables(indices, rows, 1, launch["KEYS"]).tiles
    bound = capacity if max_prefix_len is None else min(capacity, max_prefix_len)
    splits = max(1, min(bound // PIECE, PROGRAMS // (len(tiles) * kv_heads)))
    pieces = dq if splits == 1 else q.new_empty((splits, *q.shape), dtype=torch.float32)
    if softcap is None:
        numbers = (window, scale, scale * LOG2_E, 0.0)
    else:
        numbers = (window, scale, softcap * LOG2_E, scale / softcap)
    strides = [n for x in tensors for n in x.stride()[:-1]]
    _branch_attention_bwd_kernel[((len(tiles) * splits + len(key_tiles)) * kv_heads,)](
        *tensors, lse, grad_lse, pieces, dk, dv,
        tiles, key_tiles, starts, prefix_start.contiguous(), prefix_len.contiguous(), table,
        rows, kv_heads, len(tiles), splits, capacity, max(page_size, 1), prefix_k.shape[0],
        *numbers, *strides, *lse.stride(), *table.stride(), OWN=k is not None, PAGED=block_table is not None,
        ALIGNED=aligned, WINDOW=windowed, SOFTCAP=softcap is not None, REPEAT=repeat, HEAD_DIM=width,
        BLOCK_E=block_e, OFFSETS=branch_layout.OFFSETS, COLUMNS=branch_layout.COLUMNS, **launch,
    )  # fmt: skip
    if splits > 1:
        _branch_attention_bwd_add_kernel[(triton.cdiv(dq.numel(), 512),)](
            pieces, dq, dq.numel(), splits, BLOCK=512, num_warps=4
        )
    if dprefix_k.numel():
        grad, query, *_, own_out = tensors
        state = q.new_empty((2, rows, heads), dtype=torch.float32)
        launch = tuning.branch_attention_backward_prefix(q.dtype, width, form)
        state_rows = max(1, (4096 if aligned else 1024) // block_e)  # unaligned addresses take registers
        _branch_attention_bwd_state_kernel[(triton.cdiv(rows * heads, state_rows),)](
            grad, own_out, lse, grad_lse, state, rows, heads, *grad.stride()[:2], *own_out.stride()[:2], *lse.stride(),
            ALIGNED=aligned, HEAD_DIM=width, BLOCK_E=block_e, ROWS=state_rows, num_warps=4,
        )  # fmt: skip
        _branch_attention_bwd_prefix_kernel[(triton.cdiv(capacity, launch["KEYS"]) * kv_heads,)](
            grad, query, tensors[4], tensors[5], state, dprefix_k, dprefix_v,
            tiles, starts, cu_group.contiguous(), prefix_start.contiguous(), prefix_len.contiguous(),
            rows, kv_heads, groups, capacity, *numbers,
            *(n for x in (grad, query, tensors[4], tensors[5]) for n in x.stride()[-3:-1]),
            ALIGNED=aligned, WINDOW=windowed, SOFTCAP=softcap is not None, REPEAT=repeat, HEAD_DIM=width,
            BLOCK_E=block_e, OFFSETS=branch_layout.OFFSETS, **launch,
        )  # fmt: skip
    return dq, dk, dv, dprefix_k, dprefix_v
