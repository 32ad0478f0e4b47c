"""`branch_attention` in plain PyTorch, on any device: flash attention in blocks of rows, with merged states.

All work is split into pieces: a block of rows against a range of keys, with a mask; the pieces' states are merged. On
the CPU the host reads the layout and makes pieces for it; elsewhere pieces are whole buffers, masked on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fb_kernels import layout as layouts
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.branch_attention.arguments import BranchAttention, BranchAttentionBackward
from fb_kernels.layout import Group, Plan
from fb_kernels.merge_attention_states.reference import merge_attention_states

SCORES = 1 << 22
"""Scores in memory at once."""
ROW_BLOCK = 256
OWN_BLOCK = 64  # rows against own branches; most keys of a larger block would belong to other branches


class _Piece(NamedTuple):
    """R rows against n keys; `keys` says which rows of k and v, or of a flat prefix, they are (unused for pages)."""

    rows: slice
    own: bool
    keys: slice
    k: Tensor  # [n, Hkv, E] in the accumulation dtype
    v: Tensor
    visible: Tensor | None  # [R, n]; None if everything is


class _Layout(NamedTuple):
    """The layout on the device; where it is invalid, `sound` is False and indices are clamped into range."""

    row_start: Tensor  # [T]
    row_group: Tensor  # [T]
    start: Tensor  # [G]
    length: Tensor  # [G]
    sound: Tensor  # [T]


def branch_attention(call: BranchAttention) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T])."""
    q = call.q
    if not _host_reads(q):
        masks = _layout(call)
        out, lse = _exact(call, _masked_pieces(call, masks))
        out, lse = out.masked_fill(~masks.sound[:, None, None], torch.nan), lse.masked_fill(~masks.sound, torch.nan)
        return out.to(q.dtype), lse
    plan = layouts.plan(call.indices, q.shape[0], call.prefix_k)
    if call.window is None and call.softcap is None and q.numel():
        single = [group for group in plan.groups if group.longest == 1 and q.dtype == accumulation_dtype(q.dtype)]
        if sum(group.last - group.first for group in single) == q.shape[0]:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            lse = torch.empty(q.shape[1], q.shape[0], dtype=q.dtype)
        else:
            out, lse = _fast(call, plan)
        for group in single:  # the same bits whatever other groups there are
            _single_rows(call, plan, group, out, lse)
        return out, lse
    out, lse = _exact(call, _pieces(call, plan))
    return out.to(q.dtype), lse


