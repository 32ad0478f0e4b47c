"""`branch_attention_qkv` in plain PyTorch, on any device: all of a decode step in few operations."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels import checks
from fb_kernels.branch_attention.reference import _fold, _unfold, branch_attention
from fb_kernels.precision import accumulation_dtype
from fb_kernels.qk_norm_rope.reference import qk_norm_rope, qk_norm_rope_out

OP = "branch_attention_qkv"


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
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    window: int | None,
    scale: float,
) -> Tensor:
    """[N, Hq, E]."""
    inputs = (qkv, q_weight, k_weight, cos, sin, positions)
    options = (num_heads, num_kv_heads, eps, OP)
    if not qkv.shape[0]:
        return qkv.new_empty(0, num_heads, cos.shape[1])
    if _host_reads(qkv):
        return _on_host(inputs, k_cache, v_cache, held, slots, options, window, scale)
    sound, slots = sound_slots(cos, positions, k_cache, held, slots)
    if slots is None:
        q, k, v = qk_norm_rope(*inputs, *options)
    else:
        q, k, v = qk_norm_rope_out(*inputs, k_cache, v_cache, slots, *options)
    out = branch_attention(q, k, v, k_cache, v_cache, *layout(qkv, held), None, 1, None, window, scale, None)[0]
    return out.masked_fill(~sound[:, None, None], torch.nan)


def _host_reads(x: Tensor) -> bool:
    return x.device.type == "cpu"


def sound_slots(
    cos: Tensor, positions: Tensor, k_cache: Tensor, held: Tensor, slots: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(rows whose position, held and slot are in range [N], slots with -1 for the others); the host never looks."""
    size, length = k_cache.shape[0], held[0]
    sound = (length >= 0) & (length <= size) & (positions >= 0) & (positions < cos.shape[0])
    if slots is None:
        return sound, None
    sound = sound & ((slots < 0) | (slots >= length) & (slots < size))
    return sound, slots.where(sound, -1)


def layout(qkv: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(cu_branch, cu_group, prefix_start, prefix_len): every row a branch of one group over the cache's beginning."""
    rows = torch.arange(qkv.shape[0] + 1, dtype=torch.int32, device=qkv.device)
    groups = torch.arange(2, dtype=torch.int32, device=qkv.device) * qkv.shape[0]
    return rows, groups, torch.zeros_like(held), held


def check_held(k_cache: Tensor, held: Tensor, slots: Tensor | None, op: str = OP) -> tuple[int, list[int]]:
    """(held, slots) as the host's numbers, held within the cache and no slot below it (CPU only)."""
    length, size = int(held), k_cache.shape[0]
    if not 0 <= length <= size:
        raise checks.error(op, "held", f"0 to {size}, the caches' rows", length, "count the sequence's tokens")
    kept: list[int] = [] if slots is None else slots.tolist()
    for slot in kept:
        if 0 <= slot < length:
            least = min(filter(lambda s: s >= 0, kept))
            raise checks.error(op, "slots", f"slots from {length} on", least, "keep what is held")
    return length, kept


def _on_host(
    inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    slots: Tensor | None,
    options: tuple[int, int, float, str],
    window: int | None,
    scale: float,
) -> Tensor:
    length, kept = check_held(k_cache, held, slots)
    qkv = inputs[0]
    if slots is None:
        q, k, v = qk_norm_rope(*inputs, *options)
    else:
        q, k, v = qk_norm_rope_out(*inputs, k_cache, v_cache, slots, *options)
    alone = kept == [length]  # the row's own key lies behind those it sees
    first = 0 if window is None else max(0, length + 1 - window)
    dtype = accumulation_dtype(qkv.dtype)
    keys, values = (x[first : length + alone].to(dtype) for x in (k_cache, v_cache))
    rows, kv_heads = len(q), options[1]
    query = q * scale if q.dtype == dtype else q.to(dtype).mul_(scale)
    query = query.view(kv_heads, -1, q.shape[2]) if rows == 1 else _fold(query, kv_heads)  # [Hkv, rep N, E]
    scores = torch.bmm(query, keys.permute(1, 2, 0))
    if alone:
        out = torch.bmm(scores.softmax(-1), values.transpose(0, 1))
    else:
        own_k, own_v = (x.to(dtype).transpose(0, 1).repeat(1, q.shape[1] // kv_heads, 1) for x in (k, v))
        p = torch.cat([scores, torch.linalg.vecdot(query, own_k)[..., None]], -1).softmax(-1)
        out = torch.bmm(p[..., :-1], values.transpose(0, 1)).addcmul_(p[..., -1:], own_v)
    out = out.view(q.shape) if rows == 1 else _unfold(out, rows).contiguous()
    return out if out.dtype == q.dtype else out.to(q.dtype)
