"""The large model kept in step with a sequence: buffers of a fixed size, new tokens and query in one forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fb_core import hf
from fb_core.engine.sequence import StaticModel
from fb_core.llm import LocalLLM


class InStepLLM(LocalLLM):
    """A `LocalLLM` whose `candidates` run over buffers of a fixed size.

    What a query shares with the one before it, from the first token on, is not computed again; the rest is one forward
    of 32, 64, 128 or 256 rows, or several of 256. Safe to share between threads as a `LocalLLM` is; decoders that share
    it compute more, since each drives the other's sequence out.

    Args:
        model: a causal LM of the Llama family in eval mode.
        slots: the most tokens of a query.
        valid_vocab: as for `LocalLLM`.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model without a native decoder, in training mode, or valid_vocab out of range.
    """

    def __init__(self, model: hf.CausalLM, slots: int, *, valid_vocab: int | None = None) -> None:
        super().__init__(model, valid_vocab=valid_vocab)
        self.static = StaticModel(model, slots)
        self._held: list[int] = []

    @torch.no_grad()
    def begin(self, tokens: Sequence[int]) -> None:
        """Take a prompt, so that the first query has only its last token and what followed to add."""
        with self._turn:
            self.static.refresh()
            self._held = []
            if len(tokens) > 1:
                self._extend(tokens[:-1])

    @torch.no_grad()
    def _in_step(self, ids: Tensor) -> Tensor:
        """Logits [1, V] behind ids; the last of them is computed in any case."""
        if len(ids) > self.static.slots:
            raise ValueError(
                f"ids: expected at most the {self.static.slots} tokens of the buffers, got {len(ids)}; "
                "make the decoder with a larger max_length"
            )
        return self.static.logits(self._extend(ids.tolist()), hf.vocabulary(self.model)).float()

    def _extend(self, ids: Sequence[int]) -> Tensor:
        held, self._held = self._held, []
        common = 0
        for ours, theirs in zip(held, ids[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        hidden = self.static.extend(ids[common:], common)
        self._held = list(ids)
        return hidden
