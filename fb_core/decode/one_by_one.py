"""The engine's loop for families without a native decoder: one sequence after another in the plain loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial

from fb_core.decode.decoder import CollaborativeDecoder
from fb_core.decode.loop import PairTask
from fb_core.llm.local import GONE
from fb_core.runtime.plain import check_decodable, steps
from fb_core.score.scorer import CompatibilityScorer


class OneByOne:
    """What an `Engine` needs of a `PairLoop`, without pages; the likeliest tokens are not ranked."""

    def __init__(self, decoder: CollaborativeDecoder) -> None:
        self.decoder = decoder
        self.waiting: deque[PairTask] = deque()
        self.running: PairTask | None = None
        self._steps: Iterator[None] = iter(())

    def check(self, task: PairTask) -> None:
        """ValueError for what needs a native decoder."""
        if task.ranking or task.prompt_ranking:
            raise ValueError("ranking: expected an SLM with a native decoder, got one without; leave it out")

    def check_scores(self, prefix: int, longest: int) -> None:
        """Nothing: the scorer says what does not fit."""

    def submit(self, task: PairTask) -> None:
        """Queue a sequence."""
        self.waiting.append(task)

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return self.running is not None or bool(self.waiting)

    def tick(self) -> list[PairTask]:
        """Append one token to the sequence whose turn it is, or score its continuations."""
        if self.running is None:
            self.running = self.waiting.popleft()
            self._steps = self._run(self.running)
        task = self.running
        GONE.set(task.gone)
        try:
            task.done = next(self._steps, True) is not None
        except BaseException as problem:  # a selector's, whatever it is
            task.error, task.done = CancelledError() if task.gone.cancelled() else problem, True
        if task.done:
            self.running = None
        return [task]

    def _run(self, task: PairTask) -> Iterator[None]:
        decoder = copy.copy(self.decoder)
        if task.continuations is not None:
            scorer = CompatibilityScorer(decoder.slm, valid_vocab=decoder.vocabulary)
            scores = scorer.logprobs(task.row.tokens, task.continuations, return_greedy=True)
            task.scores = [tuple(each.cpu() for each in one) for one in scores]
            return
        check_decodable("slm", decoder.slm)
        decoder.policy = replace(decoder.policy, threshold=task.threshold)
        decoder.max_events = task.halts
        if task.selector is not None:
            decoder.intervention = replace(decoder.intervention, selector=task.selector)
        draws = [task.draw] if task.draw.temperature else []
        yield from steps(decoder.slm, [task.row], task.stop, partial(decoder.choose, draws))

    def end(self, task: PairTask) -> None:
        """End a sequence now."""
        task.done = True
        task.give_up()
        if task in self.waiting:
            self.waiting.remove(task)
        if task is self.running:
            self.running, self._steps = None, iter(())  # its cache goes with its steps

    def clear(self) -> None:
        """End all sequences."""
        for task in (*self.waiting, *([self.running] if self.running else [])):
            self.end(task)

    close = clear
