"""`joint_pool` in plain PyTorch, on any device: all pairs are compared, so that no shape depends on values."""

from __future__ import annotations

import torch
from torch import Tensor


def joint_pool(slm_ids: Tensor, llm_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ids[..., K], count[...], source[..., K]) with K = Ks + Kt."""
    split = slm_ids.shape[-1]
    ids = torch.cat([slm_ids, llm_ids], -1)
    same = ids[..., :, None] == ids[..., None, :]  # [..., K, K]
    first = (ids >= 0) & ~same.tril(-1).any(-1)  # first occurrences
    source = same[..., :split].any(-1).int() + 2 * same[..., split:].any(-1).int()
    count = first.sum(-1, dtype=torch.int32)
    front, rest = first.cumsum(-1) - 1, (~first).cumsum(-1) - 1
    positions = torch.where(first, front, count[..., None] + rest)  # a permutation: kept ids move to the front
    return (
        torch.empty_like(ids).scatter_(-1, positions, ids.masked_fill(~first, -1)),
        count,
        torch.empty_like(source).scatter_(-1, positions, source.masked_fill(~first, 0)),
    )
