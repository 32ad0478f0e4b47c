"""The compiled kernels of `branch_attention` for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fb_kernels import layout
from fb_kernels._runtime import cpu
from fb_kernels.branch_attention import reference

TAKES = "float32 and bfloat16"
ALL = (1 << 63) - 1  # a window without a limit
GRADS = ("dq", "dk", "dv", "dprefix_k", "dprefix_v")


def branch_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, prefix_k: Tensor, prefix_v: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]); rows that see values that are not finite are computed by the reference."""
    results = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    done = torch.empty(len(q), dtype=torch.bool)
    given, written = {"q": q, "k": k, "v": v}, {"out": results[0], "lse": results[1], "done": done}
    if not _run("branch_attention", given, prefix_k, prefix_v, options, written):
        return NotImplemented
    if done.all():
        return results
    out, lse = reference.branch_attention(q, k, v, prefix_k, prefix_v, *options)
    return torch.where(done[:, None, None], results[0], out), torch.where(done, results[1], lse)


def branch_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
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
    given = {"grad": grad, "out": state, "q": q, "k": k, "v": v}
    done = torch.empty(2, len(q), dtype=torch.bool)  # of dq, of dk and dv
    totals = {name: x if x is None else x.contiguous() for name, x in (("lse", lse), ("dlse", grad_lse))}
    written = {**totals, **dict(zip(GRADS, grads, strict=True)), "done": done}
    if not _run("branch_attention_backward", given, prefix_k, prefix_v, tuple(layout_and_numbers), written):
        return NotImplemented
    dq, dk, dv, dprefix_k, dprefix_v = (x.to(q.dtype) for x in grads)
    if not done.all():
        exact = reference.branch_attention_backward(grad_out, grad_lse, q, k, v, prefix_k, prefix_v, out, lse, *options)
        dprefix_k, dprefix_v = exact[3:]  # of all rows: values that are not finite may already be in the sums
        mine, own = done[..., None, None]
        dq = torch.where(mine, dq, exact[0])
        if k is not None:
            dk, dv = torch.where(own, dk, exact[1]), torch.where(own, dv, exact[2])
    return dq, dk, dv, dprefix_k, dprefix_v


def _run(
    name: str,
    given: dict[str, Tensor | None],
    prefix_k: Tensor,
    prefix_v: Tensor,
    options: tuple[Any, ...],
    written: Mapping[str, Tensor | None],
) -> bool:
    """Write the results, of which `done` marks the rows that are valid; returns whether the kernel takes the call."""
    library, q = cpu.library(), given["q"]
    branch, group, start, length, table, _, _, window, scale, softcap = options  # the op's arguments from cu_branch on
    if isinstance(library, str) or q is None or q.dtype not in cpu.STEP:
        return False
    fields = {name: 0 if x is None else x.data_ptr() for name, x in written.items()}
    for argument, x in (*given.items(), ("prefix_k", prefix_k), ("prefix_v", prefix_v)):
        row = head = address = 0
        if x is not None:
            *_, row, head, step = x.stride()
            if step != 1 and x.shape[-1] > 1:
                return False
            address = x.data_ptr()
        fields[argument], fields[f"{argument}_row"], fields[f"{argument}_head"] = address, row, head
    indices = (branch, group, start, length, table)
    wide = layout.remembered(indices, ("int64",), lambda: [x if x is None else x.long().contiguous() for x in indices])
    branch_at, group_at, start_at, length_at, table_at = (0 if x is None else x.data_ptr() for x in wide)
    paged = table is not None
    rows, heads, width = q.shape
    code = getattr(library, f"fbcpu_{name}")(
        **fields, prefix_k_page=prefix_k.stride(0) if paged else 0, prefix_v_page=prefix_v.stride(0) if paged else 0,
        branch=branch_at, group=group_at, start=start_at, length=length_at, table=table_at, branches=len(branch) - 1,
        groups=len(group) - 1, columns=table.shape[1] if paged else -1, pages=prefix_k.shape[0],
        page=prefix_k.shape[1] if paged else 0, rows=rows, heads=heads, kv_heads=prefix_k.shape[-2], width=width,
        scale=scale, softcap=softcap or 0.0, window=ALL if window is None else window,
        threads=torch.get_num_threads(), narrow=q.dtype == torch.bfloat16,
    )  # fmt: skip
    return not code
