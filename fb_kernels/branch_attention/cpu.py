"""The compiled kernels of `branch_attention` for CPU tensors, float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fb_kernels import cpu, layout
from fb_kernels.branch_attention import reference

ALL = (1 << 63) - 1  # a window without a limit


def branch_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, prefix_k: Tensor, prefix_v: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]); rows that see values that are not finite are computed by the reference."""
    results = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    done = torch.empty(len(q), dtype=torch.bool)
    if not _run("branch_attention", (q, k, v, prefix_k, prefix_v), options, (*results, done)):
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
    """(dq, dk, dv, dprefix_k, dprefix_v); rows that values that are not finite reach are computed by the reference."""
    *layout_and_numbers, prefix_grads = options
    grad, state = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_out, out))  # a sum's is expanded
    wanted = (q, k, v, *((prefix_k, prefix_v) if prefix_grads else (None, None)))
    grads = [q.new_zeros(0 if x is None else x.shape, dtype=torch.float32) for x in wanted]
    given = (grad, state, q, k, v, prefix_k, prefix_v)
    done = torch.empty(2, len(q), dtype=torch.bool)  # of dq, of dk and dv
    if not _run("branch_attention_backward", given, tuple(layout_and_numbers), (lse.contiguous(), *grads, done)):
        return NotImplemented
    dq, dk, dv, dprefix_k, dprefix_v = (x.to(q.dtype) for x in grads)
    if not done.all():
        exact = reference.branch_attention_backward(grad_out, q, k, v, prefix_k, prefix_v, out, lse, *options)
        dprefix_k, dprefix_v = exact[3:]  # of all rows: values that are not finite may already be in the sums
        mine, own = done[..., None, None]
        dq = torch.where(mine, dq, exact[0])
        if k is not None:
            dk, dv = torch.where(own, dk, exact[1]), torch.where(own, dv, exact[2])
    return dq, dk, dv, dprefix_k, dprefix_v


def _run(name: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], results: tuple[Tensor, ...]) -> bool:
    """Write the results, the last of which marks the rows that are valid; returns whether the kernel takes the call."""
    library = cpu.library()
    branch, group, start, length, table, _, _, window, scale, softcap = options  # the op's arguments from cu_branch on
    if isinstance(library, str) or tensors[0] is None or tensors[0].dtype not in cpu.STEP:
        return False
    addresses: list[int | None] = []
    for index, x in enumerate(tensors):
        if x is None:
            addresses += (None, 0, 0)
            continue
        *page, row, head, step = x.stride()
        if step != 1 and x.shape[-1] > 1:
            return False
        addresses += (x.data_ptr(), row, head)
        if index >= len(tensors) - 2:
            addresses += page or [0]
    q, prefix = tensors[-5], tensors[-2]
    assert q is not None
    assert prefix is not None
    indices = (branch, group, start, length, table)
    wide = layout.remembered(indices, ("int64",), lambda: [x if x is None else x.long().contiguous() for x in indices])
    rows, heads, width = q.shape
    code = getattr(library, f"fbcpu_{name}")(
        *addresses, *(x if x is None else x.data_ptr() for x in wide), len(branch) - 1, len(group) - 1,
        -1 if table is None else table.shape[1], *prefix.shape[: 1 if table is None else 2],
        *([0] if table is None else []), *(x.data_ptr() for x in results), rows, heads,
        prefix.shape[-2], width, scale, softcap or 0.0, ALL if window is None else window, torch.get_num_threads(),
        q.dtype == torch.bfloat16,
    )  # fmt: skip
    return not code
