"""Triton kernel of `merge_attention_states`: a program takes ROWS heads of any tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fb_kernels._runtime import tuning


@triton.jit
def _weighed(out, head, weight, lse, tile):
    """[ROWS, WIDTH] out * weight; 0 and not read where the state has no keys."""
    present = (lse != -float("inf"))[:, None]
    x = tl.load(out + head, mask=tile & present, other=0.0).to(tl.float32)
    return tl.where(present, x * weight[:, None], 0.0)


@triton.jit(do_not_specialize=["tokens", "a_lse_head", "b_lse_head"])
def _merge_attention_states_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, a_token, a_head, b_token, b_head, a_lse_head, a_lse_token, b_lse_head,
    b_lse_token, tokens, heads, head_dim, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // heads, row % heads
    real = token < tokens
    column = tl.arange(0, WIDTH)[None, :]
    tile = real[:, None] & (column < head_dim)
    a = tl.load(lse_a + head * a_lse_head + token * a_lse_token, mask=real, other=0.0)
    b = tl.load(lse_b + head * b_lse_head + token * b_lse_token, mask=real, other=0.0)
    a, b = tl.where(a == float("inf"), -float("inf"), a), tl.where(b == float("inf"), -float("inf"), b)
    top = tl.where(a > b, a, b)  # NaN in either makes the total NaN
    top = tl.where(top == -float("inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    divisor = tl.where(total == 0, 1.0, total)
    merged = _weighed(out_a, (token * a_token + head * a_head)[:, None] + column, weight_a / divisor, a, tile)
    merged += _weighed(out_b, (token * b_token + head * b_head)[:, None] + column, weight_b / divisor, b, tile)
    tl.store(out + row[:, None] * head_dim + column, merged, mask=tile)
    tl.store(lse + head * tokens + token, top + tl.log(total), mask=real)


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T])."""
    if out_a.dtype == torch.float64:
        return NotImplemented
    tokens, heads, head_dim = out_a.shape
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (out_a, out_b))
    out, lse = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
    launch = tuning.merge_attention_states(out_a.dtype, head_dim)
    grid = (triton.cdiv(tokens * heads, launch["ROWS"]),)
    if lse.numel():
        _merge_attention_states_kernel[grid](
            a, lse_a, b, lse_b, out, lse, *a.stride()[:2], *b.stride()[:2], *lse_a.stride(), *lse_b.stride(),
            tokens, heads, head_dim, **launch,
        )  # fmt: skip
    return out, lse
