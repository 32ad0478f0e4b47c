"""`swiglu` in plain PyTorch, on any device, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype


def halves(gate_up: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gate, up), each [..., F]."""
    gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
    return gate, up


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up."""
    dtype = accumulation_dtype(gate_up.dtype)
    gate, up = (x if x.dtype == dtype else x.to(dtype) for x in halves(gate_up, up))
    gated = torch.nn.functional.silu(gate).mul_(up)
    return (gated if gated.dtype == gate_up.dtype else gated.to(gate_up.dtype)).contiguous()


def swiglu_backward(grad: Tensor, gate_up: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients to gate_up and up; without up the second is empty."""
    dtype = accumulation_dtype(gate_up.dtype)
    gate, factor = (x.to(dtype) for x in halves(gate_up, up))
    grad = grad.to(dtype)
    d_gate, d_up = torch.ops.aten.silu_backward(grad * factor, gate), torch.nn.functional.silu(gate).mul_(grad)
    if up is None:
        return torch.cat((d_gate, d_up), -1).to(gate_up.dtype).contiguous(), grad.new_empty(0, dtype=gate_up.dtype)
    return d_gate.to(gate_up.dtype).contiguous(), d_up.to(up.dtype).contiguous()