def branch_attention_backward(call: BranchAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dprefix_k, dprefix_v) with p = exp(s - lse), ds = p (dout . v - dout . out + dlse).

    Without k and v their gradients are empty; so are those of the (flat) prefix if they are not needed.
    """
    grad_out, grad_lse, out, lse, forward, prefix_grads = call
    q, scale, softcap, sound = forward.q, forward.scale, forward.softcap, None
    if _host_reads(q):
        pieces = _pieces(forward, layouts.plan(forward.indices, q.shape[0], forward.prefix_k))
    else:
        masks = _layout(forward)
        pieces, sound = _masked_pieces(forward, masks), masks.sound
    dtype = lse.dtype
    delta = torch.linalg.vecdot(out.to(dtype), grad_out.to(dtype)).T  # [Hq, T]
    if grad_lse is not None:
        delta = delta - grad_lse
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    grads = [
        torch.zeros(0 if x is None else x.shape, dtype=dtype, device=q.device)
        for x in (*forward[1:3], *(forward[3:5] if prefix_grads else (None, None)))
    ]
    finite = sound is None and all(map(_finite, (q, grad_out, lse)))
    for piece in pieces:
        rows, heads, keys = piece.rows, piece.k.shape[1], piece.k
        dk, dv = grads[:2] if piece.own else grads[2:]
        q_rows, grad = (_fold(x[rows].to(dtype), heads) for x in (q, grad_out))  # [Hkv, rep R, E]
        lse_rows, delta_rows = (x[:, rows].unflatten(0, (heads, -1)).flatten(1, 2)[..., None] for x in (lse, delta))
        lse_rows, slope = lse_rows.masked_fill(lse_rows == -torch.inf, 0.0), None
        if softcap is None:
            p = torch.baddbmm(-lse_rows, q_rows, keys.permute(1, 2, 0), alpha=scale).exp_()
        else:
            scores, slope = _scores(q_rows, keys, scale, softcap)
            p = scores.sub_(lse_rows).exp_()
        ds = torch.baddbmm(-delta_rows, grad, piece.v.permute(1, 2, 0))
        if not (finite and _finite(keys) and _finite(piece.v)):  # 0 times a value that is not finite would be NaN
            p.add_(torch.where(grad.isfinite().all(-1, keepdim=True), 0.0, torch.nan))
            q_rows, grad, keys = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q_rows, grad, keys))
        ds.mul_(p)
        if slope is not None:
            ds.mul_(slope)
        _mask(p, piece.visible, 0.0)
        _mask(ds, piece.visible, 0.0)
        dq[rows] += _unfold((ds @ keys.transpose(0, 1)).mul_(scale), rows.stop - rows.start)
        if dk.numel():
            dk[piece.keys] += (ds.mT @ q_rows).mul_(scale).transpose(0, 1)
            dv[piece.keys] += (p.mT @ grad).transpose(0, 1)
    if sound is not None:
        dq.masked_fill_(~sound[:, None, None], torch.nan)
    dk, dv, *of_prefix = (x.to(q.dtype) for x in grads)
    return dq.to(q.dtype), dk, dv, of_prefix[0], of_prefix[1]


def _host_reads(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[R, Hq, E] as [Hkv, rep R, E]: the query heads of one key head become rows."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _unfold(x: Tensor, rows: int) -> Tensor:
    """The reverse of `_fold`."""
    return x.unflatten(1, (-1, rows)).permute(2, 0, 1, 3).flatten(1, 2)


def _mask(folded: Tensor, visible: Tensor | None, value: float) -> None:
    if visible is not None:
        folded.unflatten(1, (-1, visible.shape[0])).masked_fill_(~visible, value)


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """([Hkv, rep R, n] scores of folded q and k[n, Hkv, E], slope of the soft-cap or None)."""
    scores = (q @ k.permute(1, 2, 0)).mul_(scale)
    if softcap is None:
        return scores, None
    scores.div_(softcap).tanh_()
    return scores * softcap, 1 - scores.square()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out[R, Hq, E], lse[Hq, R]) of q[R, Hq, E] over the visible keys k, v[n, Hkv, E]; without any 0 and -inf."""
    scores, _ = _scores(_fold(q, k.shape[1]), k, scale, softcap)
    _mask(scores, visible, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)  # [Hkv, rep R, 1]
    lse.masked_fill_(lse == torch.inf, torch.nan)  # of a score of +inf; a merge takes +inf for no keys
    p = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
    if visible is None or (_host_reads(v) and _finite(v)):
        out = p @ v.transpose(0, 1)
    else:  # 0 times a value that is not finite would reveal an unseen one
        out = p @ v.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)
        for strange in (torch.inf, -torch.inf, torch.nan):
            matches = v.isnan() if strange != strange else v == strange
            hits = torch.einsum("rn,nhe->hre", visible.to(v.dtype), matches.to(v.dtype))
            out.unflatten(1, (-1, q.shape[0])).add_(torch.where(hits > 0, strange, 0.0)[:, None])
    return _unfold(out, q.shape[0]), lse.unflatten(1, (-1, q.shape[0])).flatten(0, 1)[..., 0]


def _finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())  # the sum alone may overflow


def _exact(call: BranchAttention, pieces: Iterable[_Piece]) -> tuple[Tensor, Tensor]:
    """(out, lse) in the accumulation dtype; rows of no piece are empty."""
    q = call.q
    out = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=out.dtype, device=q.device)
    for rows, _, _, k, v, visible in pieces:
        state = _attend(q[rows].to(out.dtype), k, v, call.scale, call.softcap, visible)
        out[rows], lse[:, rows] = merge_attention_states(out[rows], lse[:, rows], *state)
    return out, lse


# --- on the CPU: by the layout's plan ---------------------------------------------------------------------------------


