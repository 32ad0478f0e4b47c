"""What results are reported with: bootstrap intervals, and how well scores order candidates by their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS_AT_ONCE = 1 << 20  # resampled outcomes held in memory


class Interval(NamedTuple):
    """A mean (or ratio, or difference of two) and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def interval(a: ArrayLike, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of a mean over problems.

    Args:
        a: one outcome for each problem: bools or finite numbers. Average the runs of a problem first: its runs are not
            independent.
        resamples: how often the problems are drawn again, with replacement.
        level: share of the resampled means between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)`. A single problem, or equal outcomes, give an interval of no width: the sample shows
        no spread, not that there is none.

    Raises:
        TypeError: outcomes or scores are no bools or real numbers.
        ValueError: `a` is empty, not one-dimensional or not finite, or an option is out of its range.
    """
    values = _vector("interval", "a", a)
    return _bootstrap(lambda drawn: values[drawn].mean(axis=1), len(values), resamples, level, seed)


def paired_interval(
    a: ArrayLike, b: ArrayLike, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of mean(a) - mean(b) over the same problems.

    A problem is drawn with both its outcomes, so what makes it easy or hard for both cancels out; the difference is
    beyond chance at the level where the interval leaves out 0.

    Args:
        a: one outcome for each problem: bools or finite numbers.
        b: the other method's outcomes, of the same problems in the same order.
        resamples: how often the problems are drawn again, with replacement.
        level: share of the resampled means between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)` of the difference a - b.

    Raises:
        TypeError: outcomes or scores are no bools or real numbers.
        ValueError: lengths differ, outcomes are empty, not one-dimensional or not finite, or an option is out of its
            range.
    """
    first, second = _vector("paired_interval", "a", a), _vector("paired_interval", "b", b)
    _same_length("paired_interval", "a", first, "b", second)
    difference = first - second
    return _bootstrap(lambda drawn: difference[drawn].mean(axis=1), len(difference), resamples, level, seed)


def ratio_interval(
    part: ArrayLike, whole: ArrayLike, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of sum(part) / sum(whole), drawn by problem.

    For shares whose denominator is counted, such as pairwise accuracy with the agreeing and the comparable pairs of
    each problem: the states of a problem are not independent, so a problem is drawn with all it has.

    Args:
        part: what counts of each problem, finite and not negative.
        whole: out of how much, of the same problems in the same order, finite and not negative, not 0 everywhere.
        resamples: how often the problems are drawn again, with replacement; draws whose whole is 0 are left out.
        level: share of the resampled ratios between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)`, mean being the ratio of the problems as given.

    Raises:
        TypeError: an argument that is no bools or real numbers.
        ValueError: lengths differ, a value is negative or not finite, the whole is 0, an argument is empty or not
            one-dimensional, or an option is out of its range.
    """
    ratio = _ratio("ratio_interval", "part", part, "whole", whole)
    return _bootstrap(lambda drawn: _divided(ratio, drawn), len(ratio), resamples, level, seed)


