"""Stage 3: the [K, H] log-likelihood matrix of every group, once for all horizons, and parts of a logged pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fb_core.apps.pipeline.collect import OverStates, StateStage, TrajectoryStage
from fb_core.apps.pipeline.futures import FutureStage, filter_futures
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.pipeline.records import Examples, Future, Group, group_files
from fb_core.apps.pipeline.run import Output
from fb_core.events import LARGE, SLM, Pool
from fb_core.score import scorer as packing
from fb_core.score.scorer import BranchGroup, CompatibilityScorer

PartKind = Literal["joint", "slm", "llm", "slm-wide"]


def reduce_pool(pool: Pool, slm_k: int, kind: PartKind = "joint") -> Pool:
    """A part of a logged pool, which has more SLM candidates than the `slm_k` that a decoder takes.

    The SLM's likeliest candidates come first, then the LLM's that are not among them. "joint", "slm" and "llm" are as a
    decoder forms them; "slm-wide" has all logged SLM candidates.
    """
    ids, bits, logprob = pool.ids.tolist(), pool.sources.tolist(), pool.llm_logprob.tolist()
    small = [index for index, bit in enumerate(bits) if bit & SLM]
    large = [index for index, bit in enumerate(bits) if bit & LARGE]
    large.sort(key=lambda index: (-logprob[index], ids[index]))  # in the LLM's order
    own = {"slm-wide": small, "llm": []}.get(kind, small[:slm_k])
    theirs = large if kind in ("joint", "llm") else []
    kept = own + [index for index in theirs if index not in own]
    sources = [SLM * (index in own) | LARGE * (index in theirs) for index in kept]
    at = torch.tensor(kept, dtype=torch.int64)
    return Pool(pool.ids[at], torch.tensor(sources, dtype=torch.int32), pool.slm_logprob[at], pool.llm_logprob[at])


def reduce_pools(futures: Iterable[Future], slm_k: int, kind: PartKind = "joint") -> list[Future]:
    """The futures with their states' pools reduced by `part_of`."""
    pools = [(future, reduce_pool(future.state.pool, slm_k, kind)) for future in futures]
    return [replace(future, state=replace(future.state, pool=pool)) for future, pool in pools]


def score_states(
    scorer: CompatibilityScorer,
    futures: Sequence[Future],
    horizon: int,
    on_done: Callable[[int], None] | None = None,
    batch: int = 64,
    token_budget: int = packing.TOKEN_BUDGET,
) -> list[Tensor]:
    """One float32 [K, horizon] per future: its log-probs after each candidate of its state's pool.

    Futures need `horizon` tokens or more; the others are ignored. `on_done` gets the number of finished groups after
    every `batch` trajectories; `token_budget` is the most rows of a packed forward.
    """
    device, matrices = scorer.model.device, dict[int, Tensor]()
    trajectories: dict[int, tuple[Tensor, dict[int, BranchGroup]]] = {}  # tokens, and branches by the future's index
    for index, future in enumerate(futures):
        state, tokens = future.state, future.tokens[:horizon].to(device)
        _, branches = trajectories.setdefault(id(state.trajectory), (state.trajectory.tokens, {}))
        branches[index] = BranchGroup(state.position, state.pool.ids.to(device), tokens)
    left = list(trajectories.values())
    for start in range(0, len(left), batch):
        part = left[start : start + batch]
        packed = [(tokens, list(branches.values())) for tokens, branches in part]
        for (_, branches), scores in zip(part, scorer.score_trajectories(packed, token_budget), strict=True):
            matrices.update(zip(branches, scores, strict=True))
        if on_done is not None:
            on_done(len(matrices))
    return [matrices[index] for index in range(len(futures))]


class ScoreStage(OverStates):
    """The groups of the states with a usable future and two or more candidates."""

    name = "scores"
    command = "futurebridge score"
    slice: ClassVar[Sequence[str]] = ("score", "collect.slm_k")
    reads = (TrajectoryStage, StateStage, FutureStage)
    uses = ("slm", "tokenizer", "valid_vocab")
    decodes = False

    def futures(self, examples: Examples) -> list[Future]:
        """The futures of a shard's states."""
        return list(examples.futures().values())

    def choose(self) -> dict[str, Any]:
        automatic = self.settings.score.token_budget == "auto"
        return {"token_budget": packing.token_budget(self.models.slm)} if automatic else {}

    def work(self, shard: str) -> Output:
        settings, slm_k = self.settings.score, self.settings.collect.slm_k
        budget = settings.token_budget
        if budget == "auto":
            chosen = (self.folder.manifest() or {}).get("chosen", {})
            budget = chosen.get("token_budget", packing.TOKEN_BUDGET)
        futures = self.futures(Examples(self.run, shard, self.models.slm.device))
        used, filters = filter_futures(reduce_pools(futures, slm_k), settings.horizon)
        ids, reduced = {future.state.id for future in used}, reduce_pools(futures, slm_k, settings.pool)
        scored = [future for future in reduced if len(future.state.pool) >= 2 and future.state.id in ids]
        matrices = score_states(self.models.scorer, scored, settings.horizon, self.on_progress, token_budget=budget)
        groups = [Group(future.state, matrix) for future, matrix in zip(scored, matrices, strict=True)]
        counts = {f"{shard.partition('-')[0]} groups": len(scored), "candidates": sum(map(len, matrices))}
        counts = vars(filters) | counts
        return Output(group_files(shard, groups, settings.horizon), counts)

    def report(self, manifest: dict[str, Any]) -> str:
        return filter_table(manifest["counts"])

    def most_tokens(self) -> int:
        candidates = self.settings.collect.slm_k + self.input(StateStage).settings.futures.llm_k
        return self.input(TrajectoryStage).longest + (1 + self.settings.score.horizon) * candidates


FILTERS = {  # words, by name of the count
    "admitted": "admitted states",
    "verified": "answer-verified future",
    "long_enough": "future of the full horizon",
    "valid_group": "valid group: 2 or more candidates, the LLM's likeliest among them",
    "train groups": "for training",
    "validation groups": "for validation",
}


def filter_table(counts: dict[str, int]) -> str:
    """The paper's table of the states left after each condition, in Markdown."""
    whole = max(1, counts["admitted"])
    left = [(words, counts.get(name, 0)) for name, words in FILTERS.items()]
    rows = [(words, f"{count:,}", f"{count / whole:.1%}") for words, count in left]
    return "\n".join(markdown_table(["condition", "states", "share of admitted"], rows))
