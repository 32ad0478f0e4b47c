"""`decoder_layer` from the ops that it consists of: plain PyTorch on the CPU, their usual implementations elsewhere."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fb_kernels.branch_attention_qkv import branch_attention_qkv
from fb_kernels.branch_attention_qkv import reference as plain_attention
from fb_kernels.branch_attention_qkv.arguments import BranchAttentionQkv
from fb_kernels.decoder_layer.arguments import DecoderLayer
from fb_kernels.skinny_linear import reference as plain_linear
from fb_kernels.skinny_linear import skinny_linear


def decoder_layer(given: DecoderLayer) -> Tensor:
    """[N, D]."""
    hidden, weights, sequences, eps, window, scale = given
    plain = plain_attention._host_reads(hidden)
    if plain:
        plain_attention.check_sequences(sequences, window, "decoder_layer")
    linear = plain_linear.skinny_linear if plain else skinny_linear
    project = partial(linear, norm_weight=None, eps=eps, residual=None, swiglu=False, frozen=True)
    qkv = project(hidden, weights.qkv, weights.qkv_bias, norm_weight=weights.input_norm)
    heads, kv_heads = weights.o.shape[1] // sequences.cos.shape[1], sequences.k_cache.shape[-2]
    call = BranchAttentionQkv(qkv, weights.q_norm, weights.k_norm, sequences, heads, kv_heads, eps, window, scale)
    named = call._asdict()
    own = named.pop("sequences")._asdict()
    attended = plain_attention.branch_attention_qkv(call) if plain else branch_attention_qkv(**named, **own)
    hidden = project(attended.flatten(1), weights.o, weights.o_bias, residual=hidden)
    gated = project(hidden, weights.gate_up, weights.gate_up_bias, norm_weight=weights.post_norm, swiglu=True)
    return project(gated, weights.down, weights.down_bias, residual=hidden)
