"""Shapes of `merge_attention_states`: the query heads of Qwen3-1.7B over packed rows and over a decode step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.aot.compiler import Case, Cost
from fb_kernels.merge_attention_states.triton import merge_attention_states


def cases() -> Iterator[Case]:
    heads, dim = 16, 128
    for rows in (16, 4096):
        out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device="meta")
        lse = torch.empty(heads, rows, device="meta")
        yield Case(
            "merge_attention_states",
            f"T={rows} {heads}x{dim} bf16",
            partial(merge_attention_states, out, lse, out, lse),
            {"_merge_attention_states_kernel": Cost(6 * out.numel() + 12 * lse.numel())},
        )
