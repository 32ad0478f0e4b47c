"""A reranker for deployment: its adapter merged into a second copy of q, k, v and o, with a fixed number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fb_core.models.adapters import adapter_scales
from fb_core.models.facts import Reading
from fb_core.models.native import Linear
from fb_core.models.packed import Prefix
from fb_core.rerank.reranker import TokenReranker
from fb_core.runtime.kv_pages import pages_of
from fb_core.runtime.paged_model import PagedModel

ROWS = 16
"""Candidates of a state in one forward; a larger pool takes several times as many."""
STATES = 4
"""States of a forward with so many candidates each; where they have fewer, more."""


class MergedReranker:
    """`TokenReranker.scores_many` over the keys and values of a `PagedModel`, the frozen model of the reranker.

    The adapter of a reranker of scope "candidate" is merged here, that of another one by `load`.
    """

    def __init__(self, reranker: TokenReranker, model: PagedModel) -> None:
        self.model = model
        device = model.keys[0].device
        with torch.inference_mode(False):
            self._ids = torch.zeros(STATES * ROWS, dtype=torch.int64, device=device)
            self._held = torch.zeros(STATES * ROWS, dtype=torch.int32, device=device)
            self._table = torch.zeros(STATES * ROWS, pages_of(model.length), dtype=torch.int32, device=device)
            self._out = model.keys[0].new_zeros(STATES * ROWS, model.width)
            self._qkv = [torch.empty_like(layer.qkv.weight) for layer in model.layers]
            self._o = [torch.empty_like(layer.o.weight) for layer in model.layers]
        self.load(reranker)

    def load(self, reranker: TokenReranker) -> None:
        """Merge another reranker of scope "candidate", made on the same model, in the same memory."""
        assert reranker.scope == "candidate", "its prefix is the frozen model's own"
        self.reranker = reranker
        self._read: Reading | None = None
        self._scales: list[object] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge base weights and adapter as they are now, unless a `Reading` is as it was; `load` always merges."""
        self.reranker.check_base()
        adapted = self.reranker.adapted
        read, scales = Reading(adapted, self.model.model), adapter_scales(adapted)
        if read.same(self._read) and scales == self._scales:
            return
        self._read, self._scales = None, scales  # unknown until all is merged
        merged, layers = self.reranker.merged(), []
        for index, (layer, qkv, o) in enumerate(zip(self.model.layers, self._qkv, self._o, strict=True)):
            qkv.copy_(layer.qkv.weight)
            o.copy_(layer.o.weight)
            width = len(qkv) // (layer.heads + 2 * layer.kv_heads)
            parts = qkv.split([heads * width for heads in (layer.heads, layer.kv_heads, layer.kv_heads)])
            for name, part in zip(("q_proj", "k_proj", "v_proj", "o_proj"), (*parts, o), strict=True):
                weight = merged.get(f"layers.{index}.self_attn.{name}")
                if weight is not None:
                    part.copy_(weight)
            layers.append(replace(layer, qkv=Linear(qkv, layer.qkv.bias), o=Linear(o, layer.o.bias)))
        self.layers, self._read = layers, read

    @torch.no_grad()
    def warm(self) -> None:
        """Capture the forwards that `scores_many` would capture at their first use."""
        if self.model.graphs.captures:
            for states in sorted({1 << (count - 1).bit_length() for count in range(1, STATES + 1)}):
                self.model.graphs.ready(("rerank", states), partial(self._forward, states, ROWS))

    @torch.no_grad()
    def scores_many(self, prefixes: Sequence[Prefix], candidates: Sequence[Tensor]) -> list[Tensor]:
        """As `TokenReranker.scores_many`; every prefix is in pages of the model from its first token on."""
        hidden = self._hidden(prefixes, candidates)
        scores = self.reranker.score_hidden(torch.cat(hidden))
        return list(scores.split([len(pool) for pool in candidates]))

    def _hidden(self, prefixes: Sequence[Prefix], candidates: Sequence[Tensor]) -> list[Tensor]:
        """Hidden states [K, D] of every state's candidates; pools are padded to the largest, or to a captured size."""
        parts = [(state, part) for state, pool in enumerate(candidates) for part in pool.split(ROWS)]
        captured = self.model.graphs.captures
        rows = ROWS if captured else max(len(part) for _, part in parts)
        states = STATES * ROWS // rows
        hidden: list[list[Tensor]] = [[] for _ in candidates]
        for first in range(0, len(parts), states):
            some = parts[first : first + states]
            count = 1 << (len(some) - 1).bit_length() if captured else len(some)
            for index, (state, part) in enumerate(some):
                prefix, own = prefixes[state], slice(index * rows, index * rows + len(part))
                self._ids[own] = part
                self._held[index] = prefix.length
                self._table[index, : len(prefix.pages)] = torch.tensor(prefix.pages, dtype=torch.int32)
            self._held[len(some) : count] = 0
            self.model.graphs.ready(("rerank", count), partial(self._forward, count, rows))()
            for index, (state, part) in enumerate(some):
                hidden[state].append(self._out[index * rows : index * rows + len(part)].clone())
        return [torch.cat(own) for own in hidden]

    def _forward(self, states: int, rows: int) -> None:
        """One forward with the merged weights, over `rows` candidates of each of `states` states."""
        model, held = self.model, self._held[:states]
        ids, positions = self._ids[: states * rows], held.repeat_interleave(rows, output_size=states * rows)
        hidden = model.forward(ids, positions, held, self._table[:states], layers=self.layers)
        self._out[: states * rows].copy_(model.normed(hidden))

    @property
    def nbytes(self) -> int:
        """Bytes of the merged weights."""
        return sum(weight.nbytes for weight in (*self._qkv, *self._o))
