"""The compiled kernel of `branch_attention_qkv` for CPU tensors: float32, bfloat16, a few rows over a short cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels import cpu
from fb_kernels.branch_attention_qkv.reference import check_sequences
from fb_kernels.qk_norm_rope.reference import check_positions

ROWS, KEYS = 32, 1 << 14  # the most, and of rows times keys: torch.bmm reads them once for all rows


def branch_attention_qkv(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    slots: Tensor | None,
    block_table: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    window: int | None,
    scale: float,
) -> Tensor:
    """[N, Hq, E] of branches of one token: norm, rotation, attention; keys and values go to their slots."""
    if block_table is not None:
        return NotImplemented
    found, dtype = cpu.library(), qkv.dtype
    rows, width = qkv.shape[0], cos.shape[1]
    if isinstance(found, str) or not 0 < rows <= ROWS or not width:
        return NotImplemented
    if dtype not in cpu.STEP or not (
        k_cache.dtype is v_cache.dtype is dtype and cos.dtype is sin.dtype is torch.float32
    ):
        return NotImplemented
    (k_slot, k_head, k_step), (v_slot, v_head, v_step) = k_cache.stride(), v_cache.stride()
    qkv_stride, qkv_step = qkv.stride()
    if not (qkv_step == k_step == v_step == 1 and cos.is_contiguous() and sin.is_contiguous()):
        return NotImplemented
    q_at = k_at = slots_at = wide_slots = 0
    if q_weight is not None:
        if q_weight.dtype is not dtype or not q_weight.is_contiguous():
            return NotImplemented
        q_at = q_weight.data_ptr()
    if k_weight is not None:
        if k_weight.dtype is not dtype or not k_weight.is_contiguous():
            return NotImplemented
        k_at = k_weight.data_ptr()
    if not positions.is_contiguous() or not (slots is None or slots.is_contiguous()):
        return NotImplemented
    first, length, _ = check_sequences(k_cache, held, slots, block_table, window)[0]
    if rows * (length - first) * min(2, torch.get_num_threads()) > KEYS:
        return NotImplemented
    if slots is not None:
        slots_at, wide_slots = slots.data_ptr(), slots.dtype is torch.int64
    check_positions(positions, cos.shape[0], "branch_attention_qkv")
    out = qkv.new_empty((rows, num_heads, width))
    code = found.fbcpu_branch_attention_qkv(
        qkv.data_ptr(), qkv_stride, q_at, k_at, cos.data_ptr(), sin.data_ptr(),
        positions.data_ptr(), positions.dtype is torch.int64, k_cache.data_ptr(), k_slot, k_head,
        v_cache.data_ptr(), v_slot, v_head, first, length, slots_at, wide_slots,
        out.data_ptr(), rows, num_heads, num_kv_heads, width, eps, scale, dtype is torch.bfloat16,
    )  # fmt: skip
    return NotImplemented if code else out
