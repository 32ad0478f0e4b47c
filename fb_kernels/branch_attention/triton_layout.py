"""What a program of a `branch_attention` kernel reads of the layout: groups, branches and prefix slices, all checked.

A layout that does not fit makes rows NaN; nothing is read or written by an index that was not checked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

OFFSETS = 256
"""Offsets, or pages, that a program looks at together."""


def aligned(*tensors: Tensor) -> bool:
    """Whether every row of every tensor begins at a multiple of 16 bytes and is dense."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(step * x.itemsize % 16 == 0 for step in (x.shape[-1], *x.stride()[:-1]))
        for x in tensors
    )


@triton.jit
def rises(offsets, count, last, OFFSETS: tl.constexpr):
    """Whether offsets[0 .. count] rise from 0 to `last`; false without any."""
    falls = 0
    for first in range(0, count, OFFSETS):
        i = first + tl.arange(0, OFFSETS)
        low = tl.load(offsets + i, mask=i < count, other=0)
        high = tl.load(offsets + i + 1, mask=i < count, other=0)
        falls += tl.sum((low > high).to(tl.int32))
    return (count > 0) & (falls == 0) & (tl.load(offsets) == 0) & (tl.load(offsets + count) == last)


@triton.jit
def count_up_to(offsets, first, last, value, OFFSETS: tl.constexpr):
    """How many of offsets[first + 1 .. last] are at most `value`; where these are ends, the first that holds it."""
    found = 0
    for i in range(first, last, OFFSETS):
        i = i + tl.arange(0, OFFSETS)
        end = tl.load(offsets + i + 1, mask=i < last, other=0)
        found += tl.sum(((end <= value) & (i < last)).to(tl.int32))
    return found


@triton.jit
def find_tile(cu_branch, cu_group, groups, tile, REPEAT: tl.constexpr, BLOCK_M: tl.constexpr, OFFSETS: tl.constexpr):
    """(group, tile of the group, counted from its last) of a flat tile; group -1 behind all tiles.

    Every group has as many tiles of BLOCK_M packed rows (rows times REPEAT heads) as it needs.
    """
    group, place, before = -1, 0, 0
    for first in range(0, groups, OFFSETS):
        g = first + tl.arange(0, OFFSETS)
        low = tl.load(cu_group + g, mask=g < groups, other=0)
        high = tl.load(cu_group + g + 1, mask=g < groups, other=0)
        rows = (tl.load(cu_branch + high) - tl.load(cu_branch + low)).to(tl.int32)
        tiles = tl.cdiv(rows * REPEAT, BLOCK_M)
        ends = before + tl.cumsum(tiles, 0)
        mine = (ends - tiles <= tile) & (tile < ends)
        group += tl.sum(tl.where(mine, g + 1, 0))
        place += tl.sum(tl.where(mine, ends - 1 - tile, 0))
        before += tl.sum(tiles)
    return group, place


@triton.jit
def prefix_slice(
    prefix_start,
    prefix_len,
    block_table,
    group,
    capacity,
    page_size,
    pages,
    table_row,
    table_column,
    PAGED: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """(start, length, whether it fits) of a group's slice; one that does not fit counts as empty."""
    start, length = tl.load(prefix_start + group).to(tl.int64), tl.load(prefix_len + group).to(tl.int64)
    fits = (start >= 0) & (length >= 0) & ((length == 0) | ((start <= capacity) & (length <= capacity - start)))
    length = tl.where(fits, length, 0).to(tl.int32)
    start = tl.where(length > 0, start, 0).to(tl.int32)
    if PAGED:
        wrong = 0
        table = block_table + tl.cast(group, tl.int64) * table_row
        last = tl.cdiv(start + length, page_size)
        for first in range(start // page_size, last, OFFSETS):
            i = first + tl.arange(0, OFFSETS)
            page = tl.load(table + tl.cast(i, tl.int64) * table_column, mask=i < last, other=0)
            wrong += tl.sum(((i < last) & ((page < 0) | (page >= pages))).to(tl.int32))
        fits = fits & (wrong == 0)
        length = tl.where(wrong == 0, length, 0)
    return start, length, fits
