"""The reranker's head on the candidates of many groups: score, probability and best candidate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, fake_gradients, signature
from fb_kernels._runtime.precision import accumulation_dtype


def candidate_head(
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    cu_group: Tensor,
    *,
    eps: float,
    head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm and a scalar head on every row, softmax and argmax inside each group.

    score = (x * rsqrt(mean(x^2) + eps) * norm_weight) . head_weight + head_bias, in float32 (float64 for
    float64 hidden). Under torch.autocast float tensors of several dtypes are cast to the widest of them
    (float64 stays).

    Args:
        hidden: [N, D] float, the candidates' last hidden states, sorted by group.
        norm_weight: [D] in hidden's dtype, or None if hidden is already normed.
        head_weight: [D] in hidden's dtype or float32.
        cu_group: [G + 1] int32 or int64 row offsets that begin with 0, never fall and end with at most N. Rows after
            the last offset belong to no group.
        eps: 0 or more, added to the mean square.
        head_bias: one element, in hidden's dtype or float32.

    Returns:
        (score[N], prob[N], best[G]). Score and prob are float32 (float64 for float64 hidden); rows of no group have a
        score, and prob 0. best is int64, the index within the group of the highest score, ties to the lowest index; NaN
        scores are never chosen, and a group that is empty or all NaN gives -1. A group with a NaN or +inf score, or
        with -inf only, has prob NaN. Gradients flow to hidden, norm_weight, head_weight and head_bias through score.
        On the CPU bad offsets are a ValueError; on a device prob is then NaN and best -1.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    key = signature((hidden, norm_weight, head_weight, cu_group, head_bias), (eps,))
    run = _candidate_head.checked.get(key) if key else None
    if run is None:
        op = "candidate_head"
        hidden, norm_weight, head_weight, head_bias = precision.promoted(hidden, norm_weight, head_weight, head_bias)
        checks.floating(op, "hidden", hidden)
        checks.shape(op, "hidden", hidden, (None, None), "[N, D]", "flatten it to one row a candidate")
        if norm_weight is not None:
            checks.floating(op, "norm_weight", norm_weight, like=hidden)
            checks.shape(
                op, "norm_weight", norm_weight, (hidden.shape[1],), "[D]", "pass None if hidden is normed already"
            )
        _check_head(op, "head_weight", head_weight, hidden)
        checks.shape(op, "head_weight", head_weight, (hidden.shape[1],), "[D]", "flatten the head's [1, D] weight")
        if head_bias is not None:
            _check_head(op, "head_bias", head_bias, hidden)
            if head_bias.numel() != 1:
                raise checks.error(op, "head_bias", "one element", head_bias, "pass None for no bias")
        checks.offsets(op, "cu_group", cu_group, like=hidden)
        checks.not_negative(op, "eps", eps, "pass the norm's eps")
        run = _candidate_head.passed(key, hidden)
    return run(hidden, norm_weight, head_weight, head_bias, cu_group, eps)


def _check_head(op: str, argument: str, value: Tensor, hidden: Tensor) -> None:
    checks.floating(op, argument, value)
    if value.dtype not in (hidden.dtype, torch.float32):
        raise checks.error(
            op, argument, f"dtype {hidden.dtype} or float32", value, "convert it with .to(dtype)", TypeError
        )
    checks.same_device(op, argument, value, hidden)


def _fake(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    cu_group, rows, dtype = others[3], hidden.shape[0], accumulation_dtype(hidden.dtype)
    best = cu_group.new_empty(cu_group.shape[0] - 1, dtype=torch.int64)
    return hidden.new_empty(rows, dtype=dtype), hidden.new_empty(rows, dtype=dtype), best


_candidate_head = Op(
    "candidate_head",
    "(Tensor hidden, Tensor? norm_weight, Tensor head_weight, Tensor? head_bias, Tensor cu_group, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake,
    triton=True,
    cuda=True,
    cpu=True,
)
_candidate_head_backward = Op(
    "candidate_head_backward",
    "(Tensor grad_score, Tensor hidden, Tensor? norm_weight, Tensor head_weight, Tensor? head_bias, float eps, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    folder="candidate_head",
    fake=lambda _, hidden, *others: fake_gradients(hidden, (hidden, *others[:3]), others[-1]),
    triton=True,
)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _, ctx.eps = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_score: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return _candidate_head_backward(grad_score, *ctx.saved_tensors, ctx.eps, ctx.needs)


_candidate_head.differentiate(
    to=("hidden", "norm_weight", "head_weight", "head_bias"),
    setup_context=_save,
    backward=_backward,
    by=_candidate_head_backward,
)
