"""What is peculiar to `candidate_head`: its groups, whatever their scores are and however long they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from cases.candidate_head import EPS, OP, make, offsets
from torch import Tensor
from ways import names, running_small

from fb_kernels import candidate_head
from fb_kernels._runtime import segments
from fb_kernels.testing import assert_close_to_reference

NAN, INF = math.nan, math.inf
of_every_way = pytest.mark.parametrize("way", names(OP))


@contextmanager
def small(way: str) -> Iterator[None]:
    """An implementation, in launches in which few rows are several tiles."""
    with running_small(OP, way):
        yield


def single(*sizes: Sequence[int] | int) -> dict:
    """Arguments in float32."""
    return OP.cast(make(*sizes), torch.float32).arguments


def scored(values: Sequence[float], groups: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The op on scores that are exactly `values`."""
    return candidate_head(torch.tensor(values)[:, None], None, torch.ones(1), offsets(groups), eps=EPS)


@of_every_way
@pytest.mark.parametrize("tail", [0, 40])
def test_ties_and_negative_scores(way: str, tail: int) -> None:
    with small(way):
        _, prob, best = scored([-5, -2, -2, -0.0, 0.0, *[-9] * 9, *[1] * tail], [3, 2, 9])
    assert best.tolist() == [1, 0, 0]
    assert prob[3:5].tolist() == [0.5] * 2
    assert not prob[14:].any()


@of_every_way
@pytest.mark.parametrize("tail", [0, 40])
def test_the_best_of_a_group_longer_than_a_warp(way: str, tail: int) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    values[[9, 33, 41]] = 7.0  # 9 and 41 are of one lane
    with small(way):
        _, prob, best = scored([*values.tolist(), *[0] * tail], [50])
        assert best.tolist() == [9]
        assert_close_to_reference(prob[:50], torch.softmax(values.double(), 0), torch.softmax(values, 0))
        values[9] = NAN
        assert scored(values.tolist(), [50])[2].tolist() == [33]


@of_every_way
@pytest.mark.parametrize("before", [0, 5, 35])
def test_non_finite_scores_stay_in_their_group(way: str, before: int) -> None:
    """Also where what comes first is -inf for a whole tile, and for longer than a warp."""
    groups = [[1.0, NAN, 2.0], [NAN, NAN], [-INF, -INF], [INF, 1.0], [NAN, -INF], [-INF, 0.0], [3.0, 4.0]]
    groups = [[-INF] * before + group for group in groups]
    values = [value for group in groups for value in group] + [NAN]
    with small(way):
        score, prob, best = scored(values, [len(group) for group in groups])
    first = -1 if not before else 0
    want = [2 + before, first, 0, before, 1 if not before else 0, 1 + before, 1 + before]
    assert best.tolist() == want
    parts = prob[:-1].split([len(group) for group in groups])
    assert all(part.isnan().all() for part in parts[:5])
    assert parts[5].tolist() == [0.0] * (before + 1) + [1.0]
    torch.testing.assert_close(parts[6][-2:], torch.softmax(torch.tensor([3.0, 4.0]), 0))
    assert prob[-1] == 0
    assert score[-1].isnan()


@of_every_way
def test_a_group_of_nan_in_its_first_tile(way: str) -> None:
    with small(way):
        _, prob, best = scored([NAN] * 5 + [1.0, -INF] + [NAN] * 9, [7, 9])
    assert best.tolist() == [5, -1]
    assert prob.isnan().all()


@of_every_way
@pytest.mark.parametrize("after", [2, 40])
def test_groups_are_independent(way: str, after: int) -> None:
    """Bit by bit also between one block for all and a block a group, aligned or not."""
    dtype = torch.float32 if way.startswith("cpu") else torch.bfloat16
    given = OP.cast(make((3, 9), after, 72), dtype).arguments
    hidden = given["hidden"]
    with small(way):
        alone = candidate_head(**given | {"hidden": hidden[3:12].clone(), "cu_group": offsets([9])})
        hidden[:3], hidden[12:] = NAN, INF
        moved = torch.cat([hidden.new_zeros(1), hidden.flatten()])[1:].view(hidden.shape)
        for x in (hidden, moved):
            score, prob, best = candidate_head(**given | {"hidden": x})
            assert torch.equal(score[3:12], alone[0])
            assert torch.equal(prob[3:12], alone[1])
            assert best.tolist() == [-1, alone[2].item()]


@of_every_way
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("eps", [0.0, EPS])
def test_unused_nan_rows_give_no_gradient(way: str, normed: bool, eps: float) -> None:
    case = OP.cast(make((9,), 0, 40, normed, eps=eps), torch.float32)
    case.arguments["hidden"][3], case.arguments["hidden"][8] = NAN, INF
    leaves = {name: case.arguments[name].requires_grad_() for name in case.gradients}
    used = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    with small(way):
        score = candidate_head(**case.arguments)[0]
        grads = dict(zip(leaves, torch.autograd.grad(score[used].sum(), list(leaves.values())), strict=True))
    assert all(grad.isfinite().all() for grad in grads.values())
    assert not grads["hidden"][[3, 8]].any()
    assert grads["hidden"][used].any(1).all()


def test_prob_and_best_carry_no_gradient() -> None:
    given = single((4,), 0, 8)
    score, prob, best = candidate_head(**given | {"hidden": given["hidden"].requires_grad_()})
    assert score.requires_grad
    assert not prob.requires_grad
    assert not best.requires_grad


@pytest.mark.parametrize("way", ["reference", "triton", "cuda"])
@pytest.mark.parametrize("rows", [13, 50])
@pytest.mark.parametrize(
    "bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4], [2**40, -(2**40), 4], [0, 1, 2, 3, 4, 5, 4]]
)
def test_bad_offsets_poison(way: str, bad: list[int], rows: int) -> None:
    assert_poisoned(way, bad, rows)


@pytest.mark.parametrize("way", ["reference", "cuda"])
def test_bad_offsets_at_the_end_of_many_poison(way: str) -> None:
    """Of more than a block has threads."""
    assert_poisoned(way, [*range(8), *[7] * 900, 13, 12], 20)


def assert_poisoned(way: str, bad: list[int], rows: int) -> None:
    given = single((4,), rows - 4, 8)
    with small(way), mock.patch.object(segments, "check_offsets"):  # as on a device
        sound = candidate_head(**given)[0]
        score, prob, best = candidate_head(**given | {"cu_group": torch.tensor(bad)})
    assert torch.equal(score, sound)
    assert prob.isnan().all()
    assert best.tolist() == [-1] * (len(bad) - 1)
