"""The gated activation of the MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, signature


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up in float32 (float64 for float64 input), rounded once (Shazeer 2020, equation 6).

    Under torch.autocast two float tensors of different dtypes are cast to the wider (float64 stays).

    Args:
        gate_up: [..., 2F] float: gate in the first half of the last dimension, up in the second; or gate, [..., F].
        up: [..., F] like gate, where that is a tensor of its own.

    Returns:
        [..., F] in gate_up's dtype, differentiable.

    Raises:
        TypeError: not a floating tensor, or two of different dtypes.
        ValueError: gate_up's last dimension is odd or missing, or up has another shape or device than gate.
    """
    key = signature((gate_up, up))
    run = _swiglu.checked.get(key) if key else None
    if run is None:
        op = "swiglu"
        gate_up, up = precision.promoted(gate_up, up)
        checks.floating(op, "gate_up", gate_up)
        if gate_up.ndim == 0 or (up is None and gate_up.shape[-1] % 2):
            remedy = "concatenate gate and up along the last dimension"
            raise checks.error(op, "gate_up", "shape [..., 2F]", gate_up, remedy)
        if up is not None:
            checks.floating(op, "up", up, like=gate_up)
            checks.shape(op, "up", up, tuple(gate_up.shape), "[..., F]", "give it gate's shape")
        run = _swiglu.passed(key, gate_up)
    return run(gate_up, up)


def _fake(gate_up: Tensor, up: Tensor | None) -> Tensor:
    return gate_up.new_empty(gate_up.shape if up is not None else (*gate_up.shape[:-1], gate_up.shape[-1] // 2))


_swiglu = Op("swiglu", "(Tensor gate_up, Tensor? up) -> Tensor", fake=_fake, triton=True, cpu=True)
_swiglu_backward = Op(
    "swiglu_backward",
    "(Tensor grad, Tensor gate_up, Tensor? up) -> (Tensor, Tensor)",
    folder="swiglu",
    fake=lambda _, gate_up, up: (gate_up.new_empty(gate_up.shape), gate_up.new_empty(0 if up is None else up.shape)),
    triton=True,
)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _swiglu_backward(grad, *ctx.saved_tensors)


_swiglu.differentiate(to=("gate_up", "up"), backward=_backward, by=_swiglu_backward)
