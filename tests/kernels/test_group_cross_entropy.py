"""What is peculiar to `group_cross_entropy`: targets of zero, and groups that are each by itself."""

from __future__ import annotations

import math

import pytest
import torch
from cases.base import offsets

from fb_kernels import group_cross_entropy
from fb_kernels._runtime import segments


def test_zero_targets_silence_infinite_scores() -> None:
    inf, nan = math.inf, math.nan
    score = torch.tensor([-inf, 1.0, 2.0, -inf, 3.0, nan, 1.0, 5.0, -inf, nan], requires_grad=True)
    target = torch.tensor([0.0, 0.5, 0.5, 1.0, 0.0, 0.5, 0.5, 1.0, 0.0, nan])
    loss = group_cross_entropy(score, target, offsets([3, 2, 2, 2]), reduction="none")
    torch.testing.assert_close(loss[0], -0.5 * torch.log_softmax(torch.tensor([1.0, 2.0]), 0).sum())
    assert loss[1] == inf
    assert loss[2].isnan()
    assert loss[3] == 0
    (grad,) = torch.autograd.grad(loss, score, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    soft = torch.softmax(torch.tensor([1.0, 2.0]), 0)
    torch.testing.assert_close(grad[:5], torch.tensor([0.0, soft[0] - 0.5, soft[1] - 0.5, -1.0, 1.0]))
    assert not grad[5:].any()


def test_targets_of_zero_silence_a_whole_group() -> None:
    score = torch.tensor([math.nan, 1.0, -math.inf, -math.inf], requires_grad=True)
    loss = group_cross_entropy(score, torch.zeros(4), offsets([2, 2]))
    loss.backward()
    assert loss == 0
    assert score.grad is not None
    assert not score.grad.any()


@pytest.mark.parametrize("bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4]])
def test_bad_offsets_poison_where_the_host_does_not_read_them(bad: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "check_offsets", lambda *_: None)  # as on a device
    score = torch.randn(4, requires_grad=True)
    loss = group_cross_entropy(score, torch.rand(4), torch.tensor(bad))
    assert loss.isnan()
    assert torch.autograd.grad(loss, score)[0].isnan().all()
