"""Root-mean-square normalisation, with the residual addition before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, fake_gradients, signature


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute (offset + weight) * s / sqrt(mean(s^2) + eps) over the last dimension, with s = x + residual.

    The sum is rounded to x's dtype and then normed in float32 (float64 for float64 input); the weight is applied before
    the single rounding at the end (Zhang & Sennrich 2019, equation 4). Under torch.autocast float tensors of several
    dtypes are cast to the widest (float64 stays).

    Args:
        x: [..., D] float.
        weight: [D] float, of any dtype; None for no weight; the offset is then ignored.
        eps: added to the mean square, above 0.
        residual: [..., D] like x, or None.
        offset: added to the weight, in float32; 1 where a model keeps its weights about 0 (Gemma's 1 + w).

    Returns:
        (normed, s), both of x's shape and dtype; without a residual s is x itself. Gradients flow to x, weight and
        residual through both.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    key = signature((x, weight, residual), (eps, offset))
    run = _rms_norm.checked.get(key) if key else None
    if run is None:
        op = "rms_norm"
        x, weight, residual = precision.promoted(x, weight, residual)
        checks.floating(op, "x", x)
        if x.ndim == 0:
            raise checks.error(op, "x", "shape [..., D]", x, "add a dimension")
        if weight is not None:
            checks.floating(op, "weight", weight)
            checks.same_device(op, "weight", weight, x)
            checks.shape(op, "weight", weight, (x.shape[-1],), "[D]", "give one value to each column of x")
        checks.positive(op, "eps", eps, "pass the model's rms_norm_eps")
        checks.number(op, "offset", offset, "pass 1.0 where the model multiplies by 1 + weight, else 0.0")
        if residual is not None:
            checks.floating(op, "residual", residual, like=x)
            checks.shape(op, "residual", residual, tuple(x.shape), "[..., D]", "expand it to x's shape")
        run = _rms_norm.passed(key, x)
    normed, summed = run(x, weight, eps, residual, offset)
    return normed, x if residual is None else summed


_rms_norm = Op(
    "rms_norm",
    "(Tensor x, Tensor? weight, float eps, Tensor? residual, float offset) -> (Tensor, Tensor)",
    fake=lambda x, _weight, _eps, residual, _offset: (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
    ),
    triton=True,
    cpu=True,
)
_rms_norm_backward = Op(
    "rms_norm_backward",
    "(Tensor grad_normed, Tensor grad_sum, Tensor summed, Tensor? weight, float eps, float offset, bool[] needs)"
    " -> (Tensor, Tensor)",
    folder="rms_norm",
    fake=lambda _n, _s, summed, weight, _eps, _offset, needs: fake_gradients(summed, (summed, weight), needs),
    triton=True,
)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, residual, ctx.offset = inputs
    if residual is None:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x if residual is None else output[1], weight)


def _backward(ctx: Any, grad_normed: Tensor, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
    to_x, to_weight, to_residual = ctx.needs
    needs = [to_x or to_residual, to_weight]
    summed, weight = _rms_norm_backward(grad_normed, grad_sum, *ctx.saved_tensors, ctx.eps, ctx.offset, needs)
    return summed, weight, summed


_rms_norm.differentiate(to=("x", "weight", "residual"), setup_context=_save, backward=_backward, by=_rms_norm_backward)
