"""What `compatibility_targets` means: B_h, z and q of the method, and of the paper's hybrid with `local`."""

import torch
from torch import Tensor


def compatibility_targets(
    logprob: Tensor,  # [N, H]
    cu_group: Tensor,  # [G + 1]
    *,
    horizons: list[int],
    temperature: float = 0.5,
    eps: float = 1e-6,
    local: Tensor | None = None,  # [N]
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """B_h = mean of the first h log-probs; q = softmax((alpha z(B_h) + (1 - alpha) z(local)) / temperature) in a group.

    Returns (B[N, h], q[N, h]), a column for each horizon; q is 0 outside all groups.
    """
    mean = torch.stack([logprob[:, :h].mean(1) for h in horizons], 1).detach()
    q = torch.zeros_like(mean)
    for first, last in zip(cu_group[:-1].tolist(), cu_group[1:].tolist(), strict=True):
        if first < last:
            z = torch.zeros_like(mean[first:last])
            if alpha > 0:
                z = alpha * _standardise(mean[first:last], eps)
            if local is not None and alpha < 1:
                z = z + (1 - alpha) * _standardise(local.detach()[first:last, None], eps)
            q[first:last] = (z / temperature).softmax(0)
    return mean, q


def _standardise(x: Tensor, eps: float) -> Tensor:
    """z(x) = (x - mean) / (population deviation + eps) of each column, 0 where only rounding spreads it."""
    deviation = x.std(0, correction=0)
    flat = deviation <= torch.finfo(x.dtype).eps * x.abs().amax(0)
    return ((x - x.mean(0)) / (deviation + eps)).masked_fill(flat, 0.0)
