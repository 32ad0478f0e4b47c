"""What each candidate of a pool is worth: a listwise head over the reranker's scores, fitted to rollouts.

A reranker acts at every admitted state, even at kinds of event that its training filters left out. Greedy rollouts
after the candidates of some training states show what each would have led to. A logistic regression over the candidates
of the states whose outcomes differ turns scores, both models' log-probs and the entropy into a value that replaces the
score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fb_core.events import Pool

TERMS = (
    "score_z",
    "score",
    "slm",
    "llm",
    "slm_best",
    "llm_best",
    "slm_best_certainty",
    "llm_best_certainty",
    "score_z_slm_certainty",
    "score_z_llm_certainty",
    "slm_best_entropy",
    "llm_best_entropy",
    "score_z_entropy",
    "slm_entropy",
)
LOWEST = -12.0  # nats: lower log-probs and scores of -inf are clamped to this
PENALTY = 0.01  # of the squared weights of the scaled terms, beside the mean loss; never tuned
MAX_ITERATIONS = 1000  # of L-BFGS; some 20 are usual
GRADIENT = 1e-10  # largest entry at the minimum


@dataclass(frozen=True)
class ValueHead:
    """A fitted head that turns the scores of a pool into what its candidates are worth.

    Attributes:
        weights: one per term, in the order of `TERMS`.

    Raises:
        ValueError: the wrong number of weights, or weights that are not finite.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != len(TERMS) or not bool(torch.tensor(self.weights).isfinite().all()):
            raise ValueError(
                f"ValueHead: expected {len(TERMS)} finite weights, got {list(self.weights)}; fit it with fit_value"
            )

    def __call__(self, pool: Pool, scores: Tensor, entropy: float) -> Tensor:
        """The value of each candidate, float32 [K]; nothing is read back from the device.

        The pool has the SLM's own token; scores are the selector's [K], the entropy is the SLM's here, in nats.
        """
        terms = value_terms(pool, scores, entropy)
        return (terms @ _weights_on(terms.device, self.weights)).float()


@lru_cache(maxsize=64)
def _weights_on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    """float64 [n], copied to a device once: a copy from the host synchronises with the device."""
    return torch.tensor(weights, dtype=torch.float64, device=device)


def value_terms(pool: Pool, scores: Tensor, entropy: float) -> Tensor:
    """The terms of each candidate, float64 [K, 14] in the order of `TERMS`.

    The score, standardised in the pool and centred; log p_S and log p_T minus their maxima; whether the candidate is
    the likeliest of either model; products of some of these with max p_S, max p_T and the entropy.
    """
    slm, llm = (values.double().clamp_min(LOWEST) for values in (pool.slm_logprob, pool.llm_logprob))
    score = scores.double().masked_fill(scores == -math.inf, LOWEST)
    centred = score - score.mean()
    z = centred / (score.std(correction=0) + 1e-6)
    places = torch.arange(len(slm), device=slm.device)
    own, large = ((places == values.argmax()).double() for values in (slm, llm))
    sure, llm_sure = slm.max().exp(), llm.max().exp()
    below = slm - slm.max()
    columns = [z, centred, below, llm - llm.max(), own, large, own * sure, large * llm_sure, z * sure, z * llm_sure]
    return torch.stack([*columns, own * entropy, large * entropy, z * entropy, below * entropy], 1)


def fit_value(terms: Sequence[Tensor], outcomes: Sequence[Tensor]) -> ValueHead:
    """The weights under which softmax mass falls on candidates that succeed.

    They minimise, over the states whose candidates differ in outcome, the mean of -log(sum of softmax(terms @ weights)
    over the successful candidates) plus a penalty; L-BFGS from zeros in float64, the same bits every time.

    Args:
        terms: one [K, 14] per state, as from `value_terms`.
        outcomes: one bool [K] per state: whether the rollout after each candidate was correct. States whose outcomes
            are all alike carry no information and are left out.

    Raises:
        ValueError: no state whose candidates differ in outcome.
    """
    mixed = [at for at, outcome in enumerate(outcomes) if bool(outcome.any()) and not bool(outcome.all())]
    if not mixed:
        raise ValueError("fit_value: expected a state whose candidates differ in outcome, got none; roll out more")
    deviation = torch.cat([terms[at] for at in mixed]).double().std(0, correction=0) + 1e-9
    rows = pad_sequence([terms[at].cpu().double() / deviation for at in mixed], batch_first=True)  # [M, K, 14]
    success = pad_sequence([outcomes[at].cpu() for at in mixed], batch_first=True)  # [M, K]
    absent = torch.arange(rows.shape[1]) >= torch.tensor([len(terms[at]) for at in mixed])[:, None]
    theta = torch.zeros(len(TERMS), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=MAX_ITERATIONS, tolerance_grad=GRADIENT, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        score = rows @ theta  # [M, K]
        every = score.masked_fill(absent, -math.inf).logsumexp(1)
        right = score.masked_fill(~success, -math.inf).logsumexp(1)
        objective = (every - right).mean() + PENALTY * theta.square().sum()
        objective.backward()
        return objective.item()

    optimizer.step(closure)
    return ValueHead(tuple((theta.detach() / deviation).tolist()))
