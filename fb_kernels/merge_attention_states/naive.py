"""What `merge_attention_states` means: each state acts as one key whose score is its lse and whose value is its out."""

import torch
from torch import Tensor


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out[T, Hq, E], lse[Hq, T]): lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i over i in {a, b}."""
    lses, outs = torch.stack([lse_a, lse_b]), torch.stack([out_a, out_b])  # [2, Hq, T], [2, T, Hq, E]
    empty = lses.isinf()  # such a state's out is not read
    nothing = empty.all(0)  # [Hq, T]
    scores = lses.masked_fill(empty, -torch.inf).masked_fill(nothing, 0.0)
    weights = scores.softmax(0).masked_fill(empty, 0.0)
    lse = scores.logsumexp(0).masked_fill(nothing, -torch.inf)
    return (weights.mT[..., None] * outs.masked_fill(empty.mT[..., None], 0.0)).sum(0), lse
