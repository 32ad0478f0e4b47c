"""The compiled kernel of `branch_attention`, `csrc/branch_attention.cu`: made for branches of one row.

It is correct for branches of any length (it takes a branch's own keys one by one), so no tensor must be read first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cuda, precision
from fb_kernels.branch_attention.arguments import BranchAttention

TAKES = "float16 and bfloat16, branches of one row, heads of width 64, 128 or 256; none in batch-invariant mode"


def branch_attention(call: BranchAttention) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]) of 16-bit floats, if shapes or the hint say that branches have one row."""
    q, k, v, prefix_k, prefix_v = call[:5]
    cu_branch, cu_group, prefix_start, prefix_len, block_table = call.indices
    max_branch_len, max_prefix_len, window, scale, softcap = call[10:]
    rows, heads, width = q.shape
    if rows != len(cu_branch) - 1 if max_branch_len is None else max_branch_len > 1:
        return NotImplemented
    kv_heads, branches, groups = prefix_k.shape[-2], len(cu_branch) - 1, len(cu_group) - 1
    pages, size = (1, len(prefix_k)) if block_table is None else prefix_k.shape[:2]
    table = cu_branch[None, :1] if block_table is None else block_table
    indices, capacity = (cu_branch, cu_group, prefix_start, prefix_len), size * table.shape[1]
    conditions = [not precision.batch_invariant(), window is softcap is None]
    conditions += [q.dtype in (torch.float16, torch.bfloat16), width in (64, 128, 256)]
    conditions += [max(rows * heads, pages, capacity, branches, groups) < 1 << 30]
    conditions += [x.is_contiguous() for x in indices] + [x.dtype == cu_branch.dtype for x in (*indices, table)]
    conditions += [x.stride(-1) == 1 for x in (q, q if k is None else k, prefix_k, table)]
    if not all(conditions) or prefix_k.stride() != prefix_v.stride():
        return NotImplemented
    if k is not None and v is not None and k.stride() != v.stride():  # v may be a part of a product's result
        k, v = k.contiguous(), v.contiguous()
    library, most_keys = cuda.library(), capacity if max_prefix_len is None else min(capacity, max_prefix_len)
    assert not isinstance(library, str)
    needed = library.fb_branch_attention_workspace(
        rows=rows, heads=heads, kv_heads=kv_heads, head_dim=width, groups=groups, most_keys=most_keys
    )
    if needed < 0 < q.numel():
        return NotImplemented
    out, lse = q.new_empty(q.shape), q.new_empty((heads, rows), dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    own, page = (0, 0) if k is None else k.stride()[:2], 0 if block_table is None else prefix_k.stride(0)
    workspace = q.new_empty(needed, dtype=torch.float32)
    launched = cuda.launch(
        "branch_attention", q, q=q, q_row=q.stride(0), q_head=q.stride(1), k=k, v=v, own_row=own[0], own_head=own[1],
        prefix_k=prefix_k, prefix_v=prefix_v, page_stride=page, slot_stride=prefix_k.stride(-3),
        prefix_head=prefix_k.stride(-2), pages=pages, page_size=size, cu_branch=cu_branch, cu_group=cu_group,
        prefix_start=prefix_start, prefix_len=prefix_len, block_table=block_table, table_row=table.stride(0),
        table_width=table.shape[1], branches=branches, groups=groups, wide=cu_branch.dtype == torch.int64, out=out,
        lse=lse, workspace=workspace, most_keys=most_keys, rows=rows, heads=heads, kv_heads=kv_heads, head_dim=width,
        scale=scale, dtype=cuda.DTYPES[q.dtype],
    )  # fmt: skip
    return (out, lse) if launched else NotImplemented
