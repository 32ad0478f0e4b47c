"""`candidate_head` in plain PyTorch, on any device: all groups at once, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels._runtime.segments import reduce, segments, softmax, spread


def candidate_head(
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    cu_group: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(score[N], prob[N], best[G])."""
    groups = segments("candidate_head", cu_group, hidden.shape[0])
    dtype = accumulation_dtype(hidden.dtype)
    x = hidden.to(dtype)
    if norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * norm_weight.to(dtype)
    score = (x * head_weight.to(dtype)).sum(1)
    if head_bias is not None:
        score = score + head_bias.reshape(()).to(dtype)
    wide = score.double()[:, None]  # [N, 1]
    prob = softmax(wide, groups)[:, 0].to(dtype)
    ranked = torch.where(wide.isnan(), -torch.inf, wide)
    winner = (ranked == spread(reduce(ranked, "max", groups), groups)) & ~wide.isnan()
    row = torch.arange(score.shape[0], dtype=torch.float64, device=score.device)[:, None]
    first = reduce(torch.where(winner, row, torch.inf), "min", groups)[:-1, 0]  # [G]
    has_best = groups.sound & (first != torch.inf)
    best = torch.where(has_best, first - groups.bounds[:-2], -1.0).long()
    return score, prob, best


def candidate_head_backward(
    grad_score: Tensor,
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    eps: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to hidden, norm_weight, head_weight and head_bias; what `needs` leaves out comes back empty."""
    dtype = accumulation_dtype(hidden.dtype)
    grad = grad_score.to(dtype)[:, None]  # [N, 1]
    x = torch.where(grad == 0, 0.0, hidden.to(dtype))  # 0 * NaN
    head = head_weight.to(dtype)
    if norm_weight is None:
        d_hidden = grad * head if needs[0] else x.new_empty(0)
        d_norm = x.new_empty(0)
        d_head = (grad * x).sum(0) if needs[2] else x.new_empty(0)
    else:
        norm = norm_weight.to(dtype)
        scale = torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
        normed = torch.where(grad == 0, 0.0, x * scale)
        on_normed = grad * head * norm
        pulled = scale * (on_normed - normed * (on_normed * normed).mean(1, keepdim=True))
        d_hidden = torch.where(grad == 0, 0.0, pulled) if needs[0] else x.new_empty(0)
        d_norm = (grad * normed).sum(0) * head if needs[1] else x.new_empty(0)
        d_head = (grad * normed).sum(0) * norm if needs[2] else x.new_empty(0)
    d_bias = grad.sum().reshape(head_bias.shape) if needs[3] and head_bias is not None else x.new_empty(0)
    return (
        d_hidden.to(hidden.dtype),
        d_norm.to(hidden.dtype),
        d_head.to(head_weight.dtype),
        d_bias.to(hidden.dtype if head_bias is None else head_bias.dtype),
    )
