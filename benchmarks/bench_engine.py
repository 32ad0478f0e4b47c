"""Many problems at once: the demo pair with its events, against one problem at a time and the batched plain loop.

Then a pretrained model without events, in this process and behind three servers, each asked by the same client. In
every call the prompts begin with another number, so that no server has kept their keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

from benchmarks import peers, shapes
from benchmarks.harness import OURS, Goal, Implementation
from benchmarks.servers.live_server import Served
from fb_core import (
    CollaborativeDecoder,
    FutureBridgeSelector,
    Generation,
    LLMPreference,
    LowLatencyDecoder,
    RequestPolicy,
    ServerLLM,
)
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline.models import decoder_of, greedy_decoder
from fb_core.events import Event
from fb_kernels._runtime.timing import Timing

PROBLEMS, ROWS = 128, 64
NEW = 64
THRESHOLD = 1.7  # nats: about two events per problem
SERVED_NEW = 48
SHOWN = """Ben has 3 boxes with 4 pens each. How many pens does Ben have?
3 boxes with 4 pens each are 3 * 4 = 12 pens. The answer is 12.

Ana has 17 cards and gives 5 of them to Tom. How many cards does Ana have left?
Ana keeps 17 - 5 = 12 cards. The answer is 12.

"""
HF, HF_ROWS = "HF generate, batches of 16", 16
NEAR = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # logits that rounding may swap
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
        return decoder_of(pair.slm, pair.llm, selector, RequestPolicy(THRESHOLD), **options)

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


@pytest.mark.parametrize("rows", shapes.PROMPTS)
def test_a_mixture_of_experts(compare: Callable, rows: int) -> None:
    """Greedy tokens of a Qwen3-MoE, whose rows are sorted by expert, against its own modules."""
    model, (length, new) = shapes.random_model(Qwen3MoeConfig(**shapes.OTHERS | shapes.MIXTURE), 0), shapes.ASKED
    prompts = torch.randint(300, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    ours, plain = greedy_decoder(model, max_length=length + new, max_batch=rows), greedy_decoder(model)
    runs: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: facts(ours.generate_many(prompts, new)),
        IN_STEP: lambda: facts(plain.generate_many(prompts, new)),
        PLAIN: lambda: facts([plain.generate(ids, new) for ids in prompts]),
    }
    expected = runs[IN_STEP]()
    compare(
        "experts",
        f"Qwen3-MoE, {rows} prompts of {length} tokens at once, {new} new, time of a token",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=3,
        tolerance=0.0,
        timing=Timing.EAGER,
        dtype=model.dtype,
        per=rows * new,
    )


Prompts = list[list[int]]


def few_shot(tokenizer: Any, rows: int) -> Iterator[Prompts]:
    """Prompts that share their examples, for one call after another."""
    asked = [f"Mia has {n + 20} coins and finds {n % 7 + 2}. How many coins does Mia have now?\n" for n in range(rows)]
    for number in count():
        yield [tokenizer(f"{number}.\n\n{SHOWN}{question}")["input_ids"] for question in asked]


def long_prompt(tokenizer: Any, length: int) -> Iterator[Prompts]:
    """One prompt of so many tokens, which no server has seen, for one call after another."""
    for number in count():
        yield [tokenizer(f"{length}, {number}.\n\n{SHOWN * (1 + length // 64)}")["input_ids"][:length]]


@torch.no_grad()
def generated(model: PreTrainedModel, prompts: Prompts, new: int) -> tuple[Tensor, Tensor]:
    """[sequences, new] greedy tokens of `generate`, and how far each one's logit is above the next."""
    tokens, gaps = [], []
    for start in range(0, len(prompts), HF_ROWS):
        rows = prompts[start : start + HF_ROWS]
        width = max(map(len, rows))
        padding = torch.tensor([width - len(row) for row in rows])
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        out = model.generate(
            ids,
            attention_mask=(torch.arange(width) >= padding[:, None]).long(),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens.append(out.sequences[:, width:])
        top = torch.stack([logits.topk(2).values for logits in out.logits], 1)
        gaps.append(top[..., 0] - top[..., 1])
    return torch.cat(tokens), torch.cat(gaps)


def compare_served(
    compare: Callable,
    served: Served,
    folder: Path,
    op: str,
    shape: str,
    asked: Callable[[Any], Iterator[Prompts]],
    new: int,
    rounds: int,
) -> None:
    """Tokens up to each sequence's first near tie, then the time of a token."""
    model, (running, missing) = AutoModelForCausalLM.from_pretrained(folder).eval(), served
    end, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = next(asked(tokenizer))
    tokens, gaps = generated(model, prompts, new)
    assert end not in tokens.flatten().tolist()
    (settled,) = (gaps > NEAR[model.dtype]).cummin(1).values.flatten().nonzero(as_tuple=True)
    decoder = LowLatencyDecoder(
        model,
        None,
        None,
        RequestPolicy(math.inf),
        max_events=0,
        max_length=shapes.SERVED_TOKENS,
        max_batch=len(prompts),
    )
    ways: dict[str, Callable[[Prompts], Sequence[Tensor]]] = {
        OURS: lambda these: [one.token_ids for one in decoder.generate_many(these, new)],
        HF: lambda these: [*generated(model, these, new)[0]],
    }
    about: dict[str, Any] = {"vocabulary": model.config.vocab_size, "in_flight": len(prompts), "timeout": 3600}
    for name, live in running.items():
        client = ServerLLM(live.url, "llama.cpp" if name == shapes.LLAMA_CPP else "vllm", **about)
        ways[name] = partial(client.complete_many, max_new_tokens=new)

    def run(way: Callable[[Prompts], Sequence[Tensor]]) -> Callable[[], Tensor]:
        each = asked(tokenizer)
        return lambda: torch.cat([*way(next(each))])

    compare(
        op,
        f"SmolLM2-135M{shapes.IN[model.dtype]}, {shape}",
        {name: Implementation(run(way), tokens.flatten()[settled], settled) for name, way in ways.items()},
        rounds=rounds,
        tolerance=0.0,
        timing=Timing.EAGER,
        dtype=model.dtype,
        skipped=missing,
        goals=[Goal(name, 1) for name in (HF, shapes.LLAMA_CPP, shapes.VLLM)],
        per=len(prompts) * new,
        rest=shapes.REST * (shapes.VLLM in running),
        notes=[f"tokens compared, up to each sequence's first near tie: {len(settled)} of {tokens.numel()}"],
    )


@pytest.mark.skipif(shapes.ON_GPU, reason="peers on CPUs")
@pytest.mark.parametrize("rows", shapes.SEQUENCES)
def test_sequences_beside_servers(compare: Callable, served: Served, pretrained: Path, rows: int) -> None:
    shape = f"{rows} few-shot prompts + {SERVED_NEW} tokens each, time of a token"
    asked = partial(few_shot, rows=rows)
    compare_served(compare, served, pretrained, "generate_many", shape, asked, SERVED_NEW, rounds=3)


@pytest.mark.skipif(shapes.ON_GPU, reason="peers on CPUs")
@pytest.mark.parametrize("length", shapes.FIRST)
def test_first_token_beside_servers(compare: Callable, served: Served, pretrained: Path, length: int) -> None:
    asked = partial(long_prompt, length=length)
    compare_served(compare, served, pretrained, "first_token", f"a prompt of {length} tokens", asked, 1, rounds=5)
