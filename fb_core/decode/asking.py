"""What happens at an event: both models' candidates go into one pool, and a selector picks one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fb_core.decode.selectors import Selector, State
from fb_core.events import Event, Pool, PoolKind
from fb_core.llm.local import LLM, Candidates
from fb_kernels import joint_pool, topk_entropy

OnError = Literal["raise", "slm"]


@dataclass
class Intervention:
    """Makes events of states; the fields are arguments of `CollaborativeDecoder`."""

    llm: LLM | None
    selector: Selector | None
    pool: PoolKind
    slm_k: int
    llm_k: int
    on_llm_error: OnError

    def __call__(self, states: Sequence[State], logits: Tensor) -> list[Event]:
        """The event of every state, with the SLM's logits [n, V] there; raises as `pools` and `events`."""
        return self.events(states, logits, self.pools(states, logits))

    def pools(self, states: Sequence[State], logits: Tensor) -> list[Pool] | OSError:
        """The candidates of every state, or the error if the LLM did not answer; one call of it for all of them.

        Raises:
            OSError: it did not answer, and that is to end the generation.
        """
        try:
            prompts = [state.tokens for state in states]
            return candidate_pool(logits, self.llm, prompts, self.pool, self.slm_k, self.llm_k)
        except OSError as problem:
            if self.on_llm_error == "raise":
                raise
            return problem

    def events(self, states: Sequence[State], logits: Tensor, pools: Sequence[Pool] | OSError) -> list[Event]:
        """The events that the selector makes of `pools`; without an answer, the SLM's own token.

        ValueError for a choice that is not an index into the pool.
        """
        if isinstance(pools, OSError):
            error = f"{type(pools).__name__}: {pools}"
            return [
                Event.alone(state.step, state.entropy, row, error) for state, row in zip(states, logits, strict=True)
            ]
        assert self.selector is not None
        events = []
        for state, pool, (choice, scores) in zip(states, pools, self.selector.choose_many(states, pools), strict=True):
            if not hasattr(choice, "__index__") or not 0 <= int(choice) < len(pool):
                raise ValueError(
                    f"{type(self.selector).__name__}: expected an index from 0 below {len(pool)}, got {choice}; "
                    "return an index into the pool"
                )
            events.append(Event.of(state.step, state.entropy, pool, int(choice), scores))
        return events


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
        logits: [n, V] the SLM's at each state, over the ids that both models share; the LLM's candidates of logit -inf
            are dropped.
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
    llm_ids = llm_ids.where(logits.gather(1, llm_ids.clamp_min(0)) > -torch.inf, -1)  # what is not to be chosen
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
