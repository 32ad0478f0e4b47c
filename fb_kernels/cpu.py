"""The compiled kernels for CPU tensors, `csrc/cpu.cpp`: loads their library when first asked, says why there is none.

The library is a plain C one beside this file (setup.py builds it where a C++ compiler is); it needs no torch. Made for
float32 and for what is small, the rows of a decode step and the candidates of a training step, where plain operations
cost more than their arithmetic. Linear layers run on torch's threads, whose OpenMP runtime it finds loaded (on others
where torch has another runtime), all else on one thread.

A function of an op's name takes that op's arguments; it returns NotImplemented for those it was not made for.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fb_kernels import shared_library
from fb_kernels.reference import branch_attention as reference
from fb_kernels.reference.branch_attention_qkv import check_held
from fb_kernels.reference.qk_norm_rope import check_positions, check_slots

ABI_VERSION = 3
LIBRARY = Path(__file__).with_name("libfb_cpu.so")

LINEAR_ROWS = 16  # the most: from there on oneDNN's blocks are ahead
SHARE = 1 << 17  # products, the least of a thread
ATTENTION_ROWS, ATTENTION_KEYS = 32, 1 << 14  # the most, and of rows times keys: torch.bmm reads them once for all rows
BRANCH_PREFIX = 1 << 11  # the most, keys of a group times threads: beyond, torch.bmm makes up for a call a group
TOPK_ROWS, TOPK_K = 8, 64  # the most

_SIGNATURES = {  # in the letters of `shared_library`
    "skinny_linear": "pq pq pp f pq pq qqq ii",
    "branch_attention_qkv": "pq pp pp pi pqq pqq qq pi p qqqq ff",
    "branch_attention": "pqq pqq pqq pqq pqq q pppp qqq ppp qqqq f",
    "branch_attention_backward": "pqq pqq pqq pqq pqq pqq q pppp qqq pppp qqqq f",
    "topk_entropy": "pqqqq ppp",
}


@cache
def library() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if not LIBRARY.is_file():
        return "not built: there was no C++ compiler at installation, or FB_BUILD_CPU=skip"
    return opened(LIBRARY)


def opened(path: Path) -> ctypes.CDLL | str:
    """A library with its functions typed, or why it cannot be used."""
    return shared_library.opened(path, "fbcpu_", ABI_VERSION, _SIGNATURES)


def why_not() -> str:
    """Why these kernels cannot run; empty where they can."""
    found = library()
    return found if isinstance(found, str) else ""


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    swiglu: bool,
    frozen: bool,
) -> Tensor:
    """[N, M], or [N, M / 2] where it is gated, of a few rows."""
    found, float32 = library(), torch.float32
    rows, width = x.shape
    outputs = weight.shape[0]
    if isinstance(found, str) or rows > LINEAR_ROWS or not width:
        return NotImplemented
    threads = max(1, min(torch.get_num_threads(), rows * width * outputs // SHARE))
    (x_stride, x_step), (weight_stride, weight_step) = x.stride(), weight.stride()
    if x.dtype is not float32 or weight.dtype is not float32 or (width > 1 and not x_step == weight_step == 1):
        return NotImplemented
    residual_at = residual_stride = bias_at = norm_at = 0
    if residual is not None:
        residual_stride, residual_step = residual.stride()
        if residual.dtype is not float32 or swiglu or (residual_step != 1 and outputs > 1):
            return NotImplemented
        residual_at = residual.data_ptr()
    if bias is not None:
        if bias.dtype is not float32 or not bias.is_contiguous():
            return NotImplemented
        bias_at = bias.data_ptr()
    if norm_weight is not None:
        if norm_weight.dtype is not float32 or not norm_weight.is_contiguous():
            return NotImplemented
        norm_at = norm_weight.data_ptr()
    columns = outputs // 2 if swiglu else outputs
    out = x.new_empty((rows, columns))
    code = found.fbcpu_skinny_linear(
        x.data_ptr(), x_stride, weight.data_ptr(), weight_stride, bias_at, norm_at, eps, residual_at, residual_stride,
        out.data_ptr(), columns, rows, width, outputs, swiglu, threads,
    )  # fmt: skip
    return NotImplemented if code else out


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
    """[N, Hq, E] of branches of one token: norm, rotation, attention; keys and values go to their slots."""
    found, float32 = library(), torch.float32
    rows, width = qkv.shape[0], cos.shape[1]
    if isinstance(found, str) or not 0 < rows <= ATTENTION_ROWS or not width:
        return NotImplemented
    if not (qkv.dtype is cos.dtype is sin.dtype is k_cache.dtype is v_cache.dtype is float32):
        return NotImplemented
    (k_slot, k_head, k_step), (v_slot, v_head, v_step) = k_cache.stride(), v_cache.stride()
    qkv_stride, qkv_step = qkv.stride()
    if not (qkv_step == k_step == v_step == 1 and cos.is_contiguous() and sin.is_contiguous()):
        return NotImplemented
    q_at = k_at = slots_at = wide_slots = 0
    if q_weight is not None:
        if q_weight.dtype is not float32 or not q_weight.is_contiguous():
            return NotImplemented
        q_at = q_weight.data_ptr()
    if k_weight is not None:
        if k_weight.dtype is not float32 or not k_weight.is_contiguous():
            return NotImplemented
        k_at = k_weight.data_ptr()
    if not positions.is_contiguous() or not (slots is None or slots.is_contiguous()):
        return NotImplemented
    length = check_held(k_cache, held, slots)[0]
    first = 0 if window is None else max(0, length + 1 - window)
    if rows * (length - first) * min(2, torch.get_num_threads()) > ATTENTION_KEYS:
        return NotImplemented
    if slots is not None:
        check_slots(slots, k_cache.shape[0], "branch_attention_qkv")
        slots_at, wide_slots = slots.data_ptr(), slots.dtype is torch.int64
    check_positions(positions, cos.shape[0], "branch_attention_qkv")
    out = qkv.new_empty((rows, num_heads, width))
    code = found.fbcpu_branch_attention_qkv(
        qkv.data_ptr(), qkv_stride, q_at, k_at, cos.data_ptr(), sin.data_ptr(),
        positions.data_ptr(), positions.dtype is torch.int64, k_cache.data_ptr(), k_slot, k_head,
        v_cache.data_ptr(), v_slot, v_head, first, length, slots_at, wide_slots,
        out.data_ptr(), rows, num_heads, num_kv_heads, width, eps, scale,
    )  # fmt: skip
    return NotImplemented if code else out


def branch_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, prefix_k: Tensor, prefix_v: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]); groups of branches of one row are done here, the others by the reference."""
    results = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]))
    done = _one_row_branches("branch_attention", (q, k, v, prefix_k, prefix_v), options, results)
    if done is None:
        return NotImplemented
    if done.all():
        return results
    out, lse = reference.branch_attention(q, k, v, prefix_k, prefix_v, *options)
    return torch.where(done[:, None, None], results[0], out), torch.where(done, results[1], lse)


