"""Future compatibility of every candidate, and the soft targets computed from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op
from fb_kernels._runtime.precision import accumulation_dtype


def compatibility_targets(
    logprob: Tensor,
    cu_group: Tensor,
    *,
    horizons: Sequence[int],
    temperature: float = 0.5,
    eps: float = 1e-6,
    local: Tensor | None = None,
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Mean log-likelihood of the shared future after each candidate, and its softmax within the group, per horizon.

    B_h = mean of the first h log-probs; z(x) = (x - group mean) / (group's population deviation + eps);
    q = softmax(z(B_h) / temperature) in the group. With `local`, the hybrid of the paper's ablation:
    q = softmax((alpha z(B_h) + (1 - alpha) z(local)) / temperature). Under torch.autocast logprob and local of two
    dtypes are cast to the wider one (float64 stays).

    Args:
        logprob: [N, H] float, natural log: log p_SLM of the future's tokens after each candidate, sorted by group.
        cu_group: [G + 1] int32 or int64 row offsets that begin with 0, never fall and end with at most N. Rows after
            the last offset belong to no group.
        horizons: ints from 1 to H, in any order.
        temperature: divides z.
        eps: 0 or more, added to the deviation.
        local: [N] in logprob's dtype, log p_T of the candidates; needed and used only if alpha is below 1.
        alpha: 0 to 1, the share of the future.

    Returns:
        (B[N, len(horizons)], q[N, len(horizons)]), float32 (float64 for float64 input). No argument may require grad.
        z is 0 in a group of one candidate, and in a group whose deviation is at most the output dtype's machine
        epsilon times its largest magnitude (mere rounding); without `local`, q is then exactly uniform. Rows of no
        group have a B, and q 0. A value that is not finite within the first h tokens (or in `local`, if used) makes q
        NaN for that horizon, in its group only. On the CPU bad offsets are a ValueError; on a device q is then NaN.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value, such as a horizon past H, or an argument that requires grad.
    """
    op = "compatibility_targets"
    logprob, local = precision.promoted(logprob, local)
    checks.floating(op, "logprob", logprob)
    checks.shape(op, "logprob", logprob, (None, None), "[N, H]", "flatten it to one row a candidate")
    checks.offsets(op, "cu_group", cu_group, like=logprob)
    ints = isinstance(horizons, Sequence) and all(isinstance(horizon, int | torch.SymInt) for horizon in horizons)
    if not ints or any(isinstance(horizon, bool) for horizon in horizons):
        raise checks.error(op, "horizons", "a sequence of ints", horizons, "pass a list such as [32, 128]", TypeError)
    if not horizons:
        raise checks.error(op, "horizons", "at least one horizon", horizons, "pass [H] for the whole future")
    for horizon in horizons:
        if not 1 <= horizon <= logprob.shape[1]:
            remedy = "the future is shorter than asked" if horizon > 0 else "count tokens from 1"
            raise checks.error(op, "horizons", f"ints from 1 to H = {logprob.shape[1]}", horizon, remedy)
    checks.positive(op, "temperature", temperature, "use 1.0 for none")
    checks.not_negative(op, "eps", eps, "use 1e-6")
    expected, remedy = "a share from 0 to 1", "use 1.0 for the future alone"
    checks.number(op, "alpha", alpha, remedy, expected)
    if not 0.0 <= alpha <= 1.0:
        raise checks.error(op, "alpha", expected, alpha, remedy)
    if local is not None:
        checks.floating(op, "local", local, like=logprob)
        checks.shape(
            op, "local", local, (logprob.shape[0],), "[N] of logprob[N, H]", "give one value to each candidate"
        )
    elif alpha < 1.0:
        raise checks.error(op, "local", f"a tensor, since alpha is {alpha}", None, "pass log p_T or alpha=1.0")
    return _compatibility_targets(logprob, cu_group, local, list(horizons), temperature, eps, alpha)


def _fake(
    logprob: Tensor, cu_group: Tensor, local: Tensor | None, horizons: list[int], *_: float
) -> tuple[Tensor, Tensor]:
    shape, dtype = (logprob.shape[0], len(horizons)), accumulation_dtype(logprob.dtype)
    return logprob.new_empty(shape, dtype=dtype), logprob.new_empty(shape, dtype=dtype)


_compatibility_targets = Op(
    "compatibility_targets",
    "(Tensor logprob, Tensor cu_group, Tensor? local, SymInt[] horizons, float temperature, float eps, float alpha) "
    "-> (Tensor, Tensor)",
    fake=_fake,
)
_compatibility_targets.has_no_gradient()
