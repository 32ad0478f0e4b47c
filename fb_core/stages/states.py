"""The request policy, and the states of the trajectories where the LLM is asked, with their candidates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fb_core.llm import LLM, LocalLLM
from fb_core.policy import RequestPolicy
from fb_core.pool import PoolKind, candidate_pool
from fb_core.stages.deploy import frozen_policy
from fb_core.stages.examples import Examples, State, Trajectory, example_files
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.trajectories import TrajectoryStage, logits_of, teacher_forced


def admitted(trajectory: Trajectory, policy: RequestPolicy, max_states: int = 8) -> list[int]:
    """Positions of the first `max_states` output tokens before which the policy asks the LLM."""
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
) -> list[State]:
    """The admitted states of all trajectories, with the pools that a decoder would form there."""
    found: list[State] = []
    for states, logits in _admitted_logits(slm, trajectories, policy, max_states):
        prefixes = [trajectory.tokens[:position] for trajectory, position in states]
        pools = candidate_pool(logits, llm, prefixes, pool, slm_k, llm_k)
        for (trajectory, position), candidates in zip(states, pools, strict=True):
            entropy = float(trajectory.entropy[position - trajectory.prompt_length])
            found.append(State(trajectory, position, entropy, candidates))
    return found


def _admitted_logits(
    slm: LocalLLM, trajectories: Sequence[Trajectory], policy: RequestPolicy, max_states: int
) -> Iterator[tuple[list[tuple[Trajectory, int]], Tensor]]:
    """([(trajectory, position)], the SLM's logits [n, V] there) of all admitted states, one pack at a time."""
    wanted = [(trajectory, admitted(trajectory, policy, max_states)) for trajectory in trajectories]
    wanted = [(trajectory, positions) for trajectory, positions in wanted if positions]
    prefixes = [trajectory.tokens[: positions[-1]] for trajectory, positions in wanted]
    for start, rows in teacher_forced(slm.model, prefixes, [0] * len(prefixes)):
        packed = wanted[start : start + len(rows)]
        hidden = torch.cat(
            [
                hidden[torch.tensor(positions, device=hidden.device) - 1]
                for hidden, (_, positions) in zip(rows, packed, strict=True)
            ]
        )
        states = [(trajectory, position) for trajectory, positions in packed for position in positions]
        yield states, logits_of(slm, hidden)


class PolicyStage(Stage):
    """The request policy, calibrated on the validation problems."""

    name = "policy"
    command = "futurebridge collect"
    slice = ("collect.top_k", "collect.quantile")
    reads = (TrajectoryStage,)
    unit = "policies"
    parallel = False

    def shards(self) -> dict[str, int]:
        return {"policy": 1}

    def work(self, shard: str) -> Output:
        settings = self.settings.collect
        entropies = torch.cat(
            [
                trajectory.entropy
                for name in self.input(TrajectoryStage).folder.shards("validation")
                for trajectory in Examples(self.run, name).trajectories.values()
            ]
        )
        policy = RequestPolicy.calibrate(entropies, settings.quantile, settings.top_k)
        line = json.dumps({"threshold": policy.threshold, "top_k": policy.top_k}) + "\n"
        return Output({f"{shard}.jsonl": line.encode()}, {"validation tokens": len(entropies)})

    def report(self, manifest: dict[str, Any]) -> str:
        asked, settings = f"the LLM is asked above {frozen_policy(self.run).threshold:.4f} nats", self.settings.collect
        source = f"quantile {settings.quantile:g} of {manifest['counts']['validation tokens']:,} validation tokens"
        return f"**{self.name}**: {asked}, {source}"

    def cost(self) -> Cost:
        return Cost("computed from the trajectories")


class StateStage(Stage):
    """The admitted states with both models' candidates; `slm_k + llm_k` of the SLM's and `llm_k` of the LLM's."""

    name = "states"
    command = "futurebridge collect"
    slice = ("collect.max_states", "collect.slm_k", "futures.llm_k")
    reads = (TrajectoryStage, PolicyStage)
    uses = ("slm", "llm", "tokenizer")

    def shards(self) -> dict[str, int]:
        return self.input(TrajectoryStage).shards()

    def work(self, shard: str) -> Output:
        slm, llm_k, settings = self.models.local_slm, self.settings.futures.llm_k, self.settings.collect
        trajectories = list(Examples(self.run, shard, slm.device).trajectories.values())
        found = log_states(
            slm,
            self.models.llm,
            trajectories,
            frozen_policy(self.run),
            slm_k=settings.slm_k + llm_k,  # as many as "slm-wide" needs
            llm_k=llm_k,
            max_states=settings.max_states,
        )
        counts = {"states": len(found), f"{shard.partition('-')[0]} states": len(found)}
        return Output(example_files(shard, State, found), counts)

    def cost(self) -> Cost:
        return Cost("teacher-forced, without what the LLM reads at each state", self.input(TrajectoryStage).longest)


class OverStates(Stage):
    """A stage whose shards are those of the states and whose units are the states in them."""

    unit = "states"

    def shards(self) -> dict[str, int]:
        folder, found = self.input(StateStage).folder, {}
        for shard in folder.shards():
            receipt = folder.receipt(shard)
            if receipt is None:
                raise ValueError(f"{folder.path}: expected shard {shard}, got none; run `futurebridge collect`")
            found[shard] = receipt.counts["states"]
        return found

    def most(self) -> int:
        states = self.input(StateStage)
        return states.most() * states.settings.collect.max_states
