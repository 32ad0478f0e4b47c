"""How well scores agree with rollouts: pairwise accuracy and top-1 success of scores, coverage of pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.paper import intervals
from benchmarks.paper.cells import table
from benchmarks.paper.rollouts import HeldOutRolloutStage, token_kind
from benchmarks.paper.rows import finished
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.choose import RerankerStage, rerank_states
from fb_core.apps.pipeline.collect import StateStage, TrajectoryStage
from fb_core.apps.pipeline.files import Artefact, table_bytes
from fb_core.apps.pipeline.models import chosen_reranker, models_of
from fb_core.apps.pipeline.records import NATS, Examples, Group, Rollout
from fb_core.apps.pipeline.run import Output, Stage, run_stage
from fb_core.apps.pipeline.scores import ScoreStage
from fb_core.apps.pipeline.statistics import Interval
from fb_core.apps.settings.run import RunSettings
from fb_core.events import LARGE, SLM
from fb_core.rerank.reranker import TokenReranker
from fb_core.score.targets import pairwise_agreement

Tally = NDArray[np.float64]
MATCHED = "matched"  # events at which every score is known
KINDS = ("all", MATCHED, "word", "digit", "mark")


class AgreementStage(Stage):
    """Scores of the chosen rerankers for the candidates of the held-out states that were rolled out."""

    name = "agreement"
    command = "python -m benchmarks.paper"
    slice = ("train.seeds", "train.scope", "train.horizons")
    reads: Sequence[type[Stage]] = (TrajectoryStage, StateStage, HeldOutRolloutStage, RerankerStage)
    unit = "states"

    def shards(self) -> dict[str, int]:
        folder, states = self.input(HeldOutRolloutStage).folder, {}
        for shard in folder.shards():
            receipt = folder.receipt(shard)
            if receipt is None:
                raise ValueError(f"{folder.path}: expected {shard}, got none; run `{HeldOutRolloutStage.command}`")
            states[shard] = receipt.counts["states"]
        return states

    def work(self, shard: str) -> Output:
        slm = self.models.slm
        rollouts = Examples(self.run, shard, slm.device).rollouts(HeldOutRolloutStage.name)
        states = [rollout.state for rollout in rollouts.values()]
        rows: dict[str, dict[str, Any]] = {state.id: {"state": state.id} for state in states}
        for done, (state, seed, scores) in enumerate(rerank_states(slm, self._rerankers, states)):
            self.on_progress(done // len(self._rerankers))
            rows[state.id][f"seed-{seed}"] = scores.tolist()
        columns = {"state": pa.string()} | {f"seed-{seed}": NATS for seed in self._rerankers}
        return Output({f"{shard}.parquet": table_bytes(list(rows.values()), columns)}, {"states": len(rows)})

    @cached_property
    def _rerankers(self) -> dict[int, TokenReranker]:
        """The chosen rerankers by seed."""
        return {seed: chosen_reranker(self.settings, self.trained, seed) for seed in self.settings.train.seeds}

    @property
    def trained(self) -> Path:
        """The run of the rerankers."""
        return self.run

    def report(self, manifest: dict[str, Any]) -> str:
        return agreement_table(self.settings, self.run)

    def most_tokens(self) -> int:
        return self.input(TrajectoryStage).longest


@dataclass(frozen=True, eq=False)
class Judged:
    """A held-out state that was rolled out, with all known scores [K] of its candidates, by name."""

    rolled: Rollout
    kind: str  # of the SLM's likeliest token, as `token_kind` has it
    scores: Mapping[str, Sequence[Tensor]]  # one per seed for rerankers, else one


def judged_states(settings: RunSettings, run: Path) -> list[Judged]:
    """The rolled-out held-out states with all scores from the run's finished stages; it must have rollouts."""
    shards = Artefact(run, HeldOutRolloutStage.name).shards()
    scored, learned = finished(run, ScoreStage.name), finished(run, AgreementStage.name)
    tokenizer, states = models_of(settings.models).tokenizer, []
    for shard in shards:
        examples = Examples(run, shard)
        groups = examples.groups if scored else {}
        by_state = {row["state"]: row for row in Artefact(run, AgreementStage.name).table(shard)} if learned else {}
        for state, rollout in examples.rollouts(HeldOutRolloutStage.name).items():
            pool = rollout.state.pool
            scores: dict[str, Sequence[Tensor]] = {"SLM": [pool.slm_logprob], "LLM": [pool.llm_logprob]}
            if (matrix := matrix_of(groups.get(state), rollout)) is not None:
                for horizon in settings.train.horizons:
                    scores[f"Direct-B_{horizon}"] = [matrix[:, :horizon].double().mean(1)]
            if (row := by_state.get(state)) is not None:
                scores["reranker"] = [torch.tensor(row[f"seed-{seed}"]) for seed in settings.train.seeds]
            kind = token_kind(tokenizer.decode([int(pool.ids[0])]))
            states.append(Judged(rollout, kind, scores))
    return states


