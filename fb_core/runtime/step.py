"""The decode step: one more token for every running sequence, each of which halts by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fb_core.runtime.kv_pages import SIZE, pages_of
from fb_core.runtime.paged_model import PagedModel
from fb_core.runtime.sampling import GREEDY, Draw, Draws, drawn
from fb_kernels import DecodeState, Halt, commit_, topk_entropy
from fb_kernels.env import batch_invariant

RING = 2
"""Runs whose outcomes the host may still read."""
RANKED = 20
"""Likeliest tokens that are known of a place, where they are asked for."""


class Ranked(NamedTuple):
    """The model's likeliest tokens at one place, and their log-probs in nats."""

    ids: list[int]
    logprobs: list[float]
    taken: float  # log-prob of the token that is there
    place: int = 0  # of that token among all, from 1, where it is one of a prompt's


def rank(
    model: PagedModel, hidden: Tensor, logits: Tensor, token: Tensor, given: Sequence[int] | None = None
) -> Tensor:
    """Ids and log-probs [N, 2, k + 1] of the likeliest tokens, ties to the lowest, and of the token taken.

    From logits [N, V] and token [N] int64; of a 16-bit model, and in batch-invariant mode, the log-probs are computed
    from its residual stream hidden [N, D]. The result's precision holds ids and log-probs. If ids are `given`, theirs
    take the place of the likeliest ones.
    """
    if given is None:
        _, values, ids = topk_entropy(logits, min(RANKED, logits.shape[-1]))
    else:
        ids = torch.tensor(given, dtype=torch.int64, device=logits.device).expand(len(logits), -1)
        values = logits.gather(-1, ids)
    if batch_invariant() or model.head.weight.dtype.itemsize < 4:  # its logits are rounded
        taken, logprobs = model.logprobs(hidden, token, ids, logits.shape[-1])
        logprobs = torch.where(ids == token[:, None], taken[:, None], logprobs)
        if given is None:
            logprobs, order = logprobs.sort(stable=True, descending=True)
            ids = ids.gather(-1, order)
    else:
        total = logits.logsumexp(-1)
        taken, logprobs = logits.gather(-1, token[:, None])[:, 0] - total, values - total[:, None]
    ids = torch.cat([ids, token[:, None]], -1)
    return torch.stack([ids.to(taken.dtype), torch.cat([logprobs, taken[:, None]], -1)], 1)


def ranked(row: list[list[float]]) -> Ranked:
    """One place of `rank`'s result."""
    ids, (*logprobs, taken) = row
    return Ranked([int(token) for token in ids[:-1]], logprobs, taken)


class Outcome(NamedTuple):
    """What a step did to one row."""

    halt: Halt
    token: int  # the likeliest or drawn one, appended unless it halted
    entropy: float  # nats
    ranked: Ranked | None  # None if not requested


class Wanted(NamedTuple):
    """What a step does besides; without any of it, each row takes its likeliest token."""

    ranked: bool = False  # outcomes have the likeliest tokens, which are computed after the step
    given: Mapping[int, Sequence[int]] = MappingProxyType({})  # ids, by the step's row, that its outcome has instead
    sampled: bool = False  # rows draw their tokens as they were put
    early: bool = False  # rows of fewer than their `least` tokens take none that ends them


PLAIN = Wanted()


