"""Continuations over KV pages: many prompts at once; the caller chooses each token from the logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fb_core.models.facts import CausalLM
from fb_core.runtime.kv_pages import SIZE, pages_of
from fb_core.runtime.paged_model import PagedModel, Part
from fb_core.runtime.plain import MAX_ROWS, Running, Stop

ROWS = {"cpu": 64}  # sequences that run together: the most that one call of the compiled layer takes
REFILL = 8  # 1 / REFILL of the rows must be free before others enter, so that their prompts share a forward

Choose = Callable[[Sequence[Running], Tensor], Sequence[int]]
"""The next token of every row, from float32 logits [B, V]."""


def write(
    model: CausalLM, prompts: Sequence[Tensor], stop: Stop, choose: Choose, batch_tokens: int, vocabulary: int
) -> list[Running]:
    """Continue many prompts; as one ends, another takes its place. Returns one row per prompt, in order.

    Common prefixes are computed once: full pages are shared, and the last page is copied between equal prompts.

    Args:
        model: a causal LM with a native decoder, in eval mode.
        prompts: [P] int64 each, not empty.
        stop: when a sequence ends.
        choose: gives the next token of every row.
        batch_tokens: maximum tokens held at once, new ones included; a longer sequence runs alone.
        vocabulary: how many ids count.
    """
    rows = [Running(index, ids.tolist(), len(ids)) for index, ids in enumerate(prompts)]
    if rows:
        _Writing(model, rows, stop, choose, batch_tokens, vocabulary).run()
    return rows


class _Writing:
    """The running sequences, one per row."""

    def __init__(
        self,
        model: CausalLM,
        rows: Sequence[Running],
        stop: Stop,
        choose: Choose,
        batch_tokens: int,
        vocabulary: int,
    ) -> None:
        lengths = [stop.length(row) for row in rows]
        longest, needed = max(lengths), sum(map(pages_of, lengths))
        count = min(needed, max(batch_tokens // SIZE, pages_of(longest)))
        self.model = PagedModel(model, longest, count, capture=False)  # its pages live for one call only
        self.stop, self.choose = stop, choose
        self.waiting = deque(rows)
        self.live: list[Running] = []
        self.pages: list[list[int]] = []  # of each running row
        device, self.most = model.device, min(len(rows), ROWS.get(model.device.type, MAX_ROWS))
        self.ids = torch.zeros(self.most, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)  # of the last token
        self.table = torch.zeros(self.most, pages_of(longest), dtype=torch.int32, device=device)
        self.vocabulary = vocabulary

    @torch.no_grad()
    def run(self) -> None:
        """Run until all have ended."""
        while self.waiting or self.live:
            if self.waiting and (not self.live or self.most - len(self.live) >= self.most // REFILL):
                self._admit()
            self._step()

    def _admit(self) -> None:
        """Admit waiting sequences in order while rows and pages last, but wait for a page that another is computing."""
        pages, first = self.model.pages, len(self.live)
        asked = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.most - first))]
        entering: dict[tuple[int, ...], list[int]] = {}  # prompts that are computed now -> their pages
        copies, later, parts = [], [], []
        for row in asked:
            beginning = tuple(row.tokens[:-1])
            if beginning in entering:
                copies.append(row)
            elif pages.is_being_prefilled(row.tokens, (other.tokens for other in self.live[first:])) or not (
                taken := pages.take(row.tokens, self.stop.length(row))
            ):
                later.append(row)
            else:
                entering[beginning], held = taken
                if held < len(beginning):
                    parts.append(Part(beginning[held:], held, entering[beginning]))
                self._begin(row, entering[beginning])
        if parts:
            self.model.extend(parts)
        for beginning, own in entering.items():
            pages.filled(beginning, own)
        pairs = []
        for row in copies:
            if taken := pages.take(row.tokens, self.stop.length(row)):
                last = (len(row.tokens) - 1) // SIZE
                pairs.append((entering[tuple(row.tokens[:-1])][last], taken[0][last]))
                self._begin(row, taken[0])
            else:
                later.append(row)
        if pairs:
            source, to = torch.tensor(pairs, device=self.ids.device).T
            for buffer in (*self.model.keys, *self.model.values):
                buffer[to] = buffer[source]
        self.waiting.extendleft(sorted(later, key=lambda row: -row.index))

    def _begin(self, row: Running, pages: list[int]) -> None:
        index = len(self.live)
        self.live.append(row)
        self.pages.append(pages)
        self.ids[index] = row.tokens[-1]
        self.positions[index] = len(row.tokens) - 1
        self.table[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def _step(self) -> None:
        """Append one token to every row; rows that end leave."""
        count = len(self.live)
        positions, table = self.positions[:count], self.table[:count]
        slots = table.gather(1, (positions // SIZE)[:, None])[:, 0].long() * SIZE + positions % SIZE
        hidden = self.model.forward(self.ids[:count], positions, positions, table, slots)
        tokens = self.choose(self.live, self.model.logits(hidden, self.vocabulary).float())
        for row, token in zip(self.live, tokens, strict=True):
            row.tokens.append(token)
        going = [number for number, row in enumerate(self.live) if not self.stop(row)]
        self.ids[:count] = torch.tensor(tokens)
        self.positions[:count] += 1
        if len(going) == count:
            return
        for ended in set(range(count)) - set(going):
            self.model.pages.release(self.pages[ended])
        kept = torch.tensor(going, dtype=torch.int64, device=self.ids.device)
        for buffer in (self.ids, self.positions, self.table):
            buffer[: len(going)] = buffer[kept]
        self.live = [self.live[number] for number in going]
        self.pages = [self.pages[number] for number in going]
