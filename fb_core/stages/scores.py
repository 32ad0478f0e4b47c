"""Stage 3: the [K, H] log-likelihood matrix of every group, stored once for all horizons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fb_core import scorer as packing
from fb_core.scorer import BranchGroup, CompatibilityScorer
from fb_core.stages.artefacts import Artefact, tensor_bytes
from fb_core.stages.futures import Future, FutureStage, read_futures, usable
from fb_core.stages.pools import logged_pool
from fb_core.stages.samples import OwnFutureStage, SampleStage, futures_of_quality
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.trajectories import LoggedState, StateStage, Trajectory, TrajectoryStage, read_trajectories
from fb_core.targets import future_compatibility


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
    """log p_S and log p_T of every candidate of every state's pool, and the matrices of the usable states."""

    name = "scores"
    command = "score"
    uses = ("slm", "tokenizer", "valid_vocab")
    unit = "states"

    def inputs(self) -> Sequence[type[Stage]]:
        other: dict[str, type[Stage]] = {"llm": FutureStage, "own": OwnFutureStage}
        return (TrajectoryStage, StateStage, FutureStage, other.get(self.settings.score.future, SampleStage))

    def relevant(self) -> dict[str, Any]:
        return self.settings.score.model_dump(include={"horizon", "pool", "future"}) | {
            "slm_k": self.settings.collect.slm_k
        }

    def choose(self) -> dict[str, Any]:
        automatic = self.settings.score.token_budget == "auto"
        return {"token_budget": packing.token_budget(self.models.slm)} if automatic else {}

    def shards(self) -> dict[str, int]:
        return FutureStage(self.settings, self.run).shards()

    def most(self) -> int:
        return FutureStage(self.settings, self.run).most()

    def work(self, shard: str) -> Output:
        slm, settings = self.models.slm, self.settings.score
        budget = settings.token_budget
        if budget == "auto":
            chosen = (self.folder.manifest() or {}).get("chosen", {})
            budget = chosen.get("token_budget", packing.TOKEN_BUDGET)
        trajectories = read_trajectories(self.source("trajectories"), shard, slm.device)
        states = self.source("states").table(shard)
        futures, rows = self._futures(shard)
        slm_k = self.settings.collect.slm_k
        joint = [logged_pool(row, slm_k).ids.tolist() for row in rows]
        used, filters = usable(joint, futures, settings.horizon)
        pools = [logged_pool(row, slm_k, settings.pool) for row in rows]
        kept = [row for row, pool in enumerate(pools) if len(pool.ids) >= 2]
        whole = set(used) & set(kept)
        groups: dict[int, list[BranchGroup]] = {}
        for row in kept:
            ids = pools[row].ids.to(slm.device)
            future = futures[row].tokens[: settings.horizon].to(slm.device) if row in whole else ids[:1]
            group = BranchGroup(states[row]["position"], ids, future)
            groups.setdefault(states[row]["trajectory"], []).append(group)
        packed = [(trajectories[index].tokens, members) for index, members in groups.items()]
        scored = self.models.scorer.score_trajectories(packed, budget, return_local=True)
        flat = [pair for trajectory in scored for pair in trajectory]
        sizes = [len(local) for _, local in flat]
        empty = torch.zeros(0, settings.horizon)
        matrices = [matrix.cpu() for row, (matrix, _) in zip(kept, flat, strict=True) if row in whole]
        tensors = {
            "logprob": torch.cat([empty, *matrices]),  # [rows of usable groups, H]
            "slm_logprob": torch.cat([empty[:, 0], *(local.cpu() for _, local in flat)]),  # [N]
            "llm_logprob": torch.cat([empty[:, 0], *(pools[row].llm_logprob for row in kept)]),
            "candidates": torch.cat([empty[:, 0].int(), *(pools[row].ids.int() for row in kept)]),
            "sources": torch.cat([empty[:, 0].to(torch.int8), *(pools[row].sources.to(torch.int8) for row in kept)]),
            "cu_group": torch.tensor([0, *sizes]).cumsum(0).int(),  # [G + 1]
            "state": torch.tensor(kept, dtype=torch.int32),  # [G] rows of the shard of states
            "usable": torch.tensor([row in whole for row in kept], dtype=torch.uint8),  # [G]
            "first": torch.tensor([futures[row].first for row in kept], dtype=torch.int32),  # [G] ids
        }
        side = shard.partition("-")[0]
        counts = {**vars(filters), f"{side} groups": len(whole), "candidates": sum(len(matrix) for matrix in matrices)}
        return Output({f"{shard}.safetensors": tensor_bytes(tensors)}, counts)

    def _futures(self, shard: str) -> tuple[list[Future], list[dict[str, Any]]]:
        """The futures that the settings ask for, and the rows that know the pools."""
        futures, rows = read_futures(self.source("futures"), shard)
        kind, horizon = self.settings.score.future, self.settings.score.horizon
        if kind == "own":
            return read_futures(self.source(OwnFutureStage.name), shard)[0], rows
        if kind == "llm":
            return futures, rows
        states, slm_k = self.source("states").table(shard), self.settings.collect.slm_k
        used, _ = usable([logged_pool(row, slm_k).ids.tolist() for row in rows], futures, horizon)
        sampled = self.source(SampleStage.name).table(shard)
        owners = [state["trajectory"] for state in states]
        return futures_of_quality(kind, futures, used, sampled, owners, horizon, shard), rows

    def report(self, manifest: dict[str, Any]) -> str:
        return filter_table(manifest["counts"])

    def cost(self) -> Cost:
        candidates = self.settings.collect.slm_k + self.settings.futures.llm_k
        prefix = self.longest_prompt + self.settings.collect.max_new_tokens
        return Cost("scored behind shared prefixes", prefix + (1 + self.settings.score.horizon) * candidates)


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """One state as the scores have it: K candidates with what both models and the future say of them."""

    state: int  # row of the shard of states
    candidates: Tensor  # [K] int64
    sources: Tensor  # [K] int32 bits
    slm_logprob: Tensor  # [K] float32
    llm_logprob: Tensor  # [K] float32
    first: int  # the id that the future was written behind
    logprob: Tensor | None  # [K, H] float32; None where no usable future was found

    def compatibility(self, horizon: int) -> Tensor | None:
        """B_H [K], if there is a future."""
        return None if self.logprob is None else future_compatibility(self.logprob, horizon)


def read_groups(folder: Artefact, shard: str) -> list[ScoredGroup]:
    """The groups of a finished shard, those without a usable future among them."""
    scores = folder.tensors(shard)
    sizes = scores["cu_group"].diff().tolist()
    usable_sizes = [size for size, usable in zip(sizes, scores["usable"].tolist(), strict=True) if usable]
    matrices = iter(scores["logprob"].split(usable_sizes))
    columns = [scores[name].split(sizes) for name in ("candidates", "sources", "slm_logprob", "llm_logprob")]
    found = []
    for row, (state, has_future) in enumerate(zip(scores["state"].tolist(), scores["usable"].tolist(), strict=True)):
        ids, sources, slm_logprob, llm_logprob = (column[row] for column in columns)
        matrix = next(matrices) if has_future else None
        first = int(scores["first"][row])
        found.append(ScoredGroup(state, ids.long(), sources.int(), slm_logprob, llm_logprob, first, matrix))
    return found


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
