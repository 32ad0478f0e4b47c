"""What `branch_attention_qkv` means: `qk_norm_rope`, then `branch_attention` of one-token branches over one cache."""

import torch
from torch import Tensor

from fb_kernels.branch_attention.naive import branch_attention
from fb_kernels.qk_norm_rope.naive import qk_norm_rope


def branch_attention_qkv(
    qkv: Tensor,  # [N, (Hq + 2 Hkv) E]
    q_weight: Tensor | None,  # [E]
    k_weight: Tensor | None,
    cos: Tensor,  # [S, E]
    sin: Tensor,
    positions: Tensor,  # [N]
    k_cache: Tensor,  # [slots, Hkv, E]
    v_cache: Tensor,
    held: Tensor,  # [1]
    slots: Tensor | None = None,  # [N]
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """[N, Hq, E]: every row sees k_cache[:held] and itself; its k and v go to its slot of the caches."""
    kv_out = None if slots is None else (k_cache, v_cache, slots)
    q, k, v = qk_norm_rope(
        *(qkv, q_weight, k_weight, cos, sin, positions),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        eps=eps,
        kv_out=kv_out,
    )
    out, _ = branch_attention(
        *(q, k, v, k_cache, v_cache),
        cu_branch=torch.arange(len(q) + 1),
        cu_group=torch.tensor([0, len(q)]),
        prefix_start=torch.zeros_like(held),
        prefix_len=held,
        window=window,
        scale=scale,
    )
    return out
