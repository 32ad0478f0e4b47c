"""Shapes of `swiglu`: the MLP of Qwen3-1.7B over packed rows and over a decode step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.aot.compiler import Case, Cost
from fb_kernels.swiglu import triton as swiglu


def cases() -> Iterator[Case]:
    return map(case, (16, 4096))


def case(rows: int) -> Case:
    width, dtype = 6144, torch.bfloat16
    gate_up = torch.empty(rows, 2 * width, dtype=dtype, device="meta")
    grad = torch.empty(rows, width, dtype=dtype, device="meta")
    return Case(
        "swiglu",
        f"N={rows} F={width} bf16",
        lambda: (swiglu.swiglu(gate_up), swiglu.swiglu_backward(grad, gate_up)),
        {
            "_swiglu_fwd_kernel": Cost(rows * width * 2 * 3),
            "_swiglu_bwd_kernel": Cost(rows * width * 2 * 5),
        },
    )
