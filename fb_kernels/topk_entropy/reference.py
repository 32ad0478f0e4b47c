"""`topk_entropy` in plain PyTorch, on any device: by unique integers, as torch.topk does not order equal values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype

ELEMENT_BLOCK = 1 << 22
_LOW = 0x7FFFFFFF


def _top_indices(x: Tensor, k: int) -> Tensor:
    """Indices [rows, k] of the largest entries of float32 or float64 x[rows, V], ties to the lowest index."""
    if x.device.type == "cpu" and k:  # torch.topk is exact where no two values are equal
        values, indices = x.topk(min(k + 1, x.shape[1]), dim=1)
        if bool((values[:, :-1] > values[:, 1:]).all()):  # nor is there a NaN
            return indices[:, :k]
    x = torch.where(x.isnan(), torch.nan, x + 0.0)  # all NaNs alike, all zeros alike
    if x.dtype == torch.float64:
        return x.sort(dim=1, descending=True, stable=True).indices[:, :k]
    bits = x.view(torch.int32)
    order = torch.where(bits < 0, bits ^ _LOW, bits)  # int32 in the order of x; NaN is above +inf
    low = _LOW - torch.arange(x.shape[1], device=x.device)
    return _LOW - ((order.long() << 32) + low).topk(k, dim=1).values.bitwise_and(_LOW)


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    rows, width = logits.shape[:-1], logits.shape[-1]
    x = logits.reshape(math.prod(rows), width)
    dtype = accumulation_dtype(x.dtype)
    parts = []
    for block in x.split(max(1, ELEMENT_BLOCK // width)):
        block = block if block.dtype == dtype else block.to(dtype)
        indices = _top_indices(block, k)
        parts.append((block.gather(1, indices), indices))
    values, indices = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    top = values[:, :1]
    shifted = values - top
    exponentials = shifted.exp()
    total = exponentials.sum(1)
    weighted = exponentials.mul_(shifted).masked_fill_(values == -torch.inf, 0.0).sum(1)  # 0 * -inf counts as 0
    entropy = (total.log() - weighted.div_(total)).masked_fill_(top[:, 0].isinf(), torch.nan)
    return entropy.view(rows), values.view(*rows, k), indices.contiguous().view(*rows, k)
