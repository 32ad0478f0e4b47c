"""Scoring groups and trajectories against what transformers offers, in one process.

The truth is the repeated cache in float64. On a GPU it is in float32, with the weights of the bfloat16 model, and our
error must not exceed the repeated cache's in bfloat16 by much. K full forwards are compared with the same truth.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks import harness, peers, shapes
from benchmarks.harness import OURS, Cost, Goal, Implementation
from benchmarks.servers.live_server import LiveServer, Served
from benchmarks.shapes import CANDIDATES, ON_GPU
from fb_core import BranchGroup, CompatibilityScorer
from fb_core.models.packed import Layout, forward_through_modules, packed_forward
from fb_kernels._runtime import backend

FIRST = 1000  # an ordinary word; after a special one float32 itself is ten times less accurate
LOOP, REPEATED = "K full forwards, needed logits", "repeated cache"
SEPARATELY = "fb, one group at a time"
Group = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Models:
    model: PreTrainedModel
    wide: PreTrainedModel
    scorer: CompatibilityScorer


@pytest.fixture(scope="module")
def models(slm: PreTrainedModel) -> Models:
    return Models(slm, copy.deepcopy(slm).to(shapes.WIDE), CompatibilityScorer(slm))


def random_group(model: PreTrainedModel, p: int, h: int, seed: int | None = None) -> Group:
    """(prefix[p], candidates[K], future[h])."""
    generator = torch.Generator().manual_seed(p + h if seed is None else seed)
    vocabulary = model.config.vocab_size
    candidates = torch.randperm(vocabulary, generator=generator)[:CANDIDATES].to(model.device)
    prefix, future = torch.randint(vocabulary, (p + h,), generator=generator).to(model.device).split([p, h])
    return prefix, candidates, future


def allowed_error(plain: harness.Output, expected: harness.Output) -> float:
    return max(harness.allowed_error(plain, expected), 1e-4)


def scoring_cost(
    model: PreTrainedModel,
    prefixes: list[int],
    positions: list[int],
    h: int,
    head: bool = True,
    candidates: Sequence[int] = (),
) -> Cost:
    """Cost of one forward that scores branches of h rows after each of `positions`, for K or `candidates` candidates.

    It counts the products of all rows, attention and LM head, and reads all weights once. For `prefixes` the last layer
    computes only keys and values. Without prefixes, the keys and values of all positions are read instead.
    """
    candidates = candidates or [CANDIDATES] * len(positions)
    config = model.config
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    keys, vocabulary = 2 * width * kv_heads, int(head) * width * config.vocab_size
    layer = keys + 2 * width * heads + 3 * width * config.intermediate_size
    tokens, branches = sum(prefixes), h * sum(candidates)
    products = layers * layer * (tokens + branches) - (layer - keys) * tokens + vocabulary * branches
    pairs = (layers - 1) * sum(n * (n + 1) // 2 for n in prefixes)
    pairs += layers * sum(k * (h * n + h * (h + 1) // 2) for k, n in zip(candidates, positions, strict=True))
    held = 0 if prefixes else 2 * layers * kv_heads * sum(positions)
    return Cost(
        2.0 * products + 4.0 * heads * pairs, float(model.dtype.itemsize * (layers * layer + vocabulary + held))
    )


@pytest.mark.parametrize(("p", "h"), shapes.SCORED)
def test_group(compare: Callable, models: Models, p: int, h: int) -> None:
    group = random_group(models.model, p, h)
    expected = peers.repeated_cache(models.wide, *group)
    runs = {
        OURS: partial(models.scorer.score, *group),
        "K full forwards, all logits": partial(peers.full_forwards, models.model, *group, keep_all=True),
        LOOP: partial(peers.full_forwards, models.model, *group),
        "one padded batch, needed logits": partial(peers.padded_batch, models.model, *group),
        REPEATED: partial(peers.repeated_cache, models.model, *group),
    }
    compare(
        "score_group",
        f"K={CANDIDATES} H={h} P={p}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=10 if ON_GPU else 5 if p == 512 else 3,
        tolerance=allowed_error((runs[REPEATED](), runs[LOOP]()), (expected, expected)),
        dtype=models.model.dtype,
        cost=scoring_cost(models.model, [p], [p], h),
        goals=[] if ON_GPU else [Goal("K full forwards, all logits", 5.0), Goal(LOOP, 3.5), Goal(REPEATED, 1.0)],
    )


@pytest.mark.skipif(ON_GPU, reason="a model for CPUs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_of_a_llama(compare: Callable, dtype: torch.dtype) -> None:
    """A group with a model that people run on CPUs, its weights in either dtype."""
    p, h = 256, 32
    single = shapes.random_model(LlamaConfig(**shapes.LLAMA), 0)
    model = copy.deepcopy(single).to(dtype)
    group = random_group(model, p, h)
    expected = peers.repeated_cache(copy.deepcopy(model).to(shapes.WIDE), *group)
    runs = {
        OURS: partial(CompatibilityScorer(model).score, *group),
        LOOP: partial(peers.full_forwards, model, *group),
        REPEATED: partial(peers.repeated_cache, model, *group),
    }
    implementations = {name: Implementation(run, expected) for name, run in runs.items()}
    goals = [Goal(LOOP, 4.6), Goal(REPEATED, 1.6)]
    if dtype != torch.float32:
        in_single = partial(CompatibilityScorer(single).score, *group)
        truth = peers.repeated_cache(copy.deepcopy(single).to(shapes.WIDE), *group)
        implementations["fb, float32"] = Implementation(in_single, truth, tolerance=1e-4)
        goals.append(Goal("fb, float32", 1.6))
    compare(
        "score_group",
        f"SmolLM2-135M's shapes in {str(dtype).removeprefix('torch.')}, K={CANDIDATES} H={h} P={p}",
        implementations,
        rounds=5,
        tolerance=allowed_error((runs[REPEATED](), runs[LOOP]()), (expected, expected)),
        dtype=dtype,
        goals=goals,
    )


@pytest.mark.skipif(ON_GPU, reason="models for CPUs")
@pytest.mark.parametrize("family", shapes.STATEFUL)
def test_layers_with_a_state(compare: Callable, family: str) -> None:
    """A group with a model whose layers keep a state, of which every branch goes on from a copy."""
    model = shapes.random_model(AutoConfig.for_model(family, **shapes.OTHERS | shapes.STATEFUL[family]), 0)
    p, h = shapes.STATES
    prefix, candidates, future = random_group(model, p, h)
    group = (prefix, candidates[:8], future)
    expected = peers.full_forwards(copy.deepcopy(model).to(shapes.WIDE), *group)
    runs = {
        OURS: partial(CompatibilityScorer(model).score, *group),
        LOOP: partial(peers.full_forwards, model, *group),
        "one padded batch, needed logits": partial(peers.padded_batch, model, *group),
    }
    compare(
        "score_group",
        f"{family}, K=8 H={h} P={p}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=3,
        tolerance=allowed_error(runs[LOOP](), expected),
        dtype=model.dtype,
        goals=[Goal(LOOP, 2.5)],
    )


@pytest.mark.parametrize(("count", "p", "h"), shapes.PACKED)
def test_groups(compare: Callable, models: Models, count: int, p: int, h: int) -> None:
    """One group from each of several trajectories, in one forward."""
    groups = [random_group(models.model, p, h, seed) for seed in range(count)]
    trajectories = [(prefix, [BranchGroup(p, *rest)]) for prefix, *rest in groups]

    def ours() -> Tensor:
        return torch.stack([scores for (scores,) in models.scorer.score_trajectories(trajectories)])

    batch = [torch.stack(parts) for parts in zip(*groups, strict=True)]
    compare_packed(
        compare,
        models,
        "score_group",
        f"G={count} K={CANDIDATES} H={h} P={p}",
        groups,
        {OURS: ours, "repeated caches, one batch": partial(peers.repeated_caches, models.model, *batch)},
        scoring_cost(models.model, [p] * count, [p] * count, h),
        [Goal("repeated caches, one batch", 2.0)] if ON_GPU else [],
    )


@pytest.mark.skipif(shapes.ON_GPU, reason="peers on CPUs")
@pytest.mark.parametrize(("count", "p", "h"), shapes.SERVED_GROUPS)
def test_groups_beside_servers(compare: Callable, served: Served, pretrained: Path, count: int, p: int, h: int) -> None:
    """Groups of a pretrained model in this process, and over HTTP, each with another first token in every call."""
    model, (running, missing) = AutoModelForCausalLM.from_pretrained(pretrained).eval(), served
    drawn = [random_group(model, p, h, seed) for seed in range(count)]
    scorer = CompatibilityScorer(model)

    def ours(groups: list[Group]) -> Iterable[Tensor]:
        matrices = scorer.score_trajectories([(prefix, [BranchGroup(p, *rest)]) for prefix, *rest in groups])
        return [matrix for (matrix,) in matrices]

    def asked_of(ask: Callable[..., Tensor], live: LiveServer) -> Callable[[list[Group]], Iterable[Tensor]]:
        return lambda groups: threads.map(lambda group: ask(live, *group), groups)

    ways: dict[str, Callable[[list[Group]], Iterable[Tensor]]] = {
        OURS: ours,
        f"{REPEATED}, one group at a time": lambda groups: [peers.repeated_cache(model, *group) for group in groups],
    }
    asks = {shapes.OUR_SERVER: continuations, shapes.VLLM: prompt_logprobs}
    ways |= {name: asked_of(ask, running[name]) for name, ask in asks.items() if name in running}

    def run(way: Callable[[list[Group]], Iterable[Tensor]]) -> Callable[[], Tensor]:
        numbers = itertools.count(FIRST)

        def fresh() -> Tensor:
            first = torch.tensor([next(numbers) % model.config.vocab_size])
            return torch.stack([*way([(torch.cat([first, ids[1:]]), pool, future) for ids, pool, future in drawn])])

        return fresh

    with ThreadPoolExecutor(count) as threads:
        wide = copy.deepcopy(model).to(shapes.WIDE)
        prefix, *rest = drawn[0]
        first = torch.cat([prefix.new_full((1,), FIRST % model.config.vocab_size), prefix[1:]])
        expected, plain = (peers.repeated_cache(each, first, *rest) for each in (wide, model))
        compare(
            "score_group",
            f"SmolLM2-135M{shapes.IN[model.dtype]}, G={count} K={CANDIDATES} H={h} P={p}",
            {name: Implementation(run(way), expected[None]) for name, way in ways.items()},
            rounds=3,
            tolerance=max(allowed_error(plain, expected), 1e-3),
            dtype=model.dtype,
            skipped=missing | {shapes.LLAMA_CPP: "it gives no log-probs of a prompt's tokens"},
            goals=[Goal(shapes.VLLM, 1)],
            rest=shapes.REST * (shapes.VLLM in running),
        )


def continuations(live: LiveServer, prefix: Tensor, candidates: Tensor, future: Tensor) -> Tensor:
    """[K, H] by our server."""
    asked = {"prefix": prefix.tolist(), "candidates": candidates.tolist(), "future": future.tolist()}
    return torch.tensor([each["logprobs"] for each in live.post("/v1/continuations", asked)["data"]])


def prompt_logprobs(live: LiveServer, prefix: Tensor, candidates: Tensor, future: Tensor) -> Tensor:
    """[K, H] by vLLM."""
    prompts = [[*prefix.tolist(), candidate, *future.tolist()] for candidate in candidates.tolist()]
    asked = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    choices = sorted(live.post("/v1/completions", asked)["choices"], key=lambda choice: choice["index"])
    tokens = future.tolist()
    last = [zip(tokens, choice["prompt_logprobs"][-len(tokens) :], strict=True) for choice in choices]
    return torch.tensor([[of[str(token)]["logprob"] for token, of in each] for each in last])


@pytest.mark.parametrize(("count", "t", "h"), shapes.TRAJECTORIES)
def test_trajectory(compare: Callable, models: Models, count: int, t: int, h: int) -> None:
    """All states of one trajectory, in one forward."""
    tokens, _, _ = random_group(models.model, t, h)
    positions = torch.linspace(t // 2, t, count).long().tolist()
    groups = [BranchGroup(position, *random_group(models.model, position, h)[1:]) for position in positions]

    def ours() -> Tensor:
        return torch.stack(models.scorer.score_trajectory(tokens, groups))

    compare_packed(
        compare,
        models,
        "score_trajectory",
        f"T={t} G={count} K={CANDIDATES} H={h}",
        [(tokens[: group.position], group.candidates, group.future) for group in groups],
        {OURS: ours},
        scoring_cost(models.model, [t], positions, h),
        [] if ON_GPU else [Goal(SEPARATELY, 1.2)],
    )


def sample(model: PreTrainedModel) -> list[tuple[Tensor, list[BranchGroup]]]:
    """Random trajectories that span the lengths and pools of a published run; their true distribution is not known.

    Log-lengths are uniform, and states are evenly spaced over the second half of a trajectory.
    """
    count, states, (shortest, longest), h = shapes.SAMPLE
    generator = torch.Generator().manual_seed(0)
    made = []
    for draw in torch.rand(count, generator=generator).tolist():
        length = round(math.exp(math.log(shortest) + draw * math.log(longest / shortest)))
        ids = torch.randint(model.config.vocab_size, (length,), generator=generator).to(model.device)
        groups = []
        for position in torch.linspace(length // 2, length, states).long().tolist():
            k = int(torch.randint(shapes.POOLS[0], shapes.POOLS[1] + 1, (1,), generator=generator))
            candidates = torch.randperm(model.config.vocab_size, generator=generator)[:k].to(model.device)
            future = torch.randint(model.config.vocab_size, (h,), generator=generator).to(model.device)
            groups.append(BranchGroup(position, candidates, future))
        made.append((ids, groups))
    return made


def test_sample(compare: Callable, models: Models) -> None:
    """Time per group over trajectories of all lengths, as in a run's scoring."""
    given = sample(models.model)
    groups = [(ids[: group.position], group.candidates, group.future) for ids, states in given for group in states]

    def flat(matrices: Iterable[Tensor]) -> Tensor:
        return torch.cat([matrix.flatten() for matrix in matrices])

    def one_at_a_time(model: PreTrainedModel, groups: list[Group]) -> Tensor:
        return flat(peers.repeated_cache(model, *group) for group in groups)

    few = groups[: shapes.SAMPLE[1]]
    expected, plain = (one_at_a_time(model, few) for model in (models.wide, models.model))
    compare(
        "score_trajectory",
        f"sample of {len(groups)} groups of {len(given)} trajectories, P<={shapes.SAMPLE[2][1]} "
        f"K={shapes.POOLS[0]} to {shapes.POOLS[1]} H={shapes.SAMPLE[3]}, time of a group",
        {
            OURS: Implementation(
                lambda: flat(matrix for matrices in models.scorer.score_trajectories(given) for matrix in matrices),
                expected,
            ),
            f"{REPEATED}, one group at a time": Implementation(lambda: one_at_a_time(models.model, groups), expected),
        },
        rounds=3,
        tolerance=allowed_error(plain, expected),
        dtype=models.model.dtype,
        cost=scoring_cost(
            models.model,
            [len(ids) for ids, _ in given],
            [len(prefix) for prefix, _, _ in groups],
            shapes.SAMPLE[3],
            candidates=[len(candidates) for _, candidates, _ in groups],
        ),
        per=len(groups),
    )


