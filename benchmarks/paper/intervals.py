"""Intervals that the paper's tables alone need: distances above a line of costs, ratios of times, shares of states."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from fb_core.apps.pipeline.statistics import Interval, Resample, Vector, averages, bootstrap, by_problem, columns


def above_line_interval(
    accuracy: Sequence[ArrayLike],
    tokens: Sequence[ArrayLike],
    greedy: Sequence[ArrayLike],
    takeover: Sequence[ArrayLike],
    takeover_tokens: Sequence[ArrayLike],
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """How much more accurate a method is than takeover of a random share of the problems at the same token cost.

    A random share of the problems is handed over to the large model, and the small model decodes the rest greedily,
    which costs the large one nothing. The accuracy of this mixture lies on the line from greedy decoding to takeover.
    The share is the one at which the mixture costs as many tokens as the method, or 1 if the method costs more than
    takeover. A difference above 0 means that the method is worth its tokens.

    All are as in `average_interval`; tokens are the large model's, those of takeover not 0 everywhere. Draws in which
    takeover writes nothing are left out.
    """
    own = by_problem(accuracy)
    parts = [own, *(by_problem(values, like=own) for values in (tokens, greedy, takeover, takeover_tokens))]

    def distance(draw: Resample) -> Vector:
        right, cost, least, most, written = (averages(column, draw) for column in parts)
        return right - least - _divided(cost, written).clip(max=1) * (most - least)

    return bootstrap(distance, own, resamples, level, seed)


def ratio_interval(
    part: ArrayLike, whole: ArrayLike, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Bootstrap interval of sum(part) / sum(whole), where a problem is drawn with both, such as two times.

    Draws whose whole is 0 are left out. For shares of few problems use `share_interval`, which is wide enough there.
    """
    parts, wholes = columns(part, whole)

    def ratio(draw: Resample) -> Vector:
        (drawn,) = draw.problems
        return _divided(parts[drawn].sum(axis=1), wholes[drawn].sum(axis=1))

    return bootstrap(ratio, [parts[:, None]], resamples, level, seed)


def share_interval(part: ArrayLike, whole: ArrayLike, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of the share sum(part) / sum(whole), with each problem as at most one trial.

    For shares of counted states or pairs, such as pairwise accuracy. The states of a problem are not independent, so
    the number of trials is the number of problems, or Kish's effective number if their weights differ,
    sum(whole)^2 / sum(whole^2). Unlike a bootstrap interval, it stays wide for few problems: 2 of 2 give 34% to 100%.
    """
    parts, wholes = columns(part, whole)
    z, trials, mean = _normal(level), _trials(wholes), float(parts.sum() / wholes.sum())
    centre = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z / (1 + z * z / trials) * np.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    return Interval(mean, float(min(mean, max(0.0, centre - reach))), float(max(mean, min(1.0, centre + reach))))


def paired_share_interval(a: ArrayLike, b: ArrayLike, whole: ArrayLike, *, level: float = 0.95) -> Interval:
    """Agresti and Min's interval of (sum(a) - sum(b)) / sum(whole), two shares of the same states.

    The trials are the problems' differences, counted as in `share_interval`, and two more: one half for a and half for
    b, and one without a difference. So a few problems that all agree decide nothing.
    """
    first, second, wholes = columns(a, b, whole)
    z, trials, weight = _normal(level), _trials(wholes), wholes / wholes.sum()
    difference = np.divide(first - second, wholes, out=np.zeros(len(first)), where=wholes > 0)  # [n]
    mean = float(weight @ difference)
    centre = trials * mean / (trials + 2)
    square = (trials * float(weight @ difference**2) + 1) / (trials + 2)
    reach = z * np.sqrt((square - centre * centre) / (trials + 2))
    return Interval(mean, float(min(mean, max(-1.0, centre - reach))), float(max(mean, min(1.0, centre + reach))))


def top1_success(score: ArrayLike, outcome: ArrayLike) -> float:
    """The outcome of the candidate with the highest score, ties to the lowest index."""
    return float(np.asarray(outcome)[np.argmax(score)])


def _divided(part: Vector, whole: Vector) -> Vector:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def _normal(level: float) -> float:
    """The number of standard deviations on either side of a normal mean that contain the level."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _trials(weight: Vector) -> float:
    """Kish's effective number of problems of these weights."""
    return float(weight.sum() ** 2 / np.square(weight).sum())
