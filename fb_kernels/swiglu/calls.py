"""How `swiglu` is called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import Call, Calls, by_definition, randn
from fb_kernels.swiglu import naive


def gated(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """Plain torch."""
    gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
    return F.silu(gate) * up


def swiglu(n: int = 4096, f: int = 6144, *, apart: bool = False) -> Call:
    """A call on [N, 2 F], or on two tensors."""
    arguments = {"gate_up": randn(n, f), "up": randn(n, f, seed=1)} if apart else {"gate_up": randn(n, 2 * f)}
    return Call(
        "swiglu",
        arguments,
        gradients=tuple(arguments),
        shape=f"N={n} F={f}{', two tensors' * apart}",
        bytes=6.0 * n * f,
        plain={"torch eager": gated},
        launches={"_swiglu_fwd_kernel": 6 * n * f, "_swiglu_bwd_kernel": 10 * n * f},
    )


def _checked(size: str) -> Iterator[Call]:
    dimensions = {"small": (5, 40), "checked": (33, 1000)}.get(size, ())
    yield from (swiglu(*dimensions, apart=apart) for apart in (False, True))


OPS = (
    Calls(
        "swiglu",
        swiglu,
        by_definition(naive.swiglu),
        checked=_checked,
        compiled=lambda: (swiglu(rows).cast(torch.bfloat16) for rows in (16, 4096)),
        takes="gate_up[..., 2 F], or gate_up[..., F], up[..., F]",
        gives="[..., F]",
        cpu="fp32, bf16",
        optional=("up",),
    ),
)