def compare_packed(
    compare: Callable,
    models: Models,
    op: str,
    shape: str,
    groups: list[Group],
    packed: dict[str, Callable[[], Tensor]],
    cost: Cost,
    goals: list[Goal],
) -> None:
    """All groups in one forward against one group after the other."""
    repeated = f"{REPEATED}, one group at a time"

    def in_turn(score: Callable[..., Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.stack([score(*group) for group in groups])

    runs = packed | {
        SEPARATELY: in_turn(models.scorer.score),
        repeated: in_turn(partial(peers.repeated_cache, models.model)),
    }
    if ON_GPU:
        runs[LOOP] = in_turn(partial(peers.full_forwards, models.model))
        goals = [*goals, Goal(repeated, 2.0), Goal(LOOP, 10.0)]
    expected = in_turn(partial(peers.repeated_cache, models.wide))()
    compare(
        op,
        shape,
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=5,
        tolerance=allowed_error(runs[repeated](), expected),
        dtype=models.model.dtype,
        cost=cost,
        goals=goals,
    )


@pytest.mark.parametrize("p", shapes.CACHED)
def test_one_token_branches(compare: Callable, models: Models, p: int) -> None:
    group = random_group(models.model, p, 1)
    cache = peers.prefill(models.model, group[0])
    expected = peers.repeated_cache(models.wide, *group)
    runs = {
        OURS: partial(models.scorer.score, *group, cache=cache),
        REPEATED: partial(peers.repeated_cache, models.model, *group, cache),
        "expanded cache": partial(peers.expanded_cache, models.model, *group, cache),
    }
    plain = (runs[REPEATED](), runs["expanded cache"](), peers.full_forwards(models.model, *group))  # 13 values each
    compare(
        "score_group",
        f"K={CANDIDATES} H=1 P={p} (cached)",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=30,
        tolerance=allowed_error(plain, (expected,) * len(plain)),
        dtype=models.model.dtype,
        cost=scoring_cost(models.model, [], [p], 1),
        goals=[Goal(REPEATED, 3.0)],
    )


@torch.no_grad()
def test_decoder(compare: Callable, models: Models) -> None:
    """The forward pass of a trajectory with its branches: the native decoder against the model's own modules."""
    count, t, h = shapes.TRAJECTORIES[-1]
    positions = torch.linspace(t // 2, t, count).long().tolist()
    inputs = packed_rows(models.model, t, h, positions)
    scored = torch.arange(t, len(inputs[0]), device=models.model.device)

    def through_modules(model: PreTrainedModel) -> Tensor:
        return forward_through_modules(model, *inputs)[scored]

    with backend.override("reference"):  # in both ways the attention is ours
        expected = through_modules(models.wide)
    runs = {
        OURS: partial(packed_forward, models.model, *inputs, scored),
        "HF modules": partial(through_modules, models.model),
    }
    compare(
        "packed_forward",
        f"T={t} G={len(positions)} K={CANDIDATES} H={h}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=9,
        tolerance=allowed_error(runs["HF modules"](), expected),
        dtype=models.model.dtype,
        cost=scoring_cost(models.model, [t], positions, h, head=False),
        goals=[Goal("HF modules", 1.15)],
    )


def packed_rows(model: PreTrainedModel, t: int, h: int, positions: list[int]) -> tuple[Tensor, Tensor, Layout]:
    """(ids, positions, layout) of a trajectory of t tokens with K branches of h tokens after each of its states."""
    device = model.device
    groups = [([t], 0, 0), *(([h] * CANDIDATES, 0, position) for position in positions)]
    parts = [torch.arange(t), *(torch.arange(position, position + h).repeat(CANDIDATES) for position in positions)]
    row_positions = torch.cat(parts).to(device)
    generator = torch.Generator().manual_seed(t)
    ids = torch.randint(model.config.vocab_size, row_positions.shape, generator=generator).to(device)
    return ids, row_positions, Layout.build(groups, device)
