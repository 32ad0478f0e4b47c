"""The compiled kernel of `topk_entropy`, `csrc/topk_entropy.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cuda

ROWS, K, GROUPS = 32, 64, 2048  # maximum; for more rows Triton is as fast
TAKES = f"up to {ROWS} rows and k up to {K}"


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    shape, width = logits.shape[:-1], logits.shape[-1]
    rows = shape.numel()
    if logits.dtype not in cuda.DTYPES or rows > ROWS or k > K:  # before tensors of that size are allocated
        return NotImplemented
    entropy = logits.new_empty(shape, dtype=torch.float32)
    values = logits.new_empty((*shape, k), dtype=torch.float32)
    indices = logits.new_empty((*shape, k), dtype=torch.int64)
    if not rows:
        return entropy, values, indices
    x = logits.reshape(rows, width)
    x = x if x.stride(1) == 1 else x.contiguous()
    workspace = logits.new_empty(rows * (min(width, GROUPS) + 1), dtype=torch.int64)
    taken = cuda.launch(
        "topk_entropy", x, logits=x, stride=x.stride(0), rows=rows, width=width, k=k, dtype=cuda.DTYPES[x.dtype],
        workspace=workspace, entropy=entropy, values=values, indices=indices,
    )  # fmt: skip
    return (entropy, values, indices) if taken else NotImplemented
