"""How well scores tell what becomes of candidates: pairwise accuracy, top-1 success and coverage against rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fb_core import hf, statistics
from fb_core.config import RunSettings
from fb_core.pool import LARGE, SLM
from fb_core.reranker import TokenReranker, candidate_features
from fb_core.stages.artefacts import Artefact, lists, table_bytes
from fb_core.stages.deploy import chosen_reranker
from fb_core.stages.rollouts import RolledOut, RolloutStage, read_rollouts
from fb_core.stages.scores import ScoreStage, read_groups
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Cost, Output, Stage, run_stage
from fb_core.stages.trajectories import StateStage, TrajectoryStage, read_trajectories
from fb_core.statistics import Interval

Tally = NDArray[np.float64]
KINDS = ("all", "word", "digit", "mark")


class AgreementStage(Stage):
    """What the chosen rerankers, as deployed, say of the candidates of the held-out states that were rolled out."""

    name = "agreement"
    command = "rollouts"
    reads = (TrajectoryStage, StateStage, RolloutStage, RerankerStage)
    unit = "states"

    def relevant(self) -> dict[str, Any]:
        return {"certainty": self.settings.evaluate.certainty, "seeds": list(self.settings.train.seeds)}

    def shards(self) -> dict[str, int]:
        found = {}
        for shard in validation_shards(self.settings, self.run):
            receipt = self.source("rollouts").receipt(shard)
            if receipt is None:
                raise ValueError(f"{self.source('rollouts').path}: expected {shard}, got none; run `rollouts`")
            found[shard] = receipt.counts["validation states"]
        return found

    def work(self, shard: str) -> Output:
        rolled, slm = read_rollouts(self.source("rollouts"), shard), self.models.slm
        states = self.source("states").table(shard)
        trajectories = read_trajectories(self.source("trajectories"), shard, slm.device)
        members: dict[int, list[tuple[int, int]]] = {}  # (row, position) by trajectory
        for row, one in enumerate(rolled):
            state = states[one.state]
            members.setdefault(state["trajectory"], []).append((row, state["position"]))
        scores: dict[int, dict[int, Tensor]] = {seed: {} for seed in self._rerankers}
        for done, (owner, places) in enumerate(members.items()):
            self.on_progress(done)
            tokens, last = trajectories[owner].tokens, max(position for _, position in places)
            whole = hf.prefill_packed(slm, [tokens[:last]])[0]  # once for all states and rerankers
            for seed, reranker in self._rerankers.items():
                found = _scores(reranker, tokens, whole, [(position, rolled[row]) for row, position in places])
                scores[seed].update(zip((row for row, _ in places), found, strict=True))
        certainty = self.settings.evaluate.certainty
        columns: dict[str, pa.Array] = {"state": pa.array([one.state for one in rolled], pa.int32())}
        for seed, by_row in scores.items():
            judged = [
                one.llm_logprob  # there the LLM decides, as `CertainLLM` has it
                if certainty is not None and bool(one.llm_logprob.max().exp() > certainty)
                else by_row[row]
                for row, one in enumerate(rolled)
            ]
            columns[f"seed-{seed}"] = lists(judged, pa.float32())
        return Output({f"{shard}.parquet": table_bytes(columns)}, {"states": len(rolled)})

    @cached_property
    def _rerankers(self) -> dict[int, TokenReranker]:
        """By seed."""
        return {seed: chosen_reranker(self.settings, self.run, seed) for seed in self.settings.train.seeds}

    def report(self, manifest: dict[str, Any]) -> str:
        return agreement_table(self.settings, self.run)

    def cost(self) -> Cost:
        return Cost("scored by every reranker", self.settings.collect.max_new_tokens)


@torch.no_grad()
def _scores(
    reranker: TokenReranker, tokens: Tensor, whole: hf.Prefix, places: Sequence[tuple[int, RolledOut]]
) -> list[Tensor]:
    """float32 [K] of every (position, state) of one trajectory, whose prefix `whole` reaches to the last of them."""
    device = reranker.base.device
    pools = [one.ids.to(device) for _, one in places]
    features = [
        candidate_features(one.slm_logprob, one.llm_logprob, one.sources, reranker.feature_names).to(device)
        for _, one in places
    ]
    if reranker.scope == "candidate":
        prefixes = [replace(whole, length=position) for position, _ in places]
        found = reranker.scores_many(prefixes, pools, features)
    else:
        found = [
            reranker.scores(tokens[:position], pool, features=rows)
            for (position, _), pool, rows in zip(places, pools, features, strict=True)
        ]
    return [scores.cpu() for scores in found]


@dataclass(frozen=True, eq=False)
class Judged:
    """A held-out state that was rolled out, with the scores [K] that are known of its candidates, by name."""

    rolled: RolledOut
    scores: Mapping[str, Sequence[Tensor]]  # one a seed where there are several


def judged_states(settings: RunSettings, run: Path) -> list[Judged]:
    """The held-out states with all scores that the run's finished stages know of them.

    Raises:
        ValueError: no rollouts.
    """
    Artefact(run, RolloutStage.name).finished()
    scored, reranked = Artefact(run, ScoreStage.name), Artefact(run, AgreementStage.name)
    known, learned = _complete(scored), _complete(reranked)
    found = []
    for shard in validation_shards(settings, run):
        groups = {group.state: group for group in read_groups(scored, shard)} if known else {}
        table = {row["state"]: row for row in reranked.table(shard)} if learned else {}
        for one in read_rollouts(Artefact(run, RolloutStage.name), shard):
            scores: dict[str, Sequence[Tensor]] = {"SLM": [one.slm_logprob], "LLM": [one.llm_logprob]}
            group = groups.get(one.state)
            if group is not None and group.logprob is not None and group.candidates.tolist() == one.ids.tolist():
                matrix = group.logprob
                for horizon in settings.train.horizons:
                    scores[f"Direct-B_{horizon}"] = [matrix[:, :horizon].double().mean(1)]
            if one.state in table:
                row = table[one.state]
                scores["FutureBridge"] = [torch.tensor(row[f"seed-{seed}"]) for seed in settings.train.seeds]
            found.append(Judged(one, scores))
    return found


def _complete(folder: Artefact) -> bool:
    return bool((folder.manifest() or {}).get("complete"))


def judge(settings: RunSettings, run: Path) -> str:
    """Agreement and coverage in Markdown, with the chosen rerankers held against the rollouts if there are some.

    Raises:
        ValueError: no rollouts, or as `run_stage`.
    """
    if _complete(Artefact(run, RerankerStage.name)):
        run_stage(AgreementStage(settings, run))
    return agreement_table(settings, run)


def agreement_rows(states: Sequence[Judged], names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A row for every kind of event and score: pairwise accuracy and top-1 success with intervals over problems.

    Top-1 success also comes less that of the SLM's and of the LLM's own score on the same states. Without names rows
    are of all scores.
    """
    if names is None:
        names = list(dict.fromkeys(name for state in states for name in state.scores))
    rows = []
    for kind in KINDS:
        for name in names:
            members = [
                state for state in states if name in state.scores and (kind == "all" or state.rolled.kind == kind)
            ]
            if members:
                rows.append({"score": name, "kind": kind, **_agreement(members, name)})
    return rows