class DecodeStep:
    """The running sequences, one per row, and the step that appends to them.

    `run` reads and writes the same tensors every time, without a host sync. A row that has halted computes the same
    values again and changes nothing. So a step may be enqueued before the host has read the last outcome, and the other
    rows go on. Rows without a sequence compute values that are never used.

    `vocabulary` is how many of the model's ids count, `top_k` how many of the largest logits the entropy is taken over;
    a row halts at the ids of `ends`.
    """

    def __init__(self, model: PagedModel, vocabulary: int, top_k: int, ends: frozenset[int], rows: int) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.top_k = min(top_k, vocabulary)
        self.rows = rows
        with torch.inference_mode(False):
            device = model.keys[0].device
            self.state = DecodeState(
                tokens=torch.zeros(rows, model.length, dtype=torch.int64, device=device),
                length=torch.ones(rows, dtype=torch.int32, device=device),
                halt=torch.full((rows,), int(Halt.LENGTH), dtype=torch.int32, device=device),
                budget=torch.zeros(rows, dtype=torch.int32, device=device),
            )
            self.limit = torch.zeros(rows, dtype=torch.int32, device=device)
            self.least = torch.zeros(rows, dtype=torch.int32, device=device)
            self.threshold = torch.zeros(rows, dtype=torch.float64, device=device)
            self.draws = Draws.of([GREEDY] * rows, device)
            self.token = torch.zeros(rows, dtype=torch.int64, device=device)
            self.table = torch.zeros(rows, pages_of(model.length), dtype=torch.int32, device=device)
            self.slots = torch.full((rows, self.table.shape[1] * SIZE), -1, dtype=torch.int32, device=device)
            own = torch.arange(rows, dtype=torch.int32, device=device)
            # length plus this: a row's last position; its place among all tokens; its place among all slots
            self.offsets = torch.stack([0 * own, own * model.length, own * self.slots.shape[1]]) - 1
            self.logits = model.keys[0].new_zeros(rows, vocabulary)
            self.hidden = model.keys[0].new_zeros(rows, model.width)
            self.end_ids = ends
            self.ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
            self.own_ends = self.ends[self.ends < vocabulary]  # others only an LLM chooses
            exact = torch.promote_types(model.keys[0].dtype, torch.float32)
            pinned = device.type == "cuda"
            self.ring = torch.zeros(RING, rows, 3, dtype=exact, pin_memory=pinned)  # halt, token, entropy
            top = min(RANKED, vocabulary)
            self.ranks = torch.zeros(RING, rows, 2, top + 1, dtype=exact, pin_memory=pinned)  # ids, log-probs
            self.ended = [torch.cuda.Event() for _ in range(RING)] if pinned else []
        self.ahead = 1 if pinned else 0
        self._ranked = [False] * RING
        self._given: list[dict[int, Tensor]] = [{}] * RING  # of rows for which ids were given: `rank` of those
        self.begun = 0
        """Steps run so far."""
        self._looked = 0  # those whose outcome was read

    @torch.no_grad()
    def put(
        self,
        row: int,
        tokens: Sequence[int],
        pages: Sequence[int],
        limit: int,
        threshold: float,
        draw: Draw = GREEDY,
        least: int = 0,
    ) -> None:
        """Put a sequence into an empty row; keys and values of its tokens, but perhaps the last, are in its pages.

        It halts at `limit` tokens, for which the pages are enough; below `least` in all it takes none that ends it, if
        that is `Wanted`. The threshold is in nats.
        """
        self.wait_for_stream()
        count = len(tokens)
        self.state.tokens[row, :count] = torch.tensor(tokens)
        self.state.length[row] = count
        self.limit[row] = limit
        self.least[row] = least
        self.threshold[row] = threshold
        for column, value in zip(self.draws, draw, strict=True):
            column[row] = value
        held = torch.tensor(pages, dtype=torch.int32)
        self.table[row, : len(pages)] = held
        inside = torch.arange(SIZE, dtype=torch.int32)
        self.slots[row, : len(pages) * SIZE] = (held[:, None] * SIZE + inside).flatten()

    @torch.no_grad()
    def resume(self, row: int, budget: int, token: int | None = None, position: int = 0) -> None:
        """Let a row go on with `budget` events left; `token`, if given, is written at `position`, its end."""
        self.wait_for_stream()
        if token is not None:
            self.state.tokens[row, position] = token
            self.state.length[row] = position + 1
        self.state.budget[row] = budget
        self.state.halt[row] = int(Halt.NONE)

    @torch.no_grad()
    def clear(self, row: int) -> None:
        """Remove a row's sequence."""
        self.wait_for_stream()
        self.state.halt[row] = int(Halt.LENGTH)
        self.state.length[row] = 1
        self.slots[row] = -1

    @torch.no_grad()
    def reset(self) -> None:
        """Remove all sequences, and drop the outcomes that were not read."""
        self.wait_for_stream()
        self.state.halt.fill_(int(Halt.LENGTH))
        self.state.length.fill_(1)
        self.slots.fill_(-1)
        self._looked = self.begun

    @torch.no_grad()
    def move(self, row: int, to: int, count: int) -> None:
        """Move a sequence to an empty row, and leave its own row empty.

        `count` is its number of tokens as the host knows it; steps not read yet may have appended more.
        """
        self.wait_for_stream()
        held = count + RING
        self.state.tokens[to, :held] = self.state.tokens[row, :held]
        state = self.state
        columns = (state.length, state.halt, state.budget, self.limit, self.least, self.threshold, self.table)
        for column in (*columns, *self.draws):
            column[to] = column[row]
        self.slots[to] = self.slots[row]
        self.logits[to] = self.logits[row]
        self.hidden[to] = self.hidden[row]
        self.clear(row)

    def wait_for_stream(self) -> None:
        """Make what this thread enqueues wait for the last step and `extend`, on whichever streams those ran."""
        self.model.wait_for_stream()
        if self.ended and self.begun:
            torch.cuda.current_stream(self.logits.device).wait_event(self.ended[(self.begun - 1) % RING])

    @torch.no_grad()
    def run(self, count: int, wanted: Wanted = PLAIN) -> None:
        """Run one step: each of the first `count` rows appends its token or halts; its logits are in `logits`."""
        self.wait_for_stream()
        self._ready(self._captured(count), self.begun % RING, wanted.sampled, wanted.early)()
        self._record(slice(0, count), wanted)

    @torch.no_grad()
    def first(self, rows: slice, hidden: Tensor, wanted: Wanted) -> None:
        """As `run`, for some rows alone, whose last token needs no forward: `hidden` [n, D] is the stream after it."""
        self.wait_for_stream()
        self._commit(rows, hidden, self.begun % RING, wanted.sampled, wanted.early)
        self._record(rows, wanted)

    def _record(self, rows: slice, wanted: Wanted) -> None:
        """Count a step that was enqueued."""
        slot = self.begun % RING
        self._ranked[slot] = wanted.ranked
        if wanted.ranked:
            top = rank(self.model, self.hidden[rows], self.logits[rows], self.token[rows])
            self.ranks[slot, rows].copy_(top, non_blocking=True)
        self._given[slot] = {
            row: rank(self.model, self.hidden[row, None], self.logits[row, None], self.token[row, None], ids)[0]
            for row, ids in ((rows.start + number, ids) for number, ids in wanted.given.items())
        }
        if self.ended:
            self.ended[slot].record(torch.cuda.current_stream(self.logits.device))
        self.begun += 1
        self._looked = max(self._looked, self.begun - RING)  # older outcomes are overwritten

    @property
    def enqueued(self) -> int:
        """Number of steps whose outcome was not read."""
        return self.begun - self._looked

    def outcomes(self, count: int, begin: int = 0) -> list[Outcome]:
        """Wait for the oldest step not read yet; what it did to `count` rows from `begin` on."""
        slot = self._looked % RING
        if self.ended:
            self.ended[slot].synchronize()
        self._looked += 1
        rows = slice(begin, begin + count)
        ranks = self.ranks[slot, rows].tolist() if self._ranked[slot] else [None] * count
        for row, top in self._given[slot].items():
            ranks[row - begin] = top.tolist()
        return [
            Outcome(Halt(int(halt)), int(token), nats, None if top is None else ranked(top))
            for (halt, token, nats), top in zip(self.ring[slot, rows].tolist(), ranks, strict=True)
        ]

    @torch.no_grad()
    def warm(self) -> None:
        """Capture the steps that `run` would capture at their first use."""
        if self.model.graphs.captures:
            self.wait_for_stream()
            for rows in sorted({self._captured(count) for count in range(1, self.rows + 1)}):
                for slot, sampled in product(range(RING), (False, True)):
                    self._ready(rows, slot, sampled, False)

    def _captured(self, count: int) -> int:
        """The rows of a step for `count` sequences: rounded up to a power of 2 (at most all) if captured."""
        return min(self.rows, 1 << (count - 1).bit_length()) if self.model.graphs.captures else count

    def _ready(self, rows: int, slot: int, *kind: bool) -> Callable[[], object]:
        graphs, key = self.model.graphs, ("step", rows, slot, *kind)
        compute = partial(self._compute, rows, slot, *kind)
        if not graphs.runs(key):
            return graphs.ready(key, compute)
        halt = self.state.halt.clone()
        self.state.halt.fill_(int(Halt.LENGTH))  # so that the runs of a capture append nothing
        ready = graphs.ready(key, compute)
        self.state.halt.copy_(halt)
        return ready

    def _compute(self, rows: int, slot: int, *kind: bool) -> None:
        position, token_place, slot_place = self.state.length[:rows] + self.offsets[:, :rows]
        last = self.state.tokens[:rows].view(-1).index_select(0, token_place)
        slots = self.slots[:rows].view(-1).index_select(0, slot_place)
        hidden = self.model.forward(last, position, position, self.table[:rows], slots)
        self._commit(slice(rows), hidden, slot, *kind)

    def _commit(self, rows: slice, hidden: Tensor, slot: int, sampled: bool, early: bool) -> None:
        """Rows append their tokens or halt, from the residual stream [n, D] after the last one."""
        state, logits = DecodeState(*(x[rows] for x in self.state)), self.logits[rows]
        self.hidden[rows] = hidden
        logits.copy_(self.model.logits(hidden, self.vocabulary))
        if early:  # `logits` stays as the model has it, for log-probs
            own = logits[:, self.own_ends]
            logits[:, self.own_ends] = own.masked_fill((state.length < self.least[rows])[:, None], -torch.inf)
        entropy, values, ids = topk_entropy(logits, self.top_k)
        if early:
            logits[:, self.own_ends] = own
        token = self.token[rows]
        if sampled:
            token.copy_(drawn(values, ids, Draws(*(each[rows] for each in self.draws)), state.length))
        else:
            token.copy_(ids[:, 0])  # the first of equal ones
        limits = {"threshold": self.threshold[rows], "eos_ids": self.ends, "max_length": self.limit[rows]}
        commit_(state, token, entropy, **limits, outcome=self.ring[slot, rows])
