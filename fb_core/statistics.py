"""Statistics of reported results: intervals over problems, and how well scores order candidates by outcome."""

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
        TypeError: outcomes or scores are neither bools nor real numbers.
        ValueError: `a` is empty, not one-dimensional or not finite, or an option is out of its range.
    """
    values = _vector("interval", "a", a)
    return _bootstrap(lambda drawn: values[drawn].mean(axis=1), [len(values)], resamples, level, seed)


def paired_interval(
    a: ArrayLike, b: ArrayLike, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of mean(a) - mean(b) over the same problems.

    A problem is drawn with both its outcomes, so what makes it easy or hard for both cancels out; the difference is
    statistically significant at the level where the interval leaves out 0.

    Args:
        a: one outcome for each problem: bools or finite numbers.
        b: the other method's outcomes, of the same problems in the same order.
        resamples: how often the problems are drawn again, with replacement.
        level: share of the resampled means between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)` of the difference a - b.

    Raises:
        TypeError: outcomes or scores are neither bools nor real numbers.
        ValueError: lengths differ, outcomes are empty, not one-dimensional or not finite, or an option is out of its
            range.
    """
    first, second = _vector("paired_interval", "a", a), _vector("paired_interval", "b", b)
    _same_length("paired_interval", "a", first, "b", second)
    difference = first - second
    return _bootstrap(lambda drawn: difference[drawn].mean(axis=1), [len(difference)], resamples, level, seed)


