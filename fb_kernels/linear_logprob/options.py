"""What becomes of a product before its softmax, and which rows and ids count."""

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


SCHEMA = "float logit_scale, float? softcap, float temperature, SymInt ignore_index, SymInt? valid_vocab"
