"""`qk_norm_rope` in plain PyTorch, on any device: its gradient, and its form that also writes a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.qk_norm_rope.arguments import QkNormRope, QkNormRopeBackward, QkNormRopeOut
from fb_kernels.rms_norm.reference import normalize, normalize_backward

OP = "qk_norm_rope"
FORMAT = torch.contiguous_format


def _gather(table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 1, E] rows of table[S, E]; NaN where a position lies outside."""
    if not _host_reads(positions):
        inside = (positions >= 0) & (positions < table.shape[0])
        rows = table[positions.clamp(0, table.shape[0] - 1).long()].to(dtype)
        return torch.where(inside[:, None], rows, torch.nan)[:, None]
    single = len(positions) == 1  # positions were checked already
    rows = table[int(positions)].view(1, 1, -1) if single else table.index_select(0, positions)[:, None]
    return rows if rows.dtype == dtype else rows.to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute x cos + rotate_half(x) sin."""
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return rotated


def _rotate_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = (grad * sin).chunk(2, -1)
    return grad * cos + torch.cat((second, -first), -1)


def _host_reads(index: Tensor) -> bool:
    return index.device.type == "cpu"


def check_positions(positions: Tensor, limit: int, op: str = OP) -> None:
    """Raise unless every position is a row of the tables, if the host reads them; `op` is named in errors."""
    if not _host_reads(positions) or not len(positions):
        return
    low, high = (int(positions),) * 2 if len(positions) == 1 else map(int, positions.aminmax())
    if low < 0 or high >= limit:
        bad = low if low < 0 else high
        raise checks.error(op, "positions", f"0 to {limit - 1}, rows of cos and sin", bad, "extend the rotary tables")


def check_slots(slots: Tensor, size: int, op: str = OP) -> list[int] | None:
    """The slots, checked: in the cache, none twice except negative ones; None if the host does not read them.

    `op` is named in errors.
    """
    if not _host_reads(slots):
        return None
    argument = "kv_out" if op == OP else "slots"
    values: list[int] = slots.tolist()
    used = [slot for slot in values if slot >= 0]
    if used and max(used) >= size:
        raise checks.error(
            op, argument, f"slots below {size}, the caches' rows", max(used), "mark rows not to be written with -1"
        )
    if len(set(used)) < len(used):
        repeated = next(slot for slot in used if used.count(slot) > 1)
        raise checks.error(
            op, argument, "a slot of its own for every row", f"slot {repeated} twice", "use -1 for padding"
        )
    return values


def qk_norm_rope(call: QkNormRope, op: str = OP) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), normed where a weight is given, q and k rotated; `op` is named in errors."""
    qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps = call
    check_positions(positions, cos.shape[0], op)
    dtype = accumulation_dtype(qkv.dtype)
    heads = qkv.reshape(qkv.shape[0], sum(call.heads), cos.shape[1])
    both = num_heads + num_kv_heads
    heads, v = heads[:, :both], heads[:, both:]
    heads = heads if heads.dtype == dtype else heads.to(dtype)
    parts = (slice(num_heads), slice(num_heads, both))
    if q_weight is not None and k_weight is not None:
        heads = normalize(heads, eps)[0]
    elif q_weight is not None or k_weight is not None:
        normed = zip(parts, (q_weight, k_weight), strict=True)
        heads = torch.cat([heads[:, x] if w is None else normalize(heads[:, x], eps)[0] for x, w in normed], 1)
    for part, weight in zip(parts, (q_weight, k_weight), strict=True):
        if weight is not None:
            heads[:, part].mul_(weight)
    rotated = _rotate(heads, _gather(cos, positions, dtype), _gather(sin, positions, dtype))
    rotated = rotated if rotated.dtype == qkv.dtype else rotated.to(qkv.dtype)
    q, k = rotated[:, :num_heads], rotated[:, num_heads:]
    return q.clone(memory_format=FORMAT), k.clone(memory_format=FORMAT), v.clone(memory_format=FORMAT)


def qk_norm_rope_out(call: QkNormRopeOut, op: str = OP) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope`, with k and v also written to their slots of the caches."""
    projection, k_cache, v_cache, slots = call
    size = k_cache.shape[0]
    slot_numbers = check_slots(slots, size, op)
    q, k, v = qk_norm_rope(projection, op)
    if slot_numbers is not None:
        for cache, rows in ((k_cache, k), (v_cache, v)):
            if len(slot_numbers) == 1 and slot_numbers[0] >= 0:
                cache[slot_numbers[0]] = rows[0]
            elif min(slot_numbers, default=0) >= 0:
                cache.index_copy_(0, slots.long(), rows)
            else:
                has_slot = slots >= 0
                cache.index_copy_(0, slots[has_slot].long(), rows[has_slot])
    elif size and slots.shape[0]:
        has_slot = (slots >= 0) & (slots < size)
        any_slot = has_slot.any()
        # rows without a slot repeat the write of one that has; if none has, slot 0 is written with its own content
        source = torch.where(has_slot, torch.arange(slots.shape[0], device=slots.device), has_slot.int().argmax())
        target = torch.where(any_slot, slots[source].long(), 0)
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache.index_copy_(0, target, torch.where(any_slot, rows[source], cache[:1]))
    return q, k, v


def qk_norm_rope_backward(call: QkNormRopeBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to qkv, q_weight and k_weight; what `needs` leaves out comes back empty."""
    grad_q, grad_k, grad_v, forward, needs = call
    qkv, q_weight, k_weight, cos, sin, positions, _, _, eps = forward
    dtype = accumulation_dtype(qkv.dtype)
    q, k, _ = qkv.reshape(len(qkv), sum(forward.heads), cos.shape[1]).split(forward.heads, 1)
    cosine, sine = _gather(cos, positions, dtype), _gather(sin, positions, dtype)
    to_heads, to_weights = [], []
    for x, weight, grad, need in ((q, q_weight, grad_q, needs[1]), (k, k_weight, grad_k, needs[2])):
        on_heads = _rotate_backward(grad.to(dtype), cosine, sine)
        on_weight = qkv.new_empty(0)
        if weight is not None:
            unit, inverse = normalize(x.to(dtype), eps)
            if need:
                on_weight = (on_heads * unit).sum((0, 1)).to(weight.dtype)
            on_heads = normalize_backward(on_heads * weight.to(dtype), unit, inverse)
        to_heads.append(on_heads)
        to_weights.append(on_weight)
    to_qkv = qkv.new_empty(0)
    if needs[0]:
        to_qkv = torch.cat((*to_heads, grad_v.to(dtype)), 1).to(qkv.dtype).reshape(qkv.shape)
    return to_qkv, to_weights[0], to_weights[1]
