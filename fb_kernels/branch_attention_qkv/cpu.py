"""The compiled kernel of `branch_attention_qkv` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu, precision
from fb_kernels.branch_attention_qkv.arguments import BranchAttentionQkv, CachedSequences
from fb_kernels.branch_attention_qkv.reference import check_sequences

ROWS = 32  # maximum rows of a sequence
TAKES = f"float32 and bfloat16, up to {ROWS} rows of each sequence"


def branch_attention_qkv(call: BranchAttentionQkv) -> Tensor:
    """[N, Hq, E] of branches of one token: norm, rotation, attention; keys and values go to their slots."""
    qkv, q_weight, k_weight, sequences, num_heads, num_kv_heads, eps, window, scale = call
    library, dtype = cpu.library(), qkv.dtype
    rows, groups, width = qkv.shape[0], sequences.held.shape[0], sequences.cos.shape[1]
    if isinstance(library, str) or not 0 < rows <= ROWS * groups or not width:
        return NotImplemented
    if dtype not in cpu.STEP or not sequences.k_cache.dtype is sequences.v_cache.dtype is dtype:
        return NotImplemented
    where = sequence_arguments(sequences)
    qkv_stride, qkv_step = qkv.stride()
    q_at, k_at = cpu.address(q_weight, dtype), cpu.address(k_weight, dtype)
    if where is None or qkv_step != 1 or q_at < 0 or k_at < 0:
        return NotImplemented
    out = qkv.new_empty((rows, num_heads, width))
    code = library.fbcpu_branch_attention_qkv(
        qkv=qkv.data_ptr(), qkv_stride=qkv_stride, q_weight=q_at, k_weight=k_at, **where, out=out.data_ptr(),
        each=rows // groups, window=window or 0, heads=num_heads, kv_heads=num_kv_heads, width=width, eps=eps,
        scale=scale, threads=torch.get_num_threads(), narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    if code:
        check_sequences(sequences, window)
        return NotImplemented
    return out


def sequence_arguments(sequences: CachedSequences) -> dict[str, int] | None:
    """Addresses, strides and sizes as the library takes them; None for what it does not take."""
    cos, sin, positions, k_cache, v_cache, held, slots, block_table = sequences
    if not (cos.dtype is sin.dtype is torch.float32 and cos.is_contiguous() and sin.is_contiguous()):
        return None
    if block_table is None:
        (k_slot, k_head, k_step), (v_slot, v_head, v_step) = k_cache.stride(), v_cache.stride()
        k_page, v_page, pages, page = 0, 0, 1, k_cache.shape[0]
        table_at = wide_table = table_row = table_width = 0
    else:
        (k_page, k_slot, k_head, k_step), (v_page, v_slot, v_head, v_step) = k_cache.stride(), v_cache.stride()
        pages, page = k_cache.shape[:2]
        (table_row, column), table_width = block_table.stride(), block_table.shape[1]
        if column != 1 and table_width > 1:
            return None
        table_at, wide_table = block_table.data_ptr(), block_table.dtype is torch.int64
    if not (k_step == v_step == 1 and held.is_contiguous() and positions.is_contiguous()):
        return None
    slots_at = wide_slots = 0
    if slots is not None:
        if not slots.is_contiguous():
            return None
        slots_at, wide_slots = slots.data_ptr(), slots.dtype is torch.int64
    return {
        "cos": cos.data_ptr(), "sin": sin.data_ptr(), "length": cos.shape[0], "positions": positions.data_ptr(),
        "wide_positions": positions.dtype is torch.int64, "sequences": held.shape[0],
        "k_cache": k_cache.data_ptr(), "k_page": k_page, "k_slot": k_slot, "k_head": k_head,
        "v_cache": v_cache.data_ptr(), "v_page": v_page, "v_slot": v_slot, "v_head": v_head, "pages": pages,
        "page": page, "held": held.data_ptr(), "wide_held": held.dtype is torch.int64, "table": table_at,
        "wide_table": wide_table, "table_row": table_row, "table_width": table_width, "slots": slots_at,
        "wide_slots": wide_slots, "whole": precision.batch_invariant(),
    }  # fmt: skip