def average_interval(
    a: Sequence[ArrayLike],
    b: Sequence[ArrayLike] | None = None,
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the average of the benchmarks' means, with equal weight for each benchmark.

    Problems are resampled within each benchmark: the benchmarks are fixed, not a sample of others.

    Args:
        a: one vector of outcomes per benchmark, one outcome for each of its problems: bools or finite numbers.
        b: the other method's outcomes of the same benchmarks and problems in the same order; the interval is then of
            the difference a - b, and a problem is drawn with both its outcomes.
        resamples: how often the problems are drawn again, with replacement.
        level: share of the resampled averages between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)`; for one benchmark the same as from `interval` and `paired_interval`.

    Raises:
        TypeError: outcomes that are neither bools nor real numbers.
        ValueError: no benchmark, numbers of benchmarks or lengths that differ, outcomes that are empty, not
            one-dimensional or not finite, or an option out of its range.
    """
    if not len(a) or (b is not None and len(a) != len(b)):
        expected = "one benchmark or more" if b is None else "as many benchmarks in a as in b, one or more"
        counts = len(a) if b is None else f"{len(a)} and {len(b)}"
        raise ValueError(f"average_interval: expected {expected}, got {counts}; pass one vector per benchmark.")
    values = [_vector("average_interval", f"a[{place}]", one) for place, one in enumerate(a)]
    for place, other in enumerate(b or ()):
        second = _vector("average_interval", f"b[{place}]", other)
        _same_length("average_interval", f"a[{place}]", values[place], f"b[{place}]", second)
        values[place] = values[place] - second

    def average(*drawn: NDArray[np.integer]) -> NDArray[np.float64]:
        means = [one[rows].mean(axis=1) for one, rows in zip(values, drawn, strict=True)]
        return np.mean(means, axis=0)

    return _bootstrap(average, [len(one) for one in values], resamples, level, seed)


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

    Args:
        accuracy: of the method, one vector of outcomes per benchmark, as for `average_interval`; all benchmarks have
            the same weight.
        tokens: of the large model in the method's answers, finite and not negative, of the same problems.
        greedy: outcomes of the small model alone.
        takeover: outcomes of takeover.
        takeover_tokens: of the large model in takeover, not 0 everywhere.
        resamples: how often the problems are drawn again, with replacement, each with all five of its numbers; draws in
            which takeover writes nothing are left out.
        level: share of the resampled differences between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)`, a difference of shares.

    Raises:
        TypeError: outcomes or tokens that are neither bools nor real numbers.
        ValueError: no benchmark, numbers of benchmarks or lengths that differ, a vector that is empty, not
            one-dimensional or not finite, tokens that are negative, takeover without a token, or an option out of its
            range.
    """
    given = {
        "accuracy": accuracy,
        "tokens": tokens,
        "greedy": greedy,
        "takeover": takeover,
        "takeover_tokens": takeover_tokens,
    }
    counts = {name: len(values) for name, values in given.items()}
    if not len(accuracy) or len(set(counts.values())) > 1:
        raise ValueError(f"above_line_interval: expected as many benchmarks everywhere, one or more, got {counts}.")
    known = {
        name: [_vector("above_line_interval", f"{name}[{place}]", one) for place, one in enumerate(values)]
        for name, values in given.items()
    }
    for name, vectors in known.items():
        for place, vector in enumerate(vectors):
            _same_length("above_line_interval", "accuracy", known["accuracy"][place], f"{name}[{place}]", vector)
            if name.endswith("tokens") and vector.min() < 0:
                raise ValueError(f"above_line_interval: {name} must not be negative, got {vector.min()}; pass counts.")
    if not any(vector.any() for vector in known["takeover_tokens"]):
        raise ValueError(
            "above_line_interval: takeover_tokens must not be 0 everywhere; there is no line to stand above."
        )

    def distance(*drawn: NDArray[np.integer]) -> NDArray[np.float64]:
        means = {
            name: np.mean([one[rows].mean(axis=1) for one, rows in zip(vectors, drawn, strict=True)], axis=0)
            for name, vectors in known.items()
        }
        written = means["takeover_tokens"]
        share = np.divide(means["tokens"], written, out=np.full_like(written, np.nan), where=written > 0)
        return means["accuracy"] - means["greedy"] - share.clip(max=1) * (means["takeover"] - means["greedy"])

    return _bootstrap(distance, [len(one) for one in known["accuracy"]], resamples, level, seed)


def ratio_interval(
    part: ArrayLike, whole: ArrayLike, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of sum(part) / sum(whole), drawn by problem.

    A problem is drawn with both its values, such as two times that are compared. For shares of few problems use
    `share_interval`, which is wide enough there.

    Args:
        part: the numerator of each problem, finite and not negative.
        whole: the denominator of each problem, in the same order, finite and not negative, not 0 everywhere.
        resamples: how often the problems are drawn again, with replacement; draws whose whole is 0 are left out.
        level: share of the resampled ratios between the ends, in (0, 1).
        seed: of the draws; the same arguments give the same interval.

    Returns:
        `Interval(mean, low, high)`, where mean is the ratio over the problems as given.

    Raises:
        TypeError: an argument that is neither bools nor real numbers.
        ValueError: lengths differ, a value is negative or not finite, the whole is 0, an argument is empty or not
            one-dimensional, or an option is out of its range.
    """
    ratio = _ratio("ratio_interval", "part", part, "whole", whole)
    return _bootstrap(lambda drawn: _divided(ratio, drawn), [len(ratio)], resamples, level, seed)


