"""Takeover: at the first state where the small model would ask, the large one writes the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder, Generation
from fb_core.llm import LLM
from fb_core.policy import RequestPolicy
from fb_core.selectors import LLMPreference


def takeover(
    slm: hf.CausalLM,
    llm: LLM | hf.CausalLM,
    policy: RequestPolicy,
    prompts: Sequence[Tensor | Sequence[int]],
    max_new_tokens: int = 4096,
    *,
    tokenizer: hf.Tokenizer | tuple[hf.Tokenizer, hf.Tokenizer] | None = None,
) -> list[Generation]:
    """The SLM decodes greedily up to its first admitted state; from there on the LLM does.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        policy: when the SLM would ask.
        prompts: [P] int64 each.
        max_new_tokens: the most tokens of a generation, both models' together.
        tokenizer: as in `CollaborativeDecoder`.

    Returns:
        One generation a prompt, in order, with one event (the LLM's own pool, its first token chosen) where the LLM
        took over and none where the SLM finished alone.

    Raises:
        TypeError: as `CollaborativeDecoder.generate`.
        ValueError: as `CollaborativeDecoder` and its `generate`.
    """
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), policy, pool="llm", max_events=1, tokenizer=tokenizer)
    done = decoder.generate_until(prompts, max_new_tokens, events=1)
    ends = hf.eos_ids(slm) | decoder.llm.ends
    taken = [
        place
        for place, begun in enumerate(done)
        if begun.events and len(begun.token_ids) < max_new_tokens and int(begun.token_ids[-1]) not in ends
    ]
    states = [
        torch.cat([torch.as_tensor(prompts[place], device=slm.device), done[place].token_ids]).to(decoder.llm.device)
        for place in taken
    ]
    longest = max((max_new_tokens - len(done[place].token_ids) for place in taken), default=0)
    rests = decoder.llm.complete_many(states, longest) if taken else []
    for place, rest in zip(taken, rests, strict=True):
        tokens = torch.cat([done[place].token_ids, rest.to(slm.device)])[:max_new_tokens]
        done[place] = Generation(tokens, done[place].events, decoder.text(tokens))
    return done
