"""Statistics of reported results: intervals over problems and seeds.

Outcomes are a finite number for each problem, [n], or for each problem and training seed, [n, S], in the same order for
all methods. Bootstrap intervals are those of percentiles, and repeat with their seed.
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
DRAWS_KEPT = 1 << 23  # resampled outcomes that are cached for the next interval over the same problems
Vector = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean (or ratio, or difference of two) and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


class Resample(NamedTuple):
    """R resamples: indices of problems, [R, n] for each benchmark, and of the seeds, [R, S]."""

    problems: tuple[NDArray[np.integer], ...]
    seeds: NDArray[np.integer]


def average_interval(
    a: Sequence[ArrayLike],
    b: Sequence[ArrayLike] | None = None,
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of the average of the benchmarks' means, with equal weight for each benchmark.

    Problems are resampled within each benchmark: the benchmarks are fixed, not a sample of others. Training seeds are
    resampled too, the same for all benchmarks, so what a seed did to all its problems counts once. A single problem and
    seed, or equal outcomes, give an interval of no width: the sample shows no spread, not that there is none. With two
    or three seeds it shows little of theirs.

    Args:
        a: the outcomes on each benchmark, [n] or [n, S].
        b: the other method's outcomes; the interval is then of the difference a - b. A problem is drawn with both its
            outcomes, and a seed likewise if both have S, so what makes it easy or hard for both cancels out.
        resamples: how often problems and seeds are drawn again, with replacement.
        level: share of the resampled averages between the ends, in (0, 1).
        seed: of the draws.
    """
    values = by_problem(a)
    if b is not None:
        values = [own - other for own, other in zip(values, by_problem(b, like=values), strict=True)]
    return bootstrap(lambda draw: averages(values, draw), values, resamples, level, seed)


def paired_lower_bound(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
    """Tango's lower score bound (Statistics in Medicine 17, 1998) on the difference of two paired shares.

    The bound is the smallest difference that the one-sided score test does not reject, with the nuisance share at its
    restricted maximum likelihood. Unlike bounds that shrink towards no difference, it keeps its level if the methods
    differ on few problems, all of them to the method's disadvantage. Outcomes are 0 or 1, the upper end is 1.
    """
    first, second = columns(a, b)
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


def outcomes_differ(outcome: ArrayLike) -> bool:
    """Whether a state's candidates differ in outcome: in the other states every choice has the same."""
    outcomes = np.asarray(outcome)
    return bool(outcomes.min() < outcomes.max())


def bootstrap(
    statistic: Callable[[Resample], Vector], sets: Sequence[Vector], resamples: int, level: float, seed: int
) -> Interval:
    """The interval of a statistic [R] of a `Resample` of these sets, each [n, S]; NaN values of it are left out."""
    assert resamples >= 1
    assert 0 < level < 1
    problems, seeds = tuple(len(own) for own in sets), max(own.shape[1] for own in sets)
    draw = _kept_draws if resamples * sum(problems) <= DRAWS_KEPT else _draws
    values = np.concatenate([statistic(drawn) for drawn in draw(problems, seeds, resamples, seed)])
    low, high = np.quantile(values[~np.isnan(values)], [(1 - level) / 2, (1 + level) / 2])
    whole = Resample(tuple(np.arange(n)[None] for n in problems), np.arange(seeds)[None])
    return Interval(float(statistic(whole)[0]), float(low), float(high))


def _draws(problems: tuple[int, ...], seeds: int, resamples: int, seed: int) -> Iterator[Resample]:
    """Resampled problems and seeds, in parts that fit in memory."""
    of_problems, of_seeds = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    rows = max(1, DRAWS_AT_ONCE // (sum(problems) * seeds))
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        yield Resample(
            tuple(of_problems.integers(n, size=(size, n), dtype=np.int32) for n in problems),
            of_seeds.integers(seeds, size=(size, seeds)),
        )


@lru_cache(maxsize=4)
def _kept_draws(problems: tuple[int, ...], seeds: int, resamples: int, seed: int) -> list[Resample]:
    return list(_draws(problems, seeds, resamples, seed))


def averages(values: Sequence[Vector], draw: Resample) -> Vector:
    """[R] averages of the sets' means over the drawn problems and, where there are several, seeds."""
    by_seed = np.mean([one[rows].mean(axis=1) for one, rows in zip(values, draw.problems, strict=True)], axis=0)
    if by_seed.shape[1] == 1:
        return by_seed[:, 0]
    return np.take_along_axis(by_seed, draw.seeds, axis=1).mean(axis=1)


def columns(*given: ArrayLike) -> Vector:
    """Vectors of the same problems, [C, n]."""
    matrix = np.array([np.asarray(vector, np.float64) for vector in given])
    assert matrix.ndim == 2
    assert matrix.size
    assert np.isfinite(matrix).all()
    return matrix


def by_problem(outcomes: Sequence[ArrayLike], like: Sequence[Vector] | None = None) -> list[Vector]:
    """The outcomes on each benchmark as [n, S], S = 1 for [n]; with `like`, of as many problems as those."""
    values = [np.asarray(own, np.float64) for own in outcomes]
    values = [own[:, None] if own.ndim == 1 else own for own in values]
    assert all(own.ndim == 2 and own.size and np.isfinite(own).all() for own in values)
    assert like is None or list(map(len, values)) == list(map(len, like))
    return values
