"""The fast loop over a pair: events are resolved as answers come; LLM and reranker lie on pages too."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fb_core.decode.asking import Intervention
from fb_core.decode.deployment import Deployed
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import (
    FutureBridgeSelector,
    MergedSelector,
    ScoringSelector,
    Selector,
    State,
    ValueSelector,
)
from fb_core.events import Event, Pool
from fb_core.llm.local import GONE, LLM, LocalLLM
from fb_core.llm.paged_llm import PagedLLM
from fb_core.models import facts as models
from fb_core.models.facts import CausalLM, free_memory, max_positions
from fb_core.models.native import NativeDecoder
from fb_core.models.packed import Prefix
from fb_core.rerank.merged_reranker import MergedReranker
from fb_core.rerank.reranker import TokenReranker
from fb_core.runtime.kv_pages import SIZE, pages_of
from fb_core.runtime.loop import Loop, Task
from fb_core.runtime.paged_model import PagedModel, page_bytes
from fb_core.runtime.step import DecodeStep, rank, ranked

MAX_WAIT_STEPS = 8
"""Steps that an event waits for others, where the LLM is in this process and one forward serves them all."""
POLL_SECONDS = 0.05
"""Seconds that the loop waits for an LLM elsewhere where nothing else is to be done."""
Ask = Callable[[Sequence[State], Tensor], Sequence[Pool] | OSError]


@dataclass(eq=False)
class Asking:
    """An event that waits to be resolved."""

    state: State
    logits: Tensor  # [1, V] the SLM's, of ids that may be chosen
    own: Tensor  # [1, V] those of all
    since: int  # steps run when it halted
    answer: Future[Sequence[Pool] | OSError] | None  # None if the LLM runs in this process
    began: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class PairTask(Task):
    """A sequence of a pair."""

    selector: Selector | None = None  # None for the loop's
    waits: list[float] = field(default_factory=list)  # seconds that each event took
    asking: Asking | None = None

    def give_up(self) -> None:
        """As `Task.give_up`, and let go of the event that waits to be resolved."""
        super().give_up()
        if self.asking is not None and self.asking.answer is not None:
            self.asking.answer.cancel()
        self.asking = None


class PairLoop(Loop[PairTask]):
    """Runs sequences of a pair together; not safe to share between threads.

    Args:
        pair: its SLM has a native decoder.
        policy: its threshold and `top_k` say where a sequence halts.
        rows: maximum number of sequences that run together.
        length: maximum tokens of a sequence.
        memory: bytes for keys and values of the models in this process; None for what `rows` sequences of `length`
            tokens need, but at most half of the free memory.
        prefill: as of `Loop`.

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
        model, llm, selector, self.merged_reranker = over_pages(pair, intervention.selector, length, count)
        super().__init__(
            DecodeStep(model, pair.vocabulary, policy.top_k, pair.ends, rows), prefill, self._request_candidates
        )
        self.paged_llm = llm if isinstance(llm, PagedLLM) else None
        self.intervention = replace(intervention, llm=llm, selector=selector)
        self.stale = False  # set by any thread: what was computed so far is not to be used by later sequences
        elsewhere = llm is not None and not isinstance(llm, LocalLLM)
        self._threads = ThreadPoolExecutor(rows, "fb-ask") if elsewhere and rows > 1 else None
        self._process = os.getpid()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of "buffers", "merged" weights and "graphs"."""
        models = [self.model] if self.paged_llm is None else [self.model, self.paged_llm.paged]
        return {
            "buffers": sum(model.nbytes for model in models),
            "merged": 0 if self.merged_reranker is None else self.merged_reranker.nbytes,
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
        assert self.merged_reranker is not None
        self.merged_reranker.load(reranker)
        assert isinstance(selector, MergedSelector)
        selector.reranker = reranker

    def check(self, task: PairTask) -> None:
        """ValueError for a sequence that can never fit, or with an id that only the SLM has."""
        largest = max(task.row.tokens)
        if self.paged_llm is not None and largest >= (size := models.vocabulary(self.paged_llm.model)):
            raise ValueError(
                f"input_ids: expected ids below {size}, as the large model has, got {largest}; use the models' own "
                "tokenizer"
            )
        super().check(task)

    def submit(self, task: PairTask) -> None:
        """Queue a sequence that `check` lets through."""
        if self.stale:
            self.stale = False
            self.forget()
            if self.merged_reranker is not None:
                self.merged_reranker.load(self.merged_reranker.reranker)
        if not self.busy:
            self.refresh()
            if os.getpid() != self._process:  # a fork: its threads stayed in the parent
                self._threads = None
        super().submit(task)

    def refresh(self) -> None:
        """Read the models again."""
        self.model.refresh()
        if self.merged_reranker is not None:
            self.merged_reranker.refresh()
        if self.paged_llm is not None:
            self.paged_llm.refresh()

    def warm(self) -> None:
        """Make on a GPU what the first sequences would wait for: the graphs of all forwards; nothing may run yet."""
        self.step.warm()
        if self.merged_reranker is not None:
            self.merged_reranker.warm()
        for model in (self.model, *([] if self.paged_llm is None else [self.paged_llm.paged])):
            model.warm()
            if model.graphs.captures:
                torch.cuda.synchronize(model.graphs.device)

    def forget(self) -> None:
        """Share no pages of earlier sequences, so that what comes next has the same bits every time."""
        self.model.pages.forget()
        if self.paged_llm is not None:
            self.paged_llm.weights_changed()

    def clear(self) -> None:
        """End all sequences, also after an interrupt at any point."""
        super().clear()
        if self.paged_llm is not None:
            self.paged_llm.weights_changed()

    def close(self) -> None:
        """End all sequences and the threads that ask the LLM."""
        self.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def tick(self) -> list[PairTask]:
        """As `Loop.tick`, and resolve events."""
        changed = super().tick()
        self._resolve_events(changed)
        return list(dict.fromkeys(changed))

    def _request_candidates(self, task: PairTask, entropy: float) -> None:
        assert task.step_row is not None
        assert task.pages is not None
        tokens = torch.tensor(task.row.tokens, device=self.step.logits.device)
        prefix = Prefix(self.model.kv, 0, len(tokens), tuple(task.pages[: pages_of(len(tokens))]))
        state = State(tokens, len(task.row.new), entropy, prefix)
        own = logits = self.step.logits[task.step_row : task.step_row + 1].to(torch.float32, copy=True)
        if task.row.early:
            logits = own.index_fill(1, self.step.own_ends, -torch.inf)
        answer = None
        if self._threads is not None:
            made = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
            answer = self._threads.submit(_ask_elsewhere, task, self.intervention.pools, [state], logits, made)
        task.asking = Asking(state, logits, own, self.step.begun, answer)

    def _resolve_events(self, changed: list[PairTask]) -> None:
        """Resolve the events that are answered; with the LLM in this process, all of them once enough have gathered."""
        asking = [task for task in self.rows if task.asking is not None]
        if not asking:
            return
        alone = len(asking) == len(self.rows) and not self.entering and not self.scoring  # no other work is left
        if self._threads is None:
            longest = max(self.step.begun - task.asking.since for task in asking if task.asking)
            if alone or 2 * len(asking) >= len(self.rows) or longest >= MAX_WAIT_STEPS:
                pools = self.intervention.pools
                self._resolve(asking, pools if len(asking) > 1 else partial(_ask_for, asking[0], pools), changed)
            return
        answers = [task.asking.answer for task in asking if task.asking and task.asking.answer]
        done, _ = wait(answers, timeout=POLL_SECONDS if alone else 0, return_when=FIRST_COMPLETED)
        for task in asking:
            if task.asking is not None and (answer := task.asking.answer) in done and answer is not None:
                self._resolve([task], lambda *_, answer=answer: answer.result(), changed)

    def _resolve(self, tasks: Sequence[PairTask], ask: Ask, changed: list[PairTask]) -> None:
        """Resolve events with the pools from `ask`; an error of one ends only its sequence."""
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
                self.fail(tasks[0], problem)
                changed += tasks
            return
        changed += tasks
        for task, event, each in zip(tasks, events, asking, strict=True):
            task.asking = None
            task.row.events.append(event)
            task.waits.append(time.perf_counter() - each.began)
            top = None
            if task.ranking:
                token, row = torch.tensor([event.token], device=each.logits.device), task.step_row
                top = ranked(rank(self.model, self.step.hidden[row, None], each.own, token, task.given)[0].tolist())
            self.resume(task, event.token, top)

    def _events(
        self, tasks: Sequence[PairTask], states: Sequence[State], logits: Tensor, pools: Sequence[Pool] | OSError
    ) -> list[Event]:
        """The tasks' events, each by its own selector."""
        made: dict[int, Event] = {}
        for selector in {id(task.selector): task.selector for task in tasks}.values():
            indices = [index for index, task in enumerate(tasks) if task.selector is selector]
            own = self.intervention if selector is None else replace(self.intervention, selector=selector)
            some = pools if isinstance(pools, OSError) else [pools[index] for index in indices]
            made.update(zip(indices, own.events([states[p] for p in indices], logits[indices], some), strict=True))
        return [made[index] for index in range(len(tasks))]


