"""`branch_attention_qkv` in plain PyTorch, on any device: all of a decode step in few operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.precision import accumulation_dtype, batch_invariant
from fb_kernels.branch_attention.arguments import BranchAttention
from fb_kernels.branch_attention.reference import _fold, _unfold, branch_attention
from fb_kernels.branch_attention_qkv.arguments import BranchAttentionQkv, CachedSequences
from fb_kernels.layout import Indices
from fb_kernels.qk_norm_rope.arguments import QkNormRope, QkNormRopeOut
from fb_kernels.qk_norm_rope.reference import check_positions, check_slots, qk_norm_rope, qk_norm_rope_out

OP = "branch_attention_qkv"
LARGEST = torch.iinfo(torch.int32).max
_project, _project_out = partial(qk_norm_rope, op=OP), partial(qk_norm_rope_out, op=OP)  # errors name this op


class Sequence(NamedTuple):
    """The keys of a sequence that its rows see, as numbers on the host."""

    first: int  # key
    held: int
    pages: list[int]  # of the keys from `first` on; none of a flat cache


def branch_attention_qkv(call: BranchAttentionQkv) -> Tensor:
    """[N, Hq, E]."""
    if not len(call.qkv):
        return call.qkv.new_empty(0, call.num_heads, call.sequences.cos.shape[1])
    return _on_host(call) if _host_reads(call.qkv) else on_device(_project, _project_out, branch_attention, call)


def on_device(
    project: Callable[..., Any], project_out: Callable[..., Any], attend: Callable[..., Any], call: BranchAttentionQkv
) -> Tensor:
    """The op by `qk_norm_rope` and its form with caches, and `branch_attention`; without a sync, bad rows are NaN."""
    sequences = call.sequences
    sound, slots = sound_slots(sequences, call.window)
    q, k, v = project_and_write(project, project_out, call, slots)
    scale, cut, window, table = call.scale, call.window, None, sequences.block_table
    if batch_invariant():  # blocks of keys begin at the sequence's first, though it need not be there any more
        cut, window = None, cut
        table = table if table is None else table.where(_visible(sequences, window), 0)
    indices = layout(q, sequences.held, table, cut)
    if scale <= 0:  # kernels find the largest score before they scale
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    options = 1, None, window, scale, None
    state = attend(BranchAttention(q, k, v, sequences.k_cache, sequences.v_cache, *indices, *options))
    return state if state is NotImplemented else state[0].masked_fill_(~sound[:, None, None], torch.nan)


def _host_reads(x: Tensor) -> bool:
    return x.device.type == "cpu"


def first_seen(held: Tensor, window: int | None) -> Tensor:
    """[G]: the first key that a sequence's rows see; any number where `held` is below 0."""
    return torch.zeros_like(held) if window is None else (held - (min(window, LARGEST) - 1)).clamp(min=0)


def _visible(sequences: CachedSequences, window: int | None) -> Tensor:
    """[G, n]: which pages have keys that their sequence's rows see."""
    assert sequences.block_table is not None
    held, page = sequences.held[:, None], sequences.k_cache.shape[1]
    begin = torch.arange(sequences.block_table.shape[1], device=held.device) * page
    return (begin < held) & (begin + page > first_seen(held, window))


