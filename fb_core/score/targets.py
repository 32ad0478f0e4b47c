"""From log-probabilities of the shared future to training targets, and how well scores order a state's candidates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fb_kernels import compatibility_targets


def future_compatibility(logprob: Tensor, horizon: int) -> Tensor:
    """B_H, float32 [K]: the mean log-likelihood of the shared future's first `horizon` tokens after every candidate.

    Args:
        logprob: [K, H] as from `CompatibilityScorer`.
        horizon: 1 to H.

    Raises:
        ValueError: a future shorter than the horizon.
    """
    return group_targets([logprob], [horizon])[0][0][:, 0]


def group_targets(
    logprobs: Sequence[Tensor],
    horizons: Sequence[int],
    *,
    temperature: float = 0.5,
    eps: float = 1e-6,
    local: Sequence[Tensor] | None = None,
    alpha: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Scores and soft targets of many groups at once, for all horizons.

    Args:
        logprobs: one [K, H] per group; futures may be longer than the longest horizon.
        horizons: h lengths, in tokens.
        temperature: of the softmax over standardised scores.
        eps: added to the group's standard deviation.
        local: one [K] of log p_T per group, for the hybrid target.
        alpha: share of B in the hybrid; 1 is the plain target.

    Returns:
        (B, q): two lists with one [K, h] per group.

    Raises:
        ValueError: a future shorter than the longest horizon, or an argument out of range.
    """
    longest = max(horizons, default=0)
    for group, logprob in enumerate(logprobs):
        if logprob.ndim != 2 or logprob.shape[1] < longest:
            raise ValueError(
                f"logprobs: expected [K, {longest} or more] for horizon {longest}, got {list(logprob.shape)} in group "
                f"{group}; score a longer future or ask for a shorter horizon"
            )
    if not logprobs:
        return [], []
    counts = [len(logprob) for logprob in logprobs]
    cu_group = torch.tensor([0, *counts]).cumsum(0).to(logprobs[0].device, torch.int32)
    score, target = compatibility_targets(
        torch.cat([logprob[:, :longest] for logprob in logprobs]).detach(),
        cu_group,
        horizons=horizons,
        temperature=temperature,
        eps=eps,
        local=None if local is None else torch.cat(list(local)).detach(),
        alpha=alpha,
    )
    return list(score.split(counts)), list(target.split(counts))


def pairwise_agreement(score: ArrayLike, outcome: ArrayLike) -> tuple[float, int]:
    """How many pairs of one state's candidates the scores [K] order as their outcomes [K] do, and how many there are.

    Only pairs whose outcomes differ are comparable; a tie of their scores counts one half. Sum both numbers over the
    states and divide once: the denominator of pairwise accuracy is the comparable pairs.
    """
    scores, outcomes = np.asarray(score), np.asarray(outcome)  # [K]
    assert scores.shape == outcomes.shape
    assert not np.isnan(scores).any()
    better = outcomes[:, None] > outcomes[None, :]
    agreeing = np.sum(better & (scores[:, None] > scores[None, :]))
    tied = np.sum(better & (scores[:, None] == scores[None, :]))
    return float(agreeing + 0.5 * tied), int(np.sum(better))
