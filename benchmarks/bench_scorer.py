"""Scoring groups and trajectories against what transformers offers; log-probs are checked against float64.

The truth is the repeated cache in float64: the K full forwards, held against it, show that it is theirs too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import peers
from benchmarks.harness import OURS, Goal, Implementation
from fb_core import BranchGroup, CompatibilityScorer, hf
from fb_kernels.testing import count_launches

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


@torch.no_grad()
def test_decoder(compare: Callable, models: Models) -> None:
    """The forward of such a trajectory: the native decoder against the model's own modules."""
    t, h = 1024, 64
    positions = torch.linspace(t // 2, t, 4).long().tolist()
    inputs = packed_rows(models.model, t, h, positions)
    scored = torch.arange(t, len(inputs[0]), device=models.model.device)

    def through_modules(model: PreTrainedModel) -> Tensor:
        return hf.forward_through_modules(model, *inputs)[scored]

    expected = through_modules(models.double)
    runs = {
        OURS: partial(hf.packed_forward, models.model, *inputs, scored),
        "HF modules": partial(through_modules, models.model),
    }
    ours, theirs = layer_cost(hf.packed_forward), layer_cost(hf.forward_through_modules)
    compare(
        "packed_forward",
        f"T={t} G={len(positions)} K={CANDIDATES} H={h}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=9,
        goals=[Goal("HF modules", 1.15)],
        notes=[
            "a layer of Qwen3-1.7B in bfloat16, counted: "
            f"{ours[0]} operations and {ours[1] / 1e3:.0f} KB a token besides the products, "
            f"HF modules {theirs[0]} and {theirs[1] / 1e3:.0f} KB"
        ],
    )


def packed_rows(model: PreTrainedModel, t: int, h: int, positions: list[int]) -> tuple[Tensor, Tensor, hf.Layout]:
    """(ids, positions, layout) of a trajectory of t tokens and K branches of h behind each of its states."""
    device = model.device
    groups = [([t], 0, 0), *(([h] * CANDIDATES, 0, position) for position in positions)]
    places = [torch.arange(t), *(torch.arange(position, position + h).repeat(CANDIDATES) for position in positions)]
    place = torch.cat(places).to(device)
    generator = torch.Generator().manual_seed(t)
    ids = torch.randint(model.config.vocab_size, place.shape, generator=generator).to(device)
    return ids, place, hf.Layout.build(groups, device)


@torch.no_grad()
def layer_cost(forward: Callable[..., Tensor]) -> tuple[int, float]:
    """(operations, bytes a token besides the products) of a layer of Qwen3-1.7B: what a second one adds."""
    counted = []
    for layers in (1, 2):
        config = Qwen3Config(
            hidden_size=2048,
            num_hidden_layers=layers,
            intermediate_size=6144,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=1024,
        )
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
        inputs = packed_rows(model, 64, 8, [64])
        forward(model, *inputs)
        with count_launches() as launches:
            forward(model, *inputs)
        with Traffic() as traffic:
            forward(model, *inputs)
        counted.append((launches.total, traffic.bytes / len(inputs[0])))
    (first, first_bytes), (second, second_bytes) = counted
    return second - first, second_bytes - first_bytes


class Traffic(TorchDispatchMode):
    """Counts what every operation but a product reads and writes; an fb:: op is one operation."""

    PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "fb":
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if not func.is_view and func._schema.name not in self.PRODUCTS:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            distinct = {(tensor.data_ptr(), tensor.shape): tensor.nbytes for tensor in tensors}
            self.bytes += sum(distinct.values())
        return out
