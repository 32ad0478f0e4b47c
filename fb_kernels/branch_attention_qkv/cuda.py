"""The compiled kernel of `branch_attention_qkv`, `csrc/branch_attention_qkv.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cuda, precision
from fb_kernels.branch_attention_qkv.arguments import BranchAttentionQkv

TAKES = "float16 and bfloat16; none in batch-invariant mode"


def branch_attention_qkv(call: BranchAttentionQkv) -> Tensor:
    """[N, Hq, E] of branches of one token: norm, rotation, attention; keys and values go to their slots."""
    qkv, q_weight, k_weight, (cos, sin, positions, k_cache, v_cache, held, slots, block_table), *_ = call
    num_heads, num_kv_heads, eps, window, scale = call[4:]
    library, rows, width, sequences = cuda.library(), qkv.shape[0], cos.shape[-1], held.shape[0]
    floats = [x for x in (qkv, q_weight, k_weight, k_cache, v_cache) if x is not None]
    indices = [x for x in (positions, held, slots, block_table) if x is not None]
    conditions = [x.dtype == qkv.dtype for x in floats] + [x.dtype == torch.int32 for x in indices]
    conditions += [x.dtype == torch.float32 for x in (cos, sin)]
    conditions += [x.is_contiguous() for x in (q_weight, k_weight, cos, sin, positions, held, slots) if x is not None]
    conditions += [x.stride(-1) == 1 and (x.shape[-2] == 1 or x.stride(-2) == width) for x in (k_cache, v_cache)]
    conditions += [qkv.dtype in (torch.float16, torch.bfloat16), qkv.stride(1) == 1]
    if block_table is None:
        pages, page, page_stride, capacity, table = 1, k_cache.shape[0], 0, k_cache.shape[0], (0, 0)
    else:
        (pages, page), page_stride = k_cache.shape[:2], k_cache.stride(0)
        capacity, table = page * block_table.shape[1], (block_table.stride(0), block_table.shape[1])
        conditions += [block_table.stride(1) == 1 or block_table.shape[1] < 2]
        conditions += [pages < 2 or page_stride == v_cache.stride(0)]
    conditions += [page < 2 or k_cache.stride(-3) == v_cache.stride(-3)]
    assert not isinstance(library, str)
    needed = library.fb_branch_attention_qkv_workspace(
        sequences=sequences, rows=rows // sequences, heads=num_heads, head_dim=width, capacity=capacity
    )
    if not all(conditions) or needed < 0 or precision.batch_invariant():
        return NotImplemented
    out = torch.empty(rows, num_heads, width, dtype=qkv.dtype, device=qkv.device)
    partials = torch.empty(needed, dtype=torch.float32, device=qkv.device)
    launched = cuda.launch(
        "branch_attention_qkv", qkv, qkv=qkv, qkv_stride=qkv.stride(0), q_weight=q_weight, k_weight=k_weight, cos=cos,
        sin=sin, table_rows=len(cos), positions=positions, k_cache=k_cache, v_cache=v_cache, page_stride=page_stride,
        cache_stride=k_cache.stride(-3), pages=pages, page_size=page, held=held, block_table=block_table,
        block_table_row=table[0], table_width=table[1], slots=slots, out=out, out_stride=out.stride(0),
        partials=partials, sequences=sequences, rows=rows // sequences, heads=num_heads, kv_heads=num_kv_heads,
        head_dim=width, window=min(window or 0, 2**31 - 1), eps=eps, scale=scale, dtype=cuda.DTYPES[qkv.dtype],
    )  # fmt: skip
    return out if launched else NotImplemented
