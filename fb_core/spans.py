"""Spans: what the LLM writes after its own candidate at an event, so that several tokens are one choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fb_core import hf
from fb_core.counts import check_count
from fb_core.llm import LLM, LocalLLM
from fb_core.shared_prefix import Branches, forward

PIECE = 16
"""Tokens asked for at once where a span may end at a token: a continuation cannot be told to stop there."""


@dataclass(frozen=True)
class Span:
    """How far the LLM writes on after its likeliest candidate; what it writes is the candidate's tail.

    The tail is appended together with its candidate. A span also ends with its sequence, and where there is no room for
    more. One token is the published method. With no bound at all and the LLM's own preference, the first event is a
    takeover.

    Attributes:
        tokens: maximum tokens, the candidate included; None for any number.
        ends: ids after which a span ends.
        agree: whether a span ends before the first token of its tail that the SLM would have written itself.

    Raises:
        ValueError: tokens below 1.
    """

    tokens: int | None = 1
    ends: frozenset[int] = frozenset()
    agree: bool = False

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_count("tokens", self.tokens, 1, "1 is the published method", "{} or more of a span")

    @property
    def single(self) -> bool:
        """Whether every span is one token."""
        return self.tokens == 1

    def tail(self, first: int, written: Sequence[int]) -> tuple[int, ...]:
        """The part of the LLM's tokens after its candidate that belongs to the span; `agree` is not applied.

        Args:
            first: the candidate's id.
            written: ids after it; they may go beyond the span.
        """
        if first in self.ends:
            return ()
        most = len(written) if self.tokens is None else self.tokens - 1
        end = next((place for place, token in enumerate(written[:most], 1) if token in self.ends), most)
        return tuple(written[:end])


def ending_ids(tokenizer: hf.Tokenizer, delimiter: str) -> frozenset[int]:
    """The ids whose text contains a delimiter.

    Raises:
        ValueError: there are none.
    """
    vocabulary = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[token] for token in vocabulary])
    found = frozenset(token for token, text in zip(vocabulary, texts, strict=True) if delimiter in text)
    if not found:
        raise ValueError(
            f"delimiter: expected a text that some token holds, got {delimiter!r}; take one that is a single token"
        )
    return found


def write_tails(
    llm: LLM, prompts: Sequence[Tensor], firsts: Sequence[int], rooms: Sequence[int], span: Span, vocabulary: int
) -> list[tuple[int, ...]]:
    """What the LLM writes after its own candidate of each state, as far as the span goes; `agree` is not applied.

    Args:
        llm: the large model.
        prompts: the [P] tokens of each state.
        firsts: the LLM's candidate in each state.
        rooms: maximum tokens for which each sequence has room, the candidate included.
        span: how far.
        vocabulary: ids from this one on are not shared; a tail ends before one.

    Returns:
        one tail per state, the end-of-sequence token included; raises as `LLM.complete_branches`.
    """
    positions = hf.max_positions(llm.model) if isinstance(llm, LocalLLM) else None
    limits = [room if span.tokens is None else min(room, span.tokens) for room in rooms]
    if positions is not None:
        limits = [min(limit, positions - len(ids)) for limit, ids in zip(limits, prompts, strict=True)]
    spans = [[first] for first in firsts]
    going = [row for row, limit in enumerate(limits) if limit > 1 and firsts[row] not in span.ends]
    while going:
        count = min(limits[row] - len(spans[row]) for row in going)  # those with more room go on
        count = min(count, PIECE) if span.ends else count
        prefixes = [[*prompts[row].tolist(), *spans[row][:-1]] for row in going]
        written = llm.complete_branches(prefixes, [spans[row][-1:] for row in going], count)
        unfinished = []
        for row, (new,) in zip(going, written, strict=True):
            for token in new.tolist():
                if token >= vocabulary:
                    break
                spans[row].append(token)
                if token in span.ends or len(spans[row]) == limits[row]:
                    break
            else:
                unfinished += [row] if len(new) == count else []
        going = unfinished
    return [tuple(tokens[1:]) for tokens in spans]


@torch.no_grad()
def until_agreement(
    slm: hf.CausalLM,
    prefixes: Sequence[hf.Prefix],
    firsts: Sequence[int],
    tails: Sequence[Sequence[int]],
    vocabulary: int,
) -> list[tuple[int, ...]]:
    """Each tail cut before its first token that the SLM would have written itself, by one packed forward.

    Args:
        slm: the small model.
        prefixes: its keys and values of each state, all of one `PrefixKV`.
        firsts: the LLM's candidate in each state.
        tails: what the LLM wrote after each candidate.
        vocabulary: the number of ids that count.
    """
    pack = [
        (prefix, [Branches(prefix.length, [torch.tensor([first, *tail], device=slm.device)], 1)])
        for prefix, first, tail in zip(prefixes, firsts, tails, strict=True)
    ]
    found = forward(slm, pack, valid_vocab=vocabulary, return_greedy=True)
    return [agreed(tail, own) for tail, (((_, own),),) in zip(tails, found, strict=True)]


def agreed(tail: Sequence[int], own: Tensor) -> tuple[int, ...]:
    """A tail cut before its first token that is the SLM's own; `own`, bool [n], says which tokens are."""
    return tuple(tail[: [*own.tolist(), True].index(True)])
