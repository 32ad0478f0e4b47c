"""Shapes of `branch_attention`'s backward: reranker training over K candidates, and long branches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.aot.compiler import Case, Cost
from fb_kernels.branch_attention.arguments import BranchAttention, BranchAttentionBackward
from fb_kernels.branch_attention.triton_backward import branch_attention_backward

CANDIDATES = 13
KERNEL, ADD, STATE, PREFIX = (f"_branch_attention_bwd_{name}kernel" for name in ("", "add_", "state_", "prefix_"))


def cases() -> Iterator[Case]:
    for groups in (1, 16):
        for prefix in (1024, 2048, 4096):
            yield _case(groups, 1, prefix)
    for groups in (1, 4):
        yield _case(groups, 128, 2048)
    for width in (64, 80, 96, 256):
        yield _case(1, 1, 1024, width=width)
        yield _case(1, 128, 1024, width=width)
    for length in (1, 128):
        yield _case(1, length, 1024, dtype=torch.float16)
        yield _case(1, length, 1024, window=512, softcap=50.0, page=16)
        yield _case(1, length, 1024, window=512)
        yield _case(1, length, 1024, softcap=50.0)
        yield _case(1, length, 1024, softcap=50.0, width=256)
        yield _case(1, length, 1024, window=512, softcap=50.0, width=256)
        yield _case(1, length, 1024, pad=1)
        yield _case(1, length, 1024, window=512, softcap=50.0, width=256, page=16, pad=1)
        yield _case(1, length, 1024, dtype=torch.float32)
        yield _case(1, length, 1024, through_lse=True)


def _case(
    groups: int,
    length: int,
    prefix: int,
    *,
    width: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
    page: int | None = None,
    pad: int = 0,
    through_lse: bool = False,
) -> Case:
    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    branches, heads, kv_heads = groups * CANDIDATES, 16, 8
    rows = branches * length
    q, k = meta(rows, heads, width), meta(rows, kv_heads, width)
    pages = (groups * prefix,) if page is None else (groups * prefix // page, page)
    keys = meta(*pages, kv_heads, width + pad)[..., :width]
    table = None if page is None else meta(groups, prefix // page, dtype=torch.int32)
    cu_branch, cu_group, start, count = (meta(n, dtype=torch.int32) for n in (branches + 1, groups + 1, groups, groups))
    lse = meta(heads, rows, dtype=torch.float32)
    seen, size = prefix if window is None else min(window, prefix), 2 * width * dtype.itemsize
    cost = Cost(
        bytes=groups * seen * kv_heads * size + rows * (2 * heads + 2 * kv_heads) * size,
        flops=rows * heads * width * (3 * 2 * seen + 8 * 2 * length // 2),  # 3 products; 8 over half of the own keys
    )
    on_prefix = Cost(
        bytes=2 * groups * seen * kv_heads * size + rows * heads * size,
        flops=8 * rows * heads * width * seen,  # four products
    )
    trained, tensors = page is None, (q, k, k, keys, keys, cu_branch, cu_group, start, count, table)
    forward = BranchAttention(*tensors, length, prefix, window, width**-0.5, softcap)
    given = BranchAttentionBackward(q, lse if through_lse else None, q, lse, forward, trained)
    tall = length > 1 and width <= 128 and not pad and dtype != torch.float32  # tiles of 64 rows
    many = width <= 128 and not pad and dtype != torch.float32  # tiles of 64 keys
    name = f"G={groups} K={CANDIDATES} L={length} P={prefix} E={width} {str(dtype).removeprefix('torch.')}"
    name += f" w={window}" * (window is not None) + " cap" * (softcap is not None)
    name += " paged" * (page is not None) + " unaligned" * bool(pad) + " dlse" * through_lse
    return Case(
        "branch_attention_backward",
        name,
        lambda: branch_attention_backward(given),
        {KERNEL: cost, PREFIX: on_prefix},
        matmul=(*[KERNEL] * tall, *[PREFIX] * (many and trained)),
        exact=(KERNEL, ADD, STATE, PREFIX) if dtype == torch.float32 else (),
    )
