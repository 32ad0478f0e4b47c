"""What acting at an event is worth: small heads over what is known at deployment, fitted to rollouts.

A reranker acts at every admitted state, even at kinds of event that it never saw: its training filters leave some out
altogether. Greedy rollouts after the candidates of some training states show what each would have led to. Three heads:

- "gate": ridge regression of success(best-scored candidate) - success(the SLM's own token) on seven numbers of the
  event; where the prediction is not above 0, the SLM's own token is kept;
- "listwise": logistic regression over the candidates of states whose outcomes differ; its value replaces the score;
- `AskHead`, used before the LLM is asked: ridge regression of the same gain on the SLM's hidden state and entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fb_core.calibrated import fit_choice
from fb_core.policy import AskHead
from fb_core.pool import Pool

Form = Literal["gate", "listwise"]
GATE = ("constant", "entropy", "slm_certainty", "llm_certainty", "llm_of_slm", "score_gap", "llm_gap", "spread")
LISTWISE = (
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
TERMS: dict[Form, tuple[str, ...]] = {"gate": GATE, "listwise": LISTWISE}
LOWEST = -12.0  # nats: lower log-probs and scores of -inf are clamped to this
GATE_PENALTY = 5.0  # factor of the squared weights of standardised terms, added to the sum over states; never tuned
LISTWISE_PENALTY = 0.01  # likewise, added to the mean; never tuned
ASK_PENALTIES = tuple(10.0**power for power in range(7))  # tried, by the error on states left out


@dataclass(frozen=True)
class ValueHead:
    """A fitted head that turns the scores of a pool into what its candidates are worth.

    Attributes:
        form: "gate" or "listwise".
        weights: one per term, in the order of `TERMS`.

    Raises:
        ValueError: the wrong number of weights, or weights that are not finite.
    """

    form: Form
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        wanted = TERMS.get(self.form, ())
        if len(self.weights) != len(wanted) or not bool(torch.tensor(self.weights).isfinite().all()):
            raise ValueError(
                f"ValueHead: expected {len(wanted)} finite weights for form {self.form!r}, got {list(self.weights)}; "
                "fit it with fit_gate or fit_listwise"
            )

    def __call__(self, pool: Pool, scores: Tensor, entropy: float) -> Tensor:
        """What replaces the scores; nothing is read back from the device.

        Args:
            pool: K candidates, the SLM's own token among them.
            scores: [K] of the selector.
            entropy: of the SLM at this state, nats.

        Returns:
            float32 [K]. For "gate" the scores if acting is worth more than the SLM's own token, else log p_S; for
            "listwise" the value.
        """
        if self.form == "gate":
            terms = gate_terms(pool, scores, entropy)
            gain = terms @ _weights_on(terms.device, self.weights)
            acts = (gain > 0) | scores.isnan().any()  # NaN scores are passed on, so that they are noticed
            return torch.where(acts, scores.float(), pool.slm_logprob.float())
        terms = listwise_terms(pool, scores, entropy)
        return (terms @ _weights_on(terms.device, self.weights)).float()


@lru_cache(maxsize=64)
def _weights_on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    """float64 [n], copied to a device once: a copy from the host synchronises with the device."""
    return torch.tensor(weights, dtype=torch.float64, device=device)


def gate_terms(pool: Pool, scores: Tensor, entropy: float) -> Tensor:
    """The terms of an event as a whole, float64 [8] in the order of `GATE`.

    1, entropy, max p_S, max p_T, p_T of the SLM's own token; the best-scored candidate minus that token, in score and
    in log p_T (clamped to 10 nats); the standard deviation of the scores.
    """
    slm, llm = pool.slm_logprob.double(), pool.llm_logprob.double().clamp_min(LOWEST)
    score = scores.double().masked_fill(scores == -math.inf, LOWEST)
    own, best = slm.argmax()[None], score.argmax()[None]
    llm_gap = (llm[best] - llm[own]).clamp(-10, 10)
    known = [slm.max()[None].exp(), llm.max()[None].exp(), llm[own].exp(), score[best] - score[own], llm_gap]
    event = [slm.new_full((1,), 1.0), slm.new_full((1,), entropy)]  # filled on the device, not copied to it
    return torch.cat([*event, *known, score.std(correction=0)[None]])


def listwise_terms(pool: Pool, scores: Tensor, entropy: float) -> Tensor:
    """The terms of each candidate, float64 [K, 14] in the order of `LISTWISE`.

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


