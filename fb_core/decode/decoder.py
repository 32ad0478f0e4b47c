"""The small model decodes; at uncertain steps the large one proposes candidates and a selector takes one token."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fb_core._util import check_count
from fb_core.decode.asking import Intervention, OnError
from fb_core.decode.loop import PairLoop, PairTask, check_own, has_native
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy, gate
from fb_core.decode.selectors import Selector, State
from fb_core.events import Event, PoolKind
from fb_core.llm.local import LLM, LocalLLM
from fb_core.models.facts import CausalLM, Tokenizer, max_positions
from fb_core.models.packed import Prefix, PrefixKV
from fb_core.models.tokens import check_max_new_tokens, checked_prompts
from fb_core.runtime.paged_model import CHUNK
from fb_core.runtime.plain import Running, Step, Stop, check_decodable, lockstep, streamer_of_caller
from fb_core.runtime.sampling import GREEDY, Draw, Draws, Sampling, check_sampling, drawn
from fb_kernels import topk_entropy

MAX_LENGTH = 8192


class Usage(NamedTuple):
    """What one generation asked of the LLM."""

    calls: int  # requests
    pool: float | None  # candidates an event, on average
    appended: int  # tokens chosen at events
    suffix: int  # tokens that the LLM wrote after those and that were kept, such as a takeover's rest
    read: int  # positions after the prompt that the LLM computes if it keeps its cache, rejected drafts included

    @classmethod
    def of(cls, events: Sequence[Event]) -> Usage:
        """From the events of a generation."""
        sizes = [len(event.pool) for event in events]
        calls = sum(event.asked for event in events)
        chosen = sum(len(event.pool) > 1 or event.asked for event in events)  # the others hold the SLM's token alone
        read = max((event.step for event in events if event.asked), default=0)
        return cls(calls, sum(sizes) / len(sizes) if sizes else None, chosen, 0, read)


@dataclass
class Generation:
    """What a method generated for one prompt."""

    token_ids: Tensor  # [n] int64, new tokens only, the end-of-sequence token included
    events: list[Event]
    text: str | None  # where there is a tokenizer

    @property
    def usage(self) -> Usage:
        """What it asked of the LLM; a method whose LLM does more than propose at events has its own subclass."""
        return Usage.of(self.events)


class CollaborativeDecoder:
    """Greedy decoding by the SLM; where its entropy exceeds the policy's threshold, a selector picks the next token.

    At an event the LLM gives its candidates and the log-probabilities of the SLM's candidates, so log p_S and log p_T
    are known for the whole pool. An end-of-sequence token of either model ends a generation, whichever model wrote it.

    Safe to share between threads if `llm` and `selector` are, as this library's own are: it keeps nothing between
    calls. A transformers model may run in many threads, but must not be scored at the same time: for families without a
    native decoder, a `CompatibilityScorer` switches the model's attention.

    Args:
        slm: the small model, in eval mode; it is never changed.
        llm: where candidates come from; a transformers model is wrapped in a `LocalLLM`. May be None for pool "slm",
            whose llm_logprob is then NaN, or if max_events is 0.
        selector: picks one candidate of the pool; may be None if max_events is 0.
        policy: when to ask; a subclass may override `asks` and `entropy`.
        pool: "joint" (the SLM's top slm_k, then what is new in the LLM's top llm_k), "slm" or "llm" (one side alone).
        slm_k: number of SLM candidates, clamped to the vocabulary.
        llm_k: number of LLM candidates, clamped likewise.
        max_events: maximum events of a generation; after that many the SLM decodes alone.
        tokenizer: the one both models use, or the pair (SLM's, LLM's), which must have the same vocabulary. The models'
            embeddings may then be padded differently, and ids beyond the tokenizer's are never used. Without a
            tokenizer, both models must take the same number of ids. It also decodes the texts.
        batch_tokens: maximum tokens of one batch of `generate_many`, padding and new tokens included.
        on_llm_error: what to do if the LLM does not answer (an OSError, such as `ServerError`): "raise" ends the call
            with that error; "slm" appends the SLM's own token and records the error in the event's `error`. All events
            of a step share one call and its failure. A failed event counts towards `max_events`, and the next event
            asks again.

    Raises:
        TypeError: `slm` is not a transformers model, or another argument has the wrong type.
        ValueError: models with different vocabularies, a model in training mode, a reranker made on another model, or
            an argument out of range.
    """

    def __init__(
        self,
        slm: CausalLM,
        llm: LLM | CausalLM | None,
        selector: Selector | None,
        policy: RequestPolicy,
        *,
        pool: PoolKind = "joint",
        slm_k: int = 8,
        llm_k: int = 8,
        max_events: int = 8,
        tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None,
        batch_tokens: int = 65536,
        on_llm_error: OnError = "raise",
    ) -> None:
        self.pair = Pair(slm, llm, tokenizer)
        if pool not in ("joint", "slm", "llm"):
            raise ValueError(f"pool: expected 'joint', 'slm' or 'llm', got {pool!r}; 'joint' is the method's own")
        if on_llm_error not in ("raise", "slm"):
            raise ValueError(f"on_llm_error: expected 'raise' or 'slm', got {on_llm_error!r}; 'raise' is the default")
        if (max_events := check_count("max_events", max_events, 0)) >= 1 << 31:  # the step counts them in 32 bits
            raise ValueError(f"max_events: expected at most {(1 << 31) - 1}, got {max_events}; leave it out for 8")
        slm_k, llm_k = check_count("slm_k", slm_k, 1), check_count("llm_k", llm_k, 1)
        batch_tokens = check_count("batch_tokens", batch_tokens, 1)
        for name, given, kind, needed, remedy in (
            ("llm", self.pair.llm, LLM, max_events > 0 and pool != "slm", "a LocalLLM or a transformers causal LM"),
            ("selector", selector, Selector, max_events > 0, "one such as FutureBridgeSelector(reranker)"),
            ("policy", policy, RequestPolicy, True, "RequestPolicy(threshold)"),
        ):
            if not isinstance(given, kind) and (needed or given is not None):
                raise TypeError(f"{name}: expected type {kind.__name__}, got {type(given).__name__}; pass {remedy}")
        if selector is not None:
            selector.check_slm(slm)
        self.slm = slm
        self.policy = policy
        self.max_events = max_events
        self.batch_tokens = batch_tokens
        self.vocabulary = self.pair.vocabulary
        self.intervention = Intervention(
            self.pair.llm,
            selector,
            pool,
            min(slm_k, self.vocabulary),
            min(llm_k, self.vocabulary),
            on_llm_error,
        )

    @property
    def llm(self) -> LLM | None:
        """Where candidates come from."""
        return self.intervention.llm

    @property
    def selector(self) -> Selector | None:
        """What picks a candidate."""
        return self.intervention.selector

    def generate(
        self,
        input_ids: Tensor | Sequence[int],
        max_new_tokens: int = 4096,
        *,
        on_token: Callable[[int, Event | None], None] | None = None,
        sampling: Sampling | None = None,
    ) -> Generation:
        """Decode one prompt.

        Args:
            input_ids: [P] or [1, P] int64 on the SLM's device, at least one.
            max_new_tokens: maximum tokens to generate; the model's positions are a limit too.
            on_token: called with each token as it is appended, and with its event if it is the token of one.
            sampling: how the SLM's own tokens are drawn from the policy's `top_k` likeliest; None for the likeliest.
                Events are as without it.

        Returns:
            The new tokens, the end-of-sequence token included, and the events.

        Raises:
            TypeError: ids that are not integers.
            ValueError: no ids, one outside the vocabulary, the wrong device or shape, a prompt that leaves no position
                for a new token, max_new_tokens below 1, a model in training mode, or NaN logits at a step.
            OSError: the LLM did not answer, unless `on_llm_error` is "slm". The decoder stays usable.
        """
        if isinstance(input_ids, Tensor) and input_ids.ndim == 2 and len(input_ids) == 1:
            input_ids = input_ids[0]
        if on_token is None:
            return self._decode([input_ids], max_new_tokens, sampling=sampling)[0]

        def passed_on(row: Running) -> bool:
            last = row.events[-1] if row.events and row.events[-1].step == len(row.tokens) - row.prompt - 1 else None
            on_token(row.tokens[-1], last)
            return False

        return self._decode([input_ids], max_new_tokens, on_token=passed_on, sampling=sampling)[0]

    def generate_many(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int = 4096,
        *,
        until: float = float("inf"),
        sampling: Sampling | None = None,
    ) -> list[Generation]:
        """Decode many prompts in lockstep, in left-padded batches; each as by `generate`, errors included.

        The LLM is asked once per step for all prompts of a batch; if the call fails, it fails for each of them.

        Args:
            prompts: [P] int64 each, of any lengths.
            max_new_tokens: maximum tokens to generate for each.
            until: a generation also ends after the token of this event, counted from 1.
            sampling: as for `generate`; equal prompts are different samples of it.
        """
        return self._decode(prompts, max_new_tokens, events=until, sampling=sampling)

    def as_custom_generate(self) -> Callable[..., Tensor]:
        """A callable for `decoder.slm.generate(..., custom_generate=decoder.as_custom_generate())`.

        The length limits, stopping criteria, EOS tokens, left padding and streamer (one prompt) given to `generate` are
        honoured, and so are `do_sample`, `temperature`, `top_p` and `top_k`: the seed is then drawn from torch's own
        generator. There is one beam, and logits processors are ignored. It returns the prompts and their new tokens,
        [B, P + n], padded on the right (with the first EOS token if there is no pad token), as a tensor even if
        `return_dict_in_generate` is set.
        """

        def custom_generate(
            model: CausalLM,
            input_ids: Tensor,
            *,
            stopping_criteria: Any,
            generation_config: Any,
            streamer: Any = None,
            **others: Any,
        ) -> Tensor:
            listener = streamer_of_caller() if streamer is None else streamer
            mask = others.get("attention_mask")  # as a parameter of its own it would come twice
            mask = torch.ones_like(input_ids) if mask is None else mask
            try:
                return self._custom_generate(model, input_ids, mask, stopping_criteria, generation_config, listener)
            finally:
                if listener is not None:
                    listener.end()

        return custom_generate

    def _custom_generate(
        self,
        model: CausalLM,
        input_ids: Tensor,
        mask: Tensor,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
    ) -> Tensor:
        if model is not self.slm:
            raise ValueError(
                "custom_generate: expected generate to be called on the decoder's own SLM, got another "
                f"{type(model).__name__}; call decoder.slm.generate"
            )
        if not input_ids.shape[1] or generation_config.num_beams > 1:
            raise ValueError(
                f"custom_generate: expected input_ids and one beam, got {input_ids.shape[1]} ids and "
                f"{generation_config.num_beams} beams; decode from token ids, with one beam"
            )
        if streamer is not None and len(input_ids) != 1:
            raise ValueError(f"streamer: expected one prompt, got {len(input_ids)}; stream them one by one")

        def on_token(row: Running) -> bool:
            if streamer is not None:
                streamer.put(torch.tensor(row.tokens[-1:]))
            ids = torch.cat([input_ids[row.index], input_ids.new_tensor(row.new)])
            return bool(stopping_criteria(ids[None], None).all())  # EOS is among them

        prompts = [ids[keep.bool()] for ids, keep in zip(input_ids, mask, strict=True)]
        room = generation_config.max_length - input_ids.shape[1]
        sampling = Sampling.of_transformers(vars(generation_config)) if generation_config.do_sample else None
        done = self._decode(prompts, room, frozenset(), on_token=on_token, sampling=sampling)
        new = [generation.token_ids for generation in done]
        padding = generation_config.pad_token_id
        if padding is None and (ends := generation_config.eos_token_id) is not None:
            padding = ends if isinstance(ends, int) else ends[0]
        padded = pad_sequence(new, batch_first=True, padding_value=padding or 0)
        return torch.cat([input_ids, padded], 1)

    def weights_changed(self) -> None:
        """Say that weights were written: nothing that was computed before serves a later generation.

        Writes are noticed, except through `data` where they leave the middle row of every parameter as it was.
        """
        if isinstance(self.llm, LocalLLM):
            self.llm.weights_changed()

    def _decode(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int,
        ends: frozenset[int] | None = None,
        events: float = float("inf"),
        on_token: Callable[[Running], bool] | None = None,
        sampling: Sampling | None = None,
    ) -> list[Generation]:
        """Decode prompts as a user gives them; the arguments are those of `Stop`, and how tokens are drawn."""
        max_new_tokens = check_max_new_tokens(max_new_tokens)
        if sampling is not None:
            check_sampling(sampling)
        checked = checked_prompts("input_ids", prompts, self.slm, room=1)
        ends = self.pair.ends if ends is None else ends
        stop = Stop(ends, max_new_tokens, max_positions(self.slm), events, on_token)
        return self.decode(checked, stop, [] if sampling is None else sampling.draws([ids.tolist() for ids in checked]))

    def decode(self, prompts: Sequence[Tensor], stop: Stop, draws: Sequence[Draw] = ()) -> list[Generation]:
        """Decode checked prompts, each with its draw if there are any."""
        check_decodable("slm", self.slm)
        rows = lockstep(self.slm, prompts, stop, partial(self.choose, draws), self.batch_tokens)
        return [self.generation(row) for row in rows]

    def generation(self, row: Running) -> Generation:
        """The result of a sequence."""
        new = torch.tensor(row.new, device=self.slm.device)
        return Generation(new, row.events, self.pair.text(new))

    def choose(self, draws: Sequence[Draw], step: Step) -> list[int]:
        """One token per row: the selector's where the policy asks (kept as an event), or the SLM's own."""
        logits = step.logits[:, : self.vocabulary]
        if early := [number for number, row in enumerate(step.rows) if row.early]:
            logits, ends = logits.clone(), [end for end in self.pair.ends if end < self.vocabulary]
            logits[torch.tensor(early)[:, None], ends] = -torch.inf
        entropy, asking = gate(self.policy, step, logits, self.max_events)
        if draws:
            how = Draws.of([draws[row.index] for row in step.rows], logits.device)
            _, values, likeliest = topk_entropy(logits, min(self.policy.top_k, self.vocabulary))
            place = torch.tensor([len(row.tokens) for row in step.rows], device=logits.device)
            chosen = drawn(values, likeliest, how, place)
        else:
            chosen = logits.argmax(-1)  # the first of equal ones
        tokens: list[int] = chosen.tolist()
        if not asking:
            return tokens
        kv, states = PrefixKV.from_cache(step.cache, self.slm), []
        for row in asking:
            ids = step.rows[row].tokens
            prefix = Prefix(kv, start=step.slots - len(ids), length=len(ids), pages=(row,))
            states.append(State(torch.tensor(ids, device=logits.device), step.index, entropy[row], prefix))
        for row, event in zip(asking, self.intervention(states, logits[asking]), strict=True):
            step.rows[row].events.append(event)
            tokens[row] = event.token
        return tokens


class LowLatencyDecoder(CollaborativeDecoder):
    """A `CollaborativeDecoder` in the fast loop: keys and values are paged, and every step runs the same operations.

    A reranker of scope "candidate" runs with merged weights over the same pages, and a large model in this process is
    kept in step. Tokens and events are the same, up to rounding. Families other than Llama, Mistral, Mixtral, Qwen2,
    Qwen3 and Qwen3-MoE run in the plain loop, with a warning. If threads share such a decoder, one generates at a time
    and the others wait, also for its `on_token` and streamers (an `Engine` runs them all at once). `generate_many` asks
    for each prompt by itself.

    Args:
        max_length: maximum tokens of a sequence; the models' positions are a limit too.
        max_batch: prompts that `generate_many` runs together.
        kv_memory: bytes for keys and values of the models in this process; None for what `max_batch` sequences of
            `max_length` tokens need, but at most half of the free memory.
        prefill_tokens: prompt tokens that are prefilled between two steps while other sequences wait.
        options: of `CollaborativeDecoder`.

    Raises:
        TypeError: as a `CollaborativeDecoder`.
        ValueError: as a `CollaborativeDecoder`, or a policy that overrides `asks` or `entropy`: the device
            compares with a threshold.
    """

    def __init__(
        self,
        slm: CausalLM,
        llm: LLM | CausalLM | None,
        selector: Selector | None,
        policy: RequestPolicy,
        *,
        max_length: int = MAX_LENGTH,
        max_batch: int = 1,
        kv_memory: int | None = None,
        prefill_tokens: int = CHUNK,
        **options: Any,
    ) -> None:
        super().__init__(slm, llm, selector, policy, **options)
        max_batch = check_count("max_batch", max_batch, 1)
        prefill_tokens = check_count("prefill_tokens", prefill_tokens, 1)
        max_length = check_count("max_length", max_length, 2, f"leave it out for {MAX_LENGTH}", "{} tokens or more")
        if kv_memory is not None:
            kv_memory = check_count("kv_memory", kv_memory, 1)
        self._turn = threading.Lock()
        self._at_work: int | None = None  # the thread whose turn it is
        self.loop: PairLoop | None = None
        """None where the SLM has no native decoder."""
        if has_native("slm", slm):
            self.loop = PairLoop(
                self.pair,
                self.intervention,
                self.policy,
                rows=max_batch,
                length=max_length,
                memory=kv_memory,
                prefill=prefill_tokens,
            )
            self.intervention = self.loop.intervention

    @property
    def memory(self) -> dict[str, int]:
        """Bytes allocated in addition to the models: "buffers" of keys and values, "merged" weights, CUDA "graphs"."""
        return {"buffers": 0, "merged": 0, "graphs": 0} if self.loop is None else self.loop.memory

    def weights_changed(self) -> None:
        """As `CollaborativeDecoder.weights_changed`."""
        super().weights_changed()
        if self.loop is not None:
            self.loop.stale = True

    def load_adapter(self, directory: str | os.PathLike[str]) -> None:
        """Load another reranker from a PEFT directory into the memory of the current one; no graph is recaptured.

        Raises:
            ValueError: no adapter there, a decoder without a merged reranker, an adapter of scope "sequence", for
                another model or with a chosen recipe, or a call from inside a generation.
        """
        if self.loop is None or self.loop.merged_reranker is None:
            raise ValueError(
                "load_adapter: expected a decoder whose reranker runs merged, got one without; "
                "make it with a FutureBridgeSelector"
            )
        with self._alone():
            self.loop.load_adapter(directory)

    def decode(self, prompts: Sequence[Tensor], stop: Stop, draws: Sequence[Draw] = ()) -> list[Generation]:
        """As `CollaborativeDecoder.decode`, as many prompts at once as the loop has rows."""
        if (loop := self.loop) is None:
            return super().decode(prompts, stop, draws)
        check_decodable("slm", self.slm)
        check_own(self.policy)
        if min(self.policy.top_k, self.vocabulary) != loop.step.top_k:
            raise ValueError(
                f"top_k: expected {loop.step.top_k} as when the decoder was made, got {self.policy.top_k}; make a "
                "decoder for that policy"
            )
        rows = [Running(index, ids.tolist(), len(ids)) for index, ids in enumerate(prompts)]
        threshold, events = self.policy.threshold, self.max_events
        draws = draws or [GREEDY] * len(rows)
        tasks = [PairTask(row, stop, threshold, events, draw=draw) for row, draw in zip(rows, draws, strict=True)]
        for task in tasks:
            loop.check(task)
        with self._alone():
            loop.forget()
            try:
                for task in tasks:
                    loop.submit(task)
                while loop.busy:
                    for task in loop.tick():
                        if task.error is not None:
                            raise task.error
            finally:
                loop.clear()
        return [self.generation(row) for row in rows]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """This thread's turn to use the loop."""
        me = threading.get_ident()
        if self._at_work == me:  # it would wait for itself
            raise ValueError(
                "generate: expected an idle decoder, got a call from inside its own generation (on_token, streamer, "
                "selector or LLM); make a second decoder for that"
            )
        with self._turn:
            self._at_work = me
            try:
                yield
            finally:
                self._at_work = None
