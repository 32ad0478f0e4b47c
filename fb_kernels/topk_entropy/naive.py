"""What `topk_entropy` means."""

import torch
from torch import Tensor


def topk_entropy(logits: Tensor, k: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...] = -sum p log p of p = softmax(values), values[..., k], indices[..., k]) of logits[..., V].

    The order: NaN first, then falling values, equal ones by their index.
    """
    batch, width = logits.shape[:-1], logits.shape[-1]
    indices = []
    for row in logits.reshape(batch.numel(), width).tolist():
        keys = [(value == value, -value if value == value else 0.0, index) for index, value in enumerate(row)]
        indices.append([index for *_, index in sorted(keys)[:k]])
    order = torch.tensor(indices, dtype=torch.int64).reshape(*batch, k)
    values = logits.detach().gather(-1, order)
    return torch.special.entr(values.softmax(-1)).sum(-1), values, order
