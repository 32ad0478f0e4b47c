"""The pools of logged states: what deployment would have formed there, and the parts of it that ablations look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fb_core.pool import LARGE, SLM

LoggedKind = Literal["joint", "slm", "llm", "slm-wide"]


class LoggedPool(NamedTuple):
    """K candidates of a logged state, in the order of `candidate_pool`."""

    ids: Tensor  # [K] int64
    sources: Tensor  # [K] int32 bits, 1 = SLM, 2 = LLM
    llm_logprob: Tensor  # [K] float32, nats


def logged_pool(row: Mapping[str, Any], slm_k: int, kind: LoggedKind = "joint") -> LoggedPool:
    """A pool of a state from its row among the futures, which knows more of the SLM's candidates than a pool takes.

    Args:
        row: `pool_ids`, the SLM's likeliest first, then what is new among the LLM's; `pool_sources`;
            `pool_llm_logprob`.
        slm_k: the SLM's candidates in a pool.
        kind: "joint", "slm" or "llm", as a decoder would form it; "slm-wide" for all of the SLM's that were logged.
    """
    ids, bits, logprob = row["pool_ids"], row["pool_sources"], row["pool_llm_logprob"]
    small = [place for place, bit in enumerate(bits) if bit & SLM]
    large = [place for place, bit in enumerate(bits) if bit & LARGE]
    large.sort(key=lambda place: (-logprob[place], ids[place]))  # as the LLM has them
    own = {"slm-wide": small, "llm": []}.get(kind, small[:slm_k])
    theirs = large if kind in ("joint", "llm") else []
    places = own + [place for place in theirs if place not in own]
    sources = [SLM * (place in own) | LARGE * (place in theirs) for place in places]
    return LoggedPool(
        torch.tensor([ids[place] for place in places], dtype=torch.int64),
        torch.tensor(sources, dtype=torch.int32),
        torch.tensor([logprob[place] for place in places], dtype=torch.float32),
    )
