"""What `decoder_layer` means: the sublayers of a Llama-like layer, one after the other."""

from torch import Tensor

from fb_kernels.branch_attention_qkv.naive import branch_attention_qkv
from fb_kernels.skinny_linear.naive import skinny_linear


def decoder_layer(  # type: ignore[no-untyped-def]
    hidden: Tensor,  # [N, D]
    weights,  # LayerWeights
    cos: Tensor,  # [S, E]
    sin: Tensor,
    positions: Tensor,  # [N]
    k_cache: Tensor,  # [slots, Hkv, E], or pages [pages, page, Hkv, E]
    v_cache: Tensor,
    held: Tensor,  # [G]
    slots: Tensor | None = None,  # [N]
    *,
    block_table: Tensor | None = None,  # [G, n]
    eps: float = 1e-6,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """[N, D]: hidden + attention, then that + MLP, each of the normed stream."""
    w = weights
    width = cos.shape[1]
    attended = branch_attention_qkv(
        skinny_linear(hidden, w.qkv, w.qkv_bias, norm_weight=w.input_norm, eps=eps),
        *(w.q_norm, w.k_norm, cos, sin, positions, k_cache, v_cache, held, slots),
        block_table=block_table,
        num_heads=w.o.shape[1] // width,
        num_kv_heads=k_cache.shape[-2],
        eps=eps,
        window=window,
        scale=scale,
    )
    hidden = skinny_linear(attended.flatten(1), w.o, w.o_bias, residual=hidden)
    gated = skinny_linear(hidden, w.gate_up, w.gate_up_bias, norm_weight=w.post_norm, eps=eps, swiglu=True)
    return skinny_linear(gated, w.down, w.down_bias, residual=hidden)