def matrix_of(group: Group | None, rolled: Rollout) -> Tensor | None:
    """The group's matrix [K, H], if it has one and its candidates are the ones that were rolled out."""
    if group is None:
        return None
    scored, tried = group.state.pool, rolled.state.pool
    return group.logprob if torch.equal(scored.ids, tried.ids) else None


def judge(settings: RunSettings, run: Path) -> str:
    """Agreement and coverage in Markdown; includes the chosen rerankers if there are any."""
    if finished(run, RerankerStage.name):
        run_stage(AgreementStage(settings, run))
    return agreement_table(settings, run)


def agreement_rows(states: Sequence[Judged], names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One row per kind of event and score: pairwise accuracy and top-1 success with intervals over problems.

    Targets exist only at states with a usable future; at the "matched" ones all scores are compared on the same states.

    Each row also has the differences of its top-1 success to that of the SLM's and of the LLM's own score on the same
    states. If `names` is None, there are rows for all scores.
    """
    if names is None:
        names = list(dict.fromkeys(name for state in states for name in state.scores))
    by_kind = {kind: [state for state in states if kind in ("all", state.kind)] for kind in KINDS}
    by_kind[MATCHED] = [state for state in states if set(names) <= state.scores.keys()]
    if len(by_kind[MATCHED]) == len(states):  # it would say the same again
        del by_kind[MATCHED]
    rows = []
    for kind, own in by_kind.items():
        for name in names:
            if members := [state for state in own if name in state.scores]:
                rows.append({"score": name, "kind": kind, **_agreement(members, name)})
    return rows


def _agreement(states: Sequence[Judged], name: str) -> dict[str, Any]:
    # by problem: agreeing, comparable, top-1, states, of mixed, mixed, SLM's, LLM's top-1
    tallies: dict[str, Tally] = {}
    for state in states:
        outcome, seeds = state.rolled.correct.numpy(), state.scores[name]
        tally = tallies.setdefault(state.rolled.state.trajectory.problem.id, np.zeros(8))
        mixed = statistics.outcomes_differ(outcome)
        local = [intervals.top1_success(state.scores[other][0].numpy(), outcome) for other in ("SLM", "LLM")]
        for score in seeds:
            agreeing, comparable = pairwise_agreement(score.numpy(), outcome)
            success = intervals.top1_success(score.numpy(), outcome)
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
        "top1_minus_slm": None if name == "SLM" else intervals.paired_share_interval(hits, slm, count),
        "top1_minus_llm": None if name == "LLM" else intervals.paired_share_interval(hits, llm, count),
    }


def coverage_rows(states: Sequence[Judged]) -> list[dict[str, Any]]:
    """How often the SLM's, the LLM's and the joint pool hold a candidate from which the SLM succeeds."""
    rows: list[dict[str, Any]] = []
    if not states:
        return rows
    for name, bits in (("SLM", SLM), ("LLM", LARGE), ("joint", SLM | LARGE)):
        tallies: dict[str, Tally] = {}  # by problem: covered, states, covered of mixed, mixed
        sizes = []
        for state in states:
            rollout = state.rolled
            inside = (rollout.state.pool.sources & bits) > 0
            sizes.append(int(inside.sum()))
            covered = bool((rollout.correct & inside).any())
            mixed = statistics.outcomes_differ(rollout.correct.numpy())
            tally = tallies.setdefault(rollout.state.trajectory.problem.id, np.zeros(4))
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
    return intervals.share_interval(part, whole) if whole.any() else None


def agreement_table(settings: RunSettings, run: Path) -> str:
    """Agreement and coverage on the held-out states in Markdown."""
    states = judged_states(settings, run)
    return f"{table(agreement_rows(states))}\n\n{table(coverage_rows(states))}"
