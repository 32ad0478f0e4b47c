"""The distillation loss: cross-entropy between soft targets and scores inside each group."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op
from fb_kernels._runtime.precision import accumulation_dtype


def group_cross_entropy(
    score: Tensor, target: Tensor, cu_group: Tensor, *, reduction: Literal["mean", "sum", "none"] = "mean"
) -> Tensor:
    """-sum_k q_k log softmax(score)_k over the candidates of each group, in nats.

    Under torch.autocast score and target of two dtypes are cast to the wider one (float64 stays).

    Args:
        score: [N] float, sorted by group.
        target: [N] in score's dtype: the targets q, which need not sum to 1 and may not require grad.
        cu_group: [G + 1] int32 or int64 row offsets that begin with 0, never fall and end with at most N. Rows after
            the last offset belong to no group.
        reduction: "mean" over the groups that are not empty (0 if all are empty), "sum", or "none".

    Returns:
        A scalar, or [G] for "none" with 0 for empty groups: float32 (float64 for float64 score). A target of 0 adds
        nothing, whatever its score. The gradient flows to score alone: softmax(score) * sum(q) - q in each group. A
        group with a NaN or +inf score, or with -inf only, is NaN unless all its targets are 0. On the CPU bad offsets
        are a ValueError; on a device the loss is then NaN.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value, or a target that requires grad.
    """
    op = "group_cross_entropy"
    score, target = precision.promoted(score, target)
    checks.floating(op, "score", score)
    checks.shape(op, "score", score, (None,), "[N]", "flatten the groups")
    checks.floating(op, "target", target, like=score)
    checks.shape(op, "target", target, tuple(score.shape), "[N] of score", "give one target to each score")
    checks.offsets(op, "cu_group", cu_group, like=score)
    if reduction not in ("mean", "sum", "none"):
        raise checks.error(
            op, "reduction", "'mean', 'sum' or 'none'", repr(reduction), "use 'mean' for the average group"
        )
    loss = _group_cross_entropy(score, target, cu_group)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (cu_group[1:] > cu_group[:-1]).sum().clamp(min=1)


_group_cross_entropy = Op(
    "group_cross_entropy",
    "(Tensor score, Tensor target, Tensor cu_group) -> Tensor",
    fake=lambda score, _, cu: score.new_empty(cu.shape[0] - 1, dtype=accumulation_dtype(score.dtype)),
)
_group_cross_entropy_backward = Op(
    "group_cross_entropy_backward",
    "(Tensor grad, Tensor score, Tensor target, Tensor cu_group) -> Tensor",
    folder="group_cross_entropy",
    fake=lambda grad, score, *_: score.new_empty(score.shape),
)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[0]
    return _group_cross_entropy_backward(grad, *ctx.saved_tensors) if needed else None, None, None


_group_cross_entropy.differentiate(
    to=("score",), setup_context=_save, backward=_backward, by=_group_cross_entropy_backward
)
