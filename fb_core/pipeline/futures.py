"""Stage 2: one answer-verified LLM continuation behind every admitted state, the shared future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fb_core import hf
from fb_core.llm import LLM
from fb_core.pipeline.collect import LoggedState, Trajectory
from fb_core.verify import Verdict, Verifier


@dataclass(frozen=True)
class Future:
    """What the LLM writes greedily from a state.

    Attributes:
        first: the LLM's own token at the state; it competes in the pool.
        tokens: [n] what it writes behind it: the future that all candidates share. End-of-sequence counts.
        verdict: of the whole solution against the gold answer.
    """

    first: int
    tokens: Tensor
    verdict: Verdict


def llm_futures(
    llm: LLM,
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
) -> list[Future]:
    """One future a state, verified against the gold answer of its trajectory.

    Args:
        llm: the large model.
        trajectories: as from `collect`.
        states: as from `log_states`.
        golds: one answer a trajectory.
        tokenizer: of both models.
        verifier: checks the decoded solutions.
        max_new_tokens: continuation length at most.
    """
    prefixes = [trajectories[state.trajectory].tokens[: state.position] for state in states]
    written = llm.complete_many(prefixes, max_new_tokens)
    texts = []
    for state, prefix, continuation in zip(states, prefixes, written, strict=True):
        output = torch.cat([prefix[trajectories[state.trajectory].prompt_length :], continuation])
        texts.append(tokenizer.decode(output.tolist(), skip_special_tokens=True))
    verdicts = verifier.verify_many(texts, [golds[state.trajectory] for state in states])
    return [
        Future(int(continuation[0]), continuation[1:], verdict)
        for continuation, verdict in zip(written, verdicts, strict=True)
    ]


@dataclass(frozen=True)
class Filters:
    """The paper's filter table: how many states are left after each condition."""

    admitted: int
    verified: int
    long_enough: int
    valid_group: int


def usable(states: Sequence[LoggedState], futures: Sequence[Future], horizon: int) -> tuple[list[int], Filters]:
    """Indices of the states that can be scored, and the count after each filter.

    A state needs a verified future of at least `horizon` tokens and a valid group: two or more candidates, the LLM's
    greedy token among them.
    """
    verified = [i for i, future in enumerate(futures) if future.verdict == "correct"]
    long_enough = [i for i in verified if len(futures[i].tokens) >= horizon]
    valid = [i for i in long_enough if len(states[i].pool.ids) >= 2 and futures[i].first in states[i].pool.ids.tolist()]
    return valid, Filters(len(states), len(verified), len(long_enough), len(valid))
