"""`compatibility_targets` in plain PyTorch, on any device; float64 inside, so that equal futures stay equal."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels._runtime.segments import Segments, reduce, segments, softmax, spread


def _standardise(x: Tensor, groups: Segments, eps: float, resolution: float) -> Tensor:
    """(x - mean) / (population deviation + eps) of x[N, C] in each group; 0 where nothing but rounding spreads it."""
    count = groups.bounds.diff().clamp(min=1)[:, None]
    centred = x - spread(reduce(x, "sum", groups) / count, groups)
    deviation = (reduce(centred.square(), "sum", groups) / count).sqrt()
    flat = deviation <= resolution * reduce(x.abs(), "max", groups)
    return torch.where(spread(flat, groups), 0.0, centred / (spread(deviation, groups) + eps))


def compatibility_targets(
    logprob: Tensor,
    cu_group: Tensor,
    local: Tensor | None,
    horizons: list[int],
    temperature: float,
    eps: float,
    alpha: float,
) -> tuple[Tensor, Tensor]:
    """(B[N, h], q[N, h])."""
    groups = segments("compatibility_targets", cu_group, logprob.shape[0])
    dtype = accumulation_dtype(logprob.dtype)
    total = logprob.new_zeros(logprob.shape[0], dtype=torch.float64)
    done, means = 0, {}
    for horizon in sorted(set(horizons)):
        total = total + logprob[:, done:horizon].sum(1, dtype=torch.float64)
        means[horizon] = total / horizon
        done = horizon
    mean = torch.stack([means[horizon] for horizon in horizons], 1)  # [N, h]
    resolution = torch.finfo(dtype).eps
    z = _standardise(mean, groups, eps, resolution)
    if local is not None and alpha < 1.0:
        z_local = _standardise(local.double()[:, None], groups, eps, resolution)
        z = alpha * z + (1.0 - alpha) * z_local if alpha > 0.0 else z_local.expand_as(z).contiguous()
    return mean.to(dtype), softmax(z / temperature, groups).to(dtype)
