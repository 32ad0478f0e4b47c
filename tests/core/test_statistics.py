"""Bootstrap intervals and candidate orders against hand-worked numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fb_core import statistics
from fb_core.statistics import (
    Interval,
    coverage,
    interval,
    outcomes_differ,
    paired_interval,
    paired_ratio_interval,
    pairwise_agreement,
    ratio_interval,
    top1_success,
)


def test_two_problems_resample_to_a_half_most_often() -> None:
    """One right, one wrong: the resampled means 0, 1/2 and 1 have probabilities 1/4, 1/2 and 1/4."""
    assert interval([True, False]) == Interval(0.5, 0.0, 1.0)
    assert interval([True, False], level=0.4) == Interval(0.5, 0.5, 0.5)


def test_pairing_cancels_what_the_problems_share() -> None:
    hardness = np.arange(40.0)
    assert paired_interval(hardness + 0.25, hardness) == Interval(0.25, 0.25, 0.25)
    apart = interval(hardness + 0.25)
    assert apart.high - apart.low > 5


def test_difference_of_bools_is_signed() -> None:
    assert paired_interval([True, False, False], [False, True, True]).mean == pytest.approx(-1 / 3)


def test_interval_agrees_with_the_normal_approximation() -> None:
    values = np.random.default_rng(3).normal(size=400)
    found = interval(values)
    half_width = 1.96 * values.std() / math.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half_width, abs=0.1 * half_width)
    assert found.high == pytest.approx(values.mean() + half_width, abs=0.1 * half_width)


def test_intervals_cover_the_truth_at_their_level() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(400):
        found = interval(generator.random(60) < 0.3, resamples=400, level=0.9, seed=seed)
        hits += found.low <= 0.3 <= found.high
    assert 0.85 <= hits / 400 <= 0.94


def test_the_seed_decides_and_the_chunks_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(50)
    assert interval(values) == interval(values)
    assert interval(values, seed=1) != interval(values)
    monkeypatch.setattr(statistics, "DRAWS_AT_ONCE", 10)  # fewer than the problems: one resample at a time
    one_by_one = interval(values)
    monkeypatch.undo()
    assert one_by_one.low == pytest.approx(interval(values).low, abs=0.01)


def test_two_problems_give_three_ratios() -> None:
    """1 of 1 and 0 of 3: the first twice gives 1, both 1/4, the second twice 0, with probabilities 1/4, 1/2, 1/4."""
    assert ratio_interval([1, 0], [1, 3]) == Interval(0.25, 0.0, 1.0)
    assert ratio_interval([1, 0], [1, 3], level=0.4) == Interval(0.25, 0.25, 0.25)


def test_draws_without_a_whole_are_left_out() -> None:
    """The second problem has no pairs: every other draw gives 1/2, and those of the second alone give nothing."""
    assert ratio_interval([2, 0], [4, 0]) == Interval(0.5, 0.5, 0.5)
    assert paired_ratio_interval(([2, 0], [4, 0]), ([0, 1], [0, 1])) == Interval(-0.5, -0.5, -0.5)
    with pytest.raises(ValueError, match="draw more often"):
        ratio_interval([2, 0], [4, 0], resamples=1, seed=0)  # draws the second problem twice


def test_ratios_of_problems_of_one_size_are_means() -> None:
    values = np.random.default_rng(2).random(30)
    apart, together = interval(values), ratio_interval(3 * values, np.full(30, 3.0))
    assert together == pytest.approx(apart)


def test_large_problems_widen_the_interval() -> None:
    """400 pairs in 8 problems that agree as a whole say less than 400 problems of a pair."""
    whole, right = np.full(8, 50), np.arange(8) % 2 * 50
    clustered = ratio_interval(right, whole)
    single = ratio_interval(np.repeat(right / 50, 50), np.ones(400))
    assert clustered.mean == single.mean == 0.5
    assert clustered.high - clustered.low > 5 * (single.high - single.low)


def test_pairing_ratios_cancels_what_the_problems_share() -> None:
    whole = np.arange(1.0, 41.0)
    right = whole * (np.arange(40) % 2)
    found = paired_ratio_interval((right, whole), (right, 2 * whole))
    assert found.mean == ratio_interval(right, whole).mean / 2
    assert paired_ratio_interval((right, whole), (right, whole)) == Interval(0.0, 0.0, 0.0)
    better = paired_ratio_interval((right + whole / 4, whole), (right, whole))
    assert better == pytest.approx((0.25, 0.25, 0.25))
    worse = paired_ratio_interval((right, whole), (right + whole / 4, whole))
    assert worse == pytest.approx((-0.25, -0.25, -0.25))


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
    paired = paired_ratio_interval((part, whole), (whole, whole), resamples=100, seed=seed)
    assert paired == pytest.approx(tuple(end - 1 for end in found))


@pytest.mark.parametrize(
    ("part", "whole", "message"),
    [
        ([], [], "not empty"),
        ([1, math.nan], [1, 1], "part.* must be finite, got nan at 1"),
        ([1, 1], [math.inf, 1], "whole.* must be finite, got inf at 0"),
        ([1, -1], [1, 1], "part.* must not be negative, got -1.0 at 1"),
        ([1, 1], [1, -2], "whole.* must not be negative, got -2.0 at 1"),
        ([1, 0], [1, 2, 3], "got 2 and 3"),
        ([0, 0], [0, 0], "whole.* must not be 0 everywhere, got 2 zeros"),
        ([[1]], [[1]], "one-dimensional"),
    ],
)
def test_bad_ratios_are_refused(part: list[float], whole: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ratio_interval(part, whole)
    with pytest.raises(ValueError, match=message):
        paired_ratio_interval(([1, 1], [1, 1]), (part, whole))


def test_ratios_of_other_problems_are_not_paired() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_ratio_interval(([1], [1]), ([1, 1], [1, 1]))
    with pytest.raises(ValueError, match="resamples"):
        ratio_interval([1], [1], resamples=0)


@pytest.mark.parametrize("values", [[0.7], [0.1] * 9, [True] * 3])
def test_no_spread_gives_no_width(values: list[float]) -> None:
    found = interval(values)
    assert found.low == found.high == pytest.approx(found.mean)
    assert paired_interval(values, values) == Interval(0.0, 0.0, 0.0)


@pytest.mark.parametrize("call", [interval, coverage, outcomes_differ, lambda a: paired_interval(a, a)])
@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, math.inf], [[1.0, 0.0]]])
def test_bad_outcomes_are_refused(call: Callable[[object], object], values: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        call(values)


@pytest.mark.parametrize("call", [paired_interval, pairwise_agreement, top1_success])
def test_lengths_must_match(call: Callable[[object, object], object]) -> None:
    with pytest.raises(ValueError, match="got 2 and 3"):
        call([1, 0], [1, 0, 1])


@pytest.mark.parametrize("options", [{"resamples": 0}, {"level": 0.0}, {"level": 95}, {"level": math.nan}])
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        interval([1, 0], **options)  # type: ignore[arg-type]


def test_words_are_refused() -> None:
    with pytest.raises(TypeError, match="dtype"):
        interval(["correct", "wrong"])


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
    assert coverage(outcome) == top1_success(list(range(len(outcome))), outcome) == float(outcome[0])


def test_impossible_candidates_are_tied_and_nan_scores_refused() -> None:
    assert pairwise_agreement([-math.inf, -math.inf, 0.0], [True, False, True]) == (1.5, 2)
    for call in (pairwise_agreement, top1_success):
        with pytest.raises(ValueError, match="free of NaN"):
            call([math.nan, 0.0], [True, False])


def test_top1_ties_go_to_the_lowest_index() -> None:
    assert top1_success([0.2, 0.7, 0.7], [True, False, True]) == 0.0
    assert top1_success([0.2, 0.7, 0.7], [False, True, False]) == 1.0
    assert coverage([False, True, False]) == 1.0
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
