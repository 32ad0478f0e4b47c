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
from functools import partial

import torch

from benchmarks.paper.methods import Context, CountedGeneration, Method
from benchmarks.paper.methods.spans import ending_ids
from benchmarks.paper.methods.spec_reason import write_steps
from fb_core.apps.pipeline.models import Generate
from fb_core.decode.decoder import Usage
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.llm.local import LLM, Ids, LocalLLM
from fb_core.models.facts import CausalLM, Tokenizer, max_positions
from fb_core.models.tokens import checked_prompts
from fb_core.runtime.plain import batches, last_logits, left_padded, not_finite


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
) -> list[CountedGeneration]:
    """Decode many prompts step by step; the steps of all prompts are routed and written together.

    The policy is asked at a step's first token; ids in `step_ends` end a step.
    """
    pair = Pair(slm, llm, tokenizer)
    large, small = pair.large(), LocalLLM(slm, batch_tokens=batch_tokens, tokenizer=pair.tokenizer)
    checked = checked_prompts("prompts", prompts, slm, room=1)
    texts, new = [ids.tolist() for ids in checked], [list[int]() for _ in checked]
    calls, written, read = ([0] * len(checked) for _ in range(3))
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
                calls[row] += writer is large
                if writer is large:
                    written[row], read[row] = written[row] + len(step), max(0, len(new[row]) - 1)
                if not step:  # the LLM has nothing to say
                    live.remove(row)
    tokens = [torch.tensor(ids, dtype=torch.int64, device=slm.device) for ids in new]
    used = (Usage(*row[:1], None, 0, *row[1:]) for row in zip(calls, written, read, strict=True))
    return [CountedGeneration(ids, [], pair.text(ids), counted) for ids, counted in zip(tokens, used, strict=True)]


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
