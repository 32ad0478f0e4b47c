"""LowLatencyDecoder: CollaborativeDecoder for one sequence at a time, from buffers of a fixed size."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder, Event, Generation
from fb_core.engine.in_step import InStepLLM
from fb_core.engine.merged import MergedReranker, MergedSelector
from fb_core.engine.static import StaticModel
from fb_core.engine.step import DecodeStep
from fb_core.llm import LLM, LocalLLM, Row, check_max_new_tokens, checked_prompts
from fb_core.native import NativeDecoder
from fb_core.policy import RequestPolicy
from fb_core.reranker import TokenReranker
from fb_core.selectors import CertainLLM, FutureBridgeSelector, Selector, State
from fb_kernels import Halt

MAX_LENGTH = 8192


class LowLatencyDecoder(CollaborativeDecoder):
    """A `CollaborativeDecoder` whose prompts run one after another, each as fast as it can.

    Keys, values and the sequence lie in buffers of a fixed size, with the length on the device; a step is always the
    same operations, and ends by appending its token or by halting for the host to see why. At an event the reranker
    scores the pool with merged weights over the very same keys and values, and a large model in this process has been
    kept in step. Tokens and events are those of `CollaborativeDecoder`, to rounding.

    There is one sequence: of threads that share the decoder one generates at a time and the others wait, `on_token` and
    streamers being part of that turn. SLM, LLM, reranker and policy may be shared with other decoders at work.

    SLM and LLM of other families than Llama, Mistral, Qwen2 and Qwen3 run as in `CollaborativeDecoder`; a warning says
    so when the decoder is made.

    Args:
        slm: as for `CollaborativeDecoder`, as all others; a `FutureBridgeSelector`'s reranker must be of scope
            "candidate" to run on the buffers.
        llm: likewise.
        selector: likewise.
        policy: likewise; one with its own `asks` or `entropy` is refused, since the device compares with a threshold.
        max_length: tokens of prompt and generation at most, which memory is set aside for; the models' positions bound
            it too.
        options: `pool`, `slm_k`, `llm_k`, `max_events`, `tokenizer` and `on_llm_error`.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`, max_length below 2, or a policy that the device cannot follow; in calls
            also one from inside a generation of this decoder.
    """

    def __init__(
        self,
        slm: hf.CausalLM,
        llm: LLM | hf.CausalLM,
        selector: Selector,
        policy: RequestPolicy,
        *,
        max_length: int = MAX_LENGTH,
        **options: Any,
    ) -> None:
        super().__init__(slm, llm, selector, policy, **options)
        if max_length < 2:
            raise ValueError(f"max_length: expected 2 tokens or more, got {max_length}; leave it out for {MAX_LENGTH}")
        self._turn = threading.Lock()
        self._at_work: int | None = None  # the thread whose turn it is
        self._step: DecodeStep | None = None
        self._merged: MergedReranker | None = None
        if not _is_native("slm", slm):
            return
        self._check_policy()
        slots = min(max_length, hf.max_positions(slm) or max_length)
        model = StaticModel(slm, slots)
        self._step = DecodeStep(model, self.vocabulary, policy, hf.eos_ids(slm))
        self.selector = self._on_buffers(selector, model)
        if type(self.llm) is LocalLLM and _is_native("llm", self.llm.model):
            self.llm = InStepLLM(self.llm.model, slots, valid_vocab=self.llm.vocabulary)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes set aside beside the models: "buffers" of keys and values, "merged" weights, captured "graphs"."""
        if self._step is None:
            return {"buffers": 0, "merged": 0, "graphs": 0}
        models = [self._step.model, *([self.llm.static] if isinstance(self.llm, InStepLLM) else [])]
        return {
            "buffers": sum(model.nbytes for model in models),
            "merged": 0 if self._merged is None else self._merged.nbytes,
            "graphs": sum(model.graphs.nbytes for model in models),
        }

    def load_adapter(self, directory: str | os.PathLike[str]) -> None:
        """Take another reranker, from a PEFT directory, in the memory of the one at work: no graph is captured anew.

        Raises:
            OSError: no adapter there.
            ValueError: no reranker runs on the buffers, the adapter is of scope "sequence" or for another model, or a
                call from inside a generation.
        """
        if self._merged is None:
            raise ValueError(
                "load_adapter: expected a decoder whose reranker runs merged, got one without; "
                "make it with a FutureBridgeSelector"
            )
        reranker = TokenReranker.from_pretrained(directory, self.slm).eval()
        with self._alone():
            self._merged.load(reranker)
            selector = self.selector.selector if isinstance(self.selector, CertainLLM) else self.selector
            assert isinstance(selector, MergedSelector)
            selector.reranker = reranker

    def _on_buffers(self, selector: Selector, model: StaticModel) -> Selector:
        """The selector with its reranker merged, where it has one of scope "candidate"."""
        if type(selector) is CertainLLM:
            return CertainLLM(self._on_buffers(selector.selector, model), selector.certainty)
        if type(selector) is FutureBridgeSelector and selector.reranker.scope == "candidate":
            merged = MergedSelector(selector.reranker, model)
            self._merged = merged.merged
            return merged
        return selector

    def _decode(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int,
        done: Callable[[Row, list[Event]], bool],
    ) -> list[Generation]:
        if self._step is None:
            return super()._decode(prompts, max_new_tokens, done)
        hf.check_decodable("slm", self.slm)
        check_max_new_tokens(max_new_tokens)
        checked = checked_prompts("input_ids", prompts, self.slm, room=1)
        self._check_policy()
        slots, positions = self._step.model.slots, hf.max_positions(self.slm)
        for ids in checked:
            wanted = len(ids) + max_new_tokens
            if (wanted if positions is None else min(wanted, positions)) > slots:
                raise ValueError(
                    f"input_ids: expected prompt and new tokens to fit buffers of {slots} tokens, got {len(ids)} "
                    f"and {max_new_tokens}; make the decoder with a larger max_length or ask for fewer tokens"
                )
        with self._alone():
            return [self._generate(index, ids, max_new_tokens, done) for index, ids in enumerate(checked)]

    def _check_policy(self) -> None:
        """Refuse a policy that the step would not follow."""
        for method in ("asks", "entropy"):
            if getattr(type(self.policy), method) is not getattr(RequestPolicy, method):
                raise ValueError(
                    f"policy: expected RequestPolicy's own {method}, as the device has it, got "
                    f"{type(self.policy).__name__} with another; use CollaborativeDecoder"
                )
        if self._step is not None and min(self.policy.top_k, self.vocabulary) != self._step.top_k:
            raise ValueError(
                f"top_k: expected {self._step.top_k} as when the decoder was made, got {self.policy.top_k}; make a "
                "decoder for that policy"
            )

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
        self, index: int, prompt: Tensor, max_new_tokens: int, done: Callable[[Row, list[Event]], bool]
    ) -> Generation:
        assert self._step is not None
        step, row, events = self._step, Row(index, prompt.tolist(), len(prompt)), []
        limit = min(len(prompt) + max_new_tokens, step.model.slots)
        step.threshold.fill_(self.policy.threshold)
        step.begin(prompt, self.max_events)
        if self._merged is not None:
            self._merged.refresh()
        if self.max_events and isinstance(self.llm, InStepLLM):
            self.llm.begin(row.tokens)
        while True:
            halt, token, entropy = step.outcome()
            if halt == Halt.NAN:
                raise ValueError(
                    f"slm: expected finite logits, got NaN or infinite ones at step {len(row.new)} of prompt {index}; "
                    "check its weights and dtype"
                )
            if halt == Halt.EVENT:
                events.append(self._event(step, row, entropy))
                token = events[-1].token
            if halt != Halt.NONE:
                step.take(len(row.tokens), token, self.max_events - len(events))
            row.tokens.append(token)
            if done(row, events) or len(row.tokens) >= limit:
                break
        new = torch.tensor(row.new, device=self.slm.device)
        return Generation(new, events, self.text(new))

    def _event(self, step: DecodeStep, row: Row, entropy: float) -> Event:
        tokens = step.state.tokens[0, : len(row.tokens)].clone()
        prefix = hf.Prefix(step.model.kv, start=0, length=len(tokens))
        state = State(tokens, len(row.new), entropy, prefix)
        return self._events([state], step.logits)[0]


def _is_native(name: str, model: hf.CausalLM) -> bool:
    if NativeDecoder.of(model) is not None:
        return True
    warnings.warn(
        f"{name}: {type(model).__name__} has no native decoder and runs as in CollaborativeDecoder", stacklevel=3
    )
    return False
