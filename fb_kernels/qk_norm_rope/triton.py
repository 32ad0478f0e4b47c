"""Triton kernels of `qk_norm_rope`: a program takes HEADS adjacent heads of a row, of q, k or v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning
from fb_kernels.qk_norm_rope.arguments import QkNormRope, QkNormRopeBackward, QkNormRopeOut
from fb_kernels.triton.rows import as_rows


@triton.jit
def _head_of(q, k, v, row, heads, num_heads, num_kv_heads, is_q, is_k, head_dim):
    """[HEADS, 1] pointers to the first elements of heads, each in q[T, Hq, E], k or v[T, Hkv, E]."""
    k_heads = row * num_kv_heads + heads - num_heads
    in_q, in_k = q + (row * num_heads + heads) * head_dim, k + k_heads * head_dim
    in_v = v + (k_heads - num_kv_heads) * head_dim
    return tl.where(is_q, in_q, tl.where(is_k, in_k, in_v))[:, None]


@triton.jit
def _table_row(table, positions, row, stride, length, columns, inside):
    """[HALF] float32 of the row's position; NaN where it lies outside."""
    position = tl.load(positions + row).to(tl.int64)
    in_table = (position >= 0) & (position < length)
    return tl.load(table + position * stride + columns, mask=inside & in_table, other=float("nan")).to(tl.float32)


@triton.jit
def _weights(q_weight, k_weight, is_q, is_k, columns, inside):
    """[HEADS, HALF] float32, 1 for heads that have none."""
    w = tl.full([is_q.shape[0], columns.shape[0]], 1.0, tl.float32)
    if q_weight is not None:
        w = tl.where(is_q[:, None], tl.load(q_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :], w)
    if k_weight is not None:
        w = tl.where(is_k[:, None], tl.load(k_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :], w)
    return w


@triton.jit
def _inverse_rms(first, second, q_weight, k_weight, is_q, is_k, half, eps):
    """[HEADS, 1], 1 for heads that are not normed."""
    inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)
    normed = is_q & is_k  # all False
    if q_weight is not None:
        normed = normed | is_q
    if k_weight is not None:
        normed = normed | is_k
    return tl.where(normed, inverse, 1.0)[:, None], normed[:, None]


