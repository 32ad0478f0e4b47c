"""What `swiglu` means (Shazeer 2020, equation 6)."""

from torch import Tensor


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up with silu(x) = x sigmoid(x): [..., F], of gate_up[..., 2F] or of two tensors [..., F]."""
    gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
    return gate * gate.sigmoid() * up
