"""What `branch_attention_qkv` means: `qk_norm_rope`, then `branch_attention` of branches of one token."""

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
    k_cache: Tensor,  # [slots, Hkv, E], or pages [pages, page, Hkv, E]
    v_cache: Tensor,
    held: Tensor,  # [G]
    slots: Tensor | None = None,  # [N]
    *,
    block_table: Tensor | None = None,  # [G, n]
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """[N, Hq, E]: every row sees its sequence's held tokens and itself; its k and v go to its slot of the caches."""
    if block_table is None:  # all slots are one page
        k_cache, v_cache, block_table = (
            k_cache[None],
            v_cache[None],
            torch.zeros(1, 1, dtype=torch.long, device=qkv.device),
        )
    q, k, v = qk_norm_rope(
        *(qkv, q_weight, k_weight, cos, sin, positions), num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps
    )
    if slots is not None:
        page, used_slots = k_cache.shape[1], slots[slots >= 0].long()
        k_cache[used_slots // page, used_slots % page] = k[slots >= 0]
        v_cache[used_slots // page, used_slots % page] = v[slots >= 0]
    first = torch.zeros_like(held) if window is None else (held.long() + 1 - window).clamp(min=0)  # first key seen
    out, _ = branch_attention(
        *(q, k, v, k_cache, v_cache),
        cu_branch=torch.arange(len(q) + 1),
        cu_group=torch.arange(len(held) + 1) * (len(q) // len(held)),
        prefix_start=first,
        prefix_len=held - first,
        block_table=block_table,
        scale=scale,
    )
    return out
