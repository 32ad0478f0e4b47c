"""Definition of `topk_entropy`: unique integer keys, since torch.topk promises no order among equal values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fb_kernels.reference.linear_logprob import accumulation_dtype

ELEMENT_BLOCK = 1 << 22
_LOW = 0x7FFFFFFF


def _top_indices(x: Tensor, k: int) -> Tensor:
    """Indices [rows, k] of the largest entries of float32 or float64 x[rows, V], ties to the lowest index."""
    if x.device.type == "cpu" and k:  # what torch.topk takes is settled unless the last value has equals outside
        values, indices = x.topk(k, dim=1)
        if bool((((x >= values[:, -1:]).sum(1) == k) & ~values[:, 0].isnan()).all()):
            indices = indices.sort(dim=1).values
            return indices.gather(1, x.gather(1, indices).sort(dim=1, descending=True, stable=True).indices)
    x = torch.where(x.isnan(), torch.nan, x + 0.0)  # one NaN, one zero
    if x.dtype == torch.float64:
        return x.sort(dim=1, descending=True, stable=True).indices[:, :k]
    bits = x.view(torch.int32)
    order = torch.where(bits < 0, bits ^ _LOW, bits)  # int32 that rises with x; NaN is above +inf
    low = _LOW - torch.arange(x.shape[1], device=x.device)
    return _LOW - ((order.long() << 32) + low).topk(k, dim=1).values.bitwise_and(_LOW)


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    rows, width = logits.shape[:-1], logits.shape[-1]
    x = logits.reshape(math.prod(rows), width)
    dtype = accumulation_dtype(x.dtype)
    values = torch.empty((x.shape[0], k), dtype=dtype, device=x.device)
    indices = torch.empty((x.shape[0], k), dtype=torch.int64, device=x.device)
    step = max(1, ELEMENT_BLOCK // width)
    for start in range(0, x.shape[0], step):
        block = x[start : start + step].to(dtype)
        indices[start : start + step] = _top_indices(block, k)
        values[start : start + step] = block.gather(1, indices[start : start + step])
    shifted = values - values[:, :1]
    exponentials = shifted.exp()
    total = exponentials.sum(1)
    weighted = (exponentials * shifted).masked_fill(values == -torch.inf, 0.0).sum(1)  # 0 * -inf is no term
    entropy = torch.where(values[:, 0].isinf(), torch.nan, total.log() - weighted / total)
    return entropy.view(rows), values.view(*rows, k), indices.view(*rows, k)
