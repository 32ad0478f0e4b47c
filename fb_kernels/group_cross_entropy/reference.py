"""`group_cross_entropy` in plain PyTorch, on any device; float64 inside, since the tensors are small."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels._runtime.segments import exponentials, reduce, segments, softmax, spread


def group_cross_entropy(score: Tensor, target: Tensor, cu_group: Tensor) -> Tensor:
    """-sum q log softmax(score) of each group, [G]."""
    groups = segments("group_cross_entropy", cu_group, score.shape[0])
    q = target.double()[:, None]  # [N, 1]
    shifted, _, total = exponentials(score.double()[:, None], groups)
    terms = torch.where(q == 0, 0.0, q * (total.log() - shifted))  # 0 * inf counts as 0
    loss = reduce(terms, "sum", groups)[:-1, 0]
    return torch.where(groups.sound, loss, torch.nan).to(accumulation_dtype(score.dtype))


def group_cross_entropy_backward(grad: Tensor, score: Tensor, target: Tensor, cu_group: Tensor) -> Tensor:
    """Gradient to score, grad * (softmax(score) * sum q - q); exactly 0 in groups that get no gradient."""
    groups = segments("group_cross_entropy", cu_group, score.shape[0])
    q = target.double()[:, None]  # [N, 1]
    mass = spread(reduce(q, "sum", groups), groups)
    weight = spread(torch.nn.functional.pad(grad.double(), (0, 1))[:, None], groups)
    inner = torch.where(mass == 0, 0.0, softmax(score.double()[:, None], groups) * mass) - q
    pulled = torch.where(weight == 0, 0.0, weight * inner)
    return torch.where(groups.sound, pulled, torch.nan)[:, 0].to(score.dtype)
