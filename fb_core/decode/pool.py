"""The candidates of an event: both models' proposals in one pool, with both log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fb_core.events import Pool, PoolKind
from fb_core.llm.local import LLM, Candidates
from fb_kernels import joint_pool, topk_entropy


def candidate_pool(
    logits: Tensor,
    llm: LLM | None,
    prompts: Sequence[Tensor],
    pool: PoolKind = "joint",
    slm_k: int = 8,
    llm_k: int = 8,
) -> list[Pool]:
    """The candidates of each of many states, with both models' log-probabilities, on the device of logits.

    A single prompt goes through `llm.candidates`, so that its cache stays in step with the sequence.

    Args:
        logits: [n, V] the SLM's at each state, over the ids that both models share.
        llm: gives its candidates and the log-probabilities of the SLM's; may be None for pool "slm" only, whose
            llm_logprob is then NaN.
        prompts: the [P] tokens of each state.
        pool: "joint" (the SLM's top slm_k, then what is new in the LLM's top llm_k), "slm" or "llm" (one side alone).
        slm_k: number of SLM candidates, clamped to V.
        llm_k: number of LLM candidates, clamped to V.

    Raises:
        ValueError: the LLM proposes no id below V for pool "llm", or leaves out log-probabilities.
    """
    size = logits.shape[-1]
    slm_ids = logits.new_empty((len(logits), 0), dtype=torch.int64)
    if pool != "llm":
        slm_ids = topk_entropy(logits.detach(), min(slm_k, size))[2]
    if llm is None:
        assert pool == "slm"
        nothing = slm_ids.new_empty(0)
        answers = [Candidates(nothing, nothing.float(), torch.full(ids.shape, math.nan)) for ids in slm_ids]
    else:
        answers = _ask(llm, prompts, 1 if pool == "slm" else min(llm_k, size), slm_ids)
        if pool == "slm":
            answers = [Candidates(ids[:0], logprob[:0], slm_scores) for ids, logprob, slm_scores in answers]
    proposed = [answer.ids.where(answer.ids < size, -1) for answer in answers]
    llm_ids = pad_sequence(proposed, batch_first=True, padding_value=-1).to(logits.device)
    pool_ids, counts, sources = joint_pool(slm_ids, llm_ids)
    slm_logprob, pools = logits.float().log_softmax(-1), []
    for row, (answer, count) in enumerate(zip(answers, counts.tolist(), strict=True)):
        if not count:
            raise ValueError(
                f"llm: expected a candidate among the {size} shared ids, got none; tell the LLM how many ids are valid"
            )
        ids, llm_logprob = pool_ids[row, :count], answer.logprob.to(logits.device)
        asked = torch.cat([slm_ids[row], llm_ids[row, : len(proposed[row])]])
        if slm_ids.shape[1]:
            if answer.score_logprob is None:
                raise ValueError(
                    f"llm: expected log-probabilities of the {slm_ids.shape[1]} score_ids, got None; return them "
                    "along with the candidates"
                )
            llm_logprob = torch.cat([answer.score_logprob.to(logits.device), llm_logprob])
        index = (ids[:, None] == asked).int().argmax(1)  # [K] of each candidate among the ids asked about
        pools.append(Pool(ids, sources[row, :count], slm_logprob[row, ids], llm_logprob[index]))
    return pools


def _ask(llm: LLM, prompts: Sequence[Tensor], k: int, score_ids: Tensor) -> list[Candidates]:
    there = [tokens.to(llm.device) for tokens in prompts]
    scored = list(score_ids.to(llm.device)) if score_ids.shape[1] else None
    if len(there) == 1:
        return [llm.candidates(there[0], k, None if scored is None else scored[0])]
    return llm.candidates_many(there, k, scored)
