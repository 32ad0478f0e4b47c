"""The compiled kernels of `branch_attention` for CPU tensors: float32 branches of one row over a short prefix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fb_kernels import cpu, layout
from fb_kernels.branch_attention import reference

PREFIX = 1 << 11  # the most, keys of a group times threads that no key head keeps busy: beyond, torch.bmm is ahead


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dprefix_k, dprefix_v), likewise; the probabilities are made anew."""
    *layout_and_numbers, prefix_grads = options
    if k is None or v is None:
        return NotImplemented
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()  # that of a sum is expanded
    results = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    shared = [x.new_zeros(x.shape) if prefix_grads else x.new_empty(0) for x in (prefix_k, prefix_v)]
    given = (grad_out, q, k, v, prefix_k, prefix_v)
    done = _one_row_branches("branch_attention_backward", given, tuple(layout_and_numbers), (*results, *shared))
    if done is None:
        return NotImplemented
    if done.all():
        return *results, shared[0], shared[1]
    *rest, dprefix_k, dprefix_v = reference.branch_attention_backward(*given, out, lse, *options)
    dq, dk, dv = (torch.where(done[:, None, None], *pair) for pair in zip(results, rest, strict=True))
    return dq, dk, dv, dprefix_k, dprefix_v  # these of all rows: what is not finite may be added already


def _one_row_branches(
    name: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], results: tuple[Tensor, ...]
) -> Tensor | None:
    """Write the rows of the groups whose branches are one row each; bool [T], those that are done, None without any.

    A group whose results are not all finite is not done, nor is one with a long prefix.
    """
    found = cpu.library()
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
    apart = [(1, 0)] * 2 if table is None else [divmod(x.stride(0), max(1, x.stride(1))) for x in (prefix_k, prefix_v)]
    if apart[0] != apart[1] or apart[0][1]:
        return None
    indices, sizes = (branch, group, start, length, table), (*prefix_k.shape[:-2], apart[0][0])
    offsets = layout.remembered(indices, ("one row", *sizes), lambda: _offsets(indices, sizes))
    if offsets is None:
        return None
    slots = sizes[0] if table is None else sizes[2] * (sizes[0] - 1) + sizes[1]
    rows, query_heads, width = q.shape
    threads = torch.get_num_threads()
    longest = PREFIX * min(threads, k.shape[1]) // threads
    done = torch.empty(rows, dtype=torch.bool)
    code = getattr(found, f"fbcpu_{name}")(
        *heads, slots, *(x.data_ptr() for x in offsets), len(branch) - 1, len(group) - 1, longest,
        *(x.data_ptr() for x in results), done.data_ptr(), rows, query_heads, k.shape[1], width, scale,
        threads,
    )  # fmt: skip
    return None if code or not done.any() else done


def _offsets(indices: layout.Indices, sizes: tuple[int, ...]) -> list[Tensor] | None:
    """The layout as int64 for prefixes that lie in one piece, a page so many slots behind the one before; else None."""
    branch, group, start, length, table = indices
    if table is not None:
        pages, page, apart = sizes
        outside = (table[:, :1] < 0) | (table[:, :1] >= pages) | ((start < 0) | (start + length > page))[:, None]
        if table.shape[1] != 1 or bool(outside.any()):
            return None
        start = start + table[:, 0].long() * apart
    return [x.to(torch.int64).contiguous() for x in (branch, group, start, length)]