def sound_slots(sequences: CachedSequences, window: int | None) -> tuple[Tensor, Tensor | None]:
    """(rows whose position, sequence and slot are in range [N], slots with -1 for the others); without a sync."""
    cos, _, positions, k_cache, _, held, slots, block_table = sequences
    rows, groups = len(positions), len(held)

    def of_rows(x: Tensor) -> Tensor:  # [N, ..] of [G, ..]
        return x if groups == 1 else x.repeat_interleave(rows // groups, 0, output_size=rows)

    size = k_cache.shape[0]
    if block_table is None:
        sound = (held >= 0) & (held <= size)
    else:
        pages, page = k_cache.shape[:2]
        size, visible = pages * page, _visible(sequences, window)
        sound = (held >= 0) & (held <= page * block_table.shape[1])
        sound = sound & ~(visible & ((block_table < 0) | (block_table >= pages))).any(1)
    sound = of_rows(sound) & (positions >= 0) & (positions < cos.shape[0])
    if slots is None:
        return sound, None
    if block_table is None:
        occupied = slots < held
    else:
        begin, first = torch.arange(visible.shape[1], device=held.device) * page, first_seen(held, window)[:, None]
        key = begin + (slots % page)[:, None]  # [N, n]: index of the key that the slot would hold
        occupied = (of_rows(block_table) == (slots // page)[:, None]) & (key >= of_rows(first))
        occupied = (occupied & (key < of_rows(held)[:, None])).any(1)
    sound = sound & ((slots < 0) | ~occupied & (slots < size))
    return sound, slots.where(sound, -1)


def layout(q: Tensor, held: Tensor, block_table: Tensor | None, window: int | None) -> Indices:
    """The indices of `branch_attention`: each row is a branch, the rows of a sequence are a group over its keys."""
    rows, groups = q.shape[0], held.shape[0]
    bounds = torch.arange(rows + 1, dtype=held.dtype, device=q.device)
    of_groups = torch.arange(groups + 1, dtype=held.dtype, device=q.device) * (rows // groups)
    first = first_seen(held, window)
    return bounds, of_groups, first, held if window is None else held - first, block_table


def project_and_write(
    project: Callable[..., Any], project_out: Callable[..., Any], call: BranchAttentionQkv, slots: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) by `qk_norm_rope` or, with k and v in their slots, by `qk_norm_rope_out`."""
    projection = QkNormRope(*call[:3], *call.sequences[:3], *call[4:7])
    if slots is None or not len(slots):
        return project(projection)
    caches = [call.sequences.k_cache, call.sequences.v_cache]
    if caches[0].ndim == 4:
        if any(len(x) > 1 and x.stride(0) != x.shape[1] * x.stride(1) for x in caches):
            q, k, v = project(projection)
            for cache, rows in zip(caches, (k, v), strict=True):
                _write_rows(cache, slots, rows)
            return q, k, v
        caches = [x.view(-1, *x.shape[2:]) for x in caches]
    return project_out(QkNormRopeOut(projection, caches[0], caches[1], slots))


def _write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows to their slots in pages that are not contiguous; the host never reads the slots."""
    page, has_slot = cache.shape[1], slots >= 0
    any_slot = has_slot.any()
    # rows without a slot repeat the write of one that has; if none has, slot 0 is written with its own content
    source = torch.where(has_slot, torch.arange(len(slots), device=slots.device), has_slot.int().argmax())
    target = torch.where(any_slot, slots[source].long(), 0)
    cache[target // page, target % page] = torch.where(any_slot, rows[source], cache[0, 0])


def check_sequences(given: CachedSequences, window: int | None, op: str = OP) -> list[Sequence]:
    """What each sequence's rows see; all indices are in range (CPU only)."""
    cos, _, positions, k_cache, _, held, slots, block_table = given
    check_positions(positions, cos.shape[0], op)
    capacity = size = k_cache.shape[0]
    if block_table is not None:
        pages, page = k_cache.shape[:2]
        capacity, size = page * block_table.shape[1], page * pages
    sequences = []
    for g, length in enumerate(held.tolist()):
        if not 0 <= length <= capacity:
            got = f"{length} of sequence {g}"
            raise checks.error(op, "held", f"0 to {capacity}, the room there is", got, "count a sequence's tokens")
        first, numbers = 0 if window is None else max(0, length + 1 - window), []
        if block_table is not None and first < length:
            numbers = block_table[g, first // page : (length - 1) // page + 1].tolist()
            for number in numbers:
                if not 0 <= number < pages:
                    expected, got = f"pages from 0 below {pages} where tokens are held", f"{number} of sequence {g}"
                    raise checks.error(op, "block_table", expected, got, "pad only after the held tokens")
        sequences.append(Sequence(first, length, numbers))
    if slots is None:
        return sequences
    slot_numbers = check_slots(slots, size, op)
    assert slot_numbers is not None
    for row, slot in enumerate(slot_numbers):
        g = row * len(sequences) // len(slot_numbers)
        if slot >= 0 and _holds(sequences[g], slot, page if block_table is not None else None):
            expected, got = "slots that hold none of the sequence's tokens", f"{slot} of sequence {g}"
            raise checks.error(op, "slots", expected, got, "write only to free slots")
    return sequences


def _holds(sequence: Sequence, slot: int, page: int | None) -> bool:
    """Whether a slot holds a key that the sequence's rows see or, in a flat cache, any key before those."""
    first, held, pages = sequence
    if page is None:
        return slot < held
    keys = [column * page + slot % page for column, number in enumerate(pages, first // page) if number == slot // page]
    return any(first <= key < held for key in keys)


def _on_host(call: BranchAttentionQkv) -> Tensor:
    sequences, scale = check_sequences(call.sequences, call.window), call.scale
    _, _, _, k_cache, v_cache, _, slots, block_table = call.sequences
    q, k, v = project_and_write(_project, _project_out, call, slots)
    if block_table is None:
        first, length, _ = sequences[0]
        adjacent = slots is not None and len(q) == 1 and int(slots) == length  # the row's own key follows the others
        keys, values = (x[first : length + adjacent] for x in (k_cache, v_cache))
        return _attend(q, None if adjacent else (k, v), keys, values, scale)
    per_sequence, page, out = len(q) // len(sequences), k_cache.shape[1], torch.empty_like(q)
    for g, (first, length, pages) in enumerate(sequences):
        rows, begin = slice(g * per_sequence, (g + 1) * per_sequence), first % page
        keys, values = (x[torch.tensor(pages, dtype=torch.long)].flatten(0, 1)[begin:] for x in (k_cache, v_cache))
        keys, values = keys[: length - first], values[: length - first]
        out[rows] = _attend(q[rows], (k[rows], v[rows]), keys, values, scale)
    return out


def _attend(q: Tensor, own: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Rows q [R, Hq, E] over keys and values [n, Hkv, E] and each row's own [R, Hkv, E], if not among them."""
    dtype, (rows, heads, width), kv_heads = accumulation_dtype(q.dtype), q.shape, keys.shape[1]
    keys, values = keys.to(dtype), values.to(dtype)
    query = q * scale if q.dtype == dtype else q.to(dtype).mul_(scale)
    query = query.view(kv_heads, -1, width) if rows == 1 else _fold(query, kv_heads)  # [Hkv, rep R, E]
    scores = torch.bmm(query, keys.permute(1, 2, 0))
    if own is None:
        out = torch.bmm(scores.softmax(-1), values.transpose(0, 1))
    else:
        own_k, own_v = (x.to(dtype).transpose(0, 1).repeat(1, heads // kv_heads, 1) for x in own)
        p = torch.cat([scores, torch.linalg.vecdot(query, own_k)[..., None]], -1).softmax(-1)
        out = torch.bmm(p[..., :-1], values.transpose(0, 1)).addcmul_(p[..., -1:], own_v)
    out = out.view(q.shape) if rows == 1 else _unfold(out, rows).contiguous()
    return out if out.dtype == q.dtype else out.to(q.dtype)
