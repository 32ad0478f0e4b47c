"""Whole problems with each method, as in the paper: the large model of a GPU takes most of its memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from benchmarks import peers, shapes
from benchmarks.bench_decode import NEVER, PROMPT, Ours, decoder, settled, tokens
from benchmarks.gpu import gpu_status
from benchmarks.harness import OURS, Implementation
from fb_core import (
    CollaborativeDecoder,
    FutureBridgeSelector,
    Generation,
    LLMPreference,
    RequestPolicy,
    Selector,
    SLMPreference,
    TokenReranker,
)
from fb_core.decode.decoder import LowLatencyDecoder
from fb_core.decode.selectors import ScoringSelector, State
from fb_core.events import Pool, PoolKind
from fb_kernels._runtime.timing import Timing

CHECKED = 64 if shapes.ON_GPU else 1200  # maximum tokens of a problem that are compared


class NaivePEFT(ScoringSelector):
    """The reranker as plain PEFT runs it: the whole prefix again for every candidate, no cache."""

    def __init__(self, reranker: TokenReranker) -> None:
        self.reranker = reranker

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        head = self.reranker.head.detach()
        return [
            peers.rerank_full_forwards(self.reranker.adapted, head, state.tokens, pool.ids).float()
            for state, pool in zip(states, pools, strict=True)
        ]


def calibrated(slm: PreTrainedModel, ids: Tensor, new: int) -> RequestPolicy:
    """The policy that would ask EVENTS times in a greedy generation."""
    ours = Ours(decoder(slm).loop, ids)
    ours.again()
    entropies = [ours.next() for _ in range(new)]
    return RequestPolicy.calibrate(entropies, 1 - shapes.EVENTS / new)


@pytest.mark.parametrize("new", shapes.PROBLEMS)
def test_end_to_end(compare: Callable, new: int) -> None:
    """Calls, pools and latency per problem for each method; SLM and LLM on one device."""
    slm = shapes.random_model(Qwen3Config(**shapes.SLM), 0)
    wide = copy.deepcopy(slm).to("cpu", shapes.WIDE)  # beside the LLM the GPU's memory has no room for it
    reranker, ids = peers.as_trained(slm), tokens(slm, PROMPT)
    policy = calibrated(slm, ids, new)
    llm = shapes.random_model(Qwen3Config(**shapes.LLM), 2)
    methods: dict[str, tuple[Selector, RequestPolicy, PoolKind]] = {
        OURS: (FutureBridgeSelector(reranker), policy, "joint"),
        "greedy": (SLMPreference(), NEVER, "joint"),
        "S2T": (LLMPreference(), policy, "slm"),
        "FutureBridge, naive PEFT": (NaivePEFT(reranker), policy, "joint"),
    }
    decoders = {
        name: LowLatencyDecoder(slm, llm, selector, asked, pool=pool)
        for name, (selector, asked, pool) in methods.items()
    }
    last: dict[str, Generation] = {}

    def run(name: str) -> Tensor:
        last[name] = decoders[name].generate(ids, new)
        return last[name].token_ids

    expected = {}
    for name, (selector, asked, pool) in methods.items():
        plain = CollaborativeDecoder(slm, llm, selector, asked, pool=pool).generate(ids, min(CHECKED, new))
        events = [event.step for event in plain.events] if shapes.ON_GPU else []  # bfloat16 scores may nearly tie too
        expected[name] = plain.token_ids[: min([settled(slm, wide, ids, plain.token_ids), *events])]

    def counted(name: str) -> dict[str, float]:
        """Counts from the method's last run; every event appends one token, chosen from its pool."""
        events, kept = last[name].events, torch.cuda.memory_allocated() if shapes.ON_GPU else 0
        pool = sum(len(event.pool) for event in events) / max(1, len(events))
        return {"calls": len(events), "mean pool": pool, "appended": len(events), "resident bytes": kept}

    results = compare(
        "end_to_end",
        f"{PROMPT} + {new} tokens, SLM {slm.num_parameters() / 1e6:,.0f}M, LLM {llm.num_parameters() / 1e6:,.0f}M",
        {name: Implementation(partial(run, name), expected[name]) for name in methods},
        rounds=3,
        tolerance=0.0,
        timing=Timing.EAGER,
        dtype=shapes.DTYPE,
        details=counted,
        notes=[
            f"tokens compared, up to the first near tie or event: {', '.join(f'{len(x)}' for x in expected.values())}"
        ],
    )
    print(*gpu_status.cost_table([asdict(row) for row in results]), sep="\n")
