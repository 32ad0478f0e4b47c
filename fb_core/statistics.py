"""Statistics of reported results: intervals over problems, and how well scores order candidates by outcome.

Vectors hold one finite number a problem, the same problems in the same order. Average the runs of a problem first: they
are not independent. Bootstrap intervals are those of percentiles, and repeat with their seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS_AT_ONCE = 1 << 20  # resampled outcomes held in memory
DRAWS_KEPT = 1 << 23  # the most of one set of problems that are kept for the next interval over it
Vector = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean (or ratio, or difference of two) and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def average_interval(
    a: Sequence[ArrayLike],
    b: Sequence[ArrayLike] | None = None,
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of the average of the benchmarks' means, with equal weight for each benchmark.

    Problems are resampled within each benchmark: the benchmarks are fixed, not a sample of others. A single problem, or
    equal outcomes, give an interval of no width: the sample shows no spread, not that there is none.

    Args:
        a: one vector of outcomes per benchmark, one outcome for each of its problems.
        b: the other method's outcomes; the interval is then of the difference a - b. A problem is drawn with both its
            outcomes, so what makes it easy or hard for both cancels out.
        resamples: how often the problems are drawn again, with replacement.
        level: share of the resampled averages between the ends, in (0, 1).
        seed: of the draws.
    """
    values = _vectors(a)
    if b is not None:
        values = [own - other for own, other in zip(values, _vectors(b, like=values), strict=True)]

    def average(*drawn: NDArray[np.integer]) -> Vector:
        return _average(values, drawn)

    return _bootstrap(average, values, resamples, level, seed)


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
    own = _vectors(accuracy)
    columns = [own, *(_vectors(one, like=own) for one in (tokens, greedy, takeover, takeover_tokens))]

    def distance(*drawn: NDArray[np.integer]) -> Vector:
        right, cost, least, most, written = (_average(column, drawn) for column in columns)
        return right - least - _divided(cost, written).clip(max=1) * (most - least)

    return _bootstrap(distance, own, resamples, level, seed)


