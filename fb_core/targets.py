"""From log-probabilities of the shared future to training targets: B_H, group normalisation, soft and hybrid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fb_kernels import compatibility_targets

MARGIN, KL_WEIGHT = 1.0, 0.1  # of S2T-Local's loss


def future_compatibility(logprob: Tensor, horizon: int) -> Tensor:
    """B_H: the mean log-likelihood of the shared future's first `horizon` tokens after every candidate.

    Args:
        logprob: [K, H] as from `CompatibilityScorer`.
        horizon: 1 to H.

    Returns:
        float32[K].

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
        horizons: the h horizons.
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


def selection_target(llm_logprob: Tensor) -> Tensor:
    """The target of one group whose cross-entropy equals the cross-entropy and KL terms of S2T-Local's loss.

    Equality is up to a constant. Source: Ye et al., "Select to Think: Unlocking SLM Potential with Local Sufficiency",
    arXiv 2604.26940, and its software YeRona/Select-to-Think (scripts/train_s2t_local.py, `listwise_loss` in its
    default mode top1_ce). The loss is the cross-entropy to the LLM's best candidate, a hinge of MARGIN against the best
    other one (`Recipe(margin=MARGIN)`), and KL_WEIGHT * KL(p_T || p) with p = softmax(score) and p_T renormalised over
    the SLM's own candidates. The first and the last term together are the cross-entropy to
    onehot(best) + KL_WEIGHT * p_T, minus KL_WEIGHT * H(p_T), which does not depend on the scores.

    Here it trains FutureBridge's reranker: a scalar head whose score has no bounds, an adapter on the attention alone,
    and a frozen prefix. The software scores by the expected bin, 0 to 1, of reserved tokens' logits, so its hinge is
    always active. It also adapts the MLPs and the reserved rows of the head, on the prefix (its last 511 tokens) and in
    greedy decoding too. A KL term of weight 0.1 keeps the prefix close to the base model; it is zero here, where only
    candidates are adapted. It trains at a constant rate of 5e-5, four groups per step, three epochs.

    Args:
        llm_logprob: [K] log p_T of the candidates, nats; ties for the best go to the first.

    Returns:
        [K] in the dtype of llm_logprob; its sum is 1 + KL_WEIGHT.

    Raises:
        ValueError: no candidate, a wrong shape, no finite log-probability, or a NaN.
    """
    if llm_logprob.ndim != 1 or not len(llm_logprob) or not bool(llm_logprob.max().isfinite()):
        raise ValueError(
            f"llm_logprob: expected [K] with numbers and at least one finite, got {list(llm_logprob.shape)} "
            f"{llm_logprob.tolist()}; ask the LLM about the SLM's candidates"
        )
    target = KL_WEIGHT * llm_logprob.softmax(0)
    target[llm_logprob.argmax()] += 1.0
    return target