def _agreement(states: Sequence[Judged], name: str) -> dict[str, Any]:
    tallies: dict[
        str, Tally
    ] = {}  # by problem: agreeing, comparable, top-1, states, of mixed, mixed, SLM's, LLM's top-1
    for state in states:
        outcome, seeds = state.rolled.correct.numpy(), state.scores[name]
        tally = tallies.setdefault(state.rolled.problem, np.zeros(8))
        mixed = statistics.outcomes_differ(outcome)
        local = [statistics.top1_success(state.scores[other][0].numpy(), outcome) for other in ("SLM", "LLM")]
        for score in seeds:
            agreeing, comparable = statistics.pairwise_agreement(score.numpy(), outcome)
            success = statistics.top1_success(score.numpy(), outcome)
            tally += np.array([agreeing, comparable, success, 1, success * mixed, mixed, *local]) / len(seeds)
    won, pairs, hits, count, mixed_hits, mixed_count, slm, llm = np.stack(list(tallies.values())).T
    return {
        "states": round(count.sum()),
        "mixed_states": round(mixed_count.sum()),
        "pairs": round(pairs.sum()),
        "problems": len(tallies),
        "pairwise": _ratio(won, pairs),
        "top1": _ratio(hits, count),
        "top1_mixed": _ratio(mixed_hits, mixed_count),
        "top1_minus_slm": None if name == "SLM" else statistics.paired_share_interval(hits, slm, count),
        "top1_minus_llm": None if name == "LLM" else statistics.paired_share_interval(hits, llm, count),
    }


def coverage_rows(states: Sequence[Judged]) -> list[dict[str, Any]]:
    """How often a pool holds a candidate from which the SLM succeeds: the SLM's, the LLM's and both together."""
    rows: list[dict[str, Any]] = []
    if not states:
        return rows
    for name, bits in (("SLM", SLM), ("LLM", LARGE), ("joint", SLM | LARGE)):
        tallies: dict[str, Tally] = {}  # by problem: covered, states, covered of mixed, mixed
        sizes = []
        for state in states:
            one = state.rolled
            inside = (one.sources & bits) > 0
            sizes.append(int(inside.sum()))
            covered = bool((one.correct & inside).any())
            mixed = statistics.outcomes_differ(one.correct.numpy())
            tally = tallies.setdefault(one.problem, np.zeros(4))
            tally += np.array([covered, 1, covered and mixed, mixed])
        hits, count, mixed_hits, mixed_count = np.stack(list(tallies.values())).T
        rows.append(
            {
                "pool": name,
                "mean_size": sum(sizes) / len(sizes),
                "states": round(count.sum()),
                "mixed_states": round(mixed_count.sum()),
                "coverage": _ratio(hits, count),
                "coverage_mixed": _ratio(mixed_hits, mixed_count),
            }
        )
    return rows


def _ratio(part: Tally, whole: Tally) -> Interval | None:
    return statistics.share_interval(part, whole) if whole.any() else None


def _percent(value: Interval | None) -> str:
    return "" if value is None else "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * part for part in value))


def validation_shards(settings: RunSettings, run: Path) -> list[str]:
    """The shards of held-out problems."""
    return [shard for shard in TrajectoryStage(settings, run).shards() if shard.startswith("validation")]


def agreement_table(settings: RunSettings, run: Path) -> str:
    """Agreement and coverage on the held-out states in Markdown."""
    states = judged_states(settings, run)
    lines = ["| event | score | pairwise, % [95%] | pairs | top-1, % | states | top-1 of mixed, % | mixed |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in agreement_rows(states):
        pairwise, top1, mixed = (_percent(row[name]) for name in ("pairwise", "top1", "top1_mixed"))
        cells = (row["kind"], row["score"], pairwise, row["pairs"], top1, row["states"], mixed, row["mixed_states"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| pool | mean size | coverage, % [95%] | states | of mixed, % | mixed |"]
    lines.append("|---|---|---|---|---|---|")
    for row in coverage_rows(states):
        lines.append(
            f"| {row['pool']} | {row['mean_size']:.2f} | {_percent(row['coverage'])} | {row['states']} | "
            f"{_percent(row['coverage_mixed'])} | {row['mixed_states']} |"
        )
    return "\n".join(lines)
