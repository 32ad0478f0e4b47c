"""The fast loop of decoding: sequences enter, run together over KV pages, each halts by itself, and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from math import isnan
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fb_core.models.native import trim
from fb_core.models.packed import Prefix
from fb_core.runtime.kv_pages import SIZE, pages_of
from fb_core.runtime.paged_model import CHUNK, PagedModel, Part
from fb_core.runtime.plain import Running, Stop, not_finite
from fb_core.runtime.sampling import GREEDY, Draw
from fb_core.runtime.step import DecodeStep, Ranked, Wanted, rank, ranked
from fb_core.score import shared_prefix
from fb_kernels import Halt

LONGEST = 4 * CHUNK
"""Tokens of a continuation that is scored, which is one forward."""
UNTRIMMED = 1 << 28
"""Logits that are computed on a CPU before freed memory goes back to the system."""
LOGITS = 64
"""Rows of a prompt whose logits are computed at once."""


@dataclass(eq=False)
class Task:
    """A sequence to be continued or scored, and its state."""

    row: Running  # prompt and new tokens
    stop: Stop  # when it ends
    threshold: float  # nats of entropy at which it halts
    halts: int  # how often it may still do so
    ranking: bool = False  # whether the likeliest tokens at each place are recorded
    given: Sequence[int] | None = None  # ids that are recorded instead
    draw: Draw = GREEDY
    prompt_ranking: bool = False  # the same at each place of the prompt
    continuations: Sequence[Tensor] | None = None  # [R] each, scored instead of new tokens
    prompt_ranks: list[Ranked] = field(default_factory=list)  # of the prompt's tokens from the second on
    ranks: list[Ranked] = field(default_factory=list)  # of the new tokens, if they are recorded
    scores: list[tuple[Tensor, ...]] = field(default_factory=list)  # (log-probs, whether likeliest) of continuations
    error: BaseException | None = None
    gone: Future[None] = field(default_factory=Future)  # cancelled once nobody waits for it, by any thread
    done: bool = False
    halted: bool = False  # it waits for `Loop.resume`
    pages: list[int] | None = None  # None until it is admitted
    held: int = 0  # tokens whose keys and values are in its pages
    step_row: int | None = None  # its row of the step; None until its prompt is prefilled
    since: int = 0  # outcomes of earlier steps are not for this sequence

    @property
    def prefilled(self) -> int:
        """Tokens of its prompt that are prefilled: all, or all but the last where no first token is wanted of it."""
        return len(self.row.tokens) - (self.continuations is not None or not self.stop.room)

    def give_up(self) -> None:
        """Say that nobody waits for it any more."""
        self.gone.cancel()


AnyTask = TypeVar("AnyTask", bound=Task)


def _wanted(tasks: Sequence[Task]) -> Wanted:
    """What a step over these sequences does besides."""
    return Wanted(
        ranked=any(task.ranking and task.given is None for task in tasks),
        given={number: task.given for number, task in enumerate(tasks) if task.given is not None},
        sampled=any(task.draw.temperature > 0 for task in tasks),
        early=any(task.row.early for task in tasks),
    )


class Loop(Generic[AnyTask]):
    """Runs sequences of one model together; not safe to share between threads.

    Args:
        step: the rows of all running sequences, over a `PagedModel`.
        prefill: prompt tokens that are prefilled between two steps while others run.
        on_halt: called with a sequence that has halted, whose entropy in nats exceeds its threshold; it is resumed by
            `resume`, now or later. An error ends the sequence.
    """

    def __init__(self, step: DecodeStep, prefill: int, on_halt: Callable[[AnyTask, float], None]) -> None:
        self.model: PagedModel = step.model
        self.step = step
        self.prefill = prefill
        self.on_halt = on_halt
        self.waiting: deque[AnyTask] = deque()
        self.entering: deque[AnyTask] = deque()  # they have pages, and their prompts are being prefilled
        self.scoring: deque[AnyTask] = deque()  # their prompts are complete, and continuations are left
        self.rows: list[AnyTask] = []  # the step's rows, in order
        self._runs: deque[tuple[int, list[AnyTask]]] = deque()  # (first row, rows) of each step not read yet
        self._untrimmed = 0  # logits on a CPU since memory was given back

    def check(self, task: AnyTask) -> None:
        """ValueError for a sequence that can never fit."""
        length, slots = task.stop.length(task.row), self.model.length
        if length > slots:
            raise ValueError(
                f"input_ids: expected prompt and new tokens to fit buffers of {slots} tokens, got {task.row.prompt} "
                f"and {task.stop.room}; make the decoder with a larger max_length or ask for fewer tokens"
            )
        if pages_of(length) > (count := self.model.pages.count):
            raise ValueError(
                f"input_ids: expected prompt and new tokens to fit {count * SIZE} tokens of keys and values, got "
                f"{task.row.prompt} and {task.stop.room}; give more kv_memory or ask for fewer tokens"
            )

    def check_scores(self, prefix: int, longest: int) -> None:
        """ValueError for a prefix, or its longest continuation, that can never fit."""
        if longest > LONGEST:
            raise ValueError(
                f"continuations: expected at most {LONGEST} tokens each, got {longest}; ask for the log-probs of a "
                "prompt's own tokens, which run in pieces"
            )
        if prefix + longest > (room := min(self.model.length, self.model.pages.count * SIZE)):
            raise ValueError(
                f"prefix: expected at most {room} tokens with a continuation, got {prefix} and {longest}; make the "
                "decoder with a larger max_length or more kv_memory, or shorten them"
            )

    def submit(self, task: AnyTask) -> None:
        """Queue a sequence that `check` lets through; each `tick` then advances it."""
        self.waiting.append(task)

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.waiting or self.entering or self.scoring or self.rows)

    def clear(self) -> None:
        """End all sequences, also after an interrupt at any point."""
        for task in (*self.waiting, *self.entering, *self.scoring, *self.rows):
            task.done, task.step_row, task.pages = True, None, None
            task.give_up()
        for queue in (self.waiting, self.entering, self.scoring, self.rows, self._runs):
            queue.clear()
        self.step.reset()
        self.model.pages.reset()

    def tick(self) -> list[AnyTask]:
        """Admit, prefill a piece, score, run a step; returns what got a token, halted or ended."""
        changed: list[AnyTask] = []
        self.step.wait_for_stream()
        self._admit()
        self._enter(changed)
        self._score(changed)
        if any(not task.halted for task in self.rows):
            self.step.run(len(self.rows), _wanted(self.rows))
            self._record(0, changed)
        return list(dict.fromkeys(changed))  # a sequence that begins gets two tokens

    def _record(self, begin: int, changed: list[AnyTask]) -> None:
        """Note a step of the rows from `begin` on, and read the outcomes of the steps that are not to be ahead."""
        self._runs.append((begin, self.rows[begin:]))
        while self.step.enqueued > self.step.ahead:
            self._read_outcomes(changed)

    # --- in and out ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting sequences in order while rows and pages last; one whose next page another computes waits."""
        for task in list(islice(self.waiting, self.step.rows)):  # so that a tick does not read all that wait
            if len(self.rows) + len(self.entering) >= self.step.rows:
                return
            known = [] if task.prompt_ranking else task.row.tokens  # what is shared is not computed, nor ranked
            if self.model.pages.is_being_prefilled(known, (other.row.tokens for other in self.entering)):
                continue
            taken = self.model.pages.take(known, task.stop.length(task.row))
            if taken is None:
                return
            task.pages, task.held = taken
            self.waiting.remove(task)
            self.entering.append(task)

    @property
    def _room(self) -> int:
        """The rows that a forward between two steps may have, which holds up the sequences that run."""
        return self.prefill if self.rows else max(self.prefill, CHUNK)

    def _enter(self, changed: list[AnyTask]) -> None:
        """Prefill a piece of the prompts; a sequence whose prompt is complete becomes a row, is scored, or ends.

        Half of a piece is for prompts that it completes, in the order of arrival; longer ones have the rest.
        """
        if not self.entering:
            return
        room, parts, tasks = self._room, [], []
        short, half = list[AnyTask](), room // 2
        for task in self.entering:
            if (left := task.prefilled - task.held) <= half:
                short.append(task)
                half -= left
        for task in [*short, *(task for task in self.entering if task not in short)]:
            wanted = task.row.tokens[task.held : task.prefilled][:room]
            if wanted:
                assert task.pages is not None
                parts.append(Part(wanted, task.held, task.pages))
                tasks.append(task)
                room -= len(wanted)
            if not room:
                break
        streams = list[Tensor]()  # after each part's last token
        if any(task.prompt_ranking for task in tasks):
            every = self.model.extend(parts, every=True).split([len(part.tokens) for part in parts])
            self._rank(tasks, parts, every)
            streams = [own[-1] for own in every]
        elif parts:
            streams = list(self.model.extend(parts))
        for task, part in zip(tasks, parts, strict=True):
            task.held += len(part.tokens)
            known = task.row.tokens[:-1][: task.held]  # a step may write the last one's keys again
            self.model.pages.filled(known, part.pages)
        last = dict(zip(tasks, streams, strict=True))
        begun = len(self.rows)
        for task in [task for task in self.entering if task.held == task.prefilled]:
            self.entering.remove(task)
            if task.continuations:
                self.scoring.append(task)
            elif task.stop.room and task.error is None:
                self._begin(task)
            else:
                self.end(task)
            if task.done:
                changed.append(task)
        if rows := self.rows[begun:]:
            hidden = torch.stack([last[task] for task in rows])
            self.step.first(slice(begun, len(self.rows)), hidden, _wanted(rows))
            self._record(begun, changed)

    @torch.no_grad()
    def _rank(self, tasks: Sequence[AnyTask], parts: Sequence[Part], streams: Sequence[Tensor]) -> None:
        """Keep the likeliest tokens at the places of prompts that ask for them; streams are after each token."""
        for task, part, own in zip(tasks, parts, streams, strict=True):
            if not task.prompt_ranking:
                continue
            following = task.row.tokens[part.held + 1 :][: len(own)]
            tokens = torch.tensor(following, dtype=torch.int64, device=own.device)
            for rows, targets in zip(own[: len(tokens)].split(LOGITS), tokens.split(LOGITS), strict=True):
                logits = self.model.logits(rows, self.step.vocabulary)
                taken, ids = logits.gather(-1, targets[:, None]), torch.arange(logits.shape[-1], device=own.device)
                before = (logits > taken) | ((logits == taken) & (ids < targets[:, None]))
                places = (before.sum(-1) + 1).tolist()
                ranks = [ranked(row) for row in rank(self.model, rows, logits, targets).tolist()]
                task.prompt_ranks += [each._replace(place=place) for each, place in zip(ranks, places, strict=True)]
                if any(isnan(each.taken) for each in ranks):
                    task.error = not_finite(0, task.row.index)

    @torch.no_grad()
    def _score(self, changed: list[AnyTask]) -> None:
        """Run continuations whose prefixes are in pages: one forward, as large as a piece of a prompt or one of them.

        Those that wait take turns, a continuation each. The last token of a prefix begins each of its continuations.
        """
        if not self.scoring:
            return
        room, work = self._room, dict[AnyTask, list[Tensor]]()
        turns = deque((task, islice(task.continuations or (), len(task.scores), None)) for task in self.scoring)
        while turns:
            task, left = turns.popleft()
            if (tokens := next(left, None)) is None:
                continue
            if len(tokens) > room and work:
                self.scoring.rotate(-self.scoring.index(task))
                break
            work.setdefault(task, []).append(tokens)
            room -= len(tokens)
            turns.append((task, left))
        pack = []
        for task, some in work.items():
            prefix = Prefix(self.model.kv, 0, task.held, tuple(task.pages or ()))
            last = torch.tensor(task.row.tokens[-1:], device=self.step.logits.device)
            branches = [torch.cat([last, tokens]) for tokens in some]
            pack.append((prefix, [shared_prefix.Branches(task.held, branches, 1)]))
        vocabulary = self.step.vocabulary
        results = shared_prefix.forward(self.model.model, pack, valid_vocab=vocabulary, return_greedy=True)
        for task, (outputs,) in zip(work, results, strict=True):
            task.scores += [(logprob.float().cpu(), greedy.cpu()) for logprob, greedy in outputs]
            if any(bool(logprob.isnan().any()) for logprob, _ in task.scores[-len(outputs) :]):
                task.error = not_finite(0, task.row.index)
            if task.error is not None or len(task.scores) == len(task.continuations or ()):
                self.end(task)
                changed.append(task)
        self._untrimmed += (self._room - room) * vocabulary * self.step.logits.is_cpu
        if self._untrimmed > UNTRIMMED:  # results lie between freed buffers, so that glibc keeps these
            trim()
            self._untrimmed = 0

    def _begin(self, task: AnyTask) -> None:
        assert task.pages is not None
        task.step_row, task.since = len(self.rows), self.step.begun
        self.rows.append(task)
        limit = task.stop.length(task.row) - 1  # it halts before its last token
        try:
            least = task.row.prompt + task.row.least
            self.step.put(task.step_row, task.row.tokens, task.pages, limit, task.threshold, task.draw, least)
            self.step.resume(task.step_row, task.halts)
        except Exception as problem:
            self.fail(task, problem)

    def end(self, task: AnyTask) -> None:
        """End a sequence now and free what it holds; the last row moves into its place."""
        task.done = True
        if task.step_row is None:
            for queue in (self.waiting, self.entering, self.scoring):
                if task in queue:
                    queue.remove(task)
        else:
            step_row, last = task.step_row, self.rows.pop()
            self.step.clear(step_row)
            if last is not task:
                self.step.move(len(self.rows), step_row, len(last.row.tokens))
                self.rows[step_row], last.step_row = last, step_row
            task.step_row = None
        if task.pages is not None:
            self.model.pages.release(task.pages)
            task.pages = None
        task.give_up()

    # --- the step -----------------------------------------------------------------------------------------------------

    def _read_outcomes(self, changed: list[AnyTask]) -> None:
        """Read the outcomes of the oldest step not read yet."""
        number = self.step.begun - self.step.enqueued
        begin, tasks = self._runs.popleft()
        for task, outcome in zip(tasks, self.step.outcomes(len(tasks), begin), strict=True):
            if task.done or task.halted or number < task.since:
                continue
            if outcome.halt == Halt.NAN:
                self.fail(task, not_finite(len(task.row.new), task.row.index))
            elif outcome.halt == Halt.EVENT:
                task.halted = True
                try:
                    self.on_halt(task, outcome.entropy)
                    continue
                except Exception as problem:
                    self.fail(task, problem)
            else:
                self._append(task, outcome.token, outcome.ranked, bool(outcome.halt))
            changed.append(task)

    def _append(self, task: AnyTask, token: int, top: Ranked | None, halted: bool) -> None:
        """Append the step's token, or the one with which a halted row goes on."""
        row = task.row
        row.tokens.append(token)
        if task.ranking and top is not None:
            task.ranks.append(top)
        try:
            ends = task.stop(row)
        except Exception as problem:
            self.fail(task, problem)
            return
        if ends:
            self.end(task)
        elif halted:
            assert task.step_row is not None
            self.step.resume(task.step_row, task.halts, token, len(row.tokens) - 1)
            task.since = self.step.begun

    def resume(self, task: AnyTask, token: int, top: Ranked | None = None) -> None:
        """Append `token` to a halted sequence, and the likeliest ones there; it then runs on or ends."""
        task.halted = False
        task.halts -= 1
        self._append(task, token, top, halted=True)

    def fail(self, task: AnyTask, problem: BaseException) -> None:
        """End a sequence with an error."""
        task.error = problem
        self.end(task)
