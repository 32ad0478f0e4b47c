"""Stage 1: SLM trajectories without intervention, their entropies, and the candidate pools of admitted states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fb_core import hf
from fb_core.decoding import Pool, PoolKind, candidate_pool
from fb_core.llm import LLM, LocalLLM
from fb_core.policy import RequestPolicy

ROWS = 16_384


@dataclass(frozen=True)
class Trajectory:
    """One problem's SLM output.

    Attributes:
        tokens: [T] prompt and output.
        prompt_length: tokens of the prompt.
        entropy: float32 [T - prompt_length], nats: of the SLM's distribution before each output token.
    """

    tokens: Tensor
    prompt_length: int
    entropy: Tensor

    @property
    def output(self) -> Tensor:
        """The SLM's own tokens."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class LoggedState:
    """One admitted state: its prefix is tokens[:position] of its trajectory."""

    trajectory: int
    position: int
    entropy: float
    pool: Pool


def collect(
    slm: LocalLLM,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    top_k: int = 64,
    on_done: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """Greedy SLM outputs, and the entropy at every step from one teacher-forced pass.

    Args:
        slm: the small model.
        prompts: one [P] of ids a problem.
        max_new_tokens: output length at most.
        top_k: size of the softmax that the entropy is taken over.
        on_done: called with the number of problems finished.
    """
    policy = RequestPolicy(float("inf"), top_k)
    outputs = slm.complete_many(prompts, max_new_tokens)
    whole = [torch.cat([prompt, output]) for prompt, output in zip(prompts, outputs, strict=True)]
    trajectories: list[Trajectory] = []
    for start, rows in _teacher_forced(slm.model, whole, [len(prompt) - 1 for prompt in prompts]):
        for index, hidden in enumerate(rows, start):
            tokens, length = whole[index], len(prompts[index])
            entropy = policy.entropy(hf.logits(slm.model, hidden[:-1]))
            trajectories.append(Trajectory(tokens, length, entropy))
        if on_done is not None:
            on_done(len(trajectories))
    return trajectories


def admitted(trajectory: Trajectory, policy: RequestPolicy, max_states: int = 8) -> list[int]:
    """Positions of the first `max_states` output tokens before which the policy asks."""
    asked = policy.asks(trajectory.entropy).nonzero()[:max_states, 0]
    return [trajectory.prompt_length + int(step) for step in asked]


def log_states(
    slm: LocalLLM,
    llm: LLM,
    trajectories: Sequence[Trajectory],
    policy: RequestPolicy,
    *,
    slm_k: int = 8,
    llm_k: int = 8,
    max_states: int = 8,
    pool: PoolKind = "joint",
) -> list[LoggedState]:
    """The admitted states of all trajectories with the pools that deployment would form there."""
    wanted = [(index, admitted(trajectory, policy, max_states)) for index, trajectory in enumerate(trajectories)]
    wanted = [(index, positions) for index, positions in wanted if positions]
    states: list[LoggedState] = []
    prefixes = [trajectories[index].tokens[: positions[-1]] for index, positions in wanted]
    for start, rows in _teacher_forced(slm.model, prefixes, [0] * len(prefixes)):
        packed = wanted[start : start + len(rows)]
        at = [(index, position) for index, positions in packed for position in positions]
        hidden = torch.cat(
            [
                states_of[torch.tensor(positions, device=states_of.device) - 1]
                for states_of, (_, positions) in zip(rows, packed, strict=True)
            ]
        )
        tokens = [trajectories[index].tokens[:position] for index, position in at]
        pools = candidate_pool(hf.logits(slm.model, hidden), llm, tokens, pool, slm_k, llm_k)
        for (index, position), found in zip(at, pools, strict=True):
            trajectory = trajectories[index]
            entropy = float(trajectory.entropy[position - trajectory.prompt_length])
            states.append(LoggedState(index, position, entropy, found))
    return states


@torch.no_grad()
def _teacher_forced(
    model: hf.CausalLM, sequences: Sequence[Tensor], first: Sequence[int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """(index of the first sequence, hidden states from row `first` on of each) for packs of whole sequences."""
    for start, stop in hf.packs([len(tokens) for tokens in sequences], ROWS):
        pack = sequences[start:stop]
        layout = hf.Layout.build([([len(tokens)], 0, 0) for tokens in pack], model.device)
        positions = torch.cat([torch.arange(len(tokens), device=model.device) for tokens in pack])
        hidden = hf.packed_forward(model, torch.cat(list(pack)), positions, layout)
        rows = hidden.split([len(tokens) for tokens in pack])
        yield start, [states[skip:] for states, skip in zip(rows, first[start:stop], strict=True)]
