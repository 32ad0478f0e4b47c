"""`branch_attention_qkv` from the kernels of its parts, used if there is no compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels.branch_attention.triton import branch_attention
from fb_kernels.branch_attention_qkv.reference import kept, layout, sound_slots
from fb_kernels.qk_norm_rope.triton import qk_norm_rope, qk_norm_rope_out


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
    """[N, Hq, E]."""
    if torch.float64 in (qkv.dtype, cos.dtype):
        return NotImplemented
    inputs, options = (qkv, q_weight, k_weight, cos, sin, positions), (num_heads, num_kv_heads, eps)
    sound, slots = sound_slots(cos, positions, k_cache, held, slots, block_table, window)
    q, k, v = kept(qk_norm_rope, qk_norm_rope_out, inputs, k_cache, v_cache, slots, options)
    indices = layout(qkv, held, block_table, window)
    state = branch_attention(q, k, v, k_cache, v_cache, *indices, 1, None, None, scale, None)
    if state is NotImplemented:
        return NotImplemented
    return state[0].masked_fill_(~sound[:, None, None], torch.nan)
