"""The paper's intervals against hand-worked numbers and scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.paper.intervals import (
    above_line_interval,
    paired_share_interval,
    ratio_interval,
    share_interval,
    top1_success,
)
from fb_core.apps.pipeline.statistics import Interval


def test_two_problems_give_three_ratios() -> None:
    """1 of 1 and 0 of 3: the first twice gives 1, both 1/4, the second twice 0, with probabilities 1/4, 1/2, 1/4."""
    assert ratio_interval([1, 0], [1, 3]) == Interval(0.25, 0.0, 1.0)
    assert ratio_interval([1, 0], [1, 3], level=0.4) == Interval(0.25, 0.25, 0.25)


def test_draws_without_a_whole_are_left_out() -> None:
    """The second problem has no pairs: every other draw gives 1/2, and those of the second alone give nothing."""
    assert ratio_interval([2, 0], [4, 0]) == Interval(0.5, 0.5, 0.5)


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


def test_top1_ties_go_to_the_lowest_index() -> None:
    assert top1_success([0.2, 0.7, 0.7], [True, False, True]) == 0.0
    assert top1_success([0.2, 0.7, 0.7], [False, True, False]) == 1.0
