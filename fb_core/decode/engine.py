"""Continuous batching: sequences are submitted at any time, run together, and end independently."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fb_core._util import check_count
from fb_core.decode.decoder import MAX_LENGTH, Generation, LowLatencyDecoder
from fb_core.decode.loop import PairTask
from fb_core.decode.one_by_one import OneByOne
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import Selector
from fb_core.events import Event
from fb_core.models.facts import max_positions
from fb_core.models.tokens import check_max_new_tokens, checked_prompts, id_list, token_ids
from fb_core.runtime.plain import Running, Stop
from fb_core.runtime.sampling import GREEDY, Sampling, check_sampling, occurrences
from fb_core.runtime.step import Ranked
from fb_core.score import shared_prefix
from fb_kernels.env import release_threads


class Token(NamedTuple):
    """A token as it was appended, and its event if it is the token of one."""

    id: int
    event: Event | None
    seconds: float | None = None  # that the event took; None if unknown
    ranked: Ranked | None = None  # the SLM's likeliest tokens there, and its own log-prob; None if not requested


class Load(NamedTuple):
    """The current load of an engine."""

    waiting: int  # sequences
    running: int
    asking: int  # of these wait for the LLM
    pages: int  # taken
    all_pages: int


Listener = Callable[[Token | None], object]
"""Called by the engine's thread with each token, and with None at the end; it must return at once."""
Scores: TypeAlias = list[tuple[Tensor, ...]]
"""Of each continuation: log-probs float32 [R] and whether each token is the likeliest, bool [R], on the CPU."""
Result = TypeVar("Result", Generation, Scores)


class Handle(Generic[Result]):
    """A sequence, or continuations to be scored, that were submitted.

    Attributes:
        prompt_ranks: of each token of the prompt but the first, the SLM's likeliest tokens there; complete once a token
            has come or it has ended, and empty without `prompt_ranking`.
    """

    def __init__(self, state: _State, task: PairTask, listener: Listener | None) -> None:
        self._state = state
        self._task = task
        self._heard = 0  # tokens that the listener has got
        self._tokens: SimpleQueue[Token | None] = SimpleQueue()
        self._listener = self._tokens.put if listener is None else listener
        self._result: Future[Result] = Future()
        self.prompt_ranks = task.prompt_ranks

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._result.done()

    def result(self, timeout: float | None = None) -> Result:
        """Wait, for at most `timeout` seconds if given, for the sequence to end; its generation, or the scores.

        Raises:
            TimeoutError: it is still running.
            CancelledError: it was cancelled.
            Exception: what ended it: NaN logits (ValueError), an LLM that did not answer (OSError), a selector's error.
        """
        if not self.done:
            self._state.check_process()
        return self._result.result(timeout)

    def __iter__(self) -> Iterator[Token]:
        """Its tokens as they come, once, unless a listener gets them; at the end raises the error, if there was one."""
        if not self.done:
            self._state.check_process()
        while (token := self._tokens.get()) is not None:
            yield token
        if not self._result.cancelled():
            self._result.result()

    def cancel(self) -> None:
        """End it as it is and free its resources."""
        self._state.leave(self)

    def _tell(self) -> bool:
        """Tell the listener what is new (engine thread); False if the listener failed, which ends the handle."""
        task, row = self._task, self._task.row
        events = {event.step: event for event in row.events}
        waits = dict(zip(events, task.waits, strict=False))  # the plain loop does not measure them
        try:
            for step, token in enumerate(row.tokens[row.prompt + self._heard :], self._heard):
                ranked = task.ranks[step] if task.ranking else None
                self._listener(Token(token, events.get(step), waits.get(step), ranked))
        except BaseException as problem:  # an asyncio.CancelledError, for one
            self._end(problem)
            return False
        self._heard = len(row.tokens) - row.prompt
        return True

    def _end(self, outcome: Any) -> None:
        """Set the result, once; a failure of the listener is ignored here."""
        if self._result.done():
            return
        if isinstance(outcome, CancelledError):
            self._result.cancel()
        elif isinstance(outcome, BaseException):
            self._result.set_exception(outcome)
        else:
            self._result.set_result(outcome)
        with suppress(BaseException):
            self._listener(None)


