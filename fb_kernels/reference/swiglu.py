"""Definition of `swiglu`."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels.reference.linear_logprob import accumulation_dtype


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of gate_up[..., 2F]."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up).to(gate_up.dtype).contiguous()


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient to gate_up."""
    dtype = accumulation_dtype(gate_up.dtype)
    gate, up = gate_up.to(dtype).chunk(2, -1)
    grad = grad.to(dtype)
    sigmoid = torch.sigmoid(gate)
    d_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat((d_gate, grad * (gate * sigmoid)), -1).to(gate_up.dtype).contiguous()