def ratio_interval(
    part: ArrayLike, whole: ArrayLike, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Bootstrap interval of sum(part) / sum(whole), where a problem is drawn with both, such as two times.

    Draws whose whole is 0 are left out. For shares of few problems use `share_interval`, which is wide enough there.
    """
    parts, wholes = _columns(part, whole)

    def ratio(drawn: NDArray[np.integer]) -> Vector:
        return _divided(parts[drawn].sum(axis=1), wholes[drawn].sum(axis=1))

    return _bootstrap(ratio, [parts], resamples, level, seed)


def share_interval(part: ArrayLike, whole: ArrayLike, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of the share sum(part) / sum(whole), with each problem as at most one trial.

    For shares of counted states or pairs, such as pairwise accuracy. The states of a problem are not independent, so
    the number of trials is the number of problems, or Kish's effective number if their weights differ,
    sum(whole)^2 / sum(whole^2). Unlike a bootstrap interval, it stays wide for few problems: 2 of 2 give 34% to 100%.
    """
    parts, wholes = _columns(part, whole)
    z, trials, mean = _normal(level), _trials(wholes), float(parts.sum() / wholes.sum())
    centre = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z / (1 + z * z / trials) * np.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    return Interval(mean, float(min(mean, max(0.0, centre - reach))), float(max(mean, min(1.0, centre + reach))))


def paired_share_interval(a: ArrayLike, b: ArrayLike, whole: ArrayLike, *, level: float = 0.95) -> Interval:
    """Agresti and Min's interval of (sum(a) - sum(b)) / sum(whole), two shares of the same states.

    The trials are the problems' differences, counted as in `share_interval`, and two more: one half for a and half for
    b, and one without a difference. So a few problems that all agree decide nothing.
    """
    first, second, wholes = _columns(a, b, whole)
    z, trials, weight = _normal(level), _trials(wholes), wholes / wholes.sum()
    difference = np.divide(first - second, wholes, out=np.zeros(len(first)), where=wholes > 0)  # [n]
    mean = float(weight @ difference)
    centre = trials * mean / (trials + 2)
    square = (trials * float(weight @ difference**2) + 1) / (trials + 2)
    reach = z * np.sqrt((square - centre * centre) / (trials + 2))
    return Interval(mean, float(min(mean, max(-1.0, centre - reach))), float(max(mean, min(1.0, centre + reach))))


def paired_lower_bound(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
    """Tango's lower score bound (Statistics in Medicine 17, 1998) on the difference of two paired shares.

    The bound is the smallest difference that the one-sided score test does not reject, with the nuisance share at its
    restricted maximum likelihood. Unlike bounds that shrink towards no difference, it keeps its level if the methods
    differ on few problems, all of them to the method's disadvantage. Outcomes are 0 or 1, the upper end is 1.
    """
    first, second = _columns(a, b)
    assert np.isin([first, second], (0.0, 1.0)).all()
    n, won, lost = len(first), float((first > second).sum()), float((first < second).sum())
    mean, z = (won - lost) / n, NormalDist().inv_cdf(level)

    def score(delta: float) -> float:
        linear = (2 * n - won + lost) * delta - won - lost
        share = (math.sqrt(linear**2 + 8 * n * lost * delta * (1 - delta)) - linear) / (4 * n)
        variance = n * (2 * share + delta * (1 - delta))
        gap = won - lost - n * delta
        return gap / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, gap)

    low, high = -1.0, mean  # score falls from above z to 0 between them
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if score(middle) > z else (low, middle)
    return Interval(mean, low, 1.0)


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


def top1_success(score: ArrayLike, outcome: ArrayLike) -> float:
    """The outcome of the candidate with the highest score, ties to the lowest index."""
    return float(np.asarray(outcome)[np.argmax(score)])


def outcomes_differ(outcome: ArrayLike) -> bool:
    """Whether a state's candidates differ in outcome: in the other states every choice has the same."""
    outcomes = np.asarray(outcome)
    return bool(outcomes.min() < outcomes.max())


def _bootstrap(
    statistic: Callable[..., Vector], sets: Sequence[Vector], resamples: int, level: float, seed: int
) -> Interval:
    """The interval of a statistic that maps drawn problems, [R, n] of each set, to [R], NaN where it has no value."""
    assert resamples >= 1
    assert 0 < level < 1
    problems = tuple(len(one) for one in sets)
    draw = _kept_draws if resamples * sum(problems) <= DRAWS_KEPT else _draws
    values = np.concatenate([statistic(*drawn) for drawn in draw(problems, resamples, seed)])
    low, high = np.quantile(values[~np.isnan(values)], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(*(np.arange(n)[None] for n in problems))[0]), float(low), float(high))


def _draws(problems: tuple[int, ...], resamples: int, seed: int) -> Iterator[tuple[NDArray[np.int32], ...]]:
    """Resampled problems, [rows, n] of each set, in parts that fit in memory."""
    generator = np.random.default_rng(seed)
    rows = max(1, DRAWS_AT_ONCE // sum(problems))
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        yield tuple(generator.integers(n, size=(size, n), dtype=np.int32) for n in problems)


@lru_cache(maxsize=4)
def _kept_draws(problems: tuple[int, ...], resamples: int, seed: int) -> list[tuple[NDArray[np.int32], ...]]:
    return list(_draws(problems, resamples, seed))


def _average(values: Sequence[Vector], drawn: Sequence[NDArray[np.integer]]) -> Vector:
    """[R] averages of the sets' means."""
    return np.mean([one[rows].mean(axis=1) for one, rows in zip(values, drawn, strict=True)], axis=0)


def _divided(part: Vector, whole: Vector) -> Vector:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def _normal(level: float) -> float:
    """The number of standard deviations on either side of a normal mean that contain the level."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _trials(weight: Vector) -> float:
    """Kish's effective number of problems of these weights."""
    return float(weight.sum() ** 2 / np.square(weight).sum())


def _columns(*vectors: ArrayLike) -> Vector:
    """[C, n]."""
    columns = np.array([np.asarray(one, np.float64) for one in vectors])
    assert columns.ndim == 2
    assert columns.size
    assert np.isfinite(columns).all()
    return columns


def _vectors(values: Sequence[ArrayLike], like: Sequence[Vector] | None = None) -> list[Vector]:
    """Vectors, each as long as its counterpart."""
    vectors = [np.asarray(one, np.float64) for one in values]
    assert all(one.ndim == 1 and len(one) and np.isfinite(one).all() for one in vectors)
    assert like is None or [len(one) for one in vectors] == [len(one) for one in like]
    return vectors
