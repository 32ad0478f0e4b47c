"""The large model, with KV pages of many sequences: the new tokens of all queries go through one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fb_core.llm.local import Candidates, Ids, LocalLLM, scored_of
from fb_core.models.facts import CausalLM, Tokenizer, max_positions, vocabulary
from fb_core.runtime.kv_pages import SIZE
from fb_core.runtime.paged_model import PagedModel, Part


@dataclass(eq=False)
class _Held:
    """A sequence and the pages that hold its keys and values."""

    tokens: list[int]
    pages: list[int]


class PagedLLM(LocalLLM):
    """A `LocalLLM` whose candidates come from KV pages; raises as it does, and for a model without a native decoder.

    A query that extends an earlier one computes only its new tokens, and so does one that begins with full pages of
    another. The least recently used sequences make room for new ones. Safe to share between threads as a `LocalLLM` is.
    A decoder makes it for itself and has checked its prompts: only their lengths, which grow, are checked here. The
    pages must be enough for at least one query of `length` tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        length: int,
        count: int,
        *,
        valid_vocab: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(model, valid_vocab=valid_vocab, tokenizer=tokenizer)
        self.paged = PagedModel(model, length, count)
        self._held: list[_Held] = []  # the most recently used is last

    def refresh(self) -> None:
        """Read the model again; pages computed with other weights are forgotten."""
        with self._turn:
            if not self.paged.refresh():
                self._forget()

    def weights_changed(self) -> None:
        """Forget all pages: earlier queries are computed again."""
        with self._turn:
            self._forget()

    def _forget(self) -> None:
        self._held.clear()
        self.paged.pages.reset()

    @torch.no_grad()
    def candidates_many(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None = None
    ) -> list[Candidates]:
        """As `LLM.candidates_many`, in as few forwards as the pages allow, of int64 ids that the model knows.

        Raises:
            ValueError: a prompt longer than the buffers or the model's positions, or NaN logits.
        """
        queries = [ids.tolist() if isinstance(ids, Tensor) else list(ids) for ids in prompts]
        scored = [
            None if ids is None else torch.as_tensor(ids, device=self.device) for ids in scored_of(prompts, score_ids)
        ]
        room = min(self.paged.length, self.paged.pages.count * SIZE)
        room = min(room, max_positions(self.model) or room)
        for ids in queries:
            if len(ids) > room:
                raise ValueError(
                    f"ids: expected at most {room} tokens, as buffers and positions have, got {len(ids)}; make the "
                    "decoder with a larger max_length, or shorten the prompt"
                )
        answers: list[Candidates] = []
        with self._turn:
            while len(answers) < len(queries):
                first = len(answers)
                hidden = self._extend(queries[first:])
                logits = self.paged.logits(hidden, vocabulary(self.model)).float()
                answers += self._candidates(logits, k, scored[first : first + len(hidden)])
        return answers

    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """As `LLM.candidates`."""
        return self.candidates_many([ids], k, None if score_ids is None else [score_ids])[0]

    def _extend(self, queries: Sequence[list[int]]) -> Tensor:
        """The residual stream [n, D] after each of the first n queries, as many as there are pages for."""
        using: list[_Held] = []
        for ids in queries:
            held = self._room(ids, using)
            if held is None:
                break
            self._held.remove(held)  # now the most recently used
            self._held.append(held)
            using.append(held)
        assert using, "a query is no longer than all pages are"
        starts = [min(len(held.tokens), len(ids) - 1) for held, ids in zip(using, queries, strict=False)]
        parts = [Part(ids[start:], start, held.pages) for held, ids, start in zip(using, queries, starts, strict=False)]
        streams = self.paged.extend(parts)
        for held, part in zip(using, parts, strict=True):
            held.tokens += part.tokens[len(held.tokens) - part.held :]  # nothing, if all is held
            self.paged.pages.filled(held.tokens, held.pages)
        return streams

    def _room(self, ids: list[int], using: Sequence[_Held]) -> _Held | None:
        """A held sequence that extends or begins the query, else a new one, with enough pages; None without room."""
        pages = self.paged.pages
        for held in reversed(self._held):
            common = min(len(held.tokens), len(ids))
            if common and held not in using and held.tokens[:common] == ids[:common]:
                while not pages.grow(held.pages, len(ids)):
                    if not self._drop(held, *using):
                        return None
                return held
        while (taken := pages.take(ids, len(ids))) is None:
            if not self._drop(*using):
                return None
        new = _Held(ids[: taken[1]], taken[0])
        self._held.append(new)
        return new

    def _drop(self, *needed: _Held) -> bool:
        """Free the pages of the least recently used sequence; False if all are needed."""
        oldest = next((held for held in self._held if held not in needed), None)
        if oldest is None:
            return False
        self._held.remove(oldest)
        self.paged.pages.release(oldest.pages)
        return True
