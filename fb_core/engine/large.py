"""The large model kept in step with many sequences: what a query adds to them goes through one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fb_core import hf
from fb_core.engine.model import PagedModel, Part
from fb_core.engine.pages import SIZE
from fb_core.llm import Candidates, Ids, LocalLLM


@dataclass(eq=False)
class _Held:
    """A sequence whose tokens' keys and values lie in its pages."""

    tokens: list[int]
    pages: list[int]


class PagedLLM(LocalLLM):
    """A `LocalLLM` whose queries for candidates run over pages.

    A query that continues an earlier one computes only what is new, and so does one that begins with full pages of
    another; the oldest sequences make room for others. Safe to share between threads as a `LocalLLM` is.

    Args:
        model: a causal LM of the Llama family in eval mode.
        length: the most tokens of a query.
        count: of pages, enough for one query at least.
        valid_vocab: as for `LocalLLM`.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model without a native decoder, in training mode, or valid_vocab out of range.
    """

    def __init__(self, model: hf.CausalLM, length: int, count: int, *, valid_vocab: int | None = None) -> None:
        super().__init__(model, valid_vocab=valid_vocab)
        self.paged = PagedModel(model, length, count)
        self._held: list[_Held] = []  # the one used last at the end

    def refresh(self) -> None:
        """Read the model anew; what other weights have computed is forgotten."""
        with self._turn:
            if not self.paged.refresh():
                self._forget()

    def forget(self) -> None:
        """What was computed for earlier queries is computed again."""
        with self._turn:
            self._forget()

    def _forget(self) -> None:
        self._held.clear()
        self.paged.pages.release()

    @torch.no_grad()
    def candidates_many(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None = None
    ) -> list[Candidates]:
        """As `LLM.candidates_many`, all in one forward as far as the pages reach; raises as `candidates`."""
        checked, scored = self._checked(prompts, k, score_ids)
        room = min(self.paged.length, self.paged.pages.count * SIZE)
        for ids in checked:
            if len(ids) > room:
                raise ValueError(
                    f"ids: expected at most the {room} tokens of the buffers, got {len(ids)}; "
                    "make the decoder with a larger max_length"
                )
        found: list[Candidates] = []
        with self._turn:
            while len(found) < len(checked):
                first = len(found)
                hidden = self._extend([ids.tolist() for ids in checked[first:]])
                logits = self.paged.logits(hidden, hf.vocabulary(self.model)).float()
                found += self._candidates(logits, k, scored[first : first + len(hidden)])
        return found

    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """As `LLM.candidates`."""
        return self.candidates_many([ids], k, None if score_ids is None else [score_ids])[0]

    def _extend(self, queries: Sequence[list[int]]) -> Tensor:
        """The stream [n, D] behind the first n of the queries, as many as there are pages for."""
        using: list[_Held] = []
        for ids in queries:
            held = self._room(ids, using)
            if held is None:
                break
            self._held.remove(held)  # it was used last
            self._held.append(held)
            using.append(held)
        assert using, "a query is no longer than all pages are"
        known = [min(len(held.tokens), len(ids) - 1) for held, ids in zip(using, queries, strict=False)]
        parts = [Part(ids[start:], start, held.pages) for held, ids, start in zip(using, queries, known, strict=False)]
        streams = self.paged.extend(parts)
        for held, part in zip(using, parts, strict=True):
            held.tokens += part.tokens[len(held.tokens) - part.held :]  # of a beginning nothing is new
            self.paged.pages.filled(held.tokens, held.pages)
        return streams

    def _room(self, ids: list[int], using: Sequence[_Held]) -> _Held | None:
        """The sequence that a query continues or begins, or a new one, with pages for it; None without room."""
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
        """Give back the pages of the sequence that was not used for longest, unless all are needed."""
        oldest = next((held for held in self._held if held not in needed), None)
        if oldest is None:
            return False
        self._held.remove(oldest)
        self.paged.pages.give_back(oldest.pages)
        return True
