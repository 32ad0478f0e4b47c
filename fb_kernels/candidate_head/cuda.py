"""The compiled kernel of `candidate_head`, `csrc/candidate_head.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cuda

ROWS = GROUPS = 1024  # maximum
TAKES = f"up to {ROWS:,} candidates and groups"


def candidate_head(
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    cu_group: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(score[N], prob[N], best[G])."""
    (rows, width), groups = hidden.shape, len(cu_group) - 1
    if hidden.dtype not in cuda.DTYPES or not width or rows > ROWS or groups > GROUPS:
        return NotImplemented
    x = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    head_weight, cu_group = head_weight.contiguous(), cu_group.contiguous()
    score, prob = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    best = cu_group.new_empty(groups, dtype=torch.int64)
    wide_bias = head_bias is not None and head_bias.dtype == torch.float32
    taken = cuda.launch(
        "candidate_head", x, hidden=x, stride=x.stride(0), norm_weight=norm_weight, head_weight=head_weight,
        wide_head=head_weight.dtype == torch.float32, head_bias=head_bias, wide_bias=wide_bias, offsets=cu_group,
        wide_offsets=cu_group.dtype == torch.int64, rows=rows, groups=groups, width=width, dtype=cuda.DTYPES[x.dtype],
        eps=eps, score=score, prob=prob, best=best,
    )  # fmt: skip
    return (score, prob, best) if taken else NotImplemented
