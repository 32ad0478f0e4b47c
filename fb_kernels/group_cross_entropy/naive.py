"""What `group_cross_entropy` means."""

from torch import Tensor


def group_cross_entropy(score: Tensor, target: Tensor, cu_group: Tensor, *, reduction: str = "mean") -> Tensor:
    """-sum_k q_k log softmax(score)_k of each group, [G], or their sum, or the mean over groups that are not empty."""
    loss = score.new_zeros(len(cu_group) - 1)
    for g, (first, last) in enumerate(zip(cu_group[:-1].tolist(), cu_group[1:].tolist(), strict=True)):
        q = target.detach()[first:last]
        terms = -q * score[first:last].log_softmax(0)
        loss[g] = terms[q != 0].sum()  # 0 * inf counts as 0
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (cu_group.diff() > 0).sum().clamp(min=1)
