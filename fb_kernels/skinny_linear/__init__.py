"""A projection of a few rows, fused with its neighbours in a decoder layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, signature


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    frozen: bool = False,
) -> Tensor:
    """Project rows, with a norm before or a residual or gated activation after, in one pass over the weight.

    With norm_weight the rows are RMS-normed first, as in `rms_norm`. With a residual the result is added to it in
    float32 and rounded once. With swiglu the weight holds the gate's rows, then up's, and the result is
    silu(gate) * up, as in `swiglu`. Made for the 1 to 32 rows of decoding, where reading the weight takes the time; any
    number of rows is correct. Under torch.autocast float tensors are cast to its dtype first, as
    `torch.nn.functional.linear` casts them (float64 stays).

    Args:
        x: [N, K] float.
        weight: [M, K] like x.
        bias: [M] like x, or None.
        norm_weight: [K] like x, or None for no norm.
        eps: of the norm, above 0.
        residual: [N, M] like x, or None; not together with swiglu.
        swiglu: whether the result is gated; M must then be even.
        frozen: promises that no work pending on the stream writes weight or norm_weight; a kernel may then begin to
            read them before that work has ended.

    Returns:
        [N, M], with swiglu [N, M / 2], in x's dtype, contiguous. For inference: no argument may require grad.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or combination, or an argument that requires grad.
    """
    gated, frozen = bool(swiglu), bool(frozen)
    key = signature((x, weight, bias, norm_weight, residual), (eps,), (), gated)
    run = _skinny_linear.checked.get(key) if key else None
    if run is None:
        op = "skinny_linear"
        x, weight, bias, norm_weight, residual = precision.lowered(x, weight, bias, norm_weight, residual)
        checks.floating(op, "x", x)
        checks.floating(op, "weight", weight, like=x)
        checks.shape(op, "x", x, (None, None), "[N, K]", "flatten the leading dimensions")
        rows, width = x.shape
        checks.shape(op, "weight", weight, (None, width), "[M, K]", "give it a column for each of x's")
        outputs = weight.shape[0]
        shapes = (
            ("bias", bias, (outputs,), "[M]", "give it a value for each row of weight"),
            ("norm_weight", norm_weight, (width,), "[K]", "pass the norm's weight, or None for no norm"),
            ("residual", residual, (rows, outputs), "[N, M]", "give it the result's shape"),
        )
        for name, value, expected, letters, remedy in shapes:
            if value is not None:
                checks.floating(op, name, value, like=x)
                checks.shape(op, name, value, expected, letters, remedy)
        checks.positive(op, "eps", eps, "pass the model's rms_norm_eps")
        if gated and residual is not None:
            raise checks.error(op, "residual", "None together with swiglu", residual, "add it in the next projection")
        if gated and outputs % 2:
            raise checks.error(op, "weight", "an even number of rows with swiglu", weight, "stack gate and up")
        run = _skinny_linear.passed(key, x)
    return run(x, weight, bias, norm_weight, eps, residual, gated, frozen)


def _fake(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    *_, gated, _frozen = others
    return x.new_empty((x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0]))


_skinny_linear = Op(
    "skinny_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, Tensor? residual, bool swiglu, "
    "bool frozen) -> Tensor",
    fake=_fake,
    triton=True,
    cuda=True,
    cpu=True,
)
_skinny_linear.has_no_gradient()
