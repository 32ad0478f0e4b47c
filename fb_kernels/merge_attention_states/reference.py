"""`merge_attention_states` in plain PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weight of a, weight of b, merged lse), [Hq, T] each; an empty state weighs 0."""
    lse_a, lse_b = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    top = torch.maximum(lse_a, lse_b)
    top = top.masked_fill(top == -torch.inf, 0.0)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = a + b
    divisor = total.masked_fill(total == 0, 1.0)
    return a / divisor, b / divisor, top + total.log()


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E] in out_a's dtype, lse[Hq, T]), added up in lse's dtype; an empty state's out is never read."""
    weight_a, weight_b, lse = merge_weights(lse_a, lse_b)
    parts = [
        (out * weight.T[..., None]).masked_fill_(own.isinf().T[..., None], 0.0)  # [T, Hq, E]
        for out, own, weight in ((out_a, lse_a, weight_a), (out_b, lse_b, weight_b))
    ]
    return parts[0].add_(parts[1]).to(out_a.dtype).contiguous(), lse.contiguous()
