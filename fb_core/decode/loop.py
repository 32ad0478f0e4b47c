"""The fast loop of decoding: sequences enter, run together, each halts for its own events, and leave."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import isnan
from typing import cast

import torch
from torch import Tensor

from fb_core.decode.asking import Intervention
from fb_core.decode.deployment import Deployed
from fb_core.decode.merged_reranker import MergedReranker, MergedSelector
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy, not_finite
from fb_core.decode.selectors import FutureBridgeSelector, ScoringSelector, Selector, State, ValueSelector
from fb_core.events import Event, Pool
from fb_core.llm.local import GONE, LLM, LocalLLM
from fb_core.llm.paged_llm import PagedLLM
from fb_core.models import facts as models
from fb_core.models.facts import CausalLM, free_memory, max_positions
from fb_core.models.native import NativeDecoder, trim
from fb_core.models.packed import Prefix
from fb_core.rerank.reranker import TokenReranker
from fb_core.runtime.kv_pages import SIZE, pages_of
from fb_core.runtime.paged_model import CHUNK, PagedModel, Part, page_bytes
from fb_core.runtime.plain import Running, Stop
from fb_core.runtime.sampling import GREEDY, Draw
from fb_core.runtime.step import DecodeStep, Ranked, rank, ranked
from fb_core.score import shared_prefix
from fb_kernels import Halt

MAX_WAIT_STEPS = 8
"""Steps that an event waits for others, where the LLM is in this process and one forward serves them all."""
POLL_SECONDS = 0.05
"""Seconds that the loop waits for an LLM elsewhere where nothing else is to be done."""
LONGEST = 4 * CHUNK
"""Tokens of a continuation that is scored, which is one forward."""
UNTRIMMED = 1 << 28
"""Logits that are computed on a CPU before freed memory goes back to the system."""
LOGITS = 64
"""Rows of a prompt whose logits are computed at once."""
Ask = Callable[[Sequence[State], Tensor], Sequence[Pool] | OSError]


@dataclass(eq=False)
class Asking:
    """An event that waits to be served."""

    state: State
    logits: Tensor  # [1, V] the SLM's
    since: int  # steps run when it halted
    answer: Future[Sequence[Pool] | OSError] | None  # None if the LLM runs in this process
    began: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class Task:
    """A sequence to be continued, and its state."""

    row: Running  # prompt and new tokens
    stop: Stop  # when it ends
    threshold: float  # nats
    max_events: int
    ranking: bool = False  # whether the likeliest tokens at each place are recorded
    selector: Selector | None = None  # None for the loop's
    draw: Draw = GREEDY
    prompt_ranking: bool = False  # the same at each place of the prompt
    continuations: Sequence[Tensor] | None = None  # [R] each, scored instead of new tokens
    prompt_ranks: list[Ranked] = field(default_factory=list)  # of the prompt's tokens from the second on
    ranks: list[Ranked] = field(default_factory=list)  # of the new tokens, if they are recorded
    scores: list[tuple[Tensor, ...]] = field(default_factory=list)  # (log-probs, whether likeliest) of continuations
    waits: list[float] = field(default_factory=list)  # seconds that each event took
    error: BaseException | None = None
    gone: Future[None] = field(default_factory=Future)  # cancelled once nobody waits for it, by any thread
    done: bool = False
    pages: list[int] | None = None  # None until it is admitted
    held: int = 0  # tokens whose keys and values are in its pages
    step_row: int | None = None  # its row of the step; None until its prompt is prefilled
    since: int = 0  # outcomes of earlier steps are not for this sequence
    asking: Asking | None = None

    def give_up(self) -> None:
        """Let go of the event that waits to be served."""
        self.gone.cancel()
        if self.asking is not None and self.asking.answer is not None:
            self.asking.answer.cancel()
        self.asking = None


class Loop:
    """Runs sequences together; not safe to share between threads.

    Args:
        pair: its SLM has a native decoder.
        policy: when the device halts for an event; gives `top_k` and `ask`.
        rows: maximum number of sequences that run together.
        length: maximum tokens of a sequence.
        memory: bytes for keys and values of the models in this process; None for what `rows` sequences of `length`
            tokens need, but at most half of the free memory.
        prefill: prompt tokens that are prefilled between two steps while others run.

    Raises:
        ValueError: a policy that the device cannot follow.
    """

    def __init__(
        self,
        pair: Pair,
        intervention: Intervention,
        policy: RequestPolicy,
        *,
        rows: int,
        length: int,
        memory: int | None = None,
        prefill: int,
    ) -> None:
        check_own(policy)
        length = min(length, max_positions(pair.slm) or length)
        count = _pages(pair, rows, length, memory)
        self.model, llm, selector, self.merged = over_pages(pair, intervention.selector, length, count)
        self.large = llm if isinstance(llm, PagedLLM) else None
        self.intervention = replace(intervention, llm=llm, selector=selector)
        self.step = DecodeStep(self.model, pair.vocabulary, policy.top_k, pair.ends, rows)
        self.prefill = prefill
        self.stale = False  # set by any thread: what was computed so far is not to be used by later sequences
        self.waiting: deque[Task] = deque()
        self.entering: deque[Task] = deque()  # they have pages, and their prompts are being prefilled
        self.scoring: deque[Task] = deque()  # their prompts are complete, and continuations are left
        self.rows: list[Task] = []  # the step's rows, in order
        self._runs: deque[list[Task]] = deque()  # the rows of each step whose outcome was not read yet
        elsewhere = llm is not None and not isinstance(llm, LocalLLM)
        self._threads = ThreadPoolExecutor(rows, "fb-ask") if elsewhere and rows > 1 else None
        self._process = os.getpid()
        self._untrimmed = 0  # logits on a CPU since memory was given back

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of "buffers", "merged" weights and "graphs"."""
        models = [self.model] if self.large is None else [self.model, self.large.paged]
        return {
            "buffers": sum(model.nbytes for model in models),
            "merged": 0 if self.merged is None else self.merged.nbytes,
            "graphs": sum(model.graphs.nbytes for model in models),
        }

    def load_adapter(self, directory: str | os.PathLike[str]) -> None:
        """Replace the merged reranker; raises as `CollaborativeDecoder.load_adapter`."""
        selector = self.intervention.selector
        deployed = Deployed.load(directory)
        if isinstance(selector, ValueSelector) or (deployed is not None and deployed.name != "published"):
            raise ValueError(
                "load_adapter: expected the recipe published before and after, got another; make a decoder with "
                "deployment_of"
            )
        reranker = TokenReranker.from_pretrained(directory, self.model.model).eval()
        assert self.merged is not None
        self.merged.load(reranker)
        assert isinstance(selector, MergedSelector)
        selector.reranker = reranker

    def check(self, task: Task) -> None:
        """ValueError for a sequence that can never fit, or with an id that only the SLM has."""
        largest = max(task.row.tokens)
        if self.large is not None and largest >= (size := models.vocabulary(self.large.model)):
            raise ValueError(
                f"input_ids: expected ids below {size}, as the large model has, got {largest}; use the models' own "
                "tokenizer"
            )
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

    def submit(self, task: Task) -> None:
        """Queue a sequence that `check` lets through; each `tick` then advances it."""
        if self.stale:
            self.stale = False
            self.forget()
            if self.merged is not None:
                self.merged.load(self.merged.reranker)
        if not self.busy:
            self.refresh()
            if os.getpid() != self._process:  # a fork: its threads stayed in the parent
                self._threads = None
        self.waiting.append(task)

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.waiting or self.entering or self.scoring or self.rows)

    def refresh(self) -> None:
        """Read the models again."""
        self.model.refresh()
        if self.merged is not None:
            self.merged.refresh()
        if self.large is not None:
            self.large.refresh()

    def warm(self) -> None:
        """Make on a GPU what the first sequences would wait for: the graphs of all forwards; nothing may run yet."""
        self.step.warm()
        if self.merged is not None:
            self.merged.warm()
        for model in (self.model, *([] if self.large is None else [self.large.paged])):
            model.warm()
            if model.graphs.captures:
                torch.cuda.synchronize(model.graphs.device)

    def forget(self) -> None:
        """Share no pages of earlier sequences, so that what comes next has the same bits every time."""
        self.model.pages.forget()
        if self.large is not None:
            self.large.weights_changed()

    def clear(self) -> None:
        """End all sequences, also after an interrupt at any point."""
        for task in (*self.waiting, *self.entering, *self.scoring, *self.rows):
            task.done, task.step_row, task.pages = True, None, None
            task.give_up()
        for queue in (self.waiting, self.entering, self.scoring, self.rows, self._runs):
            queue.clear()
        self.step.reset()
        self.model.pages.release()
        if self.large is not None:
            self.large.weights_changed()

    def close(self) -> None:
        """End all sequences and the threads that ask the LLM."""
        self.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def tick(self) -> list[Task]:
        """Admit, prefill a piece, score, run a step, serve events; returns what got a token or ended."""
        changed: list[Task] = []
        self.step.order()
        self._admit()
        self._enter(changed)
        self._score(changed)
        if any(task.asking is None for task in self.rows):
            sampled = any(task.draw.temperature > 0 for task in self.rows)
            self.step.run(len(self.rows), any(task.ranking for task in self.rows), sampled)
            self._runs.append(list(self.rows))
            while self.step.enqueued > self.step.ahead:
                self._look(changed)
        self._serve(changed)
        return changed

    # --- in and out ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting sequences in order while rows and pages last; one whose next page another computes waits."""
        for task in list(islice(self.waiting, self.step.rows)):  # so that a tick does not read all that wait
            if len(self.rows) + len(self.entering) >= self.step.rows:
                return
            known = [] if task.prompt_ranking else task.row.tokens  # what is shared is not computed, nor ranked
            if self.model.pages.comes(known, (other.row.tokens for other in self.entering)):
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

    def _enter(self, changed: list[Task]) -> None:
        """Prefill a piece of the prompts; a sequence whose prompt is complete becomes a row, is scored, or ends.

        Half of a piece is for prompts that it completes, in the order of arrival; longer ones have the rest.
        """
        if not self.entering:
            return
        room, parts, tasks = self._room, [], []
        short, half = list[Task](), room // 2
        for task in self.entering:
            if (left := len(task.row.tokens) - 1 - task.held) <= half:
                short.append(task)
                half -= left
        for task in [*short, *(task for task in self.entering if task not in short)]:
            wanted = task.row.tokens[task.held : -1][:room]
            if wanted:
                assert task.pages is not None
                parts.append(Part(wanted, task.held, task.pages))
                tasks.append(task)
                room -= len(wanted)
            if not room:
                break
        if any(task.prompt_ranking for task in tasks):
            self._rank(tasks, parts, self.model.extend(parts, every=True))
        elif parts:
            self.model.extend(parts)
        for task, part in zip(tasks, parts, strict=True):
            task.held += len(part.tokens)
            self.model.pages.filled(task.row.tokens[: task.held], part.pages)
        for task in [task for task in self.entering if task.held == len(task.row.tokens) - 1]:
            self.entering.remove(task)
            if task.continuations:
                self.scoring.append(task)
            elif task.stop.room and task.error is None:
                self._begin(task)
            else:
                self.end(task)
            if task.done:
                changed.append(task)

    @torch.no_grad()
    def _rank(self, tasks: Sequence[Task], parts: Sequence[Part], streams: Tensor) -> None:
        """Keep the likeliest tokens at the places of prompts that ask for them; streams are after the parts' tokens."""
        for task, part, own in zip(tasks, parts, streams.split([len(part.tokens) for part in parts]), strict=True):
            if not task.prompt_ranking:
                continue
            tokens = torch.tensor(task.row.tokens[part.held + 1 :][: len(own)], device=own.device)
            for rows, targets in zip(own.split(LOGITS), tokens.split(LOGITS), strict=True):
                logits = self.model.logits(rows, self.step.vocabulary)
                taken, ids = logits.gather(-1, targets[:, None]), torch.arange(logits.shape[-1], device=own.device)
                before = (logits > taken) | ((logits == taken) & (ids < targets[:, None]))
                places = (before.sum(-1) + 1).tolist()
                ranks = [ranked(row) for row in rank(logits, targets).tolist()]
                task.prompt_ranks += [each._replace(place=place) for each, place in zip(ranks, places, strict=True)]
                if any(isnan(each.taken) for each in ranks):
                    task.error = not_finite(0, task.row.index)

    @torch.no_grad()
    def _score(self, changed: list[Task]) -> None:
        """Run continuations whose prefixes are in pages: one forward, as large as a piece of a prompt or one of them.

        Those that wait take turns, a continuation each. The last token of a prefix begins each of its continuations.
        """
        if not self.scoring:
            return
        room, work = self._room, dict[Task, list[Tensor]]()
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

    def _begin(self, task: Task) -> None:
        assert task.pages is not None
        task.step_row, task.since = len(self.rows), self.step.begun
        self.rows.append(task)
        limit = task.stop.length(task.row) - 1  # it halts before its last token
        try:
            self.step.put(task.step_row, task.row.tokens, task.pages, limit, task.threshold, task.draw)
            self.step.go_on(task.step_row, task.max_events)
        except Exception as problem:
            self._fail(task, problem)

    def end(self, task: Task) -> None:
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
            self.model.pages.give_back(task.pages)
            task.pages = None
        task.give_up()

    # --- the step -----------------------------------------------------------------------------------------------------

    def _look(self, changed: list[Task]) -> None:
        """Read the outcomes of the oldest step not read yet."""
        number = self.step.begun - self.step.enqueued
        tasks = self._runs.popleft()
        for task, outcome in zip(tasks, self.step.outcomes(len(tasks)), strict=True):
            if task.done or task.asking is not None or number < task.since:
                continue
            if outcome.halt == Halt.NAN:
                self._fail(task, not_finite(len(task.row.new), task.row.index))
            elif outcome.halt == Halt.EVENT:
                try:
                    self._ask(task, outcome.entropy)
                    continue
                except Exception as problem:
                    self._fail(task, problem)
            else:
                self._append(task, outcome.token, outcome.ranked, bool(outcome.halt))
            changed.append(task)

    def _append(self, task: Task, token: int, top: Ranked | None, halted: bool) -> None:
        """Append the step's token, or the one with which a halted row goes on."""
        row = task.row
        row.tokens.append(token)
        if task.ranking and top is not None:
            task.ranks.append(top)
        try:
            ends = task.stop(row)
        except Exception as problem:
            self._fail(task, problem)
            return
        if ends:
            self.end(task)
        elif halted:
            assert task.step_row is not None
            self.step.go_on(task.step_row, task.max_events - len(row.events), token, len(row.tokens) - 1)
            task.since = self.step.begun

    def _fail(self, task: Task, problem: BaseException) -> None:
        task.error = problem
        self.end(task)

    # --- events -------------------------------------------------------------------------------------------------------

    def _ask(self, task: Task, entropy: float) -> None:
        assert task.step_row is not None
        assert task.pages is not None
        tokens = torch.tensor(task.row.tokens, device=self.step.logits.device)
        prefix = Prefix(self.model.kv, 0, len(tokens), tuple(task.pages[: pages_of(len(tokens))]))
        state = State(tokens, len(task.row.new), entropy, prefix)
        logits = self.step.logits[task.step_row : task.step_row + 1].to(torch.float32, copy=True)
        answer = None
        if self._threads is not None:
            made = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
            answer = self._threads.submit(_asked_elsewhere, task, self.intervention.pools, [state], logits, made)
        task.asking = Asking(state, logits, self.step.begun, answer)

    def _serve(self, changed: list[Task]) -> None:
        """Serve the events that are answered; with the LLM in this process, all of them once enough have gathered."""
        asking = [task for task in self.rows if task.asking is not None]
        if not asking:
            return
        alone = len(asking) == len(self.rows) and not self.entering and not self.scoring  # no other work is left
        if self._threads is None:
            longest = max(self.step.begun - task.asking.since for task in asking if task.asking)
            if alone or 2 * len(asking) >= len(self.rows) or longest >= MAX_WAIT_STEPS:
                pools = self.intervention.pools
                self._resolve(asking, pools if len(asking) > 1 else partial(_asked_for, asking[0], pools), changed)
            return
        answers = [task.asking.answer for task in asking if task.asking and task.asking.answer]
        done, _ = wait(answers, timeout=POLL_SECONDS if alone else 0, return_when=FIRST_COMPLETED)
        for task in asking:
            if task.asking is not None and (answer := task.asking.answer) in done and answer is not None:
                self._resolve([task], lambda *_, answer=answer: answer.result(), changed)

    def _resolve(self, tasks: Sequence[Task], ask: Ask, changed: list[Task]) -> None:
        """Serve events with the pools from `ask`; an error of one ends only its sequence."""
        asking = [task.asking for task in tasks if task.asking is not None]
        states, logits = [each.state for each in asking], torch.cat([each.logits for each in asking])
        try:
            events = self._events(tasks, states, logits, ask(states, logits))
        except KeyboardInterrupt:
            raise
        except BaseException as problem:
            if len(tasks) > 1:
                for task in tasks:
                    self._resolve([task], ask, changed)
            else:
                self._fail(tasks[0], problem)
                changed += tasks
            return
        changed += tasks
        for task, event, each in zip(tasks, events, asking, strict=True):
            task.asking = None
            task.row.events.append(event)
            task.waits.append(time.perf_counter() - each.began)
            top = None
            if task.ranking:
                token = torch.tensor(event.token, device=each.logits.device)
                top = ranked(rank(each.logits[0], token).tolist())
            self._append(task, event.token, top, halted=True)

    def _events(
        self, tasks: Sequence[Task], states: Sequence[State], logits: Tensor, pools: Sequence[Pool] | OSError
    ) -> list[Event]:
        """The tasks' events, each by its own selector."""
        made: dict[int, Event] = {}
        for selector in {id(task.selector): task.selector for task in tasks}.values():
            indices = [index for index, task in enumerate(tasks) if task.selector is selector]
            own = self.intervention if selector is None else replace(self.intervention, selector=selector)
            some = pools if isinstance(pools, OSError) else [pools[index] for index in indices]
            made.update(zip(indices, own.events([states[p] for p in indices], logits[indices], some), strict=True))
        return [made[index] for index in range(len(tasks))]


