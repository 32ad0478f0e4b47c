"""Stage 3: the [K, H] log-likelihood matrix of every group, stored once for all horizons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fb_core import scorer as packing
from fb_core.pipeline.artefacts import tensor_bytes
from fb_core.pipeline.collect import LoggedState, StateStage, Trajectory, TrajectoryStage, read_trajectories
from fb_core.pipeline.futures import FutureStage, read_futures, usable
from fb_core.pipeline.stage import Cost, Output, Stage
from fb_core.scorer import BranchGroup, CompatibilityScorer


def score_states(
    scorer: CompatibilityScorer,
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    futures: Sequence[Tensor],
    horizon: int,
    on_done: Callable[[int], None] | None = None,
    batch: int = 64,
) -> list[Tensor]:
    """One float32 [K, horizon] a state, in the order of `states`.

    Args:
        scorer: over the frozen SLM.
        trajectories: as from `collect`.
        states: the groups to score.
        futures: one [n >= horizon] a state; what lies past the horizon is cut.
        horizon: tokens of the future to score.
        on_done: called with the number of groups finished.
        batch: trajectories between two calls of `on_done`.

    Raises:
        ValueError: a future shorter than the horizon.
    """
    members: dict[int, list[int]] = {}
    for index, (state, future) in enumerate(zip(states, futures, strict=True)):
        if len(future) < horizon:
            raise ValueError(
                f"futures: expected {horizon} tokens or more, got {len(future)} for state {index}; drop short futures"
            )
        members.setdefault(state.trajectory, []).append(index)
    matrices: dict[int, Tensor] = {}
    order = list(members)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        packed = [
            (
                trajectories[trajectory].tokens,
                [
                    BranchGroup(states[i].position, states[i].pool.ids, futures[i][:horizon])
                    for i in members[trajectory]
                ],
            )
            for trajectory in part
        ]
        for trajectory, scores in zip(part, scorer.score_trajectories(packed), strict=True):
            matrices.update(zip(members[trajectory], scores, strict=True))
        if on_done is not None:
            on_done(len(matrices))
    return [matrices[index] for index in range(len(states))]


class ScoreStage(Stage):
    """The matrices of the usable states, with log p_S and log p_T of every candidate of their pools."""

    name = "scores"
    command = "score"
    reads = (TrajectoryStage, StateStage, FutureStage)
    unit = "states"

    def relevant(self) -> dict[str, Any]:
        return {"horizon": self.settings.score.horizon}

    def choose(self) -> dict[str, Any]:
        automatic = self.settings.score.token_budget == "auto"
        return {"token_budget": packing.token_budget(self.models.slm)} if automatic else {}

    def shards(self) -> dict[str, int]:
        return FutureStage(self.settings, self.run).shards()

    def work(self, shard: str) -> Output:
        slm, horizon = self.models.slm, self.settings.score.horizon
        budget = self.settings.score.token_budget
        if budget == "auto":
            chosen = (self.folder.manifest() or {}).get("chosen", {})
            budget = chosen.get("token_budget", packing.TOKEN_BUDGET)
        trajectories = read_trajectories(self.source("trajectories"), shard, slm.device)
        states = self.source("states").table(shard)
        futures, rows = read_futures(self.source("futures"), shard)
        used, filters = usable([row["pool_ids"] for row in rows], futures, horizon)
        groups: dict[int, list[BranchGroup]] = {}
        for row in used:
            pool = torch.tensor(rows[row]["pool_ids"], device=slm.device)
            group = BranchGroup(states[row]["position"], pool, futures[row].tokens[:horizon].to(slm.device))
            groups.setdefault(states[row]["trajectory"], []).append(group)
        packed = [(trajectories[index].tokens, members) for index, members in groups.items()]
        scored = self._scorer.score_trajectories(packed, budget, return_local=True)
        flat = [pair for trajectory in scored for pair in trajectory]
        sizes = [len(local) for _, local in flat]
        empty = torch.zeros(0, horizon)
        pools = [rows[row] for row in used]
        tensors = {
            "logprob": torch.cat([empty, *(matrix.cpu() for matrix, _ in flat)]),  # [N, H]
            "slm_logprob": torch.cat([empty[:, 0], *(local.cpu() for _, local in flat)]),  # [N]
            "llm_logprob": torch.tensor([value for pool in pools for value in pool["pool_llm_logprob"]]).float(),
            "candidates": torch.tensor([token for pool in pools for token in pool["pool_ids"]], dtype=torch.int32),
            "sources": torch.tensor([bits for pool in pools for bits in pool["pool_sources"]], dtype=torch.int8),
            "cu_group": torch.tensor([0, *sizes]).cumsum(0).int(),  # [G + 1]
            "state": torch.tensor(used, dtype=torch.int32),  # [G] rows of the shard of states
        }
        side = shard.partition("-")[0]
        counts = {**vars(filters), f"{side} groups": len(used), "candidates": sum(sizes)}
        return Output({f"{shard}.safetensors": tensor_bytes(tensors)}, counts)

    @cached_property
    def _scorer(self) -> CompatibilityScorer:
        return CompatibilityScorer(self.models.slm)

    def report(self, manifest: dict[str, Any]) -> str:
        return filter_table(manifest["counts"])

    def cost(self) -> Cost:
        candidates = self.settings.collect.slm_k + self.settings.futures.llm_k
        return Cost("scored behind shared prefixes", self.settings.score.horizon * candidates)


def filter_table(counts: dict[str, int]) -> str:
    """What is left of the states after each condition, as the paper has it."""
    rows = (
        ("admitted states", counts["admitted"]),
        ("answer-verified future", counts["verified"]),
        ("future of the full horizon", counts["long_enough"]),
        ("valid group", counts["valid_group"]),
        ("for training", counts.get("train groups", 0)),
        ("for validation", counts.get("validation groups", 0)),
    )
    lines = [f"| {name} | {count:,} | {count / max(1, rows[0][1]):.1%} |" for name, count in rows]
    return "\n".join(["| condition | states | of admitted |", "|---|---|---|", *lines])
