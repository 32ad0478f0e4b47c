"""Hopper's kernel of `branch_attention`: persistent, a warp loads, two check values, two warpgroups attend.

Tiles of packed rows come from the same table as in triton.py; each warpgroup takes half of one. A tile goes through
stretches of keys: its group's slice of the prefix, then its branches. Each stretch is read in blocks from its first
key on, so a row's bits depend on the keys that it sees and on no other row.

A warpgroup starts queries times a block of keys, then probabilities times the values of the previous block. It computes
exponentials while its second product and the other warpgroup's two products run; the two take turns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fb_kernels._runtime import tuning
from fb_kernels.branch_attention import triton_layout
from fb_kernels.branch_attention.triton_layout import COLUMNS, OFFSETS
from fb_kernels.layout import Indices

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
LOADER_REGISTERS, ATTENDING_REGISTERS = gl.constexpr(40), gl.constexpr(232)  # of a thread
LN_2 = gl.constexpr(0.6931471805599453)

read_tile, prefix_slice = gluon.jit(triton_layout.read_tile.fn), gluon.jit(triton_layout.prefix_slice.fn)


@gluon.jit
def _tile(
    tiles, prefix_start, prefix_len, item, kv_heads, capacity,
    OWN: gl.constexpr, REPEAT: gl.constexpr, BLOCK_M: gl.constexpr, OFFSETS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The work of an item; the last line names what is returned.

    `fits`: whether the group's slice of `length` keys from `start` is valid. Its stretches are `low` to `high`, none if
    `high` is less than `low`: `prefix` is the slice, those after it are branches. The group is -1 after the last tile,
    -2 in an invalid layout.
    """
    group, place, group_row, group_end, first_branch, last_branch = read_tile(tiles, item // kv_heads, COLUMNS)
    start, length, fits = 0, 0, group >= 0
    if group >= 0:
        start, length, fits = prefix_slice(prefix_start, prefix_len, tiles, group, capacity, 1, 1, 0, 0, False, OFFSETS)
    first_row = group_row + place * (BLOCK_M // REPEAT)
    last_row = gl.minimum(first_row + BLOCK_M // REPEAT, group_end) - 1
    prefix = first_branch - 1
    low = gl.where(length > 0, prefix, first_branch)
    high = gl.where(group >= 0, last_branch if OWN else prefix, low - 1)
    return group, first_row, last_row, group_end, fits, start, length, prefix, low, high


@gluon.jit
def _stretch(branches, stretch, tile, BLOCK_N: gl.constexpr):
    """(first key, keys, keys of the leading blocks that every row of the tile sees whole)."""
    _, first_row, last_row, _, _, begin, size, prefix, _, high = tile
    whole = size
    if stretch != prefix:
        begin = gl.load(branches + stretch)
        size = gl.minimum(gl.load(branches + stretch + 1), last_row + 1) - begin
        whole = gl.where(high == prefix + 1, first_row + 1 - begin, 0)
    return begin, size, whole // BLOCK_N * BLOCK_N


@gluon.jit
def _load(
    q, k, v, prefix_k, prefix_v, queries, keys, values, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    tiles, branches, prefix_start, prefix_len, items, kv_heads, capacity,
    OWN: gl.constexpr, REPEAT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OFFSETS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Fill a stage with a block of keys and one of values as soon as both halves have read what it held."""
    step, turn, checked = 0, 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head = item % kv_heads
        tile = _tile(tiles, prefix_start, prefix_len, item, kv_heads, capacity, OWN, REPEAT, BLOCK_M, OFFSETS, COLUMNS)
        _, first_row, _, _, _, _, _, prefix, low, high = tile
        if low <= high:
            mbarrier.wait(q_empty, (turn + 1) & 1)
            mbarrier.expect(q_ready, 2 * q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [first_row, head * REPEAT, 0], q_ready, queries.index(0))
            second = first_row + BLOCK_M // REPEAT // 2
            tma.async_copy_global_to_shared(q, [second, head * REPEAT, 0], q_ready, queries.index(1))
            turn += 1
        for stretch in range(low, high + 1):
            begin, size, whole = _stretch(branches, stretch, tile, BLOCK_N)
            for n in range(0, size, BLOCK_N):
                stage = step % STAGES
                landed = k_ready.index(stage)
                mbarrier.wait(k_empty.index(stage), (step // STAGES + 1) & 1)
                mbarrier.expect(landed, k.block_type.nbytes)
                if stretch == prefix:
                    tma.async_copy_global_to_shared(prefix_k, [begin + n, head, 0], landed, keys.index(stage))
                else:
                    tma.async_copy_global_to_shared(k, [begin + n, head, 0], landed, keys.index(stage))
                mbarrier.wait(v_empty.index(stage), (step // STAGES + 1) & 1)
                landed = v_ready.index(gl.where(n < whole, stage, STAGES + checked % STAGES))
                mbarrier.expect(landed, v.block_type.nbytes)
                if stretch == prefix:
                    tma.async_copy_global_to_shared(prefix_v, [begin + n, head, 0], landed, values.index(stage))
                else:
                    tma.async_copy_global_to_shared(v, [begin + n, head, 0], landed, values.index(stage))
                checked += gl.where(n < whole, 0, 1)
                step += 1


@gluon.jit
def _check(
    values, strange, v_ready,
    tiles, branches, prefix_start, prefix_len, items, kv_heads, capacity,
    OWN: gl.constexpr, REPEAT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OFFSETS: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Set values to zero that some row does not see and whose product with 0 might not be 0.

    They are the rows after a stretch, and values that are not finite in the blocks of a branch that not all rows see.
    After a tile's last block, `strange` says whether it had any; very large values count too, which only costs time.
    """
    PANEL: gl.constexpr = min(HEAD_DIM, 64)  # adjacent columns
    ROWS: gl.constexpr = min(BLOCK_N, 16)
    PARTS: gl.constexpr = BLOCK_N // ROWS * (HEAD_DIM // PANEL)  # of a block
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PANEL, PANEL // 8], [gl.num_warps(), 1], [1, 0])
    place = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    parts = values._reinterpret(values.dtype, [STAGES * PARTS, ROWS, PANEL], gl.NVMMASharedLayout(2 * PANEL, 16))
    step, checked = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = _tile(tiles, prefix_start, prefix_len, item, kv_heads, capacity, OWN, REPEAT, BLOCK_M, OFFSETS, COLUMNS)
        _, _, _, _, _, _, _, prefix, low, high = tile
        found = 0
        for stretch in range(low, high + 1):
            _, size, whole = _stretch(branches, stretch, tile, BLOCK_N)
            for n in range(0, size, BLOCK_N):
                if n >= whole:
                    stage = step % STAGES
                    mbarrier.wait(v_ready.index(STAGES + checked % STAGES), (checked // STAGES) & 1)
                    sizes = gl.full([ROWS, PANEL], 0.0, gl.float32, layout)
                    for i in range(PARTS):
                        part, row = parts.index(stage * PARTS + i), n + i * ROWS % BLOCK_N
                        if stretch != prefix:
                            sizes += gl.abs(part.load(layout).to(gl.float32))
                        if row + ROWS > size:
                            x = part.load(layout)
                            part.store(gl.where((row + place < size)[:, None], x, gl.zeros_like(x)))
                    if (gl.sum(gl.sum(sizes, 1), 0) < float("inf")) == 0:
                        found = 1
                        for i in range(PARTS):
                            part = parts.index(stage * PARTS + i)
                            x = part.load(layout)
                            part.store(gl.where(gl.abs(x.to(gl.float32)) < float("inf"), x, gl.zeros_like(x)))
                    single: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
                    strange.index(stage).store(gl.full([1], found, gl.int32, single))
                    fence_async_shared()
                    mbarrier.arrive(v_ready.index(stage))
                    checked += 1
                step += 1


@gluon.jit
def _softmax(scores, top, total, multiplier):
    """(exp2[M, N], factor of earlier terms, new maximum, new sum); `top` is in units of log 2."""
    higher = gl.maximum(top, gl.max(scores, 1) * multiplier)
    shift = gl.where(higher == -float("inf"), 0.0, higher)
    p = gl.exp2(scores * multiplier - shift[:, None])
    decay = gl.exp2(top - shift)
    return p, decay, higher, total * decay + gl.sum(p, 1)


@gluon.jit
def _sweep(
    acc, p, top, total, step, turn,
    query, keys, values, k_ready, k_empty, v_ready, v_empty, turns, last, low, high, multiplier,
    MASKED: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """The state after the key blocks low, low + BLOCK_N, ... below high; MASKED: rows see keys up to last[M].

    The state's acc[M, E] lacks the previous block: its p[M, N] times its values is still to be added.
    """
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # of scores
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, wide))
    nothing = gl.full((HALF, BLOCK_N), 0.0, gl.float32, wide)
    for n in range(low, high, BLOCK_N):
        stage, before = step % STAGES, (step - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
        mbarrier.wait(turns.index(WHICH), (turn + 1 - WHICH) & 1)
        block = keys.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
        scores = warpgroup_mma(query, block, nothing, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, values.index(before).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH))
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage))
        if MASKED:
            scores = gl.where(key[None, :] <= (last - n)[:, None], scores, -float("inf"))
        exponentials, decay, top, total = _softmax(scores, top, total, multiplier)
        mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, layout))[:, None]
        p = gl.convert_layout(exponentials.to(p.dtype), gl.DotOperandLayout(0, layout, 2))
        step += 1
        turn += 1
    return acc, p, top, total, step, turn


@gluon.jit
def _attend(
    queries, keys, values, strange, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns, v, out, lse,
    tiles, branches, prefix_start, prefix_len, rows, items, kv_heads, capacity, v_row, v_head, multiplier,
    OWN: gl.constexpr, REPEAT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OFFSETS: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One half of each tile's rows."""
    HALF: gl.constexpr = BLOCK_M // 2
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # of scores
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    along: gl.constexpr = gl.SliceLayout(1, wide)
    place = WHICH * HALF + gl.arange(0, HALF, along)
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, wide))
    step, turn, tile_turn = 0, 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        kv_head = item % kv_heads
        tile = _tile(tiles, prefix_start, prefix_len, item, kv_heads, capacity, OWN, REPEAT, BLOCK_M, OFFSETS, COLUMNS)
        group, first_row, _, group_end, fits, _, _, prefix, low, high = tile
        if group == -2:
            first_row, group_end = item // kv_heads * BLOCK_M // REPEAT, rows
        row = first_row + place // REPEAT
        acc = gl.full((HALF, HEAD_DIM), 0.0, gl.float32, layout)
        top = gl.full((HALF,), -float("inf"), gl.float32, along)
        total = gl.full((HALF,), 0.0, gl.float32, along)
        if low <= high:
            query = queries.index(WHICH).reshape([HALF, HEAD_DIM])
            mbarrier.wait(q_ready, tile_turn & 1)
            tile_turn += 1
            begin, size, whole = _stretch(branches, low, tile, BLOCK_N)
            stage = step % STAGES
            mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
            block = keys.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
            nothing = gl.full((HALF, BLOCK_N), 0.0, gl.float32, wide)
            scores = warpgroup_mma(query, block, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_empty.index(stage))
            last = gl.where(low == prefix, size - 1, gl.where(row < begin + size, row - begin, -1))
            scores = gl.where(key[None, :] <= last[:, None], scores, -float("inf"))
            exponentials, _decay, top, total = _softmax(scores, top, total, multiplier)
            p = gl.convert_layout(exponentials.to(queries.dtype), operand)
            mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
            step += 1
            for stretch in range(low, high + 1):
                done = gl.where(stretch == low, BLOCK_N, 0)  # carried by the loop, Gluon would keep its first value
                begin, size, whole = _stretch(branches, stretch, tile, BLOCK_N)
                seen = gl.where((row >= begin) & (row < begin + size), row - begin, -1)
                last = gl.where(stretch == prefix, size - 1, seen)
                acc, p, top, total, step, turn = _sweep(
                    acc, p, top, total, step, turn, query, keys, values, k_ready, k_empty, v_ready, v_empty, turns,
                    last, done, whole, multiplier, False, HALF, BLOCK_N, HEAD_DIM, STAGES, WHICH,
                )  # fmt: skip
                acc, p, top, total, step, turn = _sweep(
                    acc, p, top, total, step, turn, query, keys, values, k_ready, k_empty, v_ready, v_empty, turns,
                    last, gl.maximum(done, whole), size, multiplier, True, HALF, BLOCK_N, HEAD_DIM, STAGES, WHICH,
                )  # fmt: skip
            mbarrier.arrive(q_empty)
            stage = (step - 1) % STAGES
            acc = warpgroup_mma(p, values.index(stage).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            found = 0
            if OWN:
                found = gl.max(strange.index(stage).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
            mbarrier.arrive(v_empty.index(stage))
            if OWN and found != 0:  # without OWN a dead branch, which Triton 3.6 does not compile
                for stretch in range(prefix + 1, high + 1):
                    begin, size, whole = _stretch(branches, stretch, tile, BLOCK_N)
                    for i in range(whole, size):
                        at = v + gl.cast(begin + i, gl.int64) * v_row + gl.cast(kv_head, gl.int64) * v_head
                        value = gl.load(at + column).to(gl.float32)
                        seeing = gl.convert_layout(row, gl.SliceLayout(1, layout))
                        seeing = (seeing >= begin + i) & (seeing < begin + size)
                        odd = seeing[:, None] & ((gl.abs(value) < float("inf")) == 0)[None, :]
                        acc = gl.where(odd, acc + value[None, :], acc)
        if group != -1:
            total = gl.where(fits & (group >= 0), total, float("nan"))
            head = gl.cast(kv_head, gl.int64) * REPEAT + place % REPEAT
            inside = row < group_end
            score = gl.where(total == 0, -float("inf"), (top + gl.log2(total)) * LN_2)
            gl.store(lse + head * rows + row, score, mask=inside)
            by_row: gl.constexpr = gl.SliceLayout(1, layout)
            place_of = gl.convert_layout((row.to(gl.int64) * (kv_heads * REPEAT) + head) * HEAD_DIM, by_row)[:, None]
            sums = gl.convert_layout(total, by_row)[:, None]
            result = gl.where(sums == 0, 0.0, acc / sums).to(queries.dtype)
            gl.store(out + place_of + column[None, :], result, mask=gl.convert_layout(inside, by_row)[:, None])


@gluon.jit(do_not_specialize=["rows", "items", "capacity"])
def _branch_attention_gluon_kernel(
    q, k, v, prefix_k, prefix_v, raw_v, out, lse, tiles, branches, prefix_start, prefix_len,
    rows, items, kv_heads, capacity, v_row, v_head, multiplier,
    OWN: gl.constexpr, REPEAT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OFFSETS: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Each program walks items, tiles of rows of one key head, with the number of programs as the stride."""
    queries = gl.allocate_shared_memory(q.dtype, [2, BLOCK_M // 2 // REPEAT, REPEAT, HEAD_DIM], q.layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, 1, HEAD_DIM], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, 1, HEAD_DIM], v.layout)
    strange = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(STAGES + stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                queries, keys, values, strange, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns,
                raw_v, out, lse, tiles, branches, prefix_start, prefix_len, rows, items, kv_heads, capacity,
                v_row, v_head, multiplier,
                OWN, REPEAT, BLOCK_M, BLOCK_N, STAGES, OFFSETS, COLUMNS, HEAD_DIM, 0,
            )),
            (_attend, (
                queries, keys, values, strange, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns,
                raw_v, out, lse, tiles, branches, prefix_start, prefix_len, rows, items, kv_heads, capacity,
                v_row, v_head, multiplier,
                OWN, REPEAT, BLOCK_M, BLOCK_N, STAGES, OFFSETS, COLUMNS, HEAD_DIM, 1,
            )),
            (_load, (
                q, k, v, prefix_k, prefix_v, queries, keys, values,
                q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                tiles, branches, prefix_start, prefix_len, items, kv_heads, capacity,
                OWN, REPEAT, BLOCK_M, BLOCK_N, STAGES, OFFSETS, COLUMNS,
            )),
            (_check, (
                values, strange, v_ready,
                tiles, branches, prefix_start, prefix_len, items, kv_heads, capacity,
                OWN, REPEAT, BLOCK_M, BLOCK_N, STAGES, OFFSETS, COLUMNS, HEAD_DIM,
            )),
        ],
        [4, 1, 2],
        [ATTENDING_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Indices,
    multiplier: float,
) -> None:
    """Write out[T, Hq, E] and lse[Hq, T].

    Args:
        q: [T, Hq, E].
        k: [T, Hkv, E] or None.
        v: likewise.
        prefix_k: [Tp, Hkv, E].
        prefix_v: likewise.
        out: of q's shape, dense.
        lse: [Hq, T] float32, dense.
        indices: of the layout, as in `BranchLayout`.
        multiplier: of scores, for exp2.
    """
    (rows, heads, width), (capacity, kv_heads, _) = q.shape, prefix_k.shape
    repeat, own = heads // kv_heads, k is not None
    launch = tuning.branch_attention_gluon(q.dtype, width, repeat)
    if launch["STAGES"] < 2:  # a block's values are held until the next block's have come
        raise ValueError(
            f"branch_attention: expected 2 stages or more, got {launch['STAGES']}; delete the device's file and tune "
            "anew"
        )
    tiles, branches, _ = triton_layout.tables(indices, rows, repeat, launch["BLOCK_M"])
    if k is None or v is None:  # never read
        k, v = prefix_k, prefix_v
    elif not capacity:  # likewise
        prefix_k, prefix_v = k, v
    items, half, block = len(tiles) * kv_heads, launch["BLOCK_M"] // 2 // repeat, launch["BLOCK_N"]
    _branch_attention_gluon_kernel[(min(items, tuning.processors()),)](
        _tiles(q, half, repeat), *(_tiles(x, block, 1) for x in (k, v, prefix_k, prefix_v)), v, out, lse,
        tiles, branches, indices[2].contiguous(), indices[3].contiguous(), rows, items, kv_heads, capacity,
        *v.stride()[:2], multiplier,
        OWN=own, REPEAT=repeat, OFFSETS=OFFSETS, COLUMNS=COLUMNS, HEAD_DIM=width, **launch, num_warps=4,
    )  # fmt: skip


def _tiles(x: Tensor, rows: int, heads: int) -> TensorDescriptor:
    """x[T, H, E] as the TMA copies see it: in tiles of so many rows and heads, and zero past its ends."""
    block = [rows, heads, x.shape[2]]
    shared = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, shared)
