"""B_H and targets of many groups."""

from __future__ import annotations

import pytest
import torch

from fb_core import future_compatibility, group_targets


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