def _asked_for(task: Task, ask: Ask, states: Sequence[State], logits: Tensor) -> Sequence[Pool] | OSError:
    """What `ask` answers; an LLM elsewhere may give up once the sequence is gone."""
    before = GONE.set(task.gone)
    try:
        return ask(states, logits)
    finally:
        GONE.reset(before)


def _asked_elsewhere(
    task: Task, ask: Ask, states: Sequence[State], logits: Tensor, made: torch.cuda.Event | None
) -> Sequence[Pool] | OSError:
    """`_asked_for` in another thread, which has a stream of its own.

    On a GPU, states and logits are complete after `made`; the pools are when this returns.
    """
    if made is None:
        return _asked_for(task, ask, states, logits)
    stream = torch.cuda.current_stream(logits.device)
    stream.wait_event(made)
    pools = _asked_for(task, ask, states, logits)
    stream.synchronize()
    return pools


def _pages(pair: Pair, rows: int, length: int, memory: int | None) -> int:
    """How many pages each model gets; ValueError for more than the device holds, or memory for less than one."""
    there = free_memory(pair.slm.device, whole=True)
    row = 12 * (length + SIZE) + pair.vocabulary * pair.slm.dtype.itemsize  # of a step: tokens, slots, logits
    if rows > (most := min(there // row, (1 << 31) // (pages_of(length) * SIZE))):  # 32 bits number the slots
        raise ValueError(
            f"max_batch: expected at most {most} sequences of {length} tokens in {there} bytes of memory, got {rows}; "
            "take fewer, or a smaller max_length"
        )
    models = [pair.slm, *([pair.llm.model] if type(pair.llm) is LocalLLM else [])]
    wanted, each = rows * pages_of(length), sum(map(page_bytes, models))
    count = min(wanted, (free_memory(pair.slm.device) // 2 if memory is None else memory) // each)
    if count < 1:
        raise ValueError(
            f"kv_memory: expected {each} bytes or more, a page of {SIZE} tokens, got {memory}; give more memory"
        )
    if count * each > there:
        raise ValueError(f"kv_memory: expected at most the {there} bytes of the device, got {memory}; leave it out")
    return count


def over_pages(
    pair: Pair, selector: Selector | None, length: int, count: int
) -> tuple[PagedModel, LLM | None, Selector | None, MergedReranker | None]:
    """(the SLM, the LLM, the selector, its reranker), over `count` pages of each model where possible.

    A reranker of scope "candidate" runs with merged weights; a sequence has at most `length` tokens.
    """
    model, llm = PagedModel(pair.slm, length, count), pair.llm
    if type(llm) is LocalLLM and has_native("llm", llm.model):
        llm = PagedLLM(llm.model, length, count, valid_vocab=llm.vocabulary, tokenizer=llm.tokenizer)
    merged: list[MergedReranker] = []

    def over(selector: Selector) -> Selector:
        if type(selector) is ValueSelector:
            return ValueSelector(cast("ScoringSelector", over(selector.selector)), selector.head)
        if type(selector) is FutureBridgeSelector and selector.reranker.scope == "candidate":
            on_pages = MergedSelector(selector.reranker, model)
            merged.append(on_pages.merged)
            return on_pages
        return selector

    selector = None if selector is None else over(selector)
    return model, llm, selector, merged[0] if merged else None


def has_native(name: str, model: CausalLM) -> bool:
    """Whether a model can run over pages; warns if not."""
    if NativeDecoder.of(model) is not None:
        return True
    warnings.warn(
        f"{name}: {type(model).__name__} has no native decoder and runs as in CollaborativeDecoder", stacklevel=4
    )
    return False


def check_own(policy: RequestPolicy) -> None:
    """Refuse a policy that the device cannot apply."""
    for method in ("asks", "entropy"):
        if getattr(type(policy), method) is not getattr(RequestPolicy, method):
            raise ValueError(
                f"policy: expected RequestPolicy's own {method}, as the device has it, got {type(policy).__name__} "
                "with another; use CollaborativeDecoder without max_length"
            )
