"""The compiled kernel of `candidate_head` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu, segments

SIZE = 1 << 18  # maximum elements of hidden: above it torch's threads are faster
TAKES = f"float32, hidden states of up to {SIZE:,} elements"


def candidate_head(
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    cu_group: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(score[N], prob[N], best[G])."""
    library, float32 = cpu.library(), torch.float32
    rows, width = hidden.shape
    stride, step = hidden.stride()
    if isinstance(library, str) or not width or rows * width > SIZE or (step != 1 and width > 1):
        return NotImplemented
    if not (hidden.dtype is head_weight.dtype is float32 and head_weight.is_contiguous() and cu_group.is_contiguous()):
        return NotImplemented
    norm_at = bias_at = 0
    if norm_weight is not None:
        if norm_weight.dtype is not float32 or not norm_weight.is_contiguous():
            return NotImplemented
        norm_at = norm_weight.data_ptr()
    if head_bias is not None:
        if head_bias.dtype is not float32:
            return NotImplemented
        bias_at = head_bias.data_ptr()
    groups = cu_group.numel() - 1
    score, prob = hidden.new_empty(rows), hidden.new_empty(rows)
    best = hidden.new_empty(groups, dtype=torch.int64)
    code = library.fbcpu_candidate_head(
        hidden=hidden.data_ptr(), hidden_stride=stride, norm_weight=norm_at, head_weight=head_weight.data_ptr(),
        bias=bias_at, eps=eps, group=cu_group.data_ptr(), wide=cu_group.dtype is torch.int64, score=score.data_ptr(),
        prob=prob.data_ptr(), best=best.data_ptr(), rows=rows, groups=groups, width=width,
    )  # fmt: skip
    if code:
        segments.check_offsets("candidate_head", cu_group, rows)
        return NotImplemented
    return score, prob, best
