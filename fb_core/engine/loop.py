"""The fast loop of decoding: one sequence after another over buffers of a fixed size."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from fb_core import hf
from fb_core.engine.in_step import InStepLLM
from fb_core.engine.merged import MergedReranker, MergedSelector
from fb_core.engine.sequence import DecodeStep, StaticModel
from fb_core.llm import LocalLLM
from fb_core.native import NativeDecoder
from fb_core.pair import Pair
from fb_core.policy import RequestPolicy, not_finite
from fb_core.pool import Event
from fb_core.reranker import TokenReranker
from fb_core.selectors import CertainLLM, FutureBridgeSelector, Selector, State
from fb_kernels import Halt

Events = Callable[[Sequence[State], Tensor], list[Event]]


class FastLoop:
    """One sequence: of threads that share the loop one generates at a time and the others wait.

    Args:
        pair: its SLM has a native decoder.
        selector: one of a reranker of scope "candidate" runs merged.
        policy: when the device halts for an event.
        max_length: tokens that memory is set aside for.

    Attributes:
        llm: the pair's, kept in step where it is in this process and has a native decoder.
        selector: the same one, over the buffers where it can be.
        merged: its reranker, where it runs merged.

    Raises:
        ValueError: a policy that the device cannot follow.
    """

    def __init__(self, pair: Pair, selector: Selector | None, policy: RequestPolicy, max_length: int) -> None:
        _check_own(policy)
        slots = min(max_length, hf.max_positions(pair.slm) or max_length)
        model = StaticModel(pair.slm, slots)
        self.step = DecodeStep(model, pair.vocabulary, policy, hf.eos_ids(pair.slm))
        self.llm = pair.llm
        if type(pair.llm) is LocalLLM and has_native("llm", pair.llm.model):
            self.llm = InStepLLM(pair.llm.model, slots, valid_vocab=pair.llm.vocabulary)
        self.merged: MergedReranker | None = None
        self.selector = None if selector is None else self._on_buffers(selector)
        self._turn = threading.Lock()
        self._at_work: int | None = None  # the thread whose turn it is

    def _on_buffers(self, selector: Selector) -> Selector:
        if type(selector) is CertainLLM:
            return CertainLLM(self._on_buffers(selector.selector), selector.certainty)
        if type(selector) is FutureBridgeSelector and selector.reranker.scope == "candidate":
            over = MergedSelector(selector.reranker, self.step.model)
            self.merged = over.merged
            return over
        return selector

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of "buffers", "merged" weights and "graphs"."""
        models = [self.step.model, *([self.llm.static] if isinstance(self.llm, InStepLLM) else [])]
        return {
            "buffers": sum(model.nbytes for model in models),
            "merged": 0 if self.merged is None else self.merged.nbytes,
            "graphs": sum(model.graphs.nbytes for model in models),
        }

    def load_adapter(self, directory: str | os.PathLike[str]) -> None:
        """Another reranker in the place of the merged one; raises as `CollaborativeDecoder.load_adapter`."""
        reranker = TokenReranker.from_pretrained(directory, self.step.model.model).eval()
        assert self.merged is not None
        with self._alone():
            self.merged.load(reranker)
            selector = self.selector.selector if isinstance(self.selector, CertainLLM) else self.selector
            assert isinstance(selector, MergedSelector)
            selector.reranker = reranker

    def run(
        self, prompts: Sequence[Tensor], stop: hf.Stop, policy: RequestPolicy, max_events: int, events: Events
    ) -> list[hf.Running]:
        """Continue prompts, one after another.

        Args:
            prompts: [P] int64 each on the model's device, not empty.
            stop: when a generation ends.
            policy: with the `top_k` that the loop was made with; its threshold counts.
            max_events: of a generation.
            events: of states with the SLM's logits [n, V] there.

        Raises:
            ValueError: a prompt that leaves too little room in the buffers, another kind of policy, NaN logits, or a
                call from inside a generation.
        """
        _check_own(policy)
        if min(policy.top_k, self.step.vocabulary) != self.step.top_k:
            raise ValueError(
                f"top_k: expected {self.step.top_k} as when the decoder was made, got {policy.top_k}; make a decoder "
                "for that policy"
            )
        rows = [hf.Running(index, ids.tolist(), len(ids)) for index, ids in enumerate(prompts)]
        for row in rows:
            if stop.length(row) > (slots := self.step.model.slots):
                raise ValueError(
                    f"input_ids: expected prompt and new tokens to fit buffers of {slots} tokens, got {row.prompt} "
                    f"and {stop.room}; make the decoder with a larger max_length or ask for fewer tokens"
                )
        with self._alone():
            for row, prompt in zip(rows, prompts, strict=True):
                self._generate(row, prompt, stop, policy, max_events, events)
        return rows

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """This thread's turn at the one sequence."""
        me = threading.get_ident()
        if self._at_work == me:  # it would wait for itself
            raise ValueError(
                "generate: expected a decoder at rest, got a call from inside its own generation (on_token, streamer, "
                "selector or LLM); make a second decoder for that"
            )
        with self._turn:
            self._at_work = me
            try:
                yield
            finally:
                self._at_work = None

    def _generate(
        self,
        row: hf.Running,
        prompt: Tensor,
        stop: hf.Stop,
        policy: RequestPolicy,
        max_events: int,
        events: Events,
    ) -> None:
        step = self.step
        step.threshold.fill_(policy.threshold)
        step.limit.fill_(stop.length(row) - 1)  # it halts ahead of the last token
        step.begin(prompt, max_events)
        if self.merged is not None:
            self.merged.refresh()
        if max_events and isinstance(self.llm, InStepLLM):
            self.llm.begin(row.tokens)
        seen_by_host = stop.told is not None or not stop.ends <= step.end_ids
        while True:
            halt, token, entropy = step.outcome()
            if halt == Halt.NAN:
                raise not_finite(len(row.new), row.index)
            if halt == Halt.EVENT:
                tokens = step.state.tokens[0, : len(row.tokens)].clone()
                prefix = hf.Prefix(step.model.kv, start=0, length=len(tokens))
                row.events += events([State(tokens, len(row.new), entropy, prefix)], step.logits.float())
                token = row.events[-1].token
            if halt:
                step.take(len(row.tokens), token, max_events - len(row.events))
            row.tokens.append(token)
            if (halt or seen_by_host) and stop(row):  # without a listener the device halts wherever the rule may hold
                return


def has_native(name: str, model: hf.CausalLM) -> bool:
    """Whether a model can run on buffers; warns where not."""
    if NativeDecoder.of(model) is not None:
        return True
    warnings.warn(
        f"{name}: {type(model).__name__} has no native decoder and runs as in CollaborativeDecoder", stacklevel=4
    )
    return False


def _check_own(policy: RequestPolicy) -> None:
    """Refuse a policy that the device would not follow."""
    for method in ("asks", "entropy"):
        if getattr(type(policy), method) is not getattr(RequestPolicy, method):
            raise ValueError(
                f"policy: expected RequestPolicy's own {method}, as the device has it, got {type(policy).__name__} "
                "with another; use CollaborativeDecoder without max_length"
            )
