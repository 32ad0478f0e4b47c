"""Intervals and candidate orders against hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.statistics import Interval, average_interval, outcomes_differ, paired_lower_bound
from fb_core.score.targets import pairwise_agreement


def test_two_problems_resample_to_a_half_most_often() -> None:
    """One right, one wrong: the resampled means 0, 1/2 and 1 have probabilities 1/4, 1/2 and 1/4."""
    assert average_interval([[True, False]]) == Interval(0.5, 0.0, 1.0)
    assert average_interval([[True, False]], level=0.4) == Interval(0.5, 0.5, 0.5)
    assert average_interval([[True, False, False]], [[False, True, True]]).mean == pytest.approx(-1 / 3)
    hardness = [np.arange(40.0), np.arange(7.0)]  # paired problem by problem
    assert average_interval([one + 0.25 for one in hardness], hardness) == Interval(0.25, 0.25, 0.25)
    apart = average_interval(hardness)
    assert apart.high - apart.low > 3


@pytest.mark.parametrize("problems", [(40,), (2, 300, 17)])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_intervals_are_scipys(problems: tuple[int, ...], level: float) -> None:
    """The same draws, since both take 32-bit integers from one generator, set by set."""
    draw = np.random.default_rng(1)
    a, b = ([draw.random(n) < share for n in problems] for share in (0.7, 0.6))
    difference = [own.astype(float) - other for own, other in zip(a, b, strict=True)]

    def average(*sets: np.ndarray, axis: int) -> np.ndarray:
        return np.mean([one.mean(axis=axis) for one in sets], axis=0)

    for values, found in (
        (a, average_interval(a, level=level, resamples=3000, seed=4)),
        (difference, average_interval(a, b, level=level, resamples=3000, seed=4)),
    ):
        options = {"confidence_level": level, "n_resamples": 3000, "method": "percentile", "rng": 4}
        batch = statistics.DRAWS_AT_ONCE // sum(problems)
        wanted = stats.bootstrap([one.astype(float) for one in values], average, batch=batch, **options)
        assert found[1:] == pytest.approx(wanted.confidence_interval)


def test_the_seed_decides_and_the_chunks_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(50)
    assert average_interval([values]) == average_interval([values])
    assert average_interval([values], seed=1) != average_interval([values])
    monkeypatch.setattr(statistics, "DRAWS_AT_ONCE", 10)  # fewer than the problems: one resample at a time
    statistics._kept_draws.cache_clear()
    one_by_one = average_interval([values])
    monkeypatch.undo()
    statistics._kept_draws.cache_clear()
    assert one_by_one.low == pytest.approx(average_interval([values]).low, abs=0.01)


def test_an_average_is_over_benchmarks_and_draws_inside_them() -> None:
    """A benchmark of one problem and one of two: the first never changes, the second gives 0, 1/2 or 1."""
    assert average_interval([[1.0], [True, False]]) == Interval(0.75, 0.5, 1.0)
    assert average_interval([[1.0], [True, False]], level=0.4) == Interval(0.75, 0.75, 0.75)
    large, small = np.arange(300) % 3 == 0, [True] * 3
    assert average_interval([large, small]).mean == pytest.approx((1 / 3 + 1) / 2)  # however many problems


def test_two_seeds_resample_to_a_half_most_often() -> None:
    """One seed right everywhere, one nowhere: however many problems, the means are those of the seeds drawn."""
    seeds = [[True, False]] * 50
    assert average_interval([seeds]) == Interval(0.5, 0.0, 1.0)
    assert average_interval([seeds], level=0.4) == Interval(0.5, 0.5, 0.5)
    assert average_interval([seeds, seeds]) == Interval(0.5, 0.0, 1.0)  # one draw of seeds for all benchmarks
    assert average_interval([seeds], [seeds]) == Interval(0.0, 0.0, 0.0)  # paired by seed
    assert average_interval([seeds], [[0.5] * 50]) == Interval(0.0, -0.5, 0.5)  # the other has one run
    assert average_interval([[[True], [False]]]) == average_interval([[True, False]])


def test_intervals_hold_what_a_seed_does_to_all_its_problems() -> None:
    """A method whose seeds differ by 10 points: intervals over problems alone miss its mean in most runs."""
    draw, covered = np.random.default_rng(5), {"problems": 0, "both": 0}
    for _ in range(100):
        share = np.clip(0.6 + draw.normal(0.0, 0.1, 8), 0, 1)
        right = draw.random((400, 8)) < share
        for name, outcomes in (("both", right), ("problems", right.mean(axis=1))):
            found = average_interval([outcomes], resamples=500)
            covered[name] += found.low <= 0.6 <= found.high
    assert covered["both"] >= 84
    assert covered["problems"] <= 55


@pytest.mark.parametrize("values", [[0.7], [0.1] * 9, [True] * 3])
def test_no_spread_gives_no_width(values: list[float]) -> None:
    found = average_interval([values])
    assert found.low == found.high == pytest.approx(found.mean)
    assert average_interval([values], [values]) == Interval(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("scores", "outcomes", "wanted"),
    [
        # comparable are (0, 1), (0, 3), (2, 1), (2, 3); of these (0, 1) is tied, (2, 1) and (2, 3) agree
        ([0.5, 0.5, 0.9, 0.6], [True, False, True, False], (2.5, 4)),
        *(([3.0, 2.0, 1.0], [1.0, 0.5, 0.0], (3.0, 3)), ([1.0, 2.0, 3.0], [1.0, 0.5, 0.0], (0.0, 3))),
        ([-math.inf, -math.inf, 0.0], [True, False, True], (1.5, 2)),
        *(([0.0] * len(same), same, (0.0, 0)) for same in ([True], [True, True], [False, False, False])),
    ],
)
def test_pairs_by_hand(scores: list[float], outcomes: list[float], wanted: tuple[float, int]) -> None:
    assert pairwise_agreement(scores, outcomes) == wanted
    assert outcomes_differ(outcomes) == (wanted[1] > 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_agreement_equals_counting_pair_by_pair(candidates: list[tuple[int, bool]]) -> None:
    agreeing, comparable = 0.0, 0
    for score, outcome in candidates:
        for other_score, other_outcome in candidates:
            if outcome and not other_outcome:
                comparable += 1
                agreeing += 1.0 if score > other_score else 0.5 if score == other_score else 0.0
    scores, outcomes = zip(*candidates, strict=True)
    assert pairwise_agreement(scores, outcomes) == (agreeing, comparable)


def test_the_paired_lower_bound_inverts_tangos_test():
    """The statistic at the bound, with the restricted maximum found on a grid, is the normal quantile."""
    a, b = np.zeros(200), np.zeros(200)
    a[:9] = 1
    b[9:25] = 1
    a[30:120] = b[30:120] = 1
    found = paired_lower_bound(a, b, level=0.975)
    assert found.mean == pytest.approx((9 - 16) / 200)
    share = np.linspace(max(0.0, -found.low) + 1e-9, (1 - found.low) / 2 - 1e-9, 2_000_001)
    likely = 9 * np.log(share + found.low) + 16 * np.log(share) + 175 * np.log(1 - 2 * share - found.low)
    best = share[likely.argmax()]
    z = (9 - 16 - 200 * found.low) / np.sqrt(200 * (2 * best + found.low * (1 - found.low)))
    assert z == pytest.approx(1.959964, abs=1e-4)


@pytest.mark.parametrize("won", [0.0, 0.005, 0.05])
def test_the_paired_lower_bound_keeps_its_level_where_methods_differ_rarely(won):
    """300 problems, two points worse: the bound is above that in 2.5% of the draws at most."""
    rng, draws = np.random.default_rng(3), 4000
    kinds = rng.choice(3, p=[won, won + 0.02, 1 - 2 * won - 0.02], size=(draws, 300))
    above = 0
    for better, worse in zip((kinds == 0).sum(1), (kinds == 1).sum(1), strict=True):
        a, b = np.zeros(300), np.zeros(300)
        a[:better] = 1
        b[better : better + worse] = 1
        above += paired_lower_bound(a, b, level=0.975).low > -0.02
    assert above / draws <= 0.025 + 3 * np.sqrt(0.025 * 0.975 / draws)


def test_the_paired_lower_bound_of_equal_outcomes_stays_wide():
    assert -0.02 < paired_lower_bound(np.ones(300), np.ones(300), level=0.9875).low < 0
    assert paired_lower_bound([1], [1]).low < -0.5
