"""Diagnostics: the SLM's own greedy rollout behind every candidate, with no later intervention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fb_core import hf
from fb_core.llm import LocalLLM
from fb_core.pipeline.collect import LoggedState, Trajectory
from fb_core.verify import Verifier


def roll_out(
    slm: LocalLLM,
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
) -> tuple[list[Tensor], list[list[str]]]:
    """(outcomes, texts): for every state a bool [K], which candidates lead to the gold answer, and the solutions.

    Args:
        slm: the small model.
        trajectories: as from `collect`.
        states: as from `log_states`.
        golds: one answer a trajectory.
        tokenizer: of both models.
        verifier: checks the decoded solutions.
        max_new_tokens: rollout length at most.
    """
    starts = [
        torch.cat([trajectories[state.trajectory].tokens[: state.position], candidate[None]])
        for state in states
        for candidate in state.pool.ids
    ]
    ends_with = hf.eos_ids(slm.model)
    open_ended = [index for index, start in enumerate(starts) if int(start[-1]) not in ends_with]
    written = slm.complete_many([starts[index] for index in open_ended], max_new_tokens)
    endings = dict(zip(open_ended, written, strict=True))
    owners = [state.trajectory for state in states for _ in state.pool.ids]
    texts = []
    for index, (start, owner) in enumerate(zip(starts, owners, strict=True)):
        output = start[trajectories[owner].prompt_length :]
        if index in endings:
            output = torch.cat([output, endings[index]])
        texts.append(tokenizer.decode(output.tolist(), skip_special_tokens=True))
    verdicts = verifier.verify_many(texts, [golds[owner] for owner in owners])
    flat = torch.tensor([verdict == "correct" for verdict in verdicts], dtype=torch.bool)
    counts = [len(state.pool.ids) for state in states]
    ends = torch.tensor(counts).cumsum(0).tolist()
    return list(flat.split(counts)), [texts[end - count : end] for end, count in zip(ends, counts, strict=True)]
