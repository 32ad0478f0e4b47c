"""The compiled kernel of `candidate_head`, `csrc/candidate_head.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels import cuda

ROWS = GROUPS = 1024  # maximum


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
        "candidate_head", x, x, x.stride(0), norm_weight, head_weight, head_weight.dtype == torch.float32,
        head_bias, wide_bias, cu_group, cu_group.dtype == torch.int64, rows, groups, width, cuda.DTYPES[x.dtype], eps,
        score, prob, best,
    )  # fmt: skip
    return (score, prob, best) if taken else NotImplemented
