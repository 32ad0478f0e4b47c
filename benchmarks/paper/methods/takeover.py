"""Takeover: at the first state where the small model would ask, the large one writes the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.methods import Method
from fb_core.apps.pipeline.models import decoder_of, greedy_decoder
from fb_core.decode.decoder import Generation, LowLatencyDecoder, Usage
from fb_core.decode.loop import has_native
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import LLMPreference
from fb_core.llm.local import LLM, LocalLLM
from fb_core.models.facts import CausalLM, max_positions
from fb_core.runtime.plain import Stop


@dataclass
class TakeoverGeneration(Generation):
    """A generation whose only event, if there is one, is where the LLM took over."""

    @property
    def usage(self) -> Usage:
        """One request, and the tokens after the first of the LLM's as suffix."""
        taken, tokens = len(self.events), len(self.token_ids)
        return Usage(taken, None, taken, tokens - self.events[0].step - 1 if taken else 0, tokens - 1 if taken else 0)


def taking_over(
    slm: CausalLM, llm: LLM | CausalLM, policy: RequestPolicy, **options: Any
) -> Callable[[Sequence[Tensor | Sequence[int]], int], list[TakeoverGeneration]]:
    """The SLM decodes greedily up to its first admitted state; from there on the LLM does.

    The result decodes prompts up to a maximum of new tokens; with `max_length` both models do so in the fast loop. A
    generation has one event (the LLM's own pool, its first token chosen) if the LLM took over, else none.
    """
    decoder = decoder_of(slm, llm, LLMPreference(), policy, pool="llm", max_events=1, **options)
    pair, large = decoder.pair, decoder.pair.large()
    model = large.model if isinstance(large, LocalLLM) else None
    positions = None if model is None else max_positions(model)
    ending = None
    fast = isinstance(decoder, LowLatencyDecoder) and decoder.loop is not None
    if fast and model is not None and has_native("llm", model):
        ending = greedy_decoder(model, **{name: value for name, value in options.items() if name != "tokenizer"})

    def rests(states: list[Tensor], longest: int) -> list[Tensor]:
        if ending is None:
            return large.complete_many(states, longest)
        slots = options["max_length"]  # a late state has fewer tokens left than `longest`
        stop = Stop(ending.pair.ends, longest, slots if positions is None else min(slots, positions))
        return [done.token_ids for done in ending.decode(states, stop)]

    def generate(prompts: Sequence[Tensor | Sequence[int]], max_new_tokens: int) -> list[TakeoverGeneration]:
        done = decoder.generate_many(prompts, max_new_tokens, until=1)
        states: dict[int, Tensor] = {}
        for index, begun in enumerate(done):
            if begun.events and len(begun.token_ids) < max_new_tokens and int(begun.token_ids[-1]) not in pair.ends:
                state = torch.cat([torch.as_tensor(prompts[index], device=slm.device), begun.token_ids])
                if positions is None or len(state) < positions:  # else the LLM has no position for another token
                    states[index] = state.to(large.device)
        longest = max((max_new_tokens - len(done[index].token_ids) for index in states), default=0)
        tokens = [begun.token_ids for begun in done]
        for index, rest in zip(states, rests(list(states.values()), longest) if states else [], strict=True):
            tokens[index] = torch.cat([tokens[index], rest.to(slm.device)])[:max_new_tokens]
        return [TakeoverGeneration(ids, begun.events, pair.text(ids)) for ids, begun in zip(tokens, done, strict=True)]

    return generate


METHOD = Method(
    name="takeover",
    label="Takeover",
    decode=lambda run, _: taking_over(run.models.slm, run.models.llm, run.policy, **run.options),
    timed=("fast", "plain"),
)