def _slice(prefix: Tensor, group: Group) -> Tensor:
    """The group's prefix, [P, Hkv, E]: a view if one page holds it."""
    if group.pages is None:
        keys = prefix
    elif len(group.pages) == 1:
        keys = prefix[group.pages[0]]
    else:
        keys = prefix[torch.tensor(group.pages, dtype=torch.long)].flatten(0, 1)
    return keys[group.start : group.start + group.length]


def _pieces(call: BranchAttention, plan: Plan) -> Iterator[_Piece]:
    """Blocks of each group's rows: against its prefix, then against the rows from the start of their first branch."""
    q, k, v, window = call.q, call.k, call.v, call.window
    dtype = accumulation_dtype(q.dtype)
    for group in plan.groups:
        keys, values = (_slice(x, group).to(dtype) if group.first < group.last else x for x in call[3:5])
        step = SCORES // max(1, q.shape[1] * max(group.length, group.longest + ROW_BLOCK))
        step = max(1, min(ROW_BLOCK, step))
        for first in range(group.first, group.last, step):
            rows = slice(first, min(first + step, group.last))
            row = torch.arange(rows.start, rows.stop)[:, None]  # [R, 1]
            start = plan.row_start[rows, None]
            first_key = 0  # first key of the prefix that the window reaches
            if window is not None:
                first_key = max(0, group.length + int((row - start).min()) + 1 - window)
            if first_key < group.length:
                visible = None
                if window is not None:
                    visible = group.length + row - start - torch.arange(first_key, group.length) < window
                shared = slice(group.start + first_key, group.start + group.length)
                yield _Piece(rows, False, shared, keys[first_key:], values[first_key:], visible)
            if k is None or v is None:
                continue
            for block in range(0, len(row), OWN_BLOCK):
                own_rows, began = row[block : block + OWN_BLOCK], start[block : block + OWN_BLOCK]
                low, stop = int(began[0]), int(own_rows[-1]) + 1
                if window is not None:
                    low = max(low, int(own_rows[0]) + 1 - window)
                own = slice(low, stop)
                visible = _own_visible(own_rows, own, began, window)
                yield _Piece(slice(int(own_rows[0]), stop), True, own, k[own].to(dtype), v[own].to(dtype), visible)


def _own_visible(row: Tensor, own: slice, start: Tensor, window: int | None) -> Tensor:
    """[R, n]: keys of the row's own branch up to itself."""
    key = torch.arange(own.start, own.stop, device=row.device)
    visible = (key >= start) & (key <= row)
    return visible if window is None else visible & (row - key < window)


