"""Speculative decoding: the small model drafts tokens, the large one checks a whole draft in one forward pass.

Definition, until the answer is finished:

1. the SLM writes `draft` tokens greedily;
2. one forward of the LLM gives its next-token distribution at each position of the draft, and after it;
3. the draft is kept up to its first token that is not accepted; then the LLM's likeliest token is appended.

"exact" accepts a token if it is the LLM's likeliest, ties to the lowest id, so the text is the LLM's own greedy text.
The lossy rules accept one among the LLM's `top_k` likeliest, or one whose probability is at least `least`. Both models
keep their keys and values from round to round. The published algorithm samples, and accepts with a probability that
keeps the LLM's distribution; at temperature 0 it is "exact".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.paper.methods import CountedGeneration, Method
from fb_core.decode.decoder import Usage
from fb_core.decode.pair import Pair
from fb_core.llm.local import LLM, Ids, LocalLLM, check_finite
from fb_core.models.facts import Cache, CausalLM, Tokenizer, max_positions
from fb_core.models.tokens import checked_prompts
from fb_core.runtime.plain import with_cache

DRAFT = 5  # tokens per round
SOURCE = (
    'Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192; Chen et al., '
    "arXiv 2302.01318"
)
Accept = Callable[[Tensor, Tensor], Tensor]
"""From the LLM's logits float32 [n, V] and drafted ids int64 [n] to bool [n]."""


def exact(logits: Tensor, drafted: Tensor) -> Tensor:
    """Whether each token is the likeliest."""
    return logits.argmax(-1) == drafted


def within_top(k: int) -> Accept:
    """Whether fewer than k tokens are likelier."""

    def accept(logits: Tensor, drafted: Tensor) -> Tensor:
        return (logits > logits.gather(1, drafted[:, None])).sum(1) < k

    return accept


def at_least(least: float) -> Accept:
    """Whether each token's probability is at least `least`, or it is the likeliest."""

    def accept(logits: Tensor, drafted: Tensor) -> Tensor:
        logprob = logits.log_softmax(-1).gather(1, drafted[:, None])[:, 0]
        return (logprob >= math.log(least)) | exact(logits, drafted)

    return accept


class _Reader:
    """A model with the keys and values of a text whose end may be taken back."""

    def __init__(self, model: CausalLM, vocabulary: int) -> None:
        self.model, self.vocabulary, self.cache, self.held = model, vocabulary, Cache(), 0

    def logits(self, tokens: Sequence[int], last: int = 1) -> Tensor:
        """float32 [last, V] after each of the last tokens; those before them must be the ones read so far, if any."""
        kept = min(self.held, len(tokens) - last)
        self.cache.crop(kept)
        ids = torch.tensor([tokens[kept:]], device=self.model.device)
        output = self.model(input_ids=ids, use_cache=True, **with_cache(self.model, self.cache))
        self.held = len(tokens)
        logits = output.logits[0, -last:, : self.vocabulary].float()
        check_finite(logits.amax(-1))
        return logits


@torch.no_grad()
def speculative(
    slm: CausalLM,
    llm: LLM | CausalLM,
    prompts: Sequence[Ids],
    max_new_tokens: int = 4096,
    *,
    accept: Accept = exact,
    draft: int = DRAFT,
    tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None,
) -> list[CountedGeneration]:
    """Decode prompts one after another; the LLM must be in this process, since a server gives no logits of a draft."""
    pair = Pair(slm, llm, tokenizer)
    large = pair.large()
    if not isinstance(large, LocalLLM):
        raise ValueError(f"llm: expected a model in this process, got {type(large).__name__}; load it here")
    positions = min(max_positions(model) or math.inf for model in (slm, large.model))
    generations = []
    for ids in checked_prompts("prompts", prompts, slm, room=1):
        text, start = ids.tolist(), len(ids)
        small, judge = (_Reader(model, pair.vocabulary) for model in (slm, large.model))
        rounds = corrected = total = 0
        while (room := min(max_new_tokens - len(text) + start, positions - len(text))) > 0:
            drafted: list[int] = []
            while len(drafted) < min(draft, room - 1) and not (drafted and drafted[-1] in pair.ends):
                drafted.append(int(small.logits(text + drafted).argmax()))
            logits = judge.logits(text + drafted, len(drafted) + 1)
            accepted = accept(logits[:-1], torch.tensor(drafted, dtype=torch.int64, device=logits.device))
            kept = int(accepted.long().cumprod(0).sum())
            text += drafted[:kept]
            rounds, total = rounds + 1, total + len(drafted)
            if not (kept and text[-1] in pair.ends):
                text.append(int(logits[kept].argmax()))
                corrected += 1
            if text[-1] in pair.ends:
                break
        new = torch.tensor(text[start:], dtype=torch.int64, device=slm.device)
        used = Usage(rounds, None, 0, corrected, total + rounds - 1)  # the LLM reads each draft whole
        generations.append(CountedGeneration(new, [], pair.text(new), used))
    return generations


def speculative_method(name: str, label: str, accept: Accept) -> Method:
    """Speculative decoding with a rule of acceptance."""
    return Method(
        name=name,
        label=label,
        source=SOURCE,
        decode=lambda run, _: partial(
            speculative, run.models.slm, run.models.llm, accept=accept, tokenizer=run.models.tokenizer
        ),
        timed=("plain",),
    )


METHOD = speculative_method("speculative", "Speculative decoding, exact", exact)
