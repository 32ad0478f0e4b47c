"""`swiglu` in plain PyTorch, on any device, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of gate_up[..., 2F]."""
    dtype, half = accumulation_dtype(gate_up.dtype), gate_up.shape[-1] // 2
    wide = gate_up if gate_up.dtype == dtype else gate_up.to(dtype)
    gated = torch.nn.functional.silu(wide[..., :half]).mul_(wide[..., half:])
    return (gated if gated.dtype == gate_up.dtype else gated.to(gate_up.dtype)).contiguous()


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient to gate_up."""
    dtype = accumulation_dtype(gate_up.dtype)
    gate, up = gate_up.to(dtype).chunk(2, -1)
    grad = grad.to(dtype)
    sigmoid = torch.sigmoid(gate)
    d_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat((d_gate, grad * (gate * sigmoid)), -1).to(gate_up.dtype).contiguous()
