"""The compiled kernel of `decoder_layer` for CPU tensors: float32 and bfloat16, a few rows."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fb_kernels import cpu
from fb_kernels.branch_attention_qkv.reference import check_sequences
from fb_kernels.qk_norm_rope.reference import check_positions

POINTERS = ctypes.c_void_p * 12


def decoder_layer(
    hidden: Tensor,
    input_norm: Tensor,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    o: Tensor,
    o_bias: Tensor | None,
    post_norm: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    slots: Tensor | None,
    block_table: Tensor | None,
    eps: float,
    window: int | None,
    scale: float,
) -> Tensor:
    """[N, D]: the whole layer in one call, on the threads of a linear layer."""
    if block_table is not None:
        return NotImplemented
    found, dtype = cpu.library(), hidden.dtype
    rows, model = hidden.shape
    attention, inner = o.shape[1], down.shape[1]
    width, kv_heads = cos.shape[1], k_cache.shape[1]
    if isinstance(found, str) or not 0 < rows <= cpu.ROWS or not (model and attention and inner):
        return NotImplemented
    if dtype not in cpu.STEP or not cos.dtype is sin.dtype is torch.float32:
        return NotImplemented
    weights = (
        input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, gate_up_bias, down, down_bias,
    )  # fmt: skip
    for weight in weights:
        if weight is not None and not weight.is_contiguous():
            return NotImplemented
    (k_slot, k_head, k_step), (v_slot, v_head, v_step) = k_cache.stride(), v_cache.stride()
    hidden_stride, hidden_step = hidden.stride()
    if not (hidden_step == k_step == v_step == 1 and cos.is_contiguous() and sin.is_contiguous()):
        return NotImplemented
    if not positions.is_contiguous() or not (slots is None or slots.is_contiguous()):
        return NotImplemented
    first, length, _ = check_sequences(k_cache, held, slots, block_table, window, "decoder_layer")[0]
    slots_at = wide_slots = 0
    if slots is not None:
        slots_at, wide_slots = slots.data_ptr(), slots.dtype is torch.int64
    check_positions(positions, cos.shape[0], "decoder_layer")
    out = hidden.new_empty(rows, model)
    code = found.fbcpu_decoder_layer(
        hidden.data_ptr(), hidden_stride, POINTERS(*[None if x is None else x.data_ptr() for x in weights]),
        cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), positions.dtype is torch.int64,
        k_cache.data_ptr(), k_slot, k_head, v_cache.data_ptr(), v_slot, v_head, first, length, slots_at, wide_slots,
        out.data_ptr(), rows, model, inner, attention // width, kv_heads, width, eps, scale,
        cpu.threads(rows * 2 * inner * model), dtype is torch.bfloat16,
    )  # fmt: skip
    return NotImplemented if code else out
