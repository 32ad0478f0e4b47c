"""The compiled kernel of `qk_norm_rope` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu
from fb_kernels.qk_norm_rope import reference

SIZE = 1 << 17  # maximum elements of qkv: above it torch's threads are faster
TAKES = f"float32, up to {SIZE:,} elements"
NOT_WRITTEN = dict.fromkeys(("k_cache", "k_slot", "k_head", "v_cache", "v_slot", "v_head", "slots", "wide_slots"), 0)


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), normed where a weight is given, q and k rotated."""
    return _launched(qkv, q_weight, k_weight, cos, sin, positions, NOT_WRITTEN, num_heads, num_kv_heads, eps)


def qk_norm_rope_out(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope`, with k and v also written to their slots of the caches."""
    (k_slot, k_head, k_step), (v_slot, v_head, v_step) = k_cache.stride(), v_cache.stride()
    if not (k_cache.dtype is v_cache.dtype is torch.float32 and k_step == v_step == 1 and slots.is_contiguous()):
        return NotImplemented
    if reference.check_slots(slots, k_cache.shape[0]) is None:
        return NotImplemented
    written = {
        "k_cache": k_cache.data_ptr(), "k_slot": k_slot, "k_head": k_head, "v_cache": v_cache.data_ptr(),
        "v_slot": v_slot, "v_head": v_head, "slots": slots.data_ptr(), "wide_slots": slots.dtype is torch.int64,
    }  # fmt: skip
    return _launched(qkv, q_weight, k_weight, cos, sin, positions, written, num_heads, num_kv_heads, eps)


def _launched(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    written: dict[str, int],
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    library, float32 = cpu.library(), torch.float32
    rows, columns = qkv.shape
    length, width = cos.shape
    if isinstance(library, str) or not 0 < rows * columns <= SIZE:
        return NotImplemented
    if not (qkv.dtype is cos.dtype is sin.dtype is float32 and cos.is_contiguous() and sin.is_contiguous()):
        return NotImplemented
    stride, step = qkv.stride()
    if step != 1 or not positions.is_contiguous():
        return NotImplemented
    q_at = k_at = 0
    if q_weight is not None:
        if q_weight.dtype is not float32 or not q_weight.is_contiguous():
            return NotImplemented
        q_at = q_weight.data_ptr()
    if k_weight is not None:
        if k_weight.dtype is not float32 or not k_weight.is_contiguous():
            return NotImplemented
        k_at = k_weight.data_ptr()
    q, k = qkv.new_empty(rows, heads, width), qkv.new_empty(rows, kv_heads, width)
    v = torch.empty_like(k)
    code = library.fbcpu_qk_norm_rope(
        qkv=qkv.data_ptr(), qkv_stride=stride, q_weight=q_at, k_weight=k_at, cos=cos.data_ptr(), sin=sin.data_ptr(),
        length=length, positions=positions.data_ptr(), wide_positions=positions.dtype is torch.int64, q=q.data_ptr(),
        k=k.data_ptr(), v=v.data_ptr(), **written, rows=rows, heads=heads, kv_heads=kv_heads, width=width, eps=eps,
    )  # fmt: skip
    if code:
        reference.check_positions(positions, length)
        return NotImplemented
    return q, k, v
