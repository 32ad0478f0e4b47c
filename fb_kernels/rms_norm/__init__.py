"""Root-mean-square normalisation, with the residual addition before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, signature


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute weight * s / sqrt(mean(s^2) + eps) over the last dimension, with s = x + residual.

    The sum is rounded to x's dtype and then normed in float32 (float64 for float64 input); the weight is applied before
    the single rounding at the end (Zhang & Sennrich 2019, equation 4). Under torch.autocast float tensors of several
    dtypes are cast to the widest (float64 stays).

    Args:
        x: [..., D] float.
        weight: [D], x's dtype.
        eps: added to the mean square, above 0.
        residual: [..., D] like x, or None.

    Returns:
        (normed, s), both of x's shape and dtype; without a residual s is x itself. Gradients flow to x, weight and
        residual through both.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    key = signature((x, weight, residual), (eps,))
    run = _rms_norm.checked.get(key) if key else None
    if run is None:
        op = "rms_norm"
        x, weight, residual = precision.promoted(x, weight, residual)
        checks.floating(op, "x", x)
        if x.ndim == 0:
            raise checks.error(op, "x", "shape [..., D]", x, "add a dimension")
        checks.floating(op, "weight", weight, like=x)
        checks.shape(op, "weight", weight, (x.shape[-1],), "[D]", "give one value to each column of x")
        checks.positive(op, "eps", eps, "pass the model's rms_norm_eps")
        if residual is not None:
            checks.floating(op, "residual", residual, like=x)
            checks.shape(op, "residual", residual, tuple(x.shape), "[..., D]", "expand it to x's shape")
        run = _rms_norm.passed(key, x)
    normed, summed = run(x, weight, eps, residual)
    return normed, x if residual is None else summed


_rms_norm = Op(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps, residual: (x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)),
    triton=True,
    cpu=True,
)
_rms_norm_backward = Op(
    "rms_norm_backward",
    "(Tensor grad_normed, Tensor grad_sum, Tensor summed, Tensor weight, float eps, bool[] needs) -> (Tensor, Tensor)",
    folder="rms_norm",
    fake=lambda _n, _s, summed, weight, _eps, needs: (
        summed.new_empty(summed.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
    ),
    triton=True,
)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, eps, residual = inputs
    if residual is None:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x if residual is None else output[1], weight)
    ctx.eps = eps


def _backward(ctx: Any, grad_normed: Tensor, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
    to_x, to_weight, _, to_residual = ctx.needs_input_grad
    summed, weight = _rms_norm_backward(
        grad_normed, grad_sum, *ctx.saved_tensors, ctx.eps, [to_x or to_residual, to_weight]
    )
    return summed if to_x else None, weight if to_weight else None, None, summed if to_residual else None


_rms_norm.differentiate(to=("x", "weight", "residual"), setup_context=_save, backward=_backward, by=_rms_norm_backward)
