"""How a product becomes a logit, and which rows and ids count."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """The arguments that the operators share, in the order of their schemas."""

    logit_scale: float
    softcap: float | None
    temperature: float
    ignore_index: int
    valid_vocab: int | None

    def rows(self, weight: Tensor, vocab_start: int = 0) -> int:
        """How many of the first rows of a shard of the head count."""
        if self.valid_vocab is None:
            return weight.shape[0]
        return max(0, min(self.valid_vocab - vocab_start, weight.shape[0]))

    def multipliers(self) -> tuple[float, float, float]:
        """Factors of product, bias and tanh: a logit is the sum of the first two or, soft-capped, tanh of that sum."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1 / self.temperature, 1.0
        return self.logit_scale / self.softcap, 1 / self.softcap, self.softcap / self.temperature


SMALL = 1 << 16  # logits of a call on a CPU that are computed again in the backward
SCHEMA = "float logit_scale, float? softcap, float temperature, SymInt ignore_index, SymInt? valid_vocab"
