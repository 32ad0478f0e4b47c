"""What `candidate_head` means."""

import torch
from torch import Tensor

from fb_kernels.rms_norm.naive import rms_norm


def candidate_head(
    hidden: Tensor,  # [N, D]
    norm_weight: Tensor | None,  # [D]
    head_weight: Tensor,  # [D]
    cu_group: Tensor,  # [G + 1]
    *,
    eps: float,
    head_bias: Tensor | None = None,  # one element
) -> tuple[Tensor, Tensor, Tensor]:
    """The score rms_norm(x) . head_weight + head_bias, and in each group its softmax and argmax.

    Returns (score[N], prob[N], best[G]); prob is 0 outside all groups, best is -1 if a group has nothing but NaN.
    """
    x = hidden if norm_weight is None else rms_norm(hidden, norm_weight, eps)[0]
    score = (x * head_weight).sum(1)
    if head_bias is not None:
        score = score + head_bias.reshape(())
    prob, best = torch.zeros_like(score), []
    for first, last in zip(cu_group[:-1].tolist(), cu_group[1:].tolist(), strict=True):
        prob[first:last] = score.detach()[first:last].softmax(0)
        values = score[first:last].tolist()
        numbers = [i for i, value in enumerate(values) if value == value]
        best.append(max(numbers, key=values.__getitem__, default=-1))  # ties to the first
    return score, prob, torch.tensor(best, dtype=torch.int64)
