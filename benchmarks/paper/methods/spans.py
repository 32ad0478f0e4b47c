"""Spans: at every admitted state the large model writes to the end of the step, then the small one goes on.

Definition: the LLM's argmax over the whole vocabulary is appended, then what the LLM writes after it, up to and
including the first token whose text contains the delimiter, to the end of the sequence or to the length limit. Such a
span is one event of the budget. A step that never ends makes the first event a takeover; a step of one token makes it
one-token takeover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.methods import Context, CountedGeneration, Method
from benchmarks.paper.methods.spec_reason import write_steps
from fb_core.apps.pipeline.models import Generate, decoder_of
from fb_core.decode.decoder import Usage
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import LLMPreference
from fb_core.events import Event
from fb_core.llm.local import LLM, LocalLLM
from fb_core.models.facts import CausalLM, Tokenizer, max_positions
from fb_core.models.tokens import checked_prompts


def spans(
    slm: CausalLM,
    llm: LLM | CausalLM,
    policy: RequestPolicy,
    prompts: Sequence[Tensor | Sequence[int]],
    max_new_tokens: int = 4096,
    *,
    step_ends: Set[int],
    max_events: int = 8,
    **options: Any,
) -> list[CountedGeneration]:
    """Decode many prompts together; at their first `max_events` admitted states the LLM writes to the end of the step.

    Ids in `step_ends` end a step; `options` are those of `CollaborativeDecoder`. The event of a span has the LLM's own
    pool, its first token chosen.
    """
    decoder = decoder_of(slm, llm, LLMPreference(), policy, pool="llm", max_events=1, **options)
    pair, large = decoder.pair, decoder.pair.large()
    asked = [ids.tolist() for ids in checked_prompts("prompts", prompts, slm, room=1)]
    new: list[list[int]] = [[] for _ in asked]
    events: list[list[Event]] = [[] for _ in asked]
    written, read = [0] * len(asked), [0] * len(asked)
    models = (slm, large.model) if isinstance(large, LocalLLM) else (slm,)
    small_positions, *large_positions = (max_positions(model) or math.inf for model in models)

    def room(row: int, positions: float = small_positions) -> int:
        return int(min(max_new_tokens - len(new[row]), positions - len(asked[row]) - len(new[row])))

    def ended(tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] in pair.ends

    def go_on(rows: Sequence[int]) -> list[int]:
        """Decode as many tokens as all rows have room for, each up to its next event; returns the rows that had one."""
        states = [torch.tensor(asked[row] + new[row], device=slm.device) for row in rows]
        generations = decoder.generate_many(states, min(map(room, rows)), until=1)
        for row, generation in zip(rows, generations, strict=True):
            events[row] += [replace(event, step=event.step + len(new[row])) for event in generation.events]
            new[row] += generation.token_ids.tolist()
        return [row for row, generation in zip(rows, generations, strict=True) if generation.events]

    def unfinished() -> list[int]:
        return [row for row in range(len(asked)) if room(row) > 0 and not ended(new[row])]

    while rows := [row for row in unfinished() if len(events[row]) < max_events]:
        asking = go_on(rows)
        begun = set(asking) & set(unfinished())
        rows = [row for row in sorted(begun) if new[row][-1] not in step_ends]
        rooms = {row: min([room(row), *(room(row, positions) for positions in large_positions)]) for row in rows}
        rows = [row for row in rows if rooms[row] > 0]
        steps = write_steps(
            large,
            [asked[row] + new[row] for row in rows],
            [rooms[row] for row in rows],
            lambda step: ended(step) or step[-1] in step_ends,
        )
        for row, step in zip(rows, steps, strict=True):
            new[row] += step
            written[row] += len(step)
        for row in asking:
            read[row] = len(new[row]) - 1
    decoder.max_events = 0
    while rows := unfinished():
        go_on(rows)
    tokens = [torch.tensor(ids, dtype=torch.int64, device=slm.device) for ids in new]
    used = (Usage.of(own)._replace(suffix=s, read=r) for own, s, r in zip(events, written, read, strict=True))
    return [CountedGeneration(*row) for row in zip(tokens, events, map(pair.text, tokens), used, strict=True)]


def ending_ids(tokenizer: Tokenizer, delimiter: str) -> frozenset[int]:
    """The ids whose text contains a delimiter; none is an error."""
    vocabulary = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[token] for token in vocabulary])
    ids = frozenset(token for token, text in zip(vocabulary, texts, strict=True) if delimiter in text)
    if not ids:
        raise ValueError(
            f"delimiter: expected a text that some token holds, got {delimiter!r}; take one that is a single token"
        )
    return ids


def decode(run: Context, seed: int | None) -> Generate:
    """Decoding with the run's delimiter and budget of events."""
    models, settings = run.models, run.settings
    ends = ending_ids(models.tokenizer, run.compare.delimiter)
    given = {"step_ends": ends, "max_events": settings.evaluate.max_events, **run.options}
    return partial(spans, models.slm, models.llm, run.policy, **given)


METHOD = Method(name="spans", label="Spans to a step's end", decode=decode, timed=("plain",))
