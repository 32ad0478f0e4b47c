"""What `swiglu` means (Shazeer 2020, equation 6)."""

from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up[..., 2F] with silu(x) = x sigmoid(x): [..., F]."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return gate * gate.sigmoid() * up
