"""Maj@n: the small model alone, sampled n times, the answer most of them agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.paper.methods import Context, Method
from fb_core.apps.pipeline.models import Generate, verifier_of
from fb_core.decode.decoder import Generation
from fb_core.llm.local import Ids, LocalLLM
from fb_core.models.facts import Tokenizer
from fb_core.verify.judges import boxed
from fb_core.verify.verifier import Verifier


def majority_vote(answers: Sequence[str | None], equivalent: Callable[[str, str], bool]) -> int | None:
    """The index of the first answer of the largest class of equivalent answers, None if there are no votes.

    Each answer is compared with the first of every class; None does not vote. Of equal classes the first wins.
    """
    classes: list[list[int]] = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        for members in classes:
            first = answers[members[0]]
            if first is not None and equivalent(first, answer):
                members.append(index)
                break
        else:
            classes.append([index])
    return max(classes, key=len)[0] if classes else None


def majority(
    sampler: LocalLLM,
    prompts: Sequence[Ids],
    verifier: Verifier,
    tokenizer: Tokenizer,
    n: int = 8,
    max_new_tokens: int = 4096,
    seed: int = 0,
) -> list[str | None]:
    r"""Sample n solutions of every prompt (temperature 0.7, top-p 0.8, top-k 20) and let their `\boxed` answers vote.

    Returns the content of each winning box; None if no sample has a box.
    """
    drawn = sampler.sample_many(prompts, n, max_new_tokens, temperature=0.7, top_p=0.8, top_k=20, seed=seed)
    winners: list[str | None] = []
    for samples in drawn:
        answers = [boxed(str(tokenizer.decode(sample.tolist(), skip_special_tokens=True))) for sample in samples]
        winner = majority_vote(answers, verifier.equivalent)
        winners.append(None if winner is None else answers[winner])
    return winners


def decode(run: Context, seed: int) -> Generate:
    """The winning answers as texts; the tokens of the samples are not kept."""
    sampler, tokenizer, votes = run.models.local_slm, run.models.tokenizer, run.compare.votes

    verifier = verifier_of(run.settings.verify)

    def generate(prompts: Sequence[Tensor], max_new_tokens: int) -> list[Generation]:
        answers = majority(sampler, prompts, verifier, tokenizer, votes, max_new_tokens, seed)
        texts = ["" if answer is None else f"\\boxed{{{answer}}}" for answer in answers]
        return [Generation(torch.zeros(0, dtype=torch.int64), [], text) for text in texts]

    return generate


METHOD = Method(name="majority", label="Maj@{votes}", decode=decode, seeded=True, timed=("plain",))