def _ask_for(task: PairTask, ask: Ask, states: Sequence[State], logits: Tensor) -> Sequence[Pool] | OSError:
    """What `ask` answers; an LLM elsewhere may give up once the sequence is gone."""
    before = GONE.set(task.gone)
    try:
        return ask(states, logits)
    finally:
        GONE.reset(before)


def _ask_elsewhere(
    task: PairTask, ask: Ask, states: Sequence[State], logits: Tensor, made: torch.cuda.Event | None
) -> Sequence[Pool] | OSError:
    """`_ask_for` in another thread, which has a stream of its own.

    On a GPU, states and logits are complete after `made`; the pools are when this returns.
    """
    if made is None:
        return _ask_for(task, ask, states, logits)
    stream = torch.cuda.current_stream(logits.device)
    stream.wait_event(made)
    pools = _ask_for(task, ask, states, logits)
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
            merged.append(on_pages.merged_reranker)
            return on_pages
        return selector

    selector = None if selector is None else over(selector)
    return model, llm, selector, merged[0] if merged else None


def has_native(name: str, model: CausalLM) -> bool:
    """Whether a model can run over pages; warns if not."""
    if NativeDecoder.of(model) is not None:
        return True
    warnings.warn(
        f"{name}: {type(model).__name__} has no native decoder and runs as in CollaborativeDecoder", stacklevel=3
    )
    return False


def check_own(policy: RequestPolicy) -> None:
    """Refuse a policy that the device cannot apply."""
    for method in ("asks", "entropy"):
        if getattr(type(policy), method) is not getattr(RequestPolicy, method):
            raise ValueError(
                f"policy: expected RequestPolicy's own {method}, as the device has it, got {type(policy).__name__} "
                "with another; use CollaborativeDecoder"
            )