# q, k = y cos + rotate_half(y) sin with y = x rsqrt(mean(x^2) + eps) weight and rotate_half(x1, x2) = (-x2, x1)
# (rotary embedding, Su et al. 2021); v is copied. k and v also go to their slots of the caches, if there are any.
# Grid: T * ceil((Hq + Hkv + Hv) / HEADS), Hv of them of v: Hkv or 0; the blocks of a row are neighbours.
# Program: HEADS adjacent heads of one row, each of q, k or v.
# Loop: none.
# Memory: registers only: the two halves of the heads [HEADS, HALF], and of cos and sin [HALF], in float32.
# Layout: qkv [T, (Hq + Hkv + Hv) E], row stride qkv_stride; q_weight, k_weight [E] or None; cos, sin [table_rows, E],
#   row strides cos_stride, sin_stride; positions, slots [T]; q [T, Hq, E], k [T, Hkv, E], v [T, Hv, E], dense;
#   k_cache, v_cache [cache_rows, Hkv, E] by their three strides, or None.
@triton.jit(do_not_specialize=["cache_rows", "table_rows"])
def _qk_norm_rope_fwd_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, q, k, v, k_cache, v_cache, slots,
    qkv_stride, cos_stride, sin_stride, k_slot_stride, k_head_stride, k_column_stride,
    v_slot_stride, v_head_stride, v_column_stride, cache_rows, table_rows, num_heads, num_kv_heads, v_heads, half, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(num_heads + num_kv_heads + v_heads, HEADS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    heads = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF)
    inside = columns < half  # HALF is a power of two, E / 2 may be none
    in_k, in_v = heads - num_heads, heads - num_heads - num_kv_heads  # [HEADS]: index in k, in v
    is_q, is_k, is_v = in_k < 0, (in_k >= 0) & (in_v < 0), (in_v >= 0) & (in_v < v_heads)
    place = heads[:, None] * 2 * half + columns[None, :]  # [HEADS, HALF]
    tile = (is_q | is_k | is_v)[:, None] & inside[None, :]
    first = tl.load(qkv + row * qkv_stride + place, mask=tile, other=0.0).to(tl.float32)
    second = tl.load(qkv + row * qkv_stride + place + half, mask=tile, other=0.0).to(tl.float32)
    cos_first = _table_row(cos, positions, row, cos_stride, table_rows, columns, inside)
    cos_second = _table_row(cos + half, positions, row, cos_stride, table_rows, columns, inside)
    sin_first = _table_row(sin, positions, row, sin_stride, table_rows, columns, inside)
    sin_second = _table_row(sin + half, positions, row, sin_stride, table_rows, columns, inside)
    inverse, _ = _inverse_rms(first, second, q_weight, k_weight, is_q, is_k, half, eps)
    x = first * inverse * _weights(q_weight, k_weight, is_q, is_k, columns, inside)
    y = second * inverse * _weights_of_second(q_weight, k_weight, is_q, is_k, columns, inside, half)
    x, y = x * cos_first - y * sin_first, y * cos_second + x * sin_second
    x, y = tl.where(is_v[:, None], first, x), tl.where(is_v[:, None], second, y)

    out = _head_of(q, k, v, row, heads, num_heads, num_kv_heads, is_q, is_k, 2 * half) + columns[None, :]
    tl.store(out, x, mask=tile)
    tl.store(out + half, y, mask=tile)
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        written = (slot >= 0) & (slot < cache_rows)  # -1: not written
        k_tile, v_tile = (is_k & written)[:, None] & inside[None, :], (is_v & written)[:, None] & inside[None, :]
        k_cache += slot * k_slot_stride + in_k[:, None].to(tl.int64) * k_head_stride
        tl.store(k_cache + columns[None, :] * k_column_stride, x, mask=k_tile)
        tl.store(k_cache + (columns[None, :] + half) * k_column_stride, y, mask=k_tile)
        v_cache += slot * v_slot_stride + in_v[:, None].to(tl.int64) * v_head_stride
        tl.store(v_cache + columns[None, :] * v_column_stride, x, mask=v_tile)
        tl.store(v_cache + (columns[None, :] + half) * v_column_stride, y, mask=v_tile)


@triton.jit
def _weights_of_second(q_weight, k_weight, is_q, is_k, columns, inside, half):
    """`_weights` of the second half."""
    if q_weight is not None:
        q_weight += half
    if k_weight is not None:
        k_weight += half
    return _weights(q_weight, k_weight, is_q, is_k, columns, inside)