def paired_ratio_interval(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the difference of two ratios over the same problems, as of two scores' accuracy.

    Args:
        a: (part, whole) as of `ratio_interval`.
        b: the other's, of the same problems in the same order; the wholes may differ.
        resamples: how often the problems are drawn again, with replacement, for both alike; draws in which a whole is 0
            are left out.
        level: share of the resampled differences between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)` of the ratio of a less that of b.

    Raises:
        TypeError: an argument that is no bools or real numbers.
        ValueError: lengths differ, a value is negative or not finite, a whole is 0, an argument is empty or not
            one-dimensional, or an option is out of its range.
    """
    first = _ratio("paired_ratio_interval", "part of a", a[0], "whole of a", a[1])
    second = _ratio("paired_ratio_interval", "part of b", b[0], "whole of b", b[1])
    _same_length("paired_ratio_interval", "a", first, "b", second)
    return _bootstrap(
        lambda drawn: _divided(first, drawn) - _divided(second, drawn), len(first), resamples, level, seed
    )


def pairwise_agreement(score: ArrayLike, outcome: ArrayLike) -> tuple[float, int]:
    """How many pairs of one state's candidates the scores put in the order of their outcomes.

    Only pairs whose outcomes differ are comparable; a tie of their scores counts one half. Sum both numbers over the
    states and divide once: pairwise accuracy has the comparable pairs as its denominator, so states whose candidates
    all end alike have no part in it.

    Args:
        score: [K], higher is better; infinities are allowed.
        outcome: [K], what became of each candidate's rollout: bools or finite numbers.

    Returns:
        `(agreeing, comparable)`, the first a multiple of one half, both 0 where all outcomes are equal.

    Raises:
        TypeError: outcomes or scores are no bools or real numbers.
        ValueError: lengths differ, an argument is empty, not one-dimensional, or holds NaN.
    """
    scores, outcomes = _candidates("pairwise_agreement", score, outcome)
    better = outcomes[:, None] > outcomes[None, :]
    agreeing = np.sum(better & (scores[:, None] > scores[None, :]))
    tied = np.sum(better & (scores[:, None] == scores[None, :]))
    return float(agreeing + 0.5 * tied), int(np.sum(better))


def top1_success(score: ArrayLike, outcome: ArrayLike) -> float:
    """The outcome of the candidate with the highest score, ties to the lowest index.

    Its mean is reported both over all states and over states whose candidates differ in outcome (`outcomes_differ`),
    with both denominators: elsewhere every choice has the same outcome, and many such states hide the selector's share.

    Args:
        score: [K], higher is better; infinities are allowed.
        outcome: [K], what became of each candidate's rollout: bools or finite numbers.

    Returns:
        0.0 or 1.0 for bools.

    Raises:
        TypeError: outcomes or scores are no bools or real numbers.
        ValueError: lengths differ, an argument is empty, not one-dimensional, or holds NaN.
    """
    scores, outcomes = _candidates("top1_success", score, outcome)
    return float(outcomes[np.argmax(scores)])


def coverage(outcome: ArrayLike) -> float:
    """The best outcome any candidate of a state reaches: what a perfect selector would get.

    Its mean is reported both over all states and over states whose candidates differ in outcome (`outcomes_differ`),
    with both denominators; over the latter it is 1 for bools by definition, so top-1 success there is a share of it.

    Args:
        outcome: [K], what became of each candidate's rollout: bools or finite numbers.

    Returns:
        0.0 or 1.0 for bools.

    Raises:
        TypeError: outcomes or scores are no bools or real numbers.
        ValueError: `outcome` is empty, not one-dimensional or not finite.
    """
    return float(_vector("coverage", "outcome", outcome).max())


def outcomes_differ(outcome: ArrayLike) -> bool:
    """Whether a state's candidates differ in outcome, as the smaller denominator counts.

    Args:
        outcome: [K], what became of each candidate's rollout: bools or finite numbers.

    Raises:
        TypeError: outcomes or scores are no bools or real numbers.
        ValueError: `outcome` is empty, not one-dimensional or not finite.
    """
    outcomes = _vector("outcomes_differ", "outcome", outcome)
    return bool(outcomes.min() < outcomes.max())


def _bootstrap(
    statistic: Callable[[NDArray[np.integer]], NDArray[np.float64]],
    problems: int,
    resamples: int,
    level: float,
    seed: int,
) -> Interval:
    """Of a statistic of drawn problems [R, n] -> [R], NaN where a draw has none."""
    if not resamples >= 1:
        raise ValueError(f"bootstrap: resamples must be at least 1, got {resamples}; 10000 is usual.")
    if not 0 < level < 1:
        raise ValueError(f"bootstrap: level must lie between 0 and 1, got {level}; 0.95 is usual.")
    generator = np.random.default_rng(seed)
    rows = max(1, DRAWS_AT_ONCE // problems)
    values = np.empty(resamples)
    for start in range(0, resamples, rows):
        part = values[start : start + rows]
        part[:] = statistic(generator.integers(problems, size=(len(part), problems), dtype=np.int32))
    values = values[~np.isnan(values)]
    if not len(values):
        raise ValueError(f"bootstrap: the whole must not be 0 in all draws, got {resamples} such; draw more often.")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(np.arange(problems)[None])[0]), float(low), float(high))


def _ratio(where: str, part_name: str, part: ArrayLike, whole_name: str, whole: ArrayLike) -> NDArray[np.float64]:
    """[n, 2] of parts and wholes."""
    parts, wholes = _vector(where, part_name, part), _vector(where, whole_name, whole)
    _same_length(where, part_name, parts, whole_name, wholes)
    for name, values in ((part_name, parts), (whole_name, wholes)):
        if values.min() < 0:
            at = int(values.argmin())
            raise ValueError(f"{where}: {name} must not be negative, got {values[at]} at {at}; pass counts.")
    if not wholes.any():
        raise ValueError(f"{where}: {whole_name} must not be 0 everywhere, got {len(wholes)} zeros; report none.")
    return np.stack([parts, wholes], axis=1)


def _divided(ratio: NDArray[np.float64], drawn: NDArray[np.integer]) -> NDArray[np.float64]:
    part, whole = ratio[:, 0][drawn].sum(axis=1), ratio[:, 1][drawn].sum(axis=1)  # [R]
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def _candidates(where: str, score: ArrayLike, outcome: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    scores = _vector(where, "score", score, finite=False)
    outcomes = _vector(where, "outcome", outcome)
    _same_length(where, "score", scores, "outcome", outcomes)
    return scores, outcomes


def _same_length(
    where: str, first_name: str, first: NDArray[np.float64], second_name: str, second: NDArray[np.float64]
) -> None:
    if len(first) != len(second):
        raise ValueError(
            f"{where}: {first_name} and {second_name} must be of one length, got {len(first)} and {len(second)}; "
            "pass the same items in the same order."
        )


def _vector(where: str, name: str, values: ArrayLike, *, finite: bool = True) -> NDArray[np.float64]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{where}: {name} must hold bools or numbers, got dtype {array.dtype}; convert it first.")
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{where}: {name} must be one-dimensional and not empty, got shape {array.shape}; reshape it.")
    vector = array.astype(np.float64)
    allowed = np.isfinite(vector) if finite else ~np.isnan(vector)
    if not allowed.all():
        at = int(np.argmin(allowed))
        expected = "finite" if finite else "free of NaN"
        raise ValueError(f"{where}: {name} must be {expected}, got {vector[at]} at {at}; drop that item everywhere.")
    return vector
