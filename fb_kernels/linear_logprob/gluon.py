"""Hopper's kernel of `linear_logprob`: persistent, one warp that loads, two warpgroups that multiply and reduce.

It writes the same statistics as the Triton kernels, one per split of the vocabulary, and uses their merge. Splits
depend only on the vocabulary, so a row's bits depend neither on other rows nor on the GPU's size.
"""

from __future__ import annotations

import torch
import triton
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
from fb_kernels.linear_logprob.options import Options
from fb_kernels.triton import functions
from fb_kernels.triton.functions import FAR_BELOW, LOG2_E

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
PRODUCER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(24), gl.constexpr(240)  # of a thread

tanh, shift_of = gluon.jit(functions.tanh.fn), gluon.jit(functions.shift_of.fn)


@gluon.jit
def _place(item, row_blocks, splits, GROUP: gl.constexpr):
    """(block of rows, split) of an item: GROUP blocks of rows, which stay in the L2 cache, meet all splits in turn."""
    group = item // (GROUP * splits)
    blocks = gl.minimum(row_blocks - group * GROUP, GROUP)
    inside = item % (GROUP * splits)
    return group * GROUP + inside % blocks, inside // blocks


@gluon.jit
def _produce(
    hidden, weight, x, w, ready, empty, items, row_blocks, splits, tiles, width,
    TILES: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Fill a stage with BLOCK_K columns of both halves' rows and of a tile of the head as soon as both have read it."""
    HALF: gl.constexpr = BLOCK_M // 2
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row_block, split = _place(item, row_blocks, splits, GROUP)
        first_row = row_block * BLOCK_M
        for tile in range(split * TILES, gl.minimum((split + 1) * TILES, tiles)):
            for k in range(0, width, BLOCK_K):
                stage = step % STAGES
                for half in gl.static_range(2):
                    mbarrier.wait(empty.index(half * STAGES + stage), (step // STAGES + 1) & 1)
                landed = ready.index(stage)
                mbarrier.expect(landed, 2 * hidden.block_type.nbytes + weight.block_type.nbytes)
                tma.async_copy_global_to_shared(hidden, [first_row, k], landed, x.index(2 * stage))
                tma.async_copy_global_to_shared(hidden, [first_row + HALF, k], landed, x.index(2 * stage + 1))
                tma.async_copy_global_to_shared(weight, [tile * BLOCK_V, k], landed, w.index(stage))
                step += 1


@gluon.jit
def _consume(
    x, w, ready, empty, bias, target, statistics, picked, items, row_blocks, splits, tiles, rows, width, valid,
    vocab_start, on_products, on_bias, on_cap, SCALED: gl.constexpr, SOFTCAP: gl.constexpr,
    TILES: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One half of the rows: maximum, sum of exp and sum of (l - max) exp of a split, and the target's logit in it."""
    HALF: gl.constexpr = BLOCK_M // 2
    LEAD: gl.constexpr = STAGES // 2  # blocks by which the first half leads: one reduces while the other multiplies
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_V, 16]
    )
    along: gl.constexpr = gl.SliceLayout(1, layout)
    columns = gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    logits = gl.full((HALF, BLOCK_V), 0.0, gl.float32, layout)  # a tile's first product starts from zero
    step = 0
    if WHICH == 1:
        mbarrier.wait(empty.index(gl.minimum(LEAD, (width + BLOCK_K - 1) // BLOCK_K) - 1), 0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row_block, split = _place(item, row_blocks, splits, GROUP)
        row = gl.cast(row_block, gl.int64) * BLOCK_M + WHICH * HALF + gl.arange(0, HALF, along)
        in_row = row < rows
        first_tile = split * TILES
        local = gl.load(target + row, mask=in_row, other=0).to(gl.int64) - vocab_start
        local -= gl.cast(first_tile, gl.int64) * BLOCK_V
        found = in_row & (local >= 0) & (local < TILES * BLOCK_V)
        column = gl.where(found, local, TILES * BLOCK_V).to(gl.int32)
        holder = column // BLOCK_V
        holding = gl.reduce_or(gl.where(found, 1 << holder, 0), 0)  # a bit for each tile with a target
        top = gl.full((HALF,), -float("inf"), gl.float32, along)
        total = gl.full((HALF,), 0.0, gl.float32, along)
        weighted = gl.full((HALF,), 0.0, gl.float32, along)
        for tile in range(first_tile, gl.minimum(first_tile + TILES, tiles)):
            for k in range(0, width, BLOCK_K):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                logits = warpgroup_mma(
                    x.index(2 * stage + WHICH), w.index(stage).permute((1, 0)), logits, use_acc=k > 0, is_async=True
                )
                logits = warpgroup_mma_wait(1, deps=(logits,))  # the previous product is done and its stage free
                mbarrier.arrive(empty.index(WHICH * STAGES + (step + STAGES - 1) % STAGES), pred=k > 0)
                step += 1
            logits = warpgroup_mma_wait(0, deps=(logits,))
            mbarrier.arrive(empty.index(WHICH * STAGES + (step + STAGES - 1) % STAGES))
            first_column = tile * BLOCK_V
            if SCALED:
                logits = logits * on_products
            if bias is not None:
                inside = gl.minimum(columns, valid - first_column - 1)
                offset = gl.load(bias + gl.cast(first_column, gl.int64) + inside)
                logits += (offset.to(gl.float32) * on_bias)[None, :]
            if SOFTCAP:
                logits = tanh(logits) * on_cap
            if (holding >> (tile - first_tile)) & 1:
                here = (column - (tile - first_tile) * BLOCK_V)[:, None] == columns[None, :]
                target_logit = gl.sum(gl.where(here, logits, 0.0), 1)
                gl.store(picked + row, target_logit, mask=holder == tile - first_tile)
            if first_column + BLOCK_V > valid:
                logits = gl.where((columns < valid - first_column)[None, :], logits, -float("inf"))
            higher = gl.maximum(top, gl.max(logits, 1))
            shift = shift_of(higher)
            fallen = logits - shift[:, None]
            exponentials = gl.exp2(fallen * LOG2_E)
            fall = gl.where(top == -float("inf"), 0.0, gl.maximum(shift_of(top) - shift, FAR_BELOW))
            kept = gl.exp2(fall * LOG2_E)
            weighted = (weighted + total * fall) * kept + gl.sum(gl.maximum(fallen, FAR_BELOW) * exponentials, 1)
            total = total * kept + gl.sum(exponentials, 1)
            top = higher
        top = gl.where(total == total, top, float("nan"))
        place = statistics + gl.cast(split, gl.int64) * rows + row
        plane = gl.cast(splits, gl.int64) * rows
        gl.store(place, top, mask=in_row)
        gl.store(place + plane, total, mask=in_row)
        gl.store(place + 2 * plane, weighted, mask=in_row)


@gluon.jit(do_not_specialize=["items", "row_blocks", "splits", "tiles", "rows", "width", "valid", "vocab_start"])
def _linear_logprob_gluon_kernel(
    hidden, weight, bias, target, statistics, picked, items, row_blocks, splits, tiles, rows, width, valid, vocab_start,
    on_products, on_bias, on_cap, SCALED: gl.constexpr, SOFTCAP: gl.constexpr,
    TILES: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Each program walks items (TILES tiles of the vocabulary against BLOCK_M rows), one per round of all programs."""
    HALF: gl.constexpr = BLOCK_M // 2
    x = gl.allocate_shared_memory(hidden.dtype, [2 * STAGES, HALF, BLOCK_K], hidden.layout)
    w = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_V, BLOCK_K], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # of each half
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
        mbarrier.init(empty.index(STAGES + stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                x, w, ready, empty, bias, target, statistics, picked, items, row_blocks, splits, tiles, rows, width,
                valid, vocab_start, on_products, on_bias, on_cap, SCALED, SOFTCAP,
                TILES, GROUP, BLOCK_M, BLOCK_V, BLOCK_K, STAGES, 0,
            )),
            (_consume, (
                x, w, ready, empty, bias, target, statistics, picked, items, row_blocks, splits, tiles, rows, width,
                valid, vocab_start, on_products, on_bias, on_cap, SCALED, SOFTCAP,
                TILES, GROUP, BLOCK_M, BLOCK_V, BLOCK_K, STAGES, 1,
            )),
            (_produce, (
                hidden, weight, x, w, ready, empty, items, row_blocks, splits, tiles, width,
                TILES, GROUP, BLOCK_M, BLOCK_V, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    picked: Tensor,
    vocab_start: int,
    options: Options,
) -> Tensor:
    """Each split's maximum, sum of exp and sum of (l - max) exp; the targets' logits go to `picked`.

    Args:
        hidden: [N, D].
        weight: [V, D], its rows that count.
        bias: [V or more] or None.
        target: [N].
        picked: [N] float32, written where the target's logit is.
        vocab_start: id of the first column.
        options: as in `linear_logprob`.

    Returns:
        [3, splits, N] float32.
    """
    (rows, width), valid = hidden.shape, len(weight)
    launch = tuning.linear_logprob_gluon(hidden.dtype, valid, width)
    if launch["STAGES"] < 2 or launch["TILES"] > 32:  # with 1 stage the ring would deadlock; 32 bits mark the tiles
        raise ValueError(
            f"linear_logprob: expected 2 stages or more and at most 32 tiles, got {launch['STAGES']} and "
            f"{launch['TILES']}; delete the device's file and tune anew"
        )
    tiles, row_blocks = triton.cdiv(valid, launch["BLOCK_V"]), triton.cdiv(rows, launch["BLOCK_M"])
    splits = triton.cdiv(tiles, launch["TILES"])
    items, (on_products, on_bias, on_cap) = splits * row_blocks, options.multipliers()
    partials = hidden.new_empty(3, splits, rows, dtype=torch.float32)
    _linear_logprob_gluon_kernel[(min(items, tuning.processors()),)](
        _tiles(hidden, launch["BLOCK_M"] // 2, launch["BLOCK_K"]), _tiles(weight, launch["BLOCK_V"], launch["BLOCK_K"]),
        bias, target, partials, picked, items, row_blocks, splits, tiles, rows, width, valid, vocab_start,
        on_products, on_bias, on_cap, SCALED=on_products != 1, SOFTCAP=options.softcap is not None, **launch,
        num_warps=4,
    )  # fmt: skip
    return partials


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x[N, D] as the TMA copies see it: in tiles, and zero past its ends."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)
