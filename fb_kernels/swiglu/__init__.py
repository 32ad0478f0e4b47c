"""The gated activation of the MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op, signature


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up in float32 (float64 for float64 input), rounded once (Shazeer 2020, equation 6).

    Args:
        gate_up: [..., 2F] float: gate in the first half of the last dimension, up in the second.

    Returns:
        [..., F] in gate_up's dtype, differentiable.

    Raises:
        TypeError: gate_up is not a floating tensor.
        ValueError: its last dimension is odd or missing.
    """
    key = signature((gate_up,))
    run = _swiglu.checked.get(key) if key else None
    if run is None:
        op = "swiglu"
        checks.floating(op, "gate_up", gate_up)
        if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
            remedy = "concatenate gate and up along the last dimension"
            raise checks.error(op, "gate_up", "shape [..., 2F]", gate_up, remedy)
        run = _swiglu.passed(key, gate_up)
    return run(gate_up)


_swiglu = Op(
    "swiglu",
    "(Tensor gate_up) -> Tensor",
    fake=lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    triton=True,
    cpu=True,
)
_swiglu_backward = Op(
    "swiglu_backward",
    "(Tensor grad, Tensor gate_up) -> Tensor",
    folder="swiglu",
    fake=lambda _, gate_up: gate_up.new_empty(gate_up.shape),
    triton=True,
)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return _swiglu_backward(grad, *ctx.saved_tensors)


_swiglu.differentiate(to=("gate_up",), setup_context=_save, backward=_backward, by=_swiglu_backward)