class Engine:
    """Continuous batching over a pair: sequences enter and leave while others run.

    The result of a sequence does not depend on the others (except at near ties in low precision). Prompts are prefilled
    in pieces between steps; full pages that prompts have in common are computed once. A sequence that waits for the LLM
    does not hold up the others. If pages run short, sequences wait for their turn; none is dropped.

    Safe to share between threads: the engine computes in one thread of its own. Selector, policy, `kv_memory` and
    errors are as of a `CollaborativeDecoder`.

    Args:
        pair: SLM, LLM and tokenizer. If the SLM has no native decoder, sequences run one after another in the plain
            loop, with a warning.
        max_batch: sequences that run together.
        max_length: maximum tokens of a sequence, prompt included.
        options: more options of `CollaborativeDecoder`: pool, slm_k, llm_k, max_events, prefill_tokens, on_llm_error.
    """

    def __init__(
        self,
        pair: Pair,
        selector: Selector | None,
        policy: RequestPolicy,
        *,
        max_batch: int = 32,
        max_length: int = MAX_LENGTH,
        kv_memory: int | None = None,
        **options: Any,
    ) -> None:
        self.decoder = LowLatencyDecoder(
            pair.slm,
            pair.llm,
            selector,
            policy,
            tokenizer=pair.tokenizer,
            max_batch=max_batch,
            max_length=max_length,
            kv_memory=kv_memory,
            **options,
        )
        self._state = _State(self.decoder)
        self._thread = threading.Thread(
            target=_work, args=(self._state, torch.get_num_threads()), name="fb-engine", daemon=True
        )
        self._closing = weakref.finalize(self, _close, self._state, self._thread)
        release_threads()
        self._thread.start()

    def submit(
        self,
        input_ids: Tensor | Sequence[int],
        max_new_tokens: int = 4096,
        *,
        threshold: float | None = None,
        max_events: int | None = None,
        selector: Selector | None = None,
        ranking: bool | Sequence[int] = False,
        listener: Listener | None = None,
        sampling: Sampling | None = None,
        sample: int = 0,
        prompt_ranking: bool = False,
        ignore_ends: bool = False,
        min_new_tokens: int = 0,
    ) -> Handle[Generation]:
        """Submit a prompt; it runs now or as soon as there is room.

        Args:
            input_ids: [P] int64 on the SLM's device, at least one.
            max_new_tokens: maximum tokens to generate; the model's positions are a limit too.
            threshold: nats, for this sequence; None for the policy's.
            max_events: for this sequence, at most the engine's; None for the engine's.
            selector: for this sequence; None for the engine's.
            ranking: whether each token comes with the SLM's likeliest tokens at its place, and with its own log-prob;
                or the ids whose log-probs come in place of the likeliest ones.
            listener: called with the tokens, which iterating over the handle then does not give.
            sampling: how the SLM's own tokens are drawn, as of `CollaborativeDecoder.generate`; None for greedy ones.
            sample: index among the samples of this prompt.
            prompt_ranking: whether the likeliest tokens at each place of the prompt are in the handle's `prompt_ranks`;
                such a prompt is computed whole, and `max_new_tokens` may be 0.
            ignore_ends: whether the tokens that end a generation end nothing.
            min_new_tokens: tokens before which none that ends a generation is chosen, as if the models gave it no
                probability; for a pool of both models' candidates, or where no large model is asked.

        Raises:
            TypeError: ids that are not integers, a selector that is not a `Selector`, or sampling of another type.
            ValueError: as `CollaborativeDecoder.generate`, a sequence that the pages can never hold, more events than
                the engine's, or `ranking` or `prompt_ranking` without a native decoder.
            RuntimeError: a closed engine, or a fork of the process that made it.
        """
        decoder = self.decoder
        max_new_tokens = check_max_new_tokens(max_new_tokens, 0 if prompt_ranking else 1)
        sample = check_count("sample", sample, 0)
        (ids,) = checked_prompts("input_ids", [input_ids], decoder.slm, room=min(1, max_new_tokens))
        if prompt_ranking:
            token_ids("input_ids", ids, decoder.slm, decoder.vocabulary)
        events = decoder.max_events if max_events is None else check_count("max_events", max_events, 0)
        if events > decoder.max_events:
            raise ValueError(
                f"max_events: expected at most the engine's {decoder.max_events}, got {events}; make it with more"
            )
        ends = frozenset[int]() if ignore_ends else decoder.pair.ends
        stop = Stop(ends, max_new_tokens, max_positions(decoder.slm))
        policy = decoder.policy if threshold is None else replace(decoder.policy, threshold=threshold)
        if selector is not None:
            if not isinstance(selector, Selector):
                raise TypeError(f"selector: expected type Selector, got {type(selector).__name__}; leave it out")
            selector.check_slm(decoder.slm)
        tokens = ids.tolist()
        draw = GREEDY
        if sampling is not None:
            check_sampling(sampling)
            draw = sampling.draw(tokens, sample)
        least = check_count("min_new_tokens", min_new_tokens, 0)
        if least > max_new_tokens:
            raise ValueError(
                f"min_new_tokens: expected at most the max_new_tokens {max_new_tokens}, got {least}; ask for fewer"
            )
        if least and events and decoder.intervention.pool == "llm":
            raise ValueError('min_new_tokens: expected 0 with the pool "llm", got more; use the pool "joint"')
        row = Running(0, tokens, len(ids), least=0 if ignore_ends else least)
        wanted = None if isinstance(ranking, bool) else id_list("ranking_ids", ranking, decoder.vocabulary)
        asked = wanted is not None or bool(ranking)
        task = PairTask(row, stop, policy.threshold, events, asked, wanted, draw, prompt_ranking, selector=selector)
        self._state.loop.check(task)
        handle: Handle[Generation] = Handle(self._state, task, listener)
        self._state.enter(handle)
        return handle

    def score(
        self, prefix: shared_prefix.Ids, continuations: Sequence[shared_prefix.Ids], *, listener: Listener | None = None
    ) -> Handle[Scores]:
        """Submit continuations of a prefix to be scored, beside the sequences that run.

        The prefix is computed once, and its full pages are those of any sequence that begins as it does. Continuations
        run behind it, as many between two steps as prompt tokens would.

        Args:
            prefix: [P] token ids, at least one.
            continuations: K sequences [R_k] of token ids, of any lengths.
            listener: called with None at the end.

        Returns:
            a handle whose result is that of `CompatibilityScorer.logprobs` with `return_greedy`, on the CPU.

        Raises:
            TypeError: ids that are not integers.
            ValueError: an empty prefix, an id outside the vocabulary or in its padding, the wrong device, or what can
                never fit.
            RuntimeError: as `submit`.
        """
        decoder = self.decoder
        ((tokens, branches),) = shared_prefix.checked(decoder.slm, [(prefix, continuations)], decoder.vocabulary)
        self._state.loop.check_scores(len(tokens), max(map(len, branches.continuations), default=0))
        row, stop = Running(0, tokens.tolist(), len(tokens)), Stop(frozenset(), 0, None)
        task = PairTask(row, stop, 0.0, 0, continuations=branches.continuations)
        handle: Handle[Scores] = Handle(self._state, task, listener)
        self._state.enter(handle)
        return handle

    def stream(self, input_ids: Tensor | Sequence[int], max_new_tokens: int = 4096, **options: Any) -> Iterator[Token]:
        """The tokens of a prompt's continuation as they come; to stop reading early cancels the sequence."""
        handle = self.submit(input_ids, max_new_tokens, **options)
        try:
            yield from handle
        finally:
            handle.cancel()

    def weights_changed(self) -> None:
        """As `CollaborativeDecoder.weights_changed`; what runs goes on with the keys and values that it has."""
        self.decoder.weights_changed()

    def warm(self) -> None:
        """Make now, on a GPU, what the first sequences would wait for; only before any is submitted."""
        if self.decoder.loop is not None:
            self.decoder.loop.warm()

    def generate_many(
        self, prompts: Sequence[Tensor | Sequence[int]], max_new_tokens: int = 4096, *, sampling: Sampling | None = None
    ) -> list[Generation]:
        """As `CollaborativeDecoder.generate_many`; an error of one prompt cancels the others."""
        handles: list[Handle] = []
        samples = occurrences([torch.as_tensor(ids).tolist() for ids in prompts]) if sampling else [0] * len(prompts)
        try:
            for ids, sample in zip(prompts, samples, strict=True):
                handles.append(self.submit(ids, max_new_tokens, sampling=sampling, sample=sample))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def cancel(self, handle: Handle) -> None:
        """As `Handle.cancel`."""
        handle.cancel()

    @property
    def load(self) -> Load:
        """The sequences and pages in use now."""
        loop, waiting = self._state.loop, len(self._state.entering)
        if isinstance(loop, OneByOne):
            return Load(waiting + len(loop.waiting), int(loop.running is not None), 0, 0, 0)
        pages = loop.model.pages
        asking = sum(task.halted for task in list(loop.rows))
        return Load(
            waiting + len(loop.waiting),
            len(loop.rows) + len(loop.entering) + len(loop.scoring),
            asking,
            pages.count - pages.free,
            pages.count,
        )

    @property
    def closed(self) -> bool:
        """Whether it takes no more sequences: it was closed, or an error has ended all of them."""
        return self._state.closed

    def close(self) -> None:
        """Cancel all sequences and let the thread end."""
        self._closing()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _State:
    """What the engine and its thread share; it does not keep the engine alive."""

    def __init__(self, decoder: LowLatencyDecoder) -> None:
        self.decoder = decoder
        self.loop = OneByOne(decoder) if decoder.loop is None else decoder.loop
        self.changed = threading.Condition()
        self.entering: deque[Handle[Any]] = deque()
        self.leaving: set[Handle[Any]] = set()
        self.closed = False
        self.process = os.getpid()

    def check_process(self) -> None:
        """Refuse to work in a forked process: the engine's thread stayed in the parent, so all would wait for ever."""
        if os.getpid() != self.process:
            raise RuntimeError("engine: expected the process that made it, got a fork of it; make one in each process")

    def enter(self, handle: Handle) -> None:
        self.check_process()
        release_threads()  # this thread's, for those of the engine's own
        with self.changed:
            if self.closed:
                raise RuntimeError("engine: expected an open one, got a closed one; make another")
            self.entering.append(handle)
            self.changed.notify()

    def leave(self, handle: Handle) -> None:
        if os.getpid() != self.process:
            return
        with self.changed:
            if not handle.done:
                self.leaving.add(handle)
                self.changed.notify()
        handle._task.gone.cancel()


