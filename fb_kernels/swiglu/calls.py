"""How `swiglu` is called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import Call, Calls, by_definition, randn
from fb_kernels.swiglu import naive


def gated(gate_up: Tensor) -> Tensor:
    """Plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu(n: int = 4096, f: int = 6144) -> Call:
    """A call on [N, 2 F]."""
    return Call(
        "swiglu",
        {"gate_up": randn(n, 2 * f)},
        gradients=("gate_up",),
        shape=f"N={n} F={f}",
        bytes=6.0 * n * f,
        plain={"torch eager": gated},
        launches={"_swiglu_fwd_kernel": 6 * n * f, "_swiglu_bwd_kernel": 10 * n * f},
    )


OPS = (
    Calls(
        "swiglu",
        swiglu,
        by_definition(naive.swiglu),
        sizes={"small": (5, 40), "checked": (33, 1000)},
        compiled=lambda: (swiglu(rows).cast(torch.bfloat16) for rows in (16, 4096)),
        takes="gate_up[..., 2 F]",
        gives="[..., F]",
        cpu="fp32, bf16",
    ),
)
