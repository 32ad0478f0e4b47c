"""A step at which the LLM was asked: the pool of candidates, and the event that is kept of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

PoolKind = Literal["joint", "slm", "llm"]
SLM, LARGE = 1, 2  # source bits


@dataclass(frozen=True, eq=False)
class Pool:
    """The candidates of one event, the SLM's first, no two alike."""

    ids: Tensor  # [K] int64
    sources: Tensor  # [K] int32 bits, 1 = SLM, 2 = LLM
    slm_logprob: Tensor  # [K] float32, nats
    llm_logprob: Tensor  # [K] float32

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Event:
    """One admitted intervention, in plain numbers."""

    step: int  # 0-based index of its token among the new ones
    entropy: float  # nats
    pool: list[int]  # ids
    sources: list[int]  # bits, 1 = SLM, 2 = LLM
    slm_logprob: list[float]
    llm_logprob: list[float]  # NaN where the LLM was not asked
    scores: list[float] | None  # the selector's, None where it has none
    choice: int  # index into the pool
    error: str | None = None  # why the LLM did not answer; the pool is then the SLM's token alone

    @property
    def token(self) -> int:
        """The id that was chosen."""
        return self.pool[self.choice]

    @property
    def asked(self) -> bool:
        """Whether the LLM answered."""
        return not all(map(math.isnan, self.llm_logprob))

    @classmethod
    def of(cls, step: int, entropy: float, pool: Pool, choice: int, scores: Tensor | None = None) -> Event:
        """The event of a choice from a pool."""
        return cls(
            step,
            entropy,
            pool.ids.tolist(),
            pool.sources.tolist(),
            pool.slm_logprob.tolist(),
            pool.llm_logprob.tolist(),
            None if scores is None else scores.tolist(),
            choice,
        )

    @classmethod
    def alone(cls, step: int, entropy: float, logits: Tensor, error: str | None = None) -> Event:
        """The event of the SLM's own token, without the LLM; logits [V] are the SLM's."""
        token = int(logits.argmax())  # the first of equal ones
        logprob = float(logits.float().log_softmax(-1)[token])
        return cls(step, entropy, [token], [SLM], [logprob], [math.nan], None, 0, error)