# d = grad cos - rotate_half(grad sin), the rotation's transpose; d_x = r (d w - u mean(d w u)) and d_weight = sum d u
# over rows and heads, with u = r x, r = rsqrt(mean(x^2) + eps); heads of v, and those without a norm, take d_x = d.
# Grid: ceil(T / ROWS) * ceil((Hq + Hkv + Hv) / HEADS); the blocks of a chunk of rows are neighbours.
# Program: HEADS adjacent heads of ROWS rows, each of q, k or v.
# Loop: over rows.
# Memory: registers only: halves of grad, x and of the weights' sums [HEADS, HALF] in float32.
# Layout: grad_q [T, Hq, E], grad_k [T, Hkv, E], grad_v [T, Hv, E], dense; qkv [T, (Hq + Hkv + Hv) E], row stride
#   qkv_stride; weights [E] or None; cos, sin [table_rows, E], row strides cos_stride, sin_stride; positions [T];
#   d_qkv [T, (Hq + Hkv + Hv) E] and d_weights [programs, 2 (q, k), E], dense, each None if it is not needed.
@triton.jit(do_not_specialize=["table_rows", "rows"])
def _qk_norm_rope_bwd_kernel(
    grad_q, grad_k, grad_v, qkv, q_weight, k_weight, cos, sin, positions, d_qkv, d_weights,
    qkv_stride, cos_stride, sin_stride, table_rows, rows, num_heads, num_kv_heads, v_heads, half, eps,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    all_heads = num_heads + num_kv_heads + v_heads
    blocks = tl.cdiv(all_heads, HEADS)
    chunk = tl.program_id(0) // blocks
    heads = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF)
    inside = columns < half
    in_k, in_v = heads - num_heads, heads - num_heads - num_kv_heads
    is_q, is_k, is_v = in_k < 0, (in_k >= 0) & (in_v < 0), (in_v >= 0) & (in_v < v_heads)
    place = heads[:, None] * 2 * half + columns[None, :]  # [HEADS, HALF]
    tile = (is_q | is_k | is_v)[:, None] & inside[None, :]
    w_first = _weights(q_weight, k_weight, is_q, is_k, columns, inside)  # [HEADS, HALF]
    w_second = _weights_of_second(q_weight, k_weight, is_q, is_k, columns, inside, half)
    on_first, on_second = tl.zeros([HEADS, HALF], tl.float32), tl.zeros([HEADS, HALF], tl.float32)
    for index in range(chunk * ROWS, min(chunk * ROWS + ROWS, rows)):  # in order
        row = tl.cast(index, tl.int64)
        g = _head_of(grad_q, grad_k, grad_v, row, heads, num_heads, num_kv_heads, is_q, is_k, 2 * half)
        g_first = tl.load(g + columns[None, :], mask=tile, other=0.0).to(tl.float32)
        g_second = tl.load(g + columns[None, :] + half, mask=tile, other=0.0).to(tl.float32)
        cos_first = _table_row(cos, positions, row, cos_stride, table_rows, columns, inside)
        cos_second = _table_row(cos + half, positions, row, cos_stride, table_rows, columns, inside)
        sin_first = _table_row(sin, positions, row, sin_stride, table_rows, columns, inside)
        sin_second = _table_row(sin + half, positions, row, sin_stride, table_rows, columns, inside)
        d_first = g_first * cos_first + g_second * sin_second
        d_second = g_second * cos_second - g_first * sin_first
        d_first = tl.where(is_v[:, None], g_first, d_first)  # v is not rotated
        d_second = tl.where(is_v[:, None], g_second, d_second)
        if (q_weight is not None) or (k_weight is not None):
            first = tl.load(qkv + row * qkv_stride + place, mask=tile, other=0.0).to(tl.float32)
            second = tl.load(qkv + row * qkv_stride + place + half, mask=tile, other=0.0).to(tl.float32)
            inverse, normed = _inverse_rms(first, second, q_weight, k_weight, is_q, is_k, half, eps)
            first *= inverse
            second *= inverse
            on_first += tl.where(tile & normed, d_first * first, 0.0)
            on_second += tl.where(tile & normed, d_second * second, 0.0)
            d_first *= w_first
            d_second *= w_second
            products = tl.where(inside[None, :], d_first * first + d_second * second, 0.0)
            mean = (tl.sum(products, 1) / (2 * half))[:, None]  # [HEADS, 1], over both halves
            d_first = tl.where(normed, inverse * (d_first - first * mean), d_first)
            d_second = tl.where(normed, inverse * (d_second - second * mean), d_second)
        if d_qkv is not None:
            d_row = d_qkv + row * all_heads * 2 * half + place
            tl.store(d_row, d_first, mask=tile)
            tl.store(d_row + half, d_second, mask=tile)
    if d_weights is not None:
        d_weights += tl.program_id(0).to(tl.int64) * 4 * half + columns  # this program's row; the launcher adds them
        tl.store(d_weights, tl.sum(tl.where(is_q[:, None], on_first, 0.0), 0), mask=inside)
        tl.store(d_weights + half, tl.sum(tl.where(is_q[:, None], on_second, 0.0), 0), mask=inside)
        tl.store(d_weights + 2 * half, tl.sum(tl.where(is_k[:, None], on_first, 0.0), 0), mask=inside)
        tl.store(d_weights + 3 * half, tl.sum(tl.where(is_k[:, None], on_second, 0.0), 0), mask=inside)


