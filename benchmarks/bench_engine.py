"""Many problems at once: the demo pair with its events, against one problem at a time and the batched plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import OURS, Goal, Implementation
from fb_core import CollaborativeDecoder, FutureBridgeSelector, Generation, LLMPreference, RequestPolicy
from fb_core.demo.pairs import load_pair
from fb_core.pool import Event
from fb_kernels.timing import Timing

PROBLEMS, ROWS = 128, 64
NEW = 64
THRESHOLD = 1.7  # nats: about two events per problem
ALONE, PLAIN, IN_STEP = "one at a time", "one at a time, plain loop", "plain loop in step"


def facts(generations: Sequence[Generation]) -> Tensor:
    """Tokens and events of all problems, concatenated."""
    events: list[list[Event]] = [generation.events for generation in generations]
    numbers = [
        [*generation.token_ids.tolist(), *(event.step for event in own)]
        for generation, own in zip(generations, events, strict=True)
    ]
    return torch.tensor([number for own in numbers for number in [*own, -1]])


@pytest.mark.parametrize("name", ["reranker", "large model's choice"])
def test_problems_at_once(compare: Callable, name: str) -> None:
    pair = load_pair("plans")
    prompts = [problem.prompt_ids for problem in pair.world.problems(PROBLEMS, seed=0, role="test")]
    longest = max(map(len, prompts)) + NEW
    selector = FutureBridgeSelector(peers.as_trained(pair.slm)) if name == "reranker" else LLMPreference()

    def decoder(**options: Any) -> CollaborativeDecoder:
        return CollaborativeDecoder(pair.slm, pair.llm, selector, RequestPolicy(THRESHOLD), **options)

    def one_by_one(decoder: CollaborativeDecoder) -> Callable[[], Tensor]:
        return lambda: facts([decoder.generate(ids, NEW) for ids in prompts])

    def together(decoder: CollaborativeDecoder) -> Callable[[], Tensor]:
        return lambda: facts(decoder.generate_many(prompts, NEW))

    runs = {
        OURS: together(decoder(max_length=longest, max_batch=ROWS)),
        ALONE: one_by_one(decoder(max_length=longest)),
        PLAIN: one_by_one(decoder()),
        IN_STEP: together(decoder()),
    }
    generations = decoder().generate_many(prompts, NEW)
    expected = facts(generations)
    compare(
        "problems_at_once",
        f"{PROBLEMS} of the demo pair, {name}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=5,
        tolerance=0.0,
        timing=Timing.EAGER,
        dtype=torch.float32,
        goals=[Goal(ALONE, 4), Goal(IN_STEP, 1.5)],
        per=PROBLEMS,
        notes=[f"{sum(len(generation.events) for generation in generations) / PROBLEMS:.1f} events a problem"],
    )
