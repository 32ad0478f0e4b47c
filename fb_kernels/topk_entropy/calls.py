"""How `topk_entropy` is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fb_kernels.calls import Call, Calls, by_definition, randn, widen
from fb_kernels.topk_entropy import naive


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Plain torch, without indices: torch.topk picks any of equal values."""
    values = widen(logits.topk(k).values)
    logprob = values.log_softmax(-1)
    return -(logprob.exp() * logprob).sum(-1), values


def topk_entropy(n: int = 1, v: int = 151_936, k: int = 64) -> Call:
    """A call on N rows of V logits."""
    return Call(
        "topk_entropy",
        {"logits": 3 * randn(n, v), "k": k},
        shape=f"N={n} V={v} k={k}",
        scales=(8.0, None, None),
        bytes=2.0 * n * v,
        plain={"torch eager": top},
    )


def compiled() -> Iterator[Call]:
    """A single row of Qwen3's vocabulary, and as many as a trajectory has."""
    half, single = torch.bfloat16, torch.float32
    for rows, dtype in ((1, half), (4096, half), (4096, torch.float16), (4096, single)):
        call = topk_entropy(rows)
        launches = {"_topk_entropy_kernel": int(call.moved(dtype))}
        yield replace(call.cast(dtype), shape=f"{call.shape} {str(dtype)[6:]}", launches=launches)


OPS = (
    Calls(
        "topk_entropy",
        topk_entropy,
        by_definition(naive.topk_entropy),
        sizes={"small": (2, 300, 5), "checked": (2, 40_000, 64)},
        compiled=compiled,
        takes="logits[..., V]",
        gives="entropy[...], values[..., k], fp32; indices[..., k] int64",
        cpu="fp32, bf16",
        cuda="fp32, bf16, fp16",
    ),
)
