"""The calibrated target: weights of B_H, log p_T and log p_S, fitted on states whose candidates were rolled out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_ITERATIONS = 1000  # of L-BFGS; some 20 are usual
GRADIENT = 1e-10  # largest entry at the minimum


class Weights(NamedTuple):
    """The weights of a candidate's terms: zB, z log p_T, z log p_S, and the same times max p_T."""

    b: float
    llm: float
    slm: float
    b_certain: float
    llm_certain: float
    slm_certain: float


class Calibration(NamedTuple):
    """Fitted weights and what they were fitted on.

    Attributes:
        theta: the weights of the terms.
        states: number of states that were rolled out.
        mixed: number of those whose candidates differ in outcome; only they carry information.
        loss_before: mean negative log of the probability that a uniform choice succeeds, over the mixed states, nats.
        loss_after: the same under the fitted softmax, without the penalty.
    """

    theta: Weights
    states: int
    mixed: int
    loss_before: float
    loss_after: float


def calibration_terms(compatibility: Tensor | None, llm_logprob: Tensor, slm_logprob: Tensor) -> Tensor:
    """The terms of a candidate's calibrated score: zB, z log p_T, z log p_S, and the same times certainty.

    z is (v - mean) / (population deviation + 1e-6) within the group, or 0 if v varies only by rounding; certainty is
    the LLM's largest probability in the group.

    Args:
        compatibility: [K] B_H, mean log-likelihood of the shared future after each candidate in nats, as from
            `future_compatibility`; None if the state has no verified future: zB is then 0.
        llm_logprob: [K] log p_T, nats.
        slm_logprob: [K] log p_S, nats.

    Returns:
        float32 [K, 6], columns as the fields of `Weights`.

    Raises:
        ValueError: lengths differ, no candidate, or a value that is not finite.
    """
    values = (llm_logprob, slm_logprob) if compatibility is None else (compatibility, llm_logprob, slm_logprob)
    if not llm_logprob.numel() or any(v.shape != (llm_logprob.numel(),) for v in values):
        raise ValueError(
            "calibration_terms: expected [K] log-probs of the same one or more candidates, got "
            f"{[list(v.shape) for v in values]}; pass the values of one pool"
        )
    if bad := sum(int((~v.isfinite()).sum()) for v in values):
        raise ValueError(f"calibration_terms: expected finite log-probs, got {bad} that are not; leave the state out")
    b = torch.zeros_like(llm_logprob) if compatibility is None else compatibility
    z = torch.stack([_standardised(v.double()) for v in (b, llm_logprob, slm_logprob)], 1)  # [K, 3]
    return torch.cat([z, z * llm_logprob.double().max().exp()], 1).float()


def calibrate(
    terms: Sequence[Tensor], outcomes: Sequence[Tensor], *, minimum_mixed: int = 25, penalty: float = 1e-2
) -> Calibration:
    """The weights under which softmax mass falls on candidates whose greedy rollouts are correct.

    theta minimises, over the mixed states, the mean of -log(sum of softmax(terms @ theta) over the successful
    candidates) plus penalty * |theta|^2; L-BFGS from zeros in float64, the same bits every time.

    Args:
        terms: one [K, 6] per state, as from `calibration_terms`.
        outcomes: one bool [K] per state: whether the rollout after each candidate was correct.
        minimum_mixed: fewer mixed states are refused; six weights need 25 to 50.
        penalty: above 0; keeps theta finite if the terms separate all successes from all failures.

    Raises:
        TypeError: outcomes that are not bool.
        ValueError: shapes that do not fit, a term that is not finite, an option out of range, or too few mixed states.
    """
    if not (minimum_mixed >= 1 and 0 < penalty < math.inf):
        raise ValueError(
            f"calibrate: expected minimum_mixed of 1 or more and a finite penalty above 0, got {minimum_mixed} and "
            f"{penalty}; the defaults are 25 and 0.01"
        )
    if len(terms) != len(outcomes):
        raise ValueError(
            f"calibrate: expected terms and outcomes of the same states, got {len(terms)} and {len(outcomes)}; pass "
            "one of each per state"
        )
    for state, (rows, outcome) in enumerate(zip(terms, outcomes, strict=True)):
        _check_terms(f"calibrate: state {state}", rows)
        if outcome.dtype != torch.bool:
            raise TypeError(
                f"calibrate: expected bool outcomes, got {outcome.dtype} in state {state}; compare with a threshold"
            )
        if outcome.shape != rows.shape[:1]:
            raise ValueError(
                f"calibrate: expected one outcome per candidate, [{len(rows)}], got {list(outcome.shape)} in state "
                f"{state}; roll every candidate out"
            )
    mixed = [state for state, outcome in enumerate(outcomes) if bool(outcome.any()) and not bool(outcome.all())]
    if len(mixed) < minimum_mixed:
        raise ValueError(
            f"calibrate: expected at least {minimum_mixed} states whose candidates differ in outcome, got {len(mixed)} "
            f"of {len(terms)} rolled out; roll out a larger share of the states"
        )
    theta, before, after = fit_choice([terms[at] for at in mixed], [outcomes[at] for at in mixed], penalty)
    return Calibration(Weights(*theta.tolist()), len(terms), len(mixed), before, after)


