"""`decoder_layer` from the ops that it consists of: plain PyTorch on the CPU, their usual implementations elsewhere."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fb_kernels.branch_attention_qkv import branch_attention_qkv
from fb_kernels.branch_attention_qkv import reference as plain_attention
from fb_kernels.skinny_linear import reference as plain_linear
from fb_kernels.skinny_linear import skinny_linear


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
    """[N, D]."""
    plain = hidden.is_cpu
    if plain and plain_attention._host_reads(hidden):
        indices = (cos, positions, k_cache, held, slots, block_table, window)
        plain_attention.check_sequences(*indices, "decoder_layer")
    attend = plain_attention.branch_attention_qkv if plain else branch_attention_qkv
    linear = plain_linear.skinny_linear if plain else skinny_linear
    project = partial(linear, norm_weight=None, eps=eps, residual=None, swiglu=False, frozen=True)
    attended = attend(
        project(hidden, qkv, qkv_bias, norm_weight=input_norm),
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        k_cache,
        v_cache,
        held,
        slots,
        block_table=block_table,
        num_heads=o.shape[1] // cos.shape[1],
        num_kv_heads=k_cache.shape[-2],
        eps=eps,
        window=window,
        scale=scale,
    )
    hidden = project(attended.flatten(1), o, o_bias, residual=hidden)
    gated = project(hidden, gate_up, gate_up_bias, norm_weight=post_norm, swiglu=True)
    return project(gated, down, down_bias, residual=hidden)