def _fast(call: BranchAttention, plan: Plan) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention for the CPU: one call per run of equal branches, one per prefix; (out, lse).

    It turns some rows without a finite score into zeros and mixes unseen NaN into a causal block. So it gets finite
    inputs only, and the rows that see anything else are computed exactly.
    """
    (q, k, v), scale = call[:3], call.scale
    exact_rows = torch.zeros(q.shape[0], dtype=torch.bool)
    if not all(x is None or _finite(x) for x in (q, k, v)):
        exact_rows |= ~q.isfinite().flatten(1).all(1)
        if k is not None and v is not None:
            strange = ~(k.isfinite() & v.isfinite()).flatten(1).all(1)
            count = strange.long().cumsum(0)
            exact_rows |= count > (count - strange.long())[plan.row_start]
        q, k, v = (None if x is None else x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v))  # type: ignore[assignment]
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype))
    out = torch.zeros(q.shape, dtype=q.dtype)
    if k is not None and v is not None:
        first = 0
        for length, run in groupby(b - a for a, b in pairwise(plan.bounds)):
            rows = slice(first, first + length * sum(1 for _ in run))
            first = rows.stop
            if length == 1:
                _attend_self(q[rows], k[rows], v[rows], scale, out[rows], lse[:, rows])
            elif length:
                _flash(q[rows], k[rows], v[rows], length, scale, out[rows], lse[:, rows])
    exact_rows |= _doubtful(lse)
    for group in plan.groups:
        rows = slice(group.first, group.last)
        if group.first == group.last or not group.length:
            continue
        keys, values = (_slice(x, group) for x in call[3:5])
        if _finite(keys) and _finite(values):
            on_prefix = torch.empty_like(out[rows]), torch.empty_like(lse[:, rows])
            _flash(q[rows], keys, values, None, scale, *on_prefix)
            exact_rows[rows] |= _doubtful(on_prefix[1])
            out[rows], lse[:, rows] = merge_attention_states(out[rows], lse[:, rows], *on_prefix)
        else:
            exact_rows[rows] = True
    if exact_rows.any():
        groups = [group for group in plan.groups if exact_rows[group.first : group.last].any()]
        exact_out, exact_lse = _exact(call, _pieces(call, plan._replace(groups=groups)))
        out = torch.where(exact_rows[:, None, None], exact_out.to(out.dtype), out)
        lse = torch.where(exact_rows, exact_lse, lse)
    return out, lse


def _doubtful(lse: Tensor) -> Tensor:
    """[T], from lse[Hq, T]: rows to compute exactly, since flash gives lse 0 or +inf for scores that are not finite."""
    return ((lse == 0) | (lse == torch.inf)).any(0)


def _single_rows(call: BranchAttention, plan: Plan, group: Group, out: Tensor, lse: Tensor) -> None:
    """Branches of one row: a group's prefix and the row itself in one softmax; writes the group's rows."""
    q, k, v = call[:3]
    heads, dtype = call.prefix_k.shape[-2], lse.dtype
    keys, values = (_slice(x, group).to(dtype) for x in call[3:5])
    step = max(1, SCORES // (q.shape[1] * (group.length + 1)))
    for first in range(group.first, group.last, step):
        rows = slice(first, min(first + step, group.last))
        query = _fold(q[rows].to(dtype), heads)  # [Hkv, rep R, E]
        scores = query @ keys.permute(1, 2, 0)
        if k is not None and v is not None:
            own_k, own_v = (x[rows].to(dtype).transpose(0, 1).repeat(1, q.shape[1] // heads, 1) for x in (k, v))
            scores = torch.cat([scores, torch.linalg.vecdot(query, own_k)[..., None]], -1)
        total = scores.mul_(call.scale).logsumexp(-1, keepdim=True)
        p = scores.sub_(total).exp_()
        result = p[..., : group.length] @ values.transpose(0, 1)
        if k is not None and v is not None:
            result += p[..., -1:] * own_v
        out[rows] = _unfold(result, rows.stop - first).to(q.dtype)
        lse[:, rows] = total.view(q.shape[1], -1)
    rows = slice(group.first, group.last)
    if not _finite(out[rows]):  # no keys, or some are not finite
        exact_out, exact_lse = _exact(call, _pieces(call, plan._replace(groups=[group])))
        out[rows], lse[:, rows] = exact_out[rows].to(q.dtype), exact_lse[:, rows]


def _attend_self(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    """Branches of one row, which see only themselves."""
    heads = k.shape[1]
    out.unflatten(1, (heads, -1)).copy_(v[:, :, None])
    scores = torch.linalg.vecdot(q.unflatten(1, (heads, -1)).to(lse.dtype), k[:, :, None].to(lse.dtype))
    lse.copy_(scores.mul_(scale).flatten(1, 2).T)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: int | None, scale: float, out: Tensor, lse: Tensor) -> None:
    """Attention of all rows over all keys, or causal within runs of `causal` rows; writes out and lse."""
    heads = k.shape[1]
    length = causal or q.shape[0]
    q, target = (x.unflatten(1, (heads, -1)).unflatten(0, (-1, length)) for x in (q, out))  # [n, L, Hkv, rep, E]
    target, target_lse = target.permute(0, 2, 3, 1, 4), lse.unflatten(1, (-1, length)).unflatten(0, (heads, -1))
    target_lse = target_lse.permute(2, 0, 1, 3)  # [n, Hkv, rep, L]
    q = q.permute(0, 2, 3, 1, 4).flatten(0, 1)  # [n Hkv, rep, L, E]
    k, v = (x.unflatten(0, (q.shape[0] // heads, -1)).transpose(1, 2).flatten(0, 1)[:, None] for x in (k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if causal is None:
        q = q.flatten(1, 2)[:, None]  # every row sees the same keys
    else:
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    result, result_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal is not None, scale=scale
    )
    target.copy_(result.reshape(target.shape))
    target_lse.copy_(result_lse.reshape(target_lse.shape))


# --- the layout on the device -----------------------------------------------------------------------------------------


def _layout(call: BranchAttention) -> _Layout:
    """The layout of every row, found without a sync; rows of an invalid layout are marked unsound."""
    (cu_branch, cu_group, prefix_start, prefix_len, block_table), prefix = call.indices, call.prefix_k
    rows, capacity = len(call.q), call.capacity
    row = torch.arange(rows, device=prefix.device)
    starts, of_groups = cu_branch.long(), cu_group.long()
    branches, groups = starts.shape[0] - 1, of_groups.shape[0] - 1
    if branches == 0 or groups == 0:  # rows without a branch
        nothing = starts.new_zeros(max(1, groups))
        return _Layout(row, torch.zeros_like(row), nothing, nothing, torch.zeros_like(row, dtype=torch.bool))
    sound = (starts[0] == 0) & (starts.diff() >= 0).all() & (starts[-1] == rows)
    sound = sound & (of_groups[0] == 0) & (of_groups.diff() >= 0).all() & (of_groups[-1] == branches)
    starts, of_groups = starts.clamp(0, rows).cummax(0).values, of_groups.clamp(0, branches).cummax(0).values
    row_branch = torch.searchsorted(starts[1:], row, right=True).clamp(max=branches - 1)
    row_group = torch.searchsorted(of_groups[1:], row_branch, right=True).clamp(max=groups - 1)
    start, length = prefix_start.long(), prefix_len.long()
    fits = (start >= 0) & (length >= 0) & ((length == 0) | (start <= capacity) & (length <= capacity - start))
    if block_table is not None:
        bad, size = (block_table < 0) | (block_table >= prefix.shape[0]), prefix.shape[1]  # [G, n]
        page = torch.arange(block_table.shape[1], device=row.device) * size
        used = (page < (start + length)[:, None]) & (page + size > start[:, None]) & (length > 0)[:, None]
        fits &= ~(bad & used).any(1)
    return _Layout(starts[row_branch], row_group, start, length, sound & fits[row_group])


def _masked_pieces(call: BranchAttention, layout: _Layout) -> Iterator[_Piece]:
    """Blocks of all rows against the whole prefix buffer, or each group's pages, and against all rows."""
    q, k, v, prefix_k, prefix_v = call[:5]
    block_table, window = call.block_table, call.window
    dtype = accumulation_dtype(q.dtype)
    total = q.shape[0]

    def blocks(keys: int) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, min(ROW_BLOCK, SCORES // max(1, q.shape[1] * keys)))
        for first in range(0, total, step):
            rows = slice(first, min(first + step, total))
            yield rows, torch.arange(rows.start, rows.stop, device=q.device)[:, None]

    for g in range(1 if block_table is None else block_table.shape[0]):
        keys, values = prefix_k, prefix_v
        if block_table is not None:
            if prefix_k.shape[0] == 0:
                break
            pages = block_table[g].long().clamp(0, prefix_k.shape[0] - 1)
            keys, values = (x[pages].flatten(0, 1) for x in (prefix_k, prefix_v))
        if keys.shape[0] == 0:
            break
        keys, values = keys.to(dtype), values.to(dtype)
        for rows, row in blocks(keys.shape[0]):
            group = layout.row_group[rows, None]
            length = layout.length[group]
            key = torch.arange(keys.shape[0], device=q.device) - layout.start[group]  # [R, n]
            visible = (key >= 0) & (key < length) & layout.sound[rows, None]
            if block_table is not None:
                visible &= group == g
            if window is not None:
                visible &= length + row - layout.row_start[rows, None] - key < window
            yield _Piece(rows, False, slice(None), keys, values, visible)
    if k is not None and v is not None:
        k, v, own = k.to(dtype), v.to(dtype), slice(0, total)
        for rows, row in blocks(total):
            yield _Piece(rows, True, own, k, v, _own_visible(row, own, layout.row_start[rows, None], window))
