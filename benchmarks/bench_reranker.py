"""A rerank event: the scores of one state's candidates, over the small model's own cache and without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import harness, peers, shapes
from benchmarks.harness import OURS, Implementation
from benchmarks.shapes import CANDIDATES
from fb_core import TokenReranker


@pytest.fixture(scope="module")
def reranker(slm: PreTrainedModel) -> TokenReranker:
    return peers.as_trained(slm)


@pytest.mark.parametrize("p", shapes.CACHED)
def test_rerank_event(compare: Callable, slm: PreTrainedModel, reranker: TokenReranker, p: int) -> None:
    generator = torch.Generator().manual_seed(p)
    prefix = torch.randint(slm.config.vocab_size, (p,), generator=generator).to(slm.device)
    candidates = torch.randperm(slm.config.vocab_size, generator=generator)[:CANDIDATES].to(slm.device)
    cache = peers.prefill(slm, prefix)
    head = reranker.head.detach()
    state = (reranker.adapted, head, prefix, candidates)
    adapted = copy.deepcopy(reranker.adapted).to(shapes.WIDE)
    wide = (adapted, head.to(shapes.WIDE), prefix, candidates)
    expected = peers.rerank_cached_forwards(*wide, peers.prefill(copy.deepcopy(slm).to(shapes.WIDE), prefix))
    others = {
        "K forwards over the cache": partial(peers.rerank_cached_forwards, *state, cache),
        "repeated cache": partial(peers.rerank_repeated_cache, *state, cache),
        "expanded cache": partial(peers.rerank_expanded_cache, *state, cache),
    }
    plain = tuple(run() for run in others.values())  # the error of 13 values alone would be chance
    runs = {OURS: torch.no_grad()(partial(reranker.scores, prefix, candidates, cache=cache)), **others}
    implementations = {name: Implementation(run, expected) for name, run in runs.items()}
    implementations["K full forwards (scope sequence)"] = Implementation(
        partial(peers.rerank_full_forwards, *state), peers.rerank_full_forwards(*wide[:-1], candidates[:1])
    )
    compare(
        "rerank_event",
        f"K={CANDIDATES} P={p} (cached)",
        implementations,
        rounds=30 if shapes.ON_GPU else 5,
        tolerance=max(harness.allowed_error(plain, (expected,) * len(plain)), 1e-4),
        dtype=slm.dtype,
    )