def qk_norm_rope(call: QkNormRope, kv_out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), normed where a weight is given, q and k rotated; kv_out is (k_cache, v_cache, slots)."""
    qkv, q_weight, k_weight, cos, sin, positions, _, _, eps = call
    if torch.float64 in (qkv.dtype, cos.dtype):
        return NotImplemented
    rows, cos, sin = as_rows(qkv), as_rows(cos), as_rows(sin)
    head_dim, sizes = cos.shape[1], call.heads
    q, k, v = (qkv.new_empty((len(qkv), heads, head_dim)) for heads in sizes)
    k_cache, v_cache, slots = kv_out or (None, None, None)
    strides = [0] * 6 if kv_out is None else [*kv_out[0].stride(), *kv_out[1].stride()]
    launch = tuning.qk_norm_rope(qkv.dtype, head_dim)
    grid = (len(rows) * triton.cdiv(sum(sizes), launch["HEADS"]),)
    if q.numel():
        _qk_norm_rope_fwd_kernel[grid](
            rows, _contiguous(q_weight), _contiguous(k_weight), cos, sin, positions.contiguous(), q, k, v,
            k_cache, v_cache, _contiguous(slots), rows.stride(0), cos.stride(0), sin.stride(0), *strides,
            0 if k_cache is None else len(k_cache), len(cos), *sizes, head_dim // 2, eps, **launch,
        )  # fmt: skip
    return q, k, v


def qk_norm_rope_out(call: QkNormRopeOut) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope`, with k and v also written to their slots of the caches."""
    return qk_norm_rope(call.projection, call[1:])


def qk_norm_rope_backward(call: QkNormRopeBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to qkv, q_weight and k_weight; the weights' are summed per program, then added in order."""
    grad_q, grad_k, grad_v, forward, needs = call
    qkv, q_weight, k_weight, cos, sin, positions, _, _, eps = forward
    if torch.float64 in (qkv.dtype, cos.dtype):
        return NotImplemented
    rows, cos, sin = as_rows(qkv), as_rows(cos), as_rows(sin)
    head_dim, sizes = cos.shape[1], forward.heads
    launch = tuning.qk_norm_rope_backward(qkv.dtype, len(rows), head_dim)
    blocks = triton.cdiv(sum(sizes), launch["HEADS"])
    grid = (triton.cdiv(len(rows), launch["ROWS"]) * blocks,)
    d_qkv = qkv.new_empty(qkv.shape if needs[0] else (0,))
    weighted = needs[1] or needs[2]
    partials = qkv.new_empty((grid[0], 2, head_dim), dtype=torch.float32) if weighted else None
    if qkv.numel():
        _qk_norm_rope_bwd_kernel[grid](
            grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous(), rows, _contiguous(q_weight),
            _contiguous(k_weight), cos, sin, positions.contiguous(), d_qkv if needs[0] else None, partials,
            rows.stride(0), cos.stride(0), sin.stride(0), len(cos), len(rows), *sizes,
            head_dim // 2, eps, **launch,
        )  # fmt: skip
    d_q_weight, d_k_weight = (
        qkv.new_empty(0) if weight is None or partials is None or not need else partials[:, i].sum(0).to(qkv.dtype)
        for i, (weight, need) in enumerate(((q_weight, needs[1]), (k_weight, needs[2])))
    )
    return d_qkv, d_q_weight, d_k_weight


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