def _close(state: _State, thread: threading.Thread) -> None:
    """Let the thread end and wait for it: the process must not exit while it computes."""
    if os.getpid() != state.process:
        return  # the lock may be held for ever here
    with state.changed:
        state.closed = True
        state.changed.notify()
    if threading.current_thread() is not thread:
        thread.join()


def _work(state: _State, threads: int) -> None:
    """The engine's thread, with `threads` torch threads; an error that ends it ends all sequences."""
    torch.set_num_threads(threads)
    handles: dict[PairTask, Handle] = {}
    reason: BaseException = CancelledError()
    try:
        _run(state, handles)
    except BaseException as problem:
        reason = problem
    finally:
        with state.changed:
            state.closed = True
            left = [*handles.values(), *state.entering]
        for handle in left:
            handle._end(reason)


def _run(state: _State, handles: dict[PairTask, Handle]) -> None:
    """Run the loop until the engine is closed; `handles` are the running sequences."""
    loop = state.loop
    while True:
        with state.changed:
            state.changed.wait_for(lambda: state.entering or state.leaving or state.closed or loop.busy)
            closed, entering, leaving = state.closed, list(state.entering), list(state.leaving)
            state.entering.clear()
            state.leaving.clear()
            handles.update({handle._task: handle for handle in entering})
        try:
            for handle in entering:
                loop.submit(handle._task)
            for task in (handle._task for handle in leaving if handle._task in handles):
                loop.end(task)
                handles.pop(task)._end(CancelledError())
            if closed:
                loop.close()
                return
            for task in loop.tick():
                handle = handles[task]
                if not handle._tell():
                    loop.end(task)
                if task.done:
                    del handles[task]
                    scored = task.continuations is not None
                    try:
                        outcome = task.error or (task.scores if scored else state.decoder.generation(task.row))
                    except Exception as problem:  # the tokenizer's
                        outcome = problem
                    handle._end(outcome)
        except BaseException as problem:  # an error of no single sequence
            while handles:
                handles.popitem()[1]._end(problem)
            loop.clear()
