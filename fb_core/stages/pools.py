"""Parts of a logged pool: the pool that deployment forms at the state, and those of the ablations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal

import torch

from fb_core import hf
from fb_core.pool import LARGE, SLM, Pool
from fb_core.scorer import CompatibilityScorer
from fb_core.spans import Span, agreed
from fb_core.stages.examples import Future

PartKind = Literal["joint", "slm", "llm", "slm-wide"]


def part_of(pool: Pool, slm_k: int, kind: PartKind = "joint") -> Pool:
    """A part of a logged pool, which has more SLM candidates than a decoder takes.

    Args:
        pool: the SLM's likeliest candidates first, then the LLM's that are not among them.
        slm_k: number of SLM candidates in a decoder's pool.
        kind: "joint", "slm" or "llm" as a decoder forms it; "slm-wide" for all logged SLM candidates.
    """
    ids, bits, logprob = pool.ids.tolist(), pool.sources.tolist(), pool.llm_logprob.tolist()
    small = [place for place, bit in enumerate(bits) if bit & SLM]
    large = [place for place, bit in enumerate(bits) if bit & LARGE]
    large.sort(key=lambda place: (-logprob[place], ids[place]))  # in the LLM's order
    own = {"slm-wide": small, "llm": []}.get(kind, small[:slm_k])
    theirs = large if kind in ("joint", "llm") else []
    places = own + [place for place in theirs if place not in own]
    sources = [SLM * (place in own) | LARGE * (place in theirs) for place in places]
    at = torch.tensor(places, dtype=torch.int64)
    return Pool(pool.ids[at], torch.tensor(sources, dtype=torch.int32), pool.slm_logprob[at], pool.llm_logprob[at])


def with_spans(futures: Sequence[Future], span: Span, scorer: CompatibilityScorer, room: int) -> list[Future]:
    """The futures, with the span that deployment would append set as the tail of the LLM's candidate in their pools.

    Args:
        futures: the LLM's own, whatever their verdict.
        span: how much the LLM offers.
        scorer: over the SLM; finds where the SLM agrees.
        room: longest output in tokens; the SLM's positions are a limit too.
    """
    found, tailed = list(futures), dict[int, tuple[int, tuple[int, ...]]]()
    positions = hf.max_positions(scorer.model) or sys.maxsize
    for row, future in enumerate(futures):
        state = future.state
        theirs = (state.pool.ids == future.first) & (state.pool.sources & LARGE).bool()
        shared = list(takewhile(lambda token: token < scorer.valid_vocab, future.tokens.tolist()))
        left = min(room - len(state.output), positions - state.position)  # tokens, the candidate included
        tail = span.tail(future.first, shared[: max(0, left - 1)])
        if bool(theirs.any()) and tail:
            tailed[row] = int(theirs.int().argmax()), tail
    if span.agree and tailed:
        requests = [(futures[row].state.prefix, [[futures[row].first, *tail]]) for row, (_, tail) in tailed.items()]
        greedy = [outputs[1][1:] for (outputs,) in scorer.logprobs_many(requests, return_greedy=True)]
        tailed = {
            row: (place, agreed(tail, own)) for (row, (place, tail)), own in zip(tailed.items(), greedy, strict=True)
        }
    for row, (place, tail) in tailed.items():
        state = found[row].state
        found[row] = replace(found[row], state=replace(state, pool=state.pool.with_tail(place, tail)))
    return found


def in_parts(futures: Iterable[Future], slm_k: int, kind: PartKind = "joint") -> list[Future]:
    """The futures with their states' pools reduced by `part_of`."""
    return [
        replace(future, state=replace(future.state, pool=part_of(future.state.pool, slm_k, kind))) for future in futures
    ]
