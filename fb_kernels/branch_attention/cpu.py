"""The compiled kernels of `branch_attention` for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fb_kernels import layout
from fb_kernels._runtime import cpu, precision
from fb_kernels.branch_attention import reference
from fb_kernels.branch_attention.arguments import BranchAttention, BranchAttentionBackward

TAKES = "float32 and bfloat16"
ALL = (1 << 63) - 1  # a window without a limit
GRADS = ("dq", "dk", "dv", "dprefix_k", "dprefix_v")


def branch_attention(call: BranchAttention) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]); rows that see inf or NaN are computed by the reference."""
    q = call.q
    results = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    done = torch.empty(len(q), dtype=torch.bool)
    if not _run(
        "branch_attention",
        call,
        {},
        {"out": results[0], "lse": results[1], "done": done},
        whole=precision.batch_invariant(),
    ):
        return NotImplemented
    if done.all():
        return results
    out, lse = reference.branch_attention(call)
    return torch.where(done[:, None, None], results[0], out), torch.where(done, results[1], lse)


def branch_attention_backward(call: BranchAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dprefix_k, dprefix_v); rows that inf or NaN reach are computed by the reference."""
    q = call.forward.q
    grad, state = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.grad_out, call.out))  # a sum's is expanded
    leaves = call.forward[:5] if call.prefix_grads else (*call.forward[:3], None, None)
    grads = [q.new_zeros(0 if x is None else x.shape, dtype=torch.float32) for x in leaves]
    done = torch.empty(2, len(q), dtype=torch.bool)  # of dq, of dk and dv
    totals = {name: x if x is None else x.contiguous() for name, x in (("lse", call.lse), ("dlse", call.grad_lse))}
    outputs = {**totals, **dict(zip(GRADS, grads, strict=True)), "done": done}
    if not _run("branch_attention_backward", call.forward, {"grad": grad, "out": state}, outputs):
        return NotImplemented
    dq, dk, dv, dprefix_k, dprefix_v = (x.to(q.dtype) for x in grads)
    if not done.all():
        exact = reference.branch_attention_backward(call)
        dprefix_k, dprefix_v = exact[3:]  # of all rows: inf or NaN may already be in the sums
        q_done, kv_done = done[..., None, None]
        dq = torch.where(q_done, dq, exact[0])
        if call.forward.k is not None:
            dk, dv = torch.where(kv_done, dk, exact[1]), torch.where(kv_done, dv, exact[2])
    return dq, dk, dv, dprefix_k, dprefix_v


def _run(
    name: str, call: BranchAttention, upstream: Mapping[str, Tensor], outputs: Mapping[str, Tensor | None], **more: bool
) -> bool:
    """Write the outputs, of which `done` marks the valid rows; returns whether the kernel takes the call."""
    library, q, prefix_k, table = cpu.library(), call.q, call.prefix_k, call.block_table
    if isinstance(library, str) or q.dtype not in cpu.STEP:
        return False
    fields = {name: 0 if x is None else x.data_ptr() for name, x in outputs.items()}
    for argument, x in (*upstream.items(), *zip(call._fields[:5], call[:5], strict=True)):
        row = head = address = 0
        if x is not None:
            *_, row, head, step = x.stride()
            if step != 1 and x.shape[-1] > 1:
                return False
            address = x.data_ptr()
        fields[argument], fields[f"{argument}_row"], fields[f"{argument}_head"] = address, row, head
    indices = call.indices
    wide = layout.remembered(indices, ("int64",), lambda: [x if x is None else x.long().contiguous() for x in indices])
    branch_at, group_at, start_at, length_at, table_at = (0 if x is None else x.data_ptr() for x in wide)
    paged = table is not None
    rows, heads, width = q.shape
    code = getattr(library, f"fbcpu_{name}")(
        **fields, prefix_k_page=prefix_k.stride(0) if paged else 0,
        prefix_v_page=call.prefix_v.stride(0) if paged else 0, branch=branch_at, group=group_at, start=start_at,
        length=length_at, table=table_at, branches=len(call.cu_branch) - 1, groups=len(call.cu_group) - 1,
        columns=-1 if table is None else table.shape[1], pages=prefix_k.shape[0],
        page=prefix_k.shape[1] if paged else 0, rows=rows, heads=heads, kv_heads=prefix_k.shape[-2], width=width,
        scale=call.scale, softcap=call.softcap or 0.0, window=ALL if call.window is None else call.window,
        threads=torch.get_num_threads(), narrow=q.dtype == torch.bfloat16, **more,
    )  # fmt: skip
    return not code
