"""B_H and targets of many groups."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fb_core import future_compatibility, group_targets
from fb_core.targets import without_hindsight


def test_future_compatibility_is_the_mean_of_the_first_tokens():
    logprob = -torch.rand(3, 5)
    torch.testing.assert_close(future_compatibility(logprob, 2), logprob[:, :2].mean(1))


def test_soft_and_hybrid_targets_by_hand():
    logprob = torch.tensor([[-1.0, -3.0], [-2.0, -2.0], [-3.0, -7.0]])
    local = torch.tensor([-1.0, -2.0, -3.0])
    scores, targets = group_targets([logprob, logprob[:1]], [1, 2])
    torch.testing.assert_close(scores[0][:, 1], torch.tensor([-2.0, -2.0, -5.0]))
    z = (scores[0][:, 1] - scores[0][:, 1].mean()) / (scores[0][:, 1].std(correction=0) + 1e-6)
    torch.testing.assert_close(targets[0][:, 1], (z / 0.5).softmax(0))
    torch.testing.assert_close(targets[1], torch.ones(1, 2))
    z_local = (local - local.mean()) / (local.std(correction=0) + 1e-6)
    hybrid = group_targets([logprob], [2], local=[local], alpha=0.3)[1][0][:, 0]
    torch.testing.assert_close(hybrid, ((0.3 * z + 0.7 * z_local) / 0.5).softmax(0))


def test_future_shorter_than_asked():
    with pytest.raises(ValueError, match="shorter horizon"):
        group_targets([torch.zeros(2, 4)], [8])
    assert group_targets([], [8]) == ([], [])


def test_hindsight_by_hand():
    """At token 0 the others lose 2 and 5, alike 2; at 1 candidate 2 loses nothing, so alike 0; token 2 is not early."""
    logprob = torch.tensor([[-3.0, -4.0, -9.0], [-1.0, -1.0, -1.0], [-6.0, -0.5, -9.0]])
    expected = torch.tensor([[-1.0, -4.0, -9.0], [-1.0, -1.0, -1.0], [-4.0, -0.5, -9.0]])
    before = logprob.clone()
    assert torch.equal(without_hindsight(logprob, 1, 2), expected)
    assert torch.equal(logprob, before)


@pytest.mark.parametrize("shape", [(1, 4), (3, 0), (1, 0)])
def test_nothing_to_compare_or_nothing_early(shape):
    logprob = -torch.rand(shape)
    assert torch.equal(without_hindsight(logprob, 0, 8), logprob)
    assert torch.equal(without_hindsight(logprob, 0, 0), logprob)


def test_a_future_shorter_than_early_is_early_as_a_whole():
    logprob = -torch.rand(3, 4, dtype=torch.float64)
    assert torch.equal(without_hindsight(logprob, 2, 99), without_hindsight(logprob, 2, 4))
    assert without_hindsight(logprob, 2, 99).dtype == torch.float64


@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 9), st.integers(0, 2**31), st.data())
def test_hindsight_takes_only_what_all_others_lose(candidates, horizon, early, seed, data):
    first = data.draw(st.integers(0, candidates - 1))
    logprob = -4 * torch.rand(candidates, horizon, generator=torch.Generator().manual_seed(seed)).double()
    repaired = without_hindsight(logprob, first, early)
    others = [k for k in range(candidates) if k != first]
    assert torch.equal(repaired[first], logprob[first])
    assert torch.equal(repaired[:, early:], logprob[:, early:])
    given_back = (repaired - logprob)[others]
    torch.testing.assert_close(given_back, given_back[:1].expand_as(given_back))
    assert bool((given_back >= 0).all())
    best = logprob[others, :early].amax(0)  # the nearest of the others reaches the first, or was ahead of it
    torch.testing.assert_close(repaired[others, :early].amax(0), torch.maximum(best, logprob[first, :early]))
    order = torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))
    moved = without_hindsight(logprob[order], order.tolist().index(first), early)
    assert torch.equal(moved, repaired[order])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), 0, 1), r"expected \[K, H\], got \[3\]"),
        ((torch.zeros(2, 3), 2, 1), "index of one of 2 candidates, got 2"),
        ((torch.zeros(2, 3), -1, 1), "index of one of 2 candidates, got -1"),
        ((torch.zeros(0, 3), 0, 1), "index of one of 0 candidates, got 0"),
        ((torch.zeros(2, 3), 0, -1), "0 or more tokens, got -1"),
        ((torch.tensor([[0.0, 0.0], [-math.inf, 0.0]]), 0, 1), "finite early log-probs, got 1 that"),
        ((torch.tensor([[0.0, math.nan], [0.0, math.nan]]), 0, 2), "finite early log-probs, got 2 that"),
    ],
)
def test_bad_hindsight_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        without_hindsight(*arguments)
    with pytest.raises(TypeError, match="floating"):
        without_hindsight(arguments[0].long().clamp(0, 0), 0, 1)


def test_what_is_not_early_may_be_anything():
    logprob = torch.tensor([[-1.0, math.nan], [-2.0, -math.inf]])
    expected = torch.tensor([[-1.0, math.nan], [-1.0, -math.inf]])
    torch.testing.assert_close(without_hindsight(logprob, 0, 1), expected, equal_nan=True)