def fit_choice(terms: Sequence[Tensor], outcomes: Sequence[Tensor], penalty: float) -> tuple[Tensor, float, float]:
    """The weights under which softmax mass falls on candidates that succeed, by `calibrate`'s objective.

    Args:
        terms: one finite [K, F] per state.
        outcomes: one bool [K] per state, some true and some false.
        penalty: of |theta|^2, above 0.

    Returns:
        theta float64 [F], then the losses of a uniform choice and of theta, in nats without the penalty.
    """
    padded = pad_sequence([rows.detach().cpu().double() for rows in terms], batch_first=True)  # [M, K, F]
    success = pad_sequence([outcome.cpu() for outcome in outcomes], batch_first=True)  # [M, K]
    absent = torch.arange(padded.shape[1]) >= torch.tensor([len(rows) for rows in terms])[:, None]

    def loss(theta: Tensor) -> Tensor:
        score = padded @ theta  # [M, K]
        every = score.masked_fill(absent, -math.inf).logsumexp(1)
        return (every - score.masked_fill(~success, -math.inf).logsumexp(1)).mean()

    theta = torch.zeros(padded.shape[2], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=MAX_ITERATIONS, tolerance_grad=GRADIENT, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        objective = loss(theta) + penalty * theta.square().sum()
        objective.backward()
        return objective.item()

    optimizer.step(closure)
    with torch.no_grad():
        return theta.detach(), loss(torch.zeros_like(theta)).item(), loss(theta).item()


def calibrated_target(terms: Tensor, theta: Sequence[float]) -> Tensor:
    """The soft target of a state, softmax(terms @ theta); theta's size sets its sharpness, so there is no temperature.

    Args:
        terms: [K, 6] as from `calibration_terms`.
        theta: six weights, as in `Calibration.theta`.

    Returns:
        float32 [K], adding up to 1; uniform if the terms have no spread.

    Raises:
        ValueError: wrong shapes, or a value that is not finite.
    """
    _check_terms("calibrated_target", terms)
    if len(theta) != len(Weights._fields) or not all(math.isfinite(weight) for weight in theta):
        raise ValueError(
            f"calibrated_target: expected six finite weights, got {list(theta)}; take theta of a Calibration"
        )
    return (terms.double() @ torch.tensor(theta, dtype=torch.float64, device=terms.device)).softmax(0).float()


def _check_terms(where: str, terms: Tensor) -> None:
    bad = int((~terms.isfinite()).sum())
    if terms.ndim != 2 or terms.shape[1] != len(Weights._fields) or bad:
        raise ValueError(
            f"{where}: expected finite terms [K, {len(Weights._fields)}], got {list(terms.shape)} with {bad} that are "
            "not; build them with calibration_terms"
        )


def _standardised(values: Tensor) -> Tensor:
    """The z of float64 [K]; 0 where the deviation is below what float32 resolves."""
    deviation = values.std(correction=0)
    flat = deviation <= torch.finfo(torch.float32).eps * values.abs().max()
    return torch.where(flat, 0.0, (values - values.mean()) / (deviation + 1e-6))
