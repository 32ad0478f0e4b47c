"""The layout as the kernels of `branch_attention` read it: groups, branches and prefix slices, all checked.

One launch for each layout checks the offsets and writes tables that the other kernels read. An invalid layout makes
rows NaN; nothing is read or written at an index that was not checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels import layout

OFFSETS = 256  # offsets, or pages, that a program loads at once
COLUMNS = 8  # numbers of a tile in its table; six are used


class Tables(NamedTuple):
    """The tables of a layout for one tile size."""

    tiles: Tensor  # [tiles, COLUMNS]
    branches: Tensor  # [B + 1]: cu_branch, if it is valid
    rows: Tensor  # [T, 2]: each row's group and its branch's first row; [0, 2] if not requested


def tables(indices: layout.Indices, rows: int, repeat: int, block: int, *, each_row: bool = False) -> Tables:
    """The tables for tiles of `block` packed rows (rows times `repeat` heads); computed once for each layout."""

    def make() -> Tables:
        cu_branch, cu_group = (x.contiguous() for x in indices[:2])
        branches, groups = cu_branch.shape[0] - 1, cu_group.shape[0] - 1
        filled = max(1, min(groups, rows))  # most groups with a row; each may leave one tile partly empty
        tiles, copies = (rows * repeat + filled * (block - 1)) // block, triton.cdiv(branches + 1, OFFSETS)
        counts = tiles * COLUMNS, branches + 1, 2 * rows * each_row
        buffers = [torch.empty(count, dtype=torch.int32, device=cu_branch.device) for count in counts]
        _branch_attention_layout_kernel[(tiles + copies + rows * each_row,)](
            *buffers, cu_branch, cu_group, rows, branches, groups, tiles, copies,
            REPEAT=repeat, BLOCK_M=block, OFFSETS=OFFSETS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
        return Tables(buffers[0].view(tiles, COLUMNS), buffers[1], buffers[2].view(-1, 2))

    return layout.remembered(indices, ("tables", rows, repeat, block, each_row), make)


@triton.jit
def rises(offsets, count, last, OFFSETS: tl.constexpr):
    """Whether offsets[0 .. count] rise from 0 to `last`; false if there are none."""
    falls = 0
    for first in range(0, count, OFFSETS):
        i = first + tl.arange(0, OFFSETS)
        low = tl.load(offsets + i, mask=i < count, other=0)
        high = tl.load(offsets + i + 1, mask=i < count, other=0)
        falls += tl.sum((low > high).to(tl.int32))
    return (count > 0) & (falls == 0) & (tl.load(offsets) == 0) & (tl.load(offsets + count) == last)


@triton.jit
def count_up_to(offsets, first, last, value, OFFSETS: tl.constexpr):
    """How many of offsets[first + 1 .. last] are at most `value`: counted from `first`, the range that has it."""
    found = 0
    for i in range(first, last, OFFSETS):
        i = i + tl.arange(0, OFFSETS)
        end = tl.load(offsets + i + 1, mask=i < last, other=0)
        found += tl.sum(((end <= value) & (i < last)).to(tl.int32))
    return found


@triton.jit
def find_tile(cu_branch, cu_group, groups, tile, REPEAT: tl.constexpr, BLOCK_M: tl.constexpr, OFFSETS: tl.constexpr):
    """(group, tile of the group, counted from its last) of tile number `tile`; the group is -1 after all tiles.

    A group has ceil(rows REPEAT / BLOCK_M) tiles.
    """
    group, place, before = -1, 0, 0
    for first in range(0, groups, OFFSETS):
        g = first + tl.arange(0, OFFSETS)
        low = tl.load(cu_group + g, mask=g < groups, other=0)
        high = tl.load(cu_group + g + 1, mask=g < groups, other=0)
        rows = (tl.load(cu_branch + high) - tl.load(cu_branch + low)).to(tl.int32)  # [OFFSETS]
        tiles = tl.cdiv(rows * REPEAT, BLOCK_M)
        ends = before + tl.cumsum(tiles, 0)
        mine = (ends - tiles <= tile) & (tile < ends)  # true for at most one group
        group += tl.sum(tl.where(mine, g + 1, 0))
        place += tl.sum(tl.where(mine, ends - 1 - tile, 0))
        before += tl.sum(tiles)
    return group, place


# The tables of a layout.
# Grid: tiles + ceil((B + 1) / OFFSETS) (copies) + T or 0 programs.
# Program: one tile's entry; or OFFSETS entries of cu_branch, copied as int32; or one row's entry.
# Loop: over all offsets, OFFSETS at a time, to check and to search them.
# Memory: registers only, [OFFSETS] integers.
# Layout: cu_branch [B + 1], cu_group [G + 1] int32 or int64, dense; table [tiles, COLUMNS], starts [B + 1],
#   each_row [T, 2], int32, dense.
@triton.jit(do_not_specialize=["rows", "branches", "groups", "tiles", "copies"])
def _branch_attention_layout_kernel(
    table, starts, each_row,  # written, as in `Tables`
    cu_branch, cu_group,
    rows, branches, groups, tiles, copies,  # sizes
    REPEAT: tl.constexpr, BLOCK_M: tl.constexpr, OFFSETS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sound = rises(cu_branch, branches, rows, OFFSETS) & rises(cu_group, groups, branches, OFFSETS)
    if program < tiles:
        group, place, group_row, group_end, first_branch, last_branch = -2, 0, 0, 0, 0, 0  # of an invalid layout
        if sound:
            group, place = find_tile(cu_branch, cu_group, groups, program, REPEAT, BLOCK_M, OFFSETS)
            if group >= 0:
                low, high = tl.load(cu_group + group).to(tl.int32), tl.load(cu_group + group + 1).to(tl.int32)
                group_row, group_end = tl.load(cu_branch + low).to(tl.int32), tl.load(cu_branch + high).to(tl.int32)
                first = group_row + place * BLOCK_M // REPEAT  # the tile's first and last row
                last = tl.minimum(group_row + (place * BLOCK_M + BLOCK_M - 1) // REPEAT, group_end - 1)
                first_branch = low + count_up_to(cu_branch, low, high, first, OFFSETS)
                last_branch = low + count_up_to(cu_branch, low, high, last, OFFSETS)
        table += program.to(tl.int64) * COLUMNS
        tl.store(table, group)
        tl.store(table + 1, place)
        tl.store(table + 2, group_row)
        tl.store(table + 3, group_end)
        tl.store(table + 4, first_branch)
        tl.store(table + 5, last_branch)
    elif program < tiles + copies:
        i = (program - tiles) * OFFSETS + tl.arange(0, OFFSETS)
        tl.store(starts + i, tl.load(cu_branch + i, mask=i <= branches, other=0).to(tl.int32), mask=i <= branches)
    else:
        row = program - tiles - copies
        group, begin = -2, 0
        if sound:
            branch = count_up_to(cu_branch, 0, branches, row, OFFSETS)
            group = count_up_to(cu_group, 0, groups, branch, OFFSETS)
            begin = tl.load(cu_branch + branch).to(tl.int32)
        each_row += 2 * row.to(tl.int64)
        tl.store(each_row, group)
        tl.store(each_row + 1, begin)


@triton.jit
def read_tile(table, tile, COLUMNS: tl.constexpr):
    """(group, tile of the group, the group's first row and the row after its last, the tile's first and last branch).

    The group is -1 after all tiles, -2 in an invalid layout.
    """
    table += tl.cast(tile, tl.int64) * COLUMNS
    return (
        tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3), tl.load(table + 4),
        tl.load(table + 5),
    )  # fmt: skip


@triton.jit
def prefix_slice(
    prefix_start, prefix_len, block_table,
    group, capacity, page_size, pages, table_row, table_column,
    PAGED: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """(start, length, whether it is valid) of a group's slice; an invalid one counts as empty."""
    start, length = tl.load(prefix_start + group).to(tl.int64), tl.load(prefix_len + group).to(tl.int64)
    fits = (start >= 0) & (length >= 0) & ((length == 0) | ((start <= capacity) & (length <= capacity - start)))
    length = tl.where(fits, length, 0).to(tl.int32)  # no more than capacity, which is below 2^30
    start = tl.where(length > 0, start, 0).to(tl.int32)
    if PAGED:
        wrong = 0
        table = block_table + tl.cast(group, tl.int64) * table_row
        last = tl.cdiv(start + length, page_size)
        for first in range(start // page_size, last, OFFSETS):  # only pages of the slice are read
            i = first + tl.arange(0, OFFSETS)
            page = tl.load(table + tl.cast(i, tl.int64) * table_column, mask=i < last, other=0)
            wrong += tl.sum(((i < last) & ((page < 0) | (page >= pages))).to(tl.int32))
        fits = fits & (wrong == 0)
        length = tl.where(wrong == 0, length, 0)
    return start, length, fits
