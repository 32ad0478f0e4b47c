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
    pairwise_agreement,
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
