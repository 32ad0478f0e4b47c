"""What `qk_norm_rope` means: what Hugging Face's Qwen3Attention does before the attention."""

import torch
from torch import Tensor

from fb_kernels.rms_norm.naive import rms_norm


def qk_norm_rope(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) E], or [T, (Hq + Hkv) E] without v
    q_weight: Tensor | None,  # [E]
    k_weight: Tensor | None,
    cos: Tensor,  # [S, E]
    sin: Tensor,
    positions: Tensor,  # [T]
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    kv_out: tuple[Tensor, Tensor, Tensor] | None = None,  # k_cache[slots, Hkv, E], v_cache, slot[T]
) -> tuple[Tensor, Tensor, Tensor]:
    """(q[T, Hq, E], k[T, Hkv, E], v): x -> x cos + rotate_half(x) sin with rotate_half(x1, x2) = (-x2, x1)."""
    width = cos.shape[1]
    q, k, v = qkv.tensor_split([num_heads * width, (num_heads + num_kv_heads) * width], 1)
    q, k = q.reshape(len(qkv), num_heads, width), k.reshape(len(qkv), num_kv_heads, width)
    v = v.reshape(len(qkv), num_kv_heads if v.shape[1] or not width else 0, width)
    q = _rotate(q if q_weight is None else rms_norm(q, q_weight, eps)[0], cos, sin, positions)
    k = _rotate(k if k_weight is None else rms_norm(k, k_weight, eps)[0], cos, sin, positions)
    if kv_out is not None:
        k_cache, v_cache, slots = kv_out
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                k_cache[slot], v_cache[slot] = k[row], v[row]
    return q, k, v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotate_half = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[positions.long(), None] + rotate_half * sin[positions.long(), None]
