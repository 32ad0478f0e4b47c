"""Intervals and candidate orders against hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fb_core import statistics
from fb_core.statistics import (
    Interval,
    above_line_interval,
    average_interval,
    outcomes_differ,
    paired_lower_bound,
    paired_share_interval,
    pairwise_agreement,
    ratio_interval,
    share_interval,
    top1_success,
)


def test_two_problems_resample_to_a_half_most_often() -> None:
    """One right, one wrong: the resampled means 0, 1/2 and 1 have probabilities 1/4, 1/2 and 1/4."""
    assert average_interval([[True, False]]) == Interval(0.5, 0.0, 1.0)
    assert average_interval([[True, False]], level=0.4) == Interval(0.5, 0.5, 0.5)


def test_difference_of_bools_is_signed() -> None:
    assert average_interval([[True, False, False]], [[False, True, True]]).mean == pytest.approx(-1 / 3)


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


def test_two_problems_give_three_ratios() -> None:
    """1 of 1 and 0 of 3: the first twice gives 1, both 1/4, the second twice 0, with probabilities 1/4, 1/2, 1/4."""
    assert ratio_interval([1, 0], [1, 3]) == Interval(0.25, 0.0, 1.0)
    assert ratio_interval([1, 0], [1, 3], level=0.4) == Interval(0.25, 0.25, 0.25)


def test_draws_without_a_whole_are_left_out() -> None:
    """The second problem has no pairs: every other draw gives 1/2, and those of the second alone give nothing."""
    assert ratio_interval([2, 0], [4, 0]) == Interval(0.5, 0.5, 0.5)


def test_ratios_of_problems_of_one_size_are_means() -> None:
    values = np.random.default_rng(2).random(30)
    apart, together = average_interval([values]), ratio_interval(3 * values, np.full(30, 3.0))
    assert together == pytest.approx(apart)


def test_large_problems_widen_the_interval() -> None:
    """400 pairs in 8 problems that agree as a whole say less than 400 problems of a pair."""
    whole, right = np.full(8, 50), np.arange(8) % 2 * 50
    clustered = ratio_interval(right, whole)
    single = ratio_interval(np.repeat(right / 50, 50), np.ones(400))
    assert clustered.mean == single.mean == 0.5
    assert clustered.high - clustered.low > 5 * (single.high - single.low)


def test_an_average_is_over_benchmarks_and_draws_inside_them() -> None:
    """A benchmark of one problem and one of two: the first never changes, the second gives 0, 1/2 or 1."""
    assert average_interval([[1.0], [True, False]]) == Interval(0.75, 0.5, 1.0)
    assert average_interval([[1.0], [True, False]], level=0.4) == Interval(0.75, 0.75, 0.75)
    large, small = np.arange(300) % 3 == 0, [True] * 3
    assert average_interval([large, small]).mean == pytest.approx((1 / 3 + 1) / 2)  # however many problems


def test_averages_are_paired_problem_by_problem() -> None:
    hardness = [np.arange(40.0), np.arange(7.0)]
    assert average_interval([one + 0.25 for one in hardness], hardness) == Interval(0.25, 0.25, 0.25)
    apart = average_interval(hardness)
    assert apart.high - apart.low > 3


def on_the_line(share: float, n: int = 2000) -> tuple[np.ndarray, ...]:
    """Every problem alike: greedy 40% right for no token, takeover 90% for 50, a method in between for its share."""
    greedy, takeover = np.full(n, 0.4), np.full(n, 0.9)
    return greedy + share * (takeover - greedy), np.full(n, share * 50), greedy, takeover, np.full(n, 50.0)


@pytest.mark.parametrize("share", [0.0, 0.04, 0.5, 1.0])
def test_taking_over_on_a_share_lies_on_the_line(share: float) -> None:
    accuracy, *others = on_the_line(share)
    for above in (0.0, 0.1, -0.2):
        found = above_line_interval([accuracy + above], *([one] for one in others))
        assert found == pytest.approx((above, above, above), abs=1e-12)


def test_the_line_by_hand() -> None:
    """2 tokens of 8 are a quarter of the way from 1/2 to 1; at 16 of 8 nothing is better than takeover."""
    greedy, takeover, written = [1.0, 0.0], [1.0, 1.0], [10.0, 6.0]
    found = above_line_interval([[1.0, 0.5]], [[1.0, 3.0]], [greedy], [takeover], [written])
    assert found.mean == pytest.approx(0.75 - (0.5 + 0.25 * 0.5))
    assert above_line_interval([[1.0, 0.5]], [[16.0, 16.0]], [greedy], [takeover], [written]).mean == -0.25
    # both problems twice: 1 - 1 - .1 * 0 and .5 - 0 - .5 * 1, and each once as above
    assert (found.low, found.high) == (pytest.approx(0.0), pytest.approx(0.125))
    two = above_line_interval([[1.0, 0.5]] * 2, [[1.0, 3.0], [0.0, 0.0]], [greedy] * 2, [takeover] * 2, [written] * 2)
    assert two.mean == pytest.approx(0.75 - (0.5 + 0.125 * 0.5))  # benchmarks count alike


def test_chance_takeover_of_a_share_is_not_told_apart_from_its_line() -> None:
    draw, covered = np.random.default_rng(3), 0
    for _ in range(60):
        greedy, takeover = draw.random(150) < 0.5, draw.random(150) < 0.9
        written = draw.integers(20, 60, 150)
        handed = draw.random(150) < 0.3
        own, tokens = np.where(handed, takeover, greedy), np.where(handed, written, 0)
        found = above_line_interval([own], [tokens], [greedy], [takeover], [written], resamples=1000)
        covered += found.low <= 0 <= found.high
    assert covered >= 50


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
@pytest.mark.parametrize(("right", "of"), [(2, 2), (0, 2), (0, 1), (8, 10), (50, 100), (399, 400)])
def test_shares_of_single_trials_are_wilsons(right: int, of: int, level: float) -> None:
    wanted = stats.binomtest(right, of).proportion_ci(level, method="wilson")
    assert share_interval(np.arange(of) < right, np.ones(of), level=level)[1:] == pytest.approx(wanted, abs=1e-12)


def test_a_problem_is_one_trial_however_many_states_it_has() -> None:
    single = share_interval([1, 0, 1], [1, 1, 1])
    assert share_interval([7, 0, 7], [7, 7, 7]) == pytest.approx(single)
    assert share_interval([1, 0, 1, 0], [1, 1, 1, 0]) == pytest.approx(single)  # one without a state is none
    uneven = share_interval([90, 1], [90, 10])
    assert uneven.high - uneven.low > 0.7  # hardly more than one trial


def test_shares_cover_the_truth_where_there_are_few() -> None:
    draw, hits = np.random.default_rng(0), 0
    for _ in range(1000):
        states = draw.integers(1, 6, size=8)
        found = share_interval(draw.binomial(states, 0.9), states)
        hits += found.low <= 0.9 <= found.high
    assert hits / 1000 >= 0.94


def test_a_difference_of_shares_is_agresti_and_mins() -> None:
    """10 and 3 discordant of 50: ((10.5 - 3.5) / 52) with the deviation of 14 discordant among 52."""
    a, b = np.arange(50) < 10, (np.arange(50) >= 10) & (np.arange(50) < 13)
    centre, deviation = 7 / 52, math.sqrt(14 / 52 - (7 / 52) ** 2) / math.sqrt(52)
    wanted = (7 / 50, centre - 1.959964 * deviation, centre + 1.959964 * deviation)
    assert paired_share_interval(a, b, np.ones(50)) == pytest.approx(wanted)
    mean, low, high = paired_share_interval(b, a, np.ones(50))
    assert (-mean, -high, -low) == pytest.approx(wanted)


def test_two_problems_decide_no_difference() -> None:
    for right, other in (([1, 1], [0, 0]), ([9, 9], [0, 0])):
        mean, low, high = paired_share_interval(right, other, np.maximum(right, 1))
        assert (mean, high) == (1.0, 1.0)
        assert low < 0
    none = paired_share_interval([1, 1], [1, 1], [1, 1])
    assert none.low < -0.4
    assert none.high > 0.4
    many = paired_share_interval(np.ones(60), np.zeros(60), np.ones(60))
    assert many.low > 0.9


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8),
    st.floats(0.5, 0.99),
)
def test_intervals_of_shares_hold_their_mean_inside_their_bounds(rows: list, level: float) -> None:
    whole = np.array([max(row) for row in rows])
    a, b = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    if not whole.any():
        return
    share, difference = share_interval(a, whole, level=level), paired_share_interval(a, b, whole, level=level)
    assert 0 <= share.low <= share.mean <= share.high <= 1
    assert share.low < share.high
    assert -1 <= difference.low <= difference.mean <= difference.high <= 1
    assert difference.low < difference.high
    assert difference.mean == pytest.approx(share_interval(a, whole).mean - share_interval(b, whole).mean)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8).filter(
        lambda pairs: any(whole for _, whole in pairs)
    ),
    st.integers(0, 3),
)
def test_ratio_bounds_hold_and_repeat(pairs: list[tuple[int, int]], seed: int) -> None:
    whole = [size for _, size in pairs]
    part = [min(count, size) for count, size in pairs]
    found = ratio_interval(part, whole, resamples=100, seed=seed)
    assert found == ratio_interval(part, whole, resamples=100, seed=seed)
    assert found.mean == sum(part) / sum(whole)
    assert 0 <= found.low <= found.high <= 1


@pytest.mark.parametrize("values", [[0.7], [0.1] * 9, [True] * 3])
def test_no_spread_gives_no_width(values: list[float]) -> None:
    found = average_interval([values])
    assert found.low == found.high == pytest.approx(found.mean)
    assert average_interval([values], [values]) == Interval(0.0, 0.0, 0.0)


def test_pairs_by_hand() -> None:
    """Comparable are (0, 1), (0, 3), (2, 1), (2, 3); of these (0, 1) is tied, (2, 1) and (2, 3) agree."""
    assert pairwise_agreement([0.5, 0.5, 0.9, 0.6], [True, False, True, False]) == (2.5, 4)


def test_graded_outcomes_compare_by_their_order() -> None:
    assert pairwise_agreement([3.0, 2.0, 1.0], [1.0, 0.5, 0.0]) == (3.0, 3)
    assert pairwise_agreement([1.0, 2.0, 3.0], [1.0, 0.5, 0.0]) == (0.0, 3)


@pytest.mark.parametrize("outcome", [[True], [True, True], [False, False, False]])
def test_equal_outcomes_are_not_comparable(outcome: list[bool]) -> None:
    assert pairwise_agreement(list(range(len(outcome))), outcome) == (0.0, 0)
    assert not outcomes_differ(outcome)
    assert top1_success(list(range(len(outcome))), outcome) == float(outcome[0])


def test_impossible_candidates_are_tied() -> None:
    assert pairwise_agreement([-math.inf, -math.inf, 0.0], [True, False, True]) == (1.5, 2)


def test_top1_ties_go_to_the_lowest_index() -> None:
    assert top1_success([0.2, 0.7, 0.7], [True, False, True]) == 0.0
    assert top1_success([0.2, 0.7, 0.7], [False, True, False]) == 1.0
    assert outcomes_differ([False, True, False])


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
