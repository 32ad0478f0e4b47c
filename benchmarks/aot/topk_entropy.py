"""Shapes of `topk_entropy`: rows of Qwen3's vocabulary, a single one and as many as a trajectory has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.aot.compiler import Case, Cost
from fb_kernels.topk_entropy.triton import topk_entropy


def cases() -> Iterator[Case]:
    vocab, k = 151_936, 64
    for rows, dtype in ((1, torch.bfloat16), (4096, torch.bfloat16), (4096, torch.float16), (4096, torch.float32)):
        logits = torch.empty(rows, vocab, dtype=dtype, device="meta")
        yield Case(
            "topk_entropy",
            f"N={rows} V={vocab} k={k} {str(dtype)[6:]}",
            partial(topk_entropy, logits, k),
            {"_topk_entropy_kernel": Cost(logits.numel() * logits.element_size())},
        )