def fit_gate(terms: Tensor, gain: Tensor) -> ValueHead:
    """Ridge regression of the gain.

    Args:
        terms: [n, 8] as from `gate_terms`.
        gain: [n] success of the best-scored candidate minus that of the SLM's own token: -1, 0 or 1.
    """
    rows = terms[:, 1:].double()
    mean, deviation = rows.mean(0), rows.std(0, correction=0) + 1e-9
    standard = torch.cat([torch.ones_like(rows[:, :1]), (rows - mean) / deviation], 1)
    gram = standard.T @ standard + GATE_PENALTY * torch.eye(standard.shape[1], dtype=torch.float64)
    constant, *weights = torch.linalg.solve(gram, standard.T @ gain.double())
    slopes = torch.stack(weights) / deviation
    return ValueHead("gate", (float(constant - slopes @ mean), *slopes.tolist()))


def fit_listwise(terms: Sequence[Tensor], outcomes: Sequence[Tensor]) -> ValueHead:
    """Logistic regression over the candidates of each state.

    Args:
        terms: one [K, 14] per state, as from `listwise_terms`.
        outcomes: one bool [K] per state; states whose outcomes are all alike carry no information and are left out.

    Raises:
        ValueError: no state whose candidates differ in outcome.
    """
    mixed = [at for at, outcome in enumerate(outcomes) if bool(outcome.any()) and not bool(outcome.all())]
    if not mixed:
        raise ValueError("fit_listwise: expected a state whose candidates differ in outcome, got none; roll out more")
    rows = torch.cat([terms[at] for at in mixed]).double()
    deviation = rows.std(0, correction=0) + 1e-9
    theta, _, _ = fit_choice(
        [terms[at].double() / deviation for at in mixed], [outcomes[at] for at in mixed], LISTWISE_PENALTY
    )
    return ValueHead("listwise", tuple((theta / deviation).tolist()))


def fit_ask(hidden: Tensor, entropy: Tensor, gains: Tensor) -> list[AskHead]:
    """Ridge regressions of several gains on the same states, each with the penalty of the least leave-one-out error.

    Args:
        hidden: [n, D] of the SLM after its final norm, at each state.
        entropy: [n] nats.
        gains: [n, m] success of a selector's choice minus that of the SLM's own token.

    Returns:
        one head per column; it asks where the expected gain is above 0.
    """
    rows = torch.cat([hidden.double(), entropy.double()[:, None]], 1)  # [n, D + 1]
    mean, deviation = rows.mean(0), rows.std(0, correction=0) + 1e-9
    u, s, vh = torch.linalg.svd((rows - mean) / deviation, full_matrices=False)
    level = gains.double().mean(0)
    along = u.T @ (gains.double() - level)  # [r, m]
    errors, slopes = [], []
    for penalty in ASK_PENALTIES:
        shrunk = (s.square() / (s.square() + penalty))[:, None]  # [r, 1]
        leverage = u.square() @ shrunk + 1 / len(rows)  # [n, 1]: of the row and of the mean
        left_out = (gains.double() - level - u @ (shrunk * along)) / (1 - leverage).clamp_min(1e-6)
        errors.append(left_out.square().mean(0))
        slopes.append(vh.T @ ((s / (s.square() + penalty))[:, None] * along) / deviation[:, None])
    best = torch.stack(errors).argmin(0)  # [m]
    heads = []
    for column, place in enumerate(best.tolist()):
        slope = slopes[place][:, column]
        heads.append(AskHead(slope[:-1].float(), float(slope[-1]), float(level[column] - slope @ mean)))
    return heads
