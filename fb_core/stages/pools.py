"""Parts of a logged pool: the pool that deployment forms at the state, and those of the ablations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch

from fb_core.pool import LARGE, SLM, Pool
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


def in_parts(futures: Iterable[Future], slm_k: int, kind: PartKind = "joint") -> list[Future]:
    """The futures with their states' pools reduced by `part_of`."""
    return [
        replace(future, state=replace(future.state, pool=part_of(future.state.pool, slm_k, kind))) for future in futures
    ]