def branch_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), likewise; the probabilities are made anew."""
    if k is None or v is None:
        return NotImplemented
    results = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    done = _one_row_branches("branch_attention_backward", (grad_out, q, k, v, prefix_k, prefix_v), options, results)
    if done is None:
        return NotImplemented
    if done.all():
        return results
    rest = reference.branch_attention_backward(grad_out, q, k, v, prefix_k, prefix_v, out, lse, *options)
    dq, dk, dv = (torch.where(done[:, None, None], *pair) for pair in zip(results, rest, strict=True))
    return dq, dk, dv


def _one_row_branches(
    name: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], results: tuple[Tensor, ...]
) -> Tensor | None:
    """Write the rows of the groups whose branches are one row each; bool [T], those that are done, None without any.

    A group whose results are not all finite is not done, nor is one with a long prefix.
    """
    found = library()
    branch, group, start, length, table, _, _, window, scale, softcap = options  # the op's, from cu_branch on
    if isinstance(found, str) or not (window is softcap is None):
        return None
    heads: list[int] = []
    for x in tensors:
        if x is None or x.dtype is not torch.float32:
            return None
        *_, row, head, step = x.stride()
        if step != 1 and x.shape[-1] > 1:
            return None
        heads += (x.data_ptr(), row, head)
    q, k, prefix_k, prefix_v = (x for x in (tensors[-5], tensors[-4], *tensors[-2:]) if x is not None)
    slots = prefix_k.shape[0]
    if table is not None:
        pages, page = prefix_k.shape[:2]
        apart = [divmod(x.stride(0), max(1, x.stride(1))) for x in (prefix_k, prefix_v)]  # in slots
        outside = (table[:, :1] < 0) | (table[:, :1] >= pages) | ((start < 0) | (start + length > page))[:, None]
        if table.shape[1] != 1 or apart[0] != apart[1] or apart[0][1] or bool(outside.any()):
            return None
        start = start + table[:, 0].long() * apart[0][0]
        slots = apart[0][0] * (pages - 1) + page
    rows, query_heads, width = q.shape
    longest = BRANCH_PREFIX // torch.get_num_threads()
    offsets = [x.to(torch.int64).contiguous() for x in (branch, group, start, length)]
    done = torch.empty(rows, dtype=torch.bool)
    code = getattr(found, f"fbcpu_{name}")(
        *heads, slots, *(x.data_ptr() for x in offsets), len(branch) - 1, len(group) - 1, longest,
        *(x.data_ptr() for x in results), done.data_ptr(), rows, query_heads, k.shape[1], width, scale,
    )  # fmt: skip
    return None if code or not done.any() else done


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    found, shape = library(), logits.shape
    width, leading = shape[-1], shape[:-1]
    rows = leading.numel()
    if isinstance(found, str) or logits.dtype is not torch.float32 or not 0 < rows <= TOPK_ROWS or k > TOPK_K:
        return NotImplemented
    x = logits.reshape(rows, width)
    if x.stride(1) != 1 and width > 1:
        return NotImplemented
    entropy, values = x.new_empty(leading), x.new_empty((*leading, k))
    indices = x.new_empty((*leading, k), dtype=torch.int64)
    found.fbcpu_topk_entropy(
        x.data_ptr(), x.stride(0), rows, width, k, entropy.data_ptr(), values.data_ptr(), indices.data_ptr()
    )
    return entropy, values, indices
