"""GlimpRouter: the entropy of the small model's first token of a reasoning step decides who writes that step.

Definition, until the answer is finished: at the beginning of a step the SLM's next-token distribution is computed. If
its entropy exceeds a threshold, the LLM writes the whole step, else the SLM does. A step ends after a token whose text
contains the delimiter, at the end of the sequence or at the length limit. Nothing is trained.

Here entropy and threshold are those of the run's request policy, as for every method; a step of the answer is a step.
Both models decode greedily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.paper.methods import Context, Method
from benchmarks.paper.methods.spans import ending_ids
from benchmarks.paper.methods.spec_reason import write_steps
from fb_core.apps.pipeline.models import Generate
from fb_core.decode.decoder import Generation, Usage
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.llm.local import LLM, Ids, LocalLLM
from fb_core.models.facts import CausalLM, Tokenizer, max_positions
from fb_core.models.tokens import check_max_new_tokens, checked_prompts
from fb_core.runtime.plain import batches, last_logits, left_padded, not_finite


@dataclass
class RoutedGeneration(Generation):
    """A generation without events.

    Attributes:
        steps: number of steps.
        calls: number of steps that the LLM wrote.
        written: tokens of these.
        read: positions after the prompt that the LLM computed.
    """

    steps: int
    calls: int
    written: int
    read: int

    @property
    def usage(self) -> Usage:
        """A call for every step that the LLM wrote."""
        return Usage(self.calls, None, 0, self.written, self.read)


def glimp_router(
    slm: CausalLM,
    llm: LLM | CausalLM,
    policy: RequestPolicy,
    prompts: Sequence[Ids],
    max_new_tokens: int = 4096,
    *,
    step_ends: Set[int],
    tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None,
    batch_tokens: int = 65536,
) -> list[RoutedGeneration]:
    """Decode many prompts step by step; the steps of all prompts are routed and written together.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        policy: whether the LLM writes a step, asked at the step's first token.
        prompts: [P] int64 each, of any lengths.
        max_new_tokens: maximum tokens of a generation, of both models together.
        step_ends: ids that end a step, as from `ending_ids`.
        tokenizer: as in `CollaborativeDecoder`.
        batch_tokens: maximum tokens of one batch, padding and new ones included.

    Returns:
        One generation per prompt, in order; `events` is empty.

    Raises:
        TypeError: as `CollaborativeDecoder.generate`.
        ValueError: as `CollaborativeDecoder` and its `generate`.
        OSError: the LLM did not answer.
    """
    pair = Pair(slm, llm, tokenizer)
    large, small = pair.large(), LocalLLM(slm, batch_tokens=batch_tokens, tokenizer=pair.tokenizer)
    check_max_new_tokens(max_new_tokens)
    checked = checked_prompts("prompts", prompts, slm, room=1)
    texts, new = [ids.tolist() for ids in checked], [list[int]() for _ in checked]
    steps, calls, written, read = ([0] * len(checked) for _ in range(4))
    models = (slm, large.model) if isinstance(large, LocalLLM) else (slm,)
    positions = min(max_positions(model) or math.inf for model in models)

    def room(row: int) -> int:
        return int(min(max_new_tokens - len(new[row]), positions - len(texts[row]) - len(new[row])))

    def ended(step: Sequence[int]) -> bool:
        return step[-1] in pair.ends or step[-1] in step_ends

    live = list(range(len(checked)))
    while live := [row for row in live if room(row) > 0 and not (new[row] and new[row][-1] in pair.ends)]:
        states = {row: texts[row] + new[row] for row in live}
        hard = _uncertain(small, states, policy, pair.vocabulary)
        for writer, rows in ((small, [row for row in live if row not in hard]), (large, sorted(hard))):
            drafts = write_steps(writer, [states[row] for row in rows], [room(row) for row in rows], ended)
            for row, step in zip(rows, drafts, strict=True):
                new[row] += step
                steps[row] += 1
                calls[row] += writer is large
                if writer is large:
                    written[row], read[row] = written[row] + len(step), max(0, len(new[row]) - 1)
                if not step:  # the LLM has nothing to say
                    live.remove(row)
    tokens = [torch.tensor(ids, dtype=torch.int64, device=slm.device) for ids in new]
    empty: list[list[object]] = [[] for _ in tokens]
    return [
        RoutedGeneration(*row)
        for row in zip(tokens, empty, map(pair.text, tokens), steps, calls, written, read, strict=True)
    ]


def _uncertain(small: LocalLLM, states: dict[int, list[int]], policy: RequestPolicy, vocabulary: int) -> set[int]:
    """The rows at whose states the policy asks."""
    rows, asked = list(states), set[int]()
    prompts = [torch.tensor(states[row], device=small.device) for row in rows]
    for batch in batches([len(ids) for ids in prompts], 0, small.batch_tokens):
        logits = last_logits(small.model, *left_padded([prompts[index] for index in batch]))
        entropy = policy.entropy(logits[:, :vocabulary])
        if entropy.isnan().any():
            raise not_finite(0, rows[batch[int(entropy.isnan().nonzero()[0])]])
        asked |= {rows[index] for index, asks in zip(batch, policy.asks(entropy).tolist(), strict=True) if asks}
    return asked


def decode(run: Context, seed: int | None) -> Generate:
    """Decoding with the run's delimiter and request policy."""
    ends = ending_ids(run.models.tokenizer, run.compare.delimiter)
    return partial(glimp_router, run.models.slm, run.models.llm, run.policy, step_ends=ends, **run.batched)


METHOD = Method(
    name="glimp-router",
    label="GlimpRouter",
    source='Zeng et al., "GlimpRouter: Efficient Collaborative Inference by Glimpsing One Token of Thoughts", '
    "arXiv 2601.05110",
    decode=decode,
    timed=("plain",),
)
