"""Shapes of `candidate_head`: one state's 13 candidates of Qwen3-1.7B, and a training batch of states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.aot.compiler import Case, Cost
from fb_kernels.candidate_head.triton import candidate_head, candidate_head_backward


def cases() -> Iterator[Case]:
    return (case(groups, normed) for groups in (1, 1024) for normed in (True, False))


def case(groups: int, normed: bool) -> Case:
    size, width = 13, 2048
    rows = groups * size
    hidden = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    head = torch.empty(width, device="meta")
    norm = hidden.new_empty(width) if normed else None
    bias, grad = head.new_empty(1), head.new_empty(rows)
    offsets = torch.empty(groups + 1, dtype=torch.int32, device="meta")
    return Case(
        "candidate_head",
        f"G={groups} K={size} D={width} {'normed ' if normed else ''}bf16",
        lambda: (
            candidate_head(hidden, norm, head, bias, offsets, 1e-6),
            candidate_head_backward(grad, hidden, norm, head, bias, 1e-6, [True, normed, True, True]),
        ),
        {
            "_candidate_head_fwd_kernel": Cost(2 * hidden.numel()),
            "_candidate_head_bwd_kernel": Cost(4 * hidden.numel()),
        },
    )
