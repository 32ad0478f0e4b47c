"""Scoring groups and trajectories against what transformers offers; log-probs are checked against float64.

The truth is the repeated cache in float64: the K full forwards, held against it, show that it is theirs too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import peers
from benchmarks.harness import OURS, Goal, Implementation
from fb_core import BranchGroup, CompatibilityScorer

CANDIDATES = 13


@dataclass(frozen=True)
class Models:
    model: PreTrainedModel
    double: PreTrainedModel
    scorer: CompatibilityScorer


@pytest.fixture(scope="module")
def models(slm: PreTrainedModel) -> Models:
    return Models(slm, copy.deepcopy(slm).double(), CompatibilityScorer(slm))


def random_group(model: PreTrainedModel, p: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    """(prefix[p], candidates[K], future[h])."""
    generator = torch.Generator().manual_seed(p + h)
    vocabulary = model.config.vocab_size
    candidates = torch.randperm(vocabulary, generator=generator)[:CANDIDATES]
    prefix, future = torch.randint(vocabulary, (p + h,), generator=generator).split([p, h])
    return prefix, candidates, future


@pytest.mark.parametrize(("p", "h"), [(512, 64), (1024, 128)])
def test_group(compare: Callable, models: Models, p: int, h: int) -> None:
    group = random_group(models.model, p, h)
    expected = peers.repeated_cache(models.double, *group)
    runs = {
        OURS: partial(models.scorer.score, *group),
        "K full forwards, all logits": partial(peers.full_forwards, models.model, *group, keep_all=True),
        "K full forwards, needed logits": partial(peers.full_forwards, models.model, *group),
        "one padded batch, needed logits": partial(peers.padded_batch, models.model, *group),
        "repeated cache": partial(peers.repeated_cache, models.model, *group),
    }
    compare(
        "score_group",
        f"K={CANDIDATES} H={h} P={p}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=5 if p == 512 else 3,
        goals=[
            Goal("K full forwards, all logits", 5.0),
            Goal("K full forwards, needed logits", 3.5),
            Goal("repeated cache", 1.0),
        ],
    )


@pytest.mark.parametrize("p", [512, 1024])
def test_one_token_branches(compare: Callable, models: Models, p: int) -> None:
    group = random_group(models.model, p, 1)
    cache = peers.prefill(models.model, group[0])
    expected = peers.repeated_cache(models.double, *group)
    runs = {
        OURS: partial(models.scorer.score, *group, cache=cache),
        "repeated cache": partial(peers.repeated_cache, models.model, *group, cache),
        "expanded cache": partial(peers.expanded_cache, models.model, *group, cache),
    }
    compare(
        "score_group",
        f"K={CANDIDATES} H=1 P={p} (cached)",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=30,
        goals=[Goal("repeated cache", 3.0)],
    )


def test_trajectory(compare: Callable, models: Models) -> None:
    t, h = 1024, 64
    tokens, _, _ = random_group(models.model, t, h)
    positions = torch.linspace(t // 2, t, 4).long().tolist()
    groups = [BranchGroup(position, *random_group(models.model, position, h)[1:]) for position in positions]
    expected = torch.stack(
        [
            peers.repeated_cache(models.double, tokens[: group.position], group.candidates, group.future)
            for group in groups
        ]
    )

    def ours() -> Tensor:
        return torch.stack(models.scorer.score_trajectory(tokens, groups))

    def separately() -> Tensor:
        score = models.scorer.score
        return torch.stack([score(tokens[: group.position], group.candidates, group.future) for group in groups])

    def repeated() -> Tensor:
        score = partial(peers.repeated_cache, models.model)
        return torch.stack([score(tokens[: group.position], group.candidates, group.future) for group in groups])

    runs = {OURS: ours, "fb, one group at a time": separately, "repeated cache, one group at a time": repeated}
    compare(
        "score_trajectory",
        f"T={t} G={len(groups)} K={CANDIDATES} H={h}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=5,
        goals=[Goal("fb, one group at a time", 1.2)],
    )
