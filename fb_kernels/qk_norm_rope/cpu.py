"""The compiled kernel of `qk_norm_rope` for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fb_kernels._runtime import cpu
from fb_kernels.qk_norm_rope import reference
from fb_kernels.qk_norm_rope.arguments import QkNormRope, QkNormRopeOut

TAKES = "float32 and bfloat16, caches of the same, tables of the same or float32"
CACHES = ("k_cache", "k_slot", "k_head", "v_cache", "v_slot", "v_head", "size", "slots", "wide_slots")
NO_CACHES = dict.fromkeys(CACHES, 0)


def qk_norm_rope_out(call: QkNormRopeOut) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope`, with k and v also written to their slots of the caches."""
    projection, k_cache, v_cache, slots = call
    (k_slot, k_head, k_step), (v_slot, v_head, v_step) = k_cache.stride(), v_cache.stride()
    dtype = projection.qkv.dtype
    if not (k_cache.dtype is v_cache.dtype is dtype and k_step == v_step == 1 and slots.is_contiguous()):
        return NotImplemented
    caches = {
        "k_cache": k_cache.data_ptr(), "k_slot": k_slot, "k_head": k_head, "v_cache": v_cache.data_ptr(),
        "v_slot": v_slot, "v_head": v_head, "size": len(k_cache), "slots": slots.data_ptr(),
        "wide_slots": slots.dtype is torch.int64,
    }  # fmt: skip
    if (made := qk_norm_rope(projection, caches)) is NotImplemented:
        reference.check_slots(slots, len(k_cache))
    return made


def qk_norm_rope(call: QkNormRope, caches: Mapping[str, int] = NO_CACHES) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), normed where a weight is given, q and k rotated; `caches` are arguments of the library's function."""
    qkv, q_weight, k_weight, cos, sin, positions, heads, kv_heads, eps = call
    library, dtype = cpu.library(), qkv.dtype
    rows, columns = qkv.shape
    length, width = cos.shape
    if isinstance(library, str) or dtype not in cpu.STEP or not rows * columns:
        return NotImplemented
    if not (cos.dtype in (dtype, torch.float32) and cos.is_contiguous() and sin.is_contiguous()):
        return NotImplemented
    stride, step = qkv.stride()
    if step != 1 or not positions.is_contiguous():
        return NotImplemented
    q_at, k_at = cpu.address(q_weight, dtype), cpu.address(k_weight, dtype)
    if q_at < 0 or k_at < 0:
        return NotImplemented
    q, k = qkv.new_empty(rows, heads, width), qkv.new_empty(rows, kv_heads, width)
    v = qkv.new_empty(rows, call.heads[2], width)
    code = library.fbcpu_qk_norm_rope(
        qkv=qkv.data_ptr(), qkv_stride=stride, q_weight=q_at, k_weight=k_at, cos=cos.data_ptr(), sin=sin.data_ptr(),
        wide_tables=cos.dtype is torch.float32, length=length, positions=positions.data_ptr(),
        wide_positions=positions.dtype is torch.int64, q=q.data_ptr(), k=k.data_ptr(),
        v=v.data_ptr() if v.numel() else 0, **caches, rows=rows, heads=heads, kv_heads=kv_heads,
        width=width, eps=eps, threads=cpu.threads(cpu.ELEMENT * rows * columns), narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    if code:
        reference.check_positions(positions, length)
        return NotImplemented
    return q, k, v
