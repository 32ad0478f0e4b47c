"""The small model decodes; at uncertain steps the large one proposes candidates and a selector takes one token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fb_core import hf
from fb_core.llm import (
    LLM,
    LocalLLM,
    Row,
    Step,
    check_max_new_tokens,
    checked_prompts,
    lockstep,
)
from fb_core.policy import RequestPolicy
from fb_core.pool import SLM, PoolKind, candidate_pool
from fb_core.selectors import Selector, State

OnError = Literal["raise", "slm"]


@dataclass
class Event:
    """One admitted intervention, in plain numbers."""

    step: int  # 0-based index of its token among the new ones
    entropy: float  # nats
    pool: list[int]  # ids
    sources: list[int]  # bits, 1 = SLM, 2 = LLM
    slm_logprob: list[float]
    llm_logprob: list[float]
    scores: list[float] | None  # the selector's, None where it has none
    choice: int  # index into the pool
    error: str | None = None  # of the LLM: then the pool is the SLM's token alone, its llm_logprob NaN

    @property
    def token(self) -> int:
        """The id that was appended."""
        return self.pool[self.choice]


@dataclass
class Generation:
    """What a decoder made of one prompt."""

    token_ids: Tensor  # [n] int64, new tokens only, the end-of-sequence token included
    events: list[Event]
    text: str | None  # where the decoder has a tokenizer


class CollaborativeDecoder:
    """Greedy decoding by the SLM; where its entropy exceeds the policy's threshold, a selector takes the next token.

    At an event the LLM is asked for its candidates and for the log-probabilities of the SLM's; log p_S and log p_T are
    known for every candidate of the pool. Tokens of an event count like any other: EOS there ends the generation.

    Safe to share between threads where `llm` and `selector` are, as this library's own are: it keeps nothing between
    calls. A transformers model runs in many threads, but must not be scored by its own modules meanwhile (a
    `CompatibilityScorer` of a family without a native decoder switches its attention).

    Args:
        slm: the small model, in eval mode; it is never changed.
        llm: where candidates come from; a transformers model is wrapped in a `LocalLLM`.
        selector: takes one candidate of the pool.
        policy: when to ask; a subclass's own `asks` and `entropy` decide.
        pool: "joint" (the SLM's top slm_k, then what is new in the LLM's top llm_k), "slm" or "llm" (one side alone).
        slm_k: candidates of the SLM, clamped to the vocabulary.
        llm_k: candidates of the LLM, clamped likewise.
        max_events: the first so many admitted events of a generation are served, then the SLM decodes alone.
        tokenizer: the one both models use, or the pair (SLM's, LLM's), which must have the same vocabulary: then the
            models' embeddings may be padded differently, and ids beyond the tokenizer's never count. Without one, the
            models must take equally many ids. Texts are decoded by it.
        batch_tokens: the most tokens, padding and new ones included, that one batch of `generate_many` may hold.
        on_llm_error: what an LLM that does not answer (an OSError, as `ServerError` is) means: "raise" ends the call
            with its error; "slm" appends the SLM's own token and marks the event by its `error`. All events of a step
            are asked for in one call and share its failure. A marked event counts among `max_events`, and the next one
            asks again.

    Raises:
        TypeError: `slm` is not a transformers model, or another argument not of its kind.
        ValueError: another vocabulary, a model in training mode, a reranker made on another model, or an argument out
            of range.
    """

    def __init__(
        self,
        slm: hf.CausalLM,
        llm: LLM | hf.CausalLM,
        selector: Selector,
        policy: RequestPolicy,
        *,
        pool: PoolKind = "joint",
        slm_k: int = 8,
        llm_k: int = 8,
        max_events: int = 8,
        tokenizer: hf.Tokenizer | tuple[hf.Tokenizer, hf.Tokenizer] | None = None,
        batch_tokens: int = 65536,
        on_llm_error: OnError = "raise",
    ) -> None:
        hf.check_decodable("slm", slm)
        if pool not in ("joint", "slm", "llm"):
            raise ValueError(f"pool: expected 'joint', 'slm' or 'llm', got {pool!r}; 'joint' is the method's own")
        if on_llm_error not in ("raise", "slm"):
            raise ValueError(f"on_llm_error: expected 'raise' or 'slm', got {on_llm_error!r}; 'raise' hides nothing")
        for name, count, least in (
            ("slm_k", slm_k, 1),
            ("llm_k", llm_k, 1),
            ("max_events", max_events, 0),
            ("batch_tokens", batch_tokens, 1),
        ):
            if not isinstance(count, Integral) or count < least:
                raise ValueError(f"{name}: expected {least} or more, got {count}; leave it out for the default")
        known = _known_ids(tokenizer)
        if isinstance(llm, hf.CausalLM):
            llm = LocalLLM(llm, valid_vocab=None if known is None else min(known, hf.vocabulary(llm)))
        for name, given, kind, remedy in (
            ("llm", llm, LLM, "a LocalLLM or a transformers causal LM"),
            ("selector", selector, Selector, "one such as FutureBridgeSelector(reranker)"),
            ("policy", policy, RequestPolicy, "RequestPolicy(threshold)"),
        ):
            if not isinstance(given, kind):
                raise TypeError(f"{name}: expected type {kind.__name__}, got {type(given).__name__}; pass {remedy}")
        selector.check_slm(slm)
        self.slm = slm
        self.llm: LLM = llm
        self.selector = selector
        self.policy = policy
        self.pool = pool
        self.max_events = max_events
        self.batch_tokens = batch_tokens
        self.on_llm_error = on_llm_error
        self.tokenizer = tokenizer[0] if isinstance(tokenizer, tuple) else tokenizer
        self.vocabulary = _common_vocabulary(hf.vocabulary(slm), llm.vocabulary, known)
        self.slm_k = min(slm_k, self.vocabulary)
        self.llm_k = min(llm_k, self.vocabulary)

    def generate(
        self,
        input_ids: Tensor | Sequence[int],
        max_new_tokens: int = 4096,
        *,
        on_token: Callable[[int, Event | None], None] | None = None,
    ) -> Generation:
        """Decode one prompt.

        Args:
            input_ids: [P] or [1, P] int64 on the SLM's device, at least one.
            max_new_tokens: the most tokens to generate; the model's positions bound it too.
            on_token: called with each token as it is appended, and with its event where it came from one.

        Returns:
            The new tokens, the end-of-sequence token included, and the events.

        Raises:
            TypeError: ids that are not integers.
            ValueError: no ids, one outside the vocabulary, another device or shape, a prompt that leaves no position
                for a new token, max_new_tokens below 1, a model in training mode, or logits that are NaN at a step.
            OSError: the LLM did not answer, unless `on_llm_error` is "slm". The decoder stays usable.
        """
        if isinstance(input_ids, Tensor) and input_ids.ndim == 2 and len(input_ids) == 1:
            input_ids = input_ids[0]
        if on_token is None:
            return self.generate_many([input_ids], max_new_tokens)[0]
        ends = hf.eos_ids(self.slm)

        def done(row: Row, events: list[Event]) -> bool:
            last = events[-1] if events and events[-1].step == len(row.new) - 1 else None
            on_token(row.tokens[-1], last)
            return row.tokens[-1] in ends

        return self._decode([input_ids], max_new_tokens, done)[0]

    def generate_many(self, prompts: Sequence[Tensor | Sequence[int]], max_new_tokens: int = 4096) -> list[Generation]:
        """Decode many prompts in lockstep, in left-padded batches; each comes out as `generate` would have it.

        The LLM is asked once a step for all prompts of a batch: where that fails, it fails for each of them.

        Args:
            prompts: [P] int64 each, of any lengths.
            max_new_tokens: the most tokens to generate for each.

        Raises:
            TypeError: as `generate`.
            ValueError: as `generate`.
            OSError: as `generate`.
        """
        ends = hf.eos_ids(self.slm)
        return self._decode(prompts, max_new_tokens, lambda row, _: row.tokens[-1] in ends)

    def generate_until(
        self, prompts: Sequence[Tensor | Sequence[int]], max_new_tokens: int, events: int
    ) -> list[Generation]:
        """As `generate_many`, but each generation also ends behind the token of its event number `events`."""
        ends = hf.eos_ids(self.slm)
        return self._decode(prompts, max_new_tokens, lambda row, found: row.tokens[-1] in ends or len(found) >= events)

    def as_custom_generate(self) -> Callable[..., Tensor]:
        """A callable for `decoder.slm.generate(..., custom_generate=decoder.as_custom_generate())`.

        The length limits, stopping criteria, EOS tokens, left padding and streamer (one prompt) given to `generate` are
        honoured. Decoding stays greedy between events, with one beam: logits processors and sampling settings do not
        act. Returned are the prompts and their new tokens, [B, P + n], padded on the right, as a tensor even where
        `return_dict_in_generate` is set.
        """

        def custom_generate(
            model: hf.CausalLM,
            input_ids: Tensor,
            logits_processor: Any = None,
            stopping_criteria: Any = None,
            generation_config: Any = None,
            streamer: Any = None,
            synced_gpus: bool = False,
            **model_kwargs: Any,
        ) -> Tensor:
            listener = hf.streamer_of_caller() if streamer is None else streamer
            try:
                mask = model_kwargs.get("attention_mask")
                return self._custom_generate(model, input_ids, mask, stopping_criteria, generation_config, listener)
            finally:
                if listener is not None:
                    listener.end()

        return custom_generate

    def _custom_generate(
        self,
        model: hf.CausalLM,
        input_ids: Tensor,
        attention_mask: Tensor | None,
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
                f"{generation_config.num_beams} beams; decoding is greedy, from token ids"
            )
        if streamer is not None and len(input_ids) != 1:
            raise ValueError(f"streamer: expected one prompt, got {len(input_ids)}; stream them one by one")

        def done(row: Row, _: list[Event]) -> bool:
            if streamer is not None:
                streamer.put(torch.tensor(row.tokens[-1:]))
            ids = torch.cat([input_ids[row.index], input_ids.new_tensor(row.new)])
            return bool(stopping_criteria(ids[None], None).all())  # EOS is among them

        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        prompts = [ids[keep.bool()] for ids, keep in zip(input_ids, attention_mask, strict=True)]
        new = [one.token_ids for one in self._decode(prompts, generation_config.max_length - input_ids.shape[1], done)]
        padding = generation_config.pad_token_id
        padded = pad_sequence(new, batch_first=True, padding_value=0 if padding is None else padding)
        return torch.cat([input_ids, padded], 1)

    def text(self, token_ids: Tensor) -> str | None:
        """token_ids [n] as text without special tokens, None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return cast(str, self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _decode(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        max_new_tokens: int,
        done: Callable[[Row, list[Event]], bool],
    ) -> list[Generation]:
        hf.check_decodable("slm", self.slm)
        check_max_new_tokens(max_new_tokens)
        checked = checked_prompts("input_ids", prompts, self.slm, room=1)
        events: list[list[Event]] = [[] for _ in checked]
        rows = lockstep(
            self.slm,
            checked,
            max_new_tokens,
            lambda step: self._next_tokens(step, events),
            lambda row: done(row, events[row.index]),
            self.batch_tokens,
        )
        generations = []
        for row in rows:
            new = torch.tensor(row.new, device=self.slm.device)
            generations.append(Generation(new, events[row.index], self.text(new)))
        return generations

    def _next_tokens(self, step: Step, events: list[list[Event]]) -> list[int]:
        """One token a row, greedy or the selector's where the policy asks; its event joins the row's others."""
        logits, rows = step.logits[:, : self.vocabulary], step.rows
        entropy = self.policy.entropy(logits)
        tokens = logits.argmax(-1).tolist()  # the first of equal ones
        entropies = entropy.tolist()
        for row, nats in zip(rows, entropies, strict=True):
            if math.isnan(nats):
                raise ValueError(
                    f"slm: expected finite logits, got NaN or infinite ones at step {step.index} of prompt "
                    f"{row.index}; check its weights and dtype"
                )
        asks = self.policy.asks(entropy).tolist()
        asking = [place for place, row in enumerate(rows) if asks[place] and len(events[row.index]) < self.max_events]
        if not asking:
            return tokens
        kv = hf.PrefixKV.from_cache(step.cache, step.slots)
        states = []
        for place in asking:
            row, held = rows[place], len(rows[place].tokens)
            prefix = hf.Prefix(kv, start=step.slots - held, length=held, row=place)
            states.append(State(torch.tensor(row.tokens, device=logits.device), step.index, entropies[place], prefix))
        for place, event in zip(asking, self._events(states, logits[asking]), strict=True):
            events[rows[place].index].append(event)
            tokens[place] = event.token
        return tokens

    def _events(self, states: Sequence[State], logits: Tensor) -> list[Event]:
        """The event of every state, with the SLM's logits [n, V] there."""
        prompts = [state.tokens for state in states]
        try:
            pools = candidate_pool(logits, self.llm, prompts, self.pool, self.slm_k, self.llm_k)
        except OSError as problem:
            if self.on_llm_error == "raise":
                raise
            tokens, error = logits.argmax(-1), f"{type(problem).__name__}: {problem}"
            logprobs = logits.float().log_softmax(-1).gather(1, tokens[:, None])
            return [
                Event(state.step, state.entropy, [token], [SLM], logprob, [math.nan], None, 0, error)
                for state, token, logprob in zip(states, tokens.tolist(), logprobs.tolist(), strict=True)
            ]
        chosen = self.selector.choose_many(states, pools)
        events = []
        for state, pool, (choice, scores) in zip(states, pools, chosen, strict=True):
            if not hasattr(choice, "__index__") or not 0 <= int(choice) < len(pool):
                raise ValueError(
                    f"{type(self.selector).__name__}: expected an index from 0 below {len(pool)}, got {choice}; "
                    "return a place in the pool"
                )
            events.append(
                Event(
                    state.step,
                    state.entropy,
                    pool.ids.tolist(),
                    pool.sources.tolist(),
                    pool.slm_logprob.tolist(),
                    pool.llm_logprob.tolist(),
                    None if scores is None else scores.tolist(),
                    int(choice),
                )
            )
        return events


def _known_ids(tokenizer: hf.Tokenizer | tuple[hf.Tokenizer, hf.Tokenizer] | None) -> int | None:
    """The number of ids that the tokenizer knows, None without one.

    Raises:
        TypeError: neither a tokenizer nor a pair of them.
        ValueError: a pair with different vocabularies.
    """
    if tokenizer is None:
        return None
    given = tokenizer if isinstance(tokenizer, tuple) else (tokenizer,)
    if len(given) > 2 or not all(hasattr(one, "get_vocab") for one in given):
        raise TypeError(
            f"tokenizer: expected a tokenizer or a pair of them, got {type(tokenizer).__name__}; load one with "
            "AutoTokenizer"
        )
    if not isinstance(tokenizer, tuple):
        return max(tokenizer.get_vocab().values()) + 1
    small, large = (one.get_vocab() for one in tokenizer)
    if small != large:
        differing = len({name for name in small.keys() | large.keys() if small.get(name) != large.get(name)})
        raise ValueError(
            f"tokenizer: expected SLM and LLM to share one vocabulary, got {len(small)} and {len(large)} entries of "
            f"which {differing} differ; use two models of one family"
        )
    return max(small.values()) + 1


def _common_vocabulary(slm: int, llm: int | None, known: int | None) -> int:
    """The number of ids that both models and the tokenizer share.

    Raises:
        ValueError: different sizes without a tokenizer, or a model that takes fewer ids than the tokenizer has.
    """
    if known is None:
        if llm is not None and slm != llm:
            raise ValueError(
                f"llm: expected the SLM's vocabulary of {slm} ids, got {llm}; use two models of one family, or pass "
                "their tokenizer where only the padding of the embeddings differs"
            )
        return slm
    for name, size in (("slm", slm), ("llm", llm)):
        if size is not None and size < known:
            raise ValueError(
                f"{name}: expected at least the tokenizer's {known} ids, got {size}; use its own tokenizer"
            )
    return known