def share_interval(part: ArrayLike, whole: ArrayLike, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of the share sum(part) / sum(whole), with each problem as at most one trial.

    For shares of counted states or pairs, such as pairwise accuracy. The states of a problem are not independent, so
    the number of trials is the number of problems, or Kish's effective number if their weights differ,
    sum(whole)^2 / sum(whole^2). Unlike a bootstrap interval, it stays wide for few problems: 2 of 2 give 34% to 100%.

    Args:
        part: the numerator of each problem, finite, from 0 to its whole.
        whole: the denominator of each problem, in the same order, finite and not negative, not 0 everywhere.
        level: of confidence, in (0, 1).

    Returns:
        `Interval(mean, low, high)` inside [0, 1], where mean is the share itself.

    Raises:
        TypeError: an argument that is neither bools nor real numbers.
        ValueError: lengths differ, a value is negative or not finite, a part is above its whole, the whole is 0, an
            argument is empty or not one-dimensional, or the level is out of its range.
    """
    counts, z = _shares("share_interval", part, whole), _normal(level)
    trials, mean = _trials(counts[:, 1]), float(counts[:, 0].sum() / counts[:, 1].sum())
    centre = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z / (1 + z * z / trials) * np.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    return Interval(mean, float(min(mean, max(0.0, centre - reach))), float(max(mean, min(1.0, centre + reach))))


def paired_share_interval(a: ArrayLike, b: ArrayLike, whole: ArrayLike, *, level: float = 0.95) -> Interval:
    """Agresti and Min's interval of the difference of two shares of the same states, a problem as at most one trial.

    The trials are the problems' differences, counted as in `share_interval`, and two more: one half for a and half for
    b, and one without a difference. So a few problems that all agree decide nothing.

    Args:
        a: the first numerator of each problem, finite, from 0 to its whole.
        b: the second numerator, of the same problems in the same order.
        whole: the denominator of each problem, finite and not negative, not 0 everywhere.
        level: of confidence, in (0, 1).

    Returns:
        `Interval(mean, low, high)` inside [-1, 1] of (sum(a) - sum(b)) / sum(whole).

    Raises:
        TypeError: an argument that is neither bools nor real numbers.
        ValueError: as `share_interval`.
    """
    first, second = _shares("paired_share_interval", a, whole), _shares("paired_share_interval", b, whole)
    z, trials, weight = _normal(level), _trials(first[:, 1]), first[:, 1] / first[:, 1].sum()
    difference = np.divide(
        first[:, 0] - second[:, 0], first[:, 1], out=np.zeros(len(first)), where=first[:, 1] > 0
    )  # [n]
    mean = float(weight @ difference)
    centre = trials * mean / (trials + 2)
    square = (trials * float(weight @ difference**2) + 1) / (trials + 2)
    reach = z * np.sqrt((square - centre * centre) / (trials + 2))
    return Interval(mean, float(min(mean, max(-1.0, centre - reach))), float(max(mean, min(1.0, centre + reach))))


def paired_lower_bound(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
    """Tango's lower score bound (Statistics in Medicine 17, 1998) on the difference of two paired shares.

    The bound is the smallest difference that the one-sided score test does not reject, with the nuisance share at its
    restricted maximum likelihood. Unlike bounds that shrink towards no difference, it keeps its level if the methods
    differ on few problems, all of them to the method's disadvantage.

    Args:
        a: 0 or 1 per problem.
        b: outcomes of the other method on the same problems in the same order.
        level: of one-sided confidence, in (0, 1).

    Returns:
        `Interval(mean, low, 1)` of mean(a) - mean(b).

    Raises:
        TypeError: outcomes that are neither bools nor numbers.
        ValueError: lengths differ, an outcome that is neither 0 nor 1, no outcomes, or a level out of its range.
    """
    first, second = _vector("paired_lower_bound", "a", a), _vector("paired_lower_bound", "b", b)
    _same_length("paired_lower_bound", "a", first, "b", second)
    if wrong := [float(value) for value in np.unique([first, second]) if value not in (0.0, 1.0)]:
        raise ValueError(f"paired_lower_bound: outcomes must be 0 or 1, got {wrong[0]}; pass one run per problem.")
    _check_level("paired_lower_bound", level)
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
    """How many pairs of one state's candidates the scores order as their outcomes do.

    Only pairs whose outcomes differ are comparable; a tie of their scores counts one half. Sum both numbers over the
    states and divide once: the denominator of pairwise accuracy is the comparable pairs, so states whose candidates all
    have the same outcome do not count.

    Args:
        score: [K], higher is better; infinities are allowed.
        outcome: [K], the outcome of each candidate's rollout: bools or finite numbers.

    Returns:
        `(agreeing, comparable)`, the first a multiple of one half, both 0 where all outcomes are equal.

    Raises:
        TypeError: outcomes or scores are neither bools nor real numbers.
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
    with both denominators: in the other states every choice has the same outcome, and many of those hide what the
    selector contributes.

    Args:
        score: [K], higher is better; infinities are allowed.
        outcome: [K], the outcome of each candidate's rollout: bools or finite numbers.

    Returns:
        0.0 or 1.0 for bools.

    Raises:
        TypeError: outcomes or scores are neither bools nor real numbers.
        ValueError: lengths differ, an argument is empty, not one-dimensional, or holds NaN.
    """
    scores, outcomes = _candidates("top1_success", score, outcome)
    return float(outcomes[np.argmax(scores)])


def coverage(outcome: ArrayLike) -> float:
    """The best outcome of any candidate of a state: what a perfect selector would get.

    Its mean is reported both over all states and over states whose candidates differ in outcome (`outcomes_differ`),
    with both denominators; over the latter it is 1 for bools by definition, so top-1 success there is a share of it.

    Args:
        outcome: [K], the outcome of each candidate's rollout: bools or finite numbers.

    Returns:
        0.0 or 1.0 for bools.

    Raises:
        TypeError: outcomes or scores are neither bools nor real numbers.
        ValueError: `outcome` is empty, not one-dimensional or not finite.
    """
    return float(_vector("coverage", "outcome", outcome).max())


def outcomes_differ(outcome: ArrayLike) -> bool:
    """Whether a state's candidates differ in outcome; such states make up the smaller denominator.

    Args:
        outcome: [K], the outcome of each candidate's rollout: bools or finite numbers.

    Raises:
        TypeError: outcomes or scores are neither bools nor real numbers.
        ValueError: `outcome` is empty, not one-dimensional or not finite.
    """
    outcomes = _vector("outcomes_differ", "outcome", outcome)
    return bool(outcomes.min() < outcomes.max())


def _bootstrap(
    statistic: Callable[..., NDArray[np.float64]],
    problems: Sequence[int],
    resamples: int,
    level: float,
    seed: int,
) -> Interval:
    """The interval of a statistic that maps drawn problems, [R, n] of each set, to [R], NaN where it has no value."""
    if not resamples >= 1:
        raise ValueError(f"bootstrap: resamples must be at least 1, got {resamples}; 10000 is usual.")
    _check_level("bootstrap", level)
    draw = _kept_draws if resamples * sum(problems) <= DRAWS_KEPT else _draws
    values = np.concatenate([statistic(*drawn) for drawn in draw(tuple(problems), resamples, seed)])
    values = values[~np.isnan(values)]
    if not len(values):
        raise ValueError(f"bootstrap: the whole must not be 0 in all draws, got {resamples} such; draw more often.")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
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


def _check_level(where: str, level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"{where}: level must lie between 0 and 1, got {level}; 0.95 is usual.")


def _normal(level: float) -> float:
    """The number of standard deviations on either side of a normal mean that contain the level."""
    _check_level("share", level)
    return NormalDist().inv_cdf((1 + level) / 2)


def _trials(weight: NDArray[np.float64]) -> float:
    """Kish's effective number of problems of these weights."""
    return float(weight.sum() ** 2 / np.square(weight).sum())


def _shares(where: str, part: ArrayLike, whole: ArrayLike) -> NDArray[np.float64]:
    """[n, 2] of parts and wholes, no part above its whole."""
    counts = _ratio(where, "part", part, "whole", whole)
    if (above := counts[:, 0] > counts[:, 1] * (1 + 1e-9)).any():
        at = int(above.argmax())
        raise ValueError(
            f"{where}: part must be at most its whole, got {counts[at, 0]} of {counts[at, 1]} at {at}; pass counts."
        )
    return counts


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
