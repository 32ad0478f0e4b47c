"""Collects a run's findings from its finished stages and variants for the report, which itself reads no stage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
import yaml
from pydantic import BaseModel

from benchmarks.paper.agreement import (
    AgreementStage,
    Judged,
    agreement_rows,
    coverage_rows,
    judged_states,
    matrix_of,
)
from benchmarks.paper.benchmark_states import benchmark_runs
from benchmarks.paper.changed_outcomes import turned
from benchmarks.paper.costs import DeploymentStage, deployment_rows, offline_rows
from benchmarks.paper.futures import OwnFutureStage, SampleStage
from benchmarks.paper.r2r.stages import RouterLabelStage, RouterStage
from benchmarks.paper.report import findings as values
from benchmarks.paper.report.findings import OURS, Findings
from benchmarks.paper.results import Results, finished
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import TABLES, Plan, Table, Variant
from benchmarks.paper.variants import plan_of, settings_of_variant
from fb_core import statistics
from fb_core.config import ModelSettings
from fb_core.stages.artefacts import Artefact, digest
from fb_core.stages.choice import STAGES as CHOICE
from fb_core.stages.choice import ChoiceStage
from fb_core.stages.deploy import frozen_policy
from fb_core.stages.examples import Examples
from fb_core.stages.futures import FutureStage
from fb_core.stages.inputs import benchmark_problems, models_of
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.scores import ScoreStage
from fb_core.stages.selection import RerankerStage, SelectionStage
from fb_core.stages.stage import Stage
from fb_core.stages.states import PolicyStage, StateStage
from fb_core.stages.training import TrainStage
from fb_core.stages.trajectories import TrajectoryStage

OFFLINE: tuple[type[Stage], ...] = (
    TrajectoryStage,
    PolicyStage,
    StateStage,
    FutureStage,
    OwnFutureStage,
    SampleStage,
    ScoreStage,
    RolloutStage,
    TrainStage,
    SelectionStage,
    RerankerStage,
    *CHOICE,
    RouterLabelStage,
    RouterStage,
)

Kind = TypeVar("Kind", bound=BaseModel)


def gather(settings: PaperSettings, run: Path, tables: Mapping[str, Table] = TABLES) -> Findings:
    """All findings in a run's folder; what was not run is None.

    Args:
        settings: of the run.
        run: its folder; the run must be trained.
        tables: the tables whose rows are shown, by name.

    Raises:
        ValueError: the run is not trained yet, or it is damaged.
    """
    plan, policy = plan_of(settings, run), frozen_policy(run)
    made = Artefact(run, TrainStage.name).finished()
    rolled = _Rolled(plan) if finished(run, RolloutStage.name) else None
    return Findings(
        name=run.name,
        settings=settings.model_dump(mode="json"),
        pair=_pair(settings),
        test_sets={
            name: digest([[problem.text, problem.answer] for problem in problems])
            for name, problems in benchmark_problems(settings).items()
        },
        policy=values.Policy(threshold=policy.threshold, top_k=policy.top_k, quantile=settings.collect.quantile),
        selection=_selection(plan),
        deployed=_deployed(plan),
        filters=Artefact(run, ScoreStage.name).finished()["counts"],
        seeds=settings.train.seeds,
        experiments=tuple(table.shown for table in tables.values()),
        rows=tuple(Results(plan, tables).rows()),
        agreement=rolled and rolled.agreement(),
        choices=rolled and rolled.choices(),
        coverage=rolled and rolled.coverage(),
        turned=turned(plan),
        future_quality=rolled and _future_quality(plan),
        trajectory=rolled and _trajectory(plan),
        worked_event=rolled and _worked_event(plan),
        costs=_costs(plan),
        machine=f"{', '.join(made['cost']['devices'])}; {os.cpu_count()} CPU cores; torch {torch.__version__}",
        commit=made["made_by"][-1].get("commit"),
        made=made["made_by"][-1],
    )


def _picked(kind: type[Kind], row: dict[str, Any], **more: Any) -> Kind:
    """A findings object from the fields of a stage's row that it has, and from `more`."""
    return kind(**{name: row[name] for name in kind.model_fields if name in row and name not in more} | more)


def _pair(settings: PaperSettings) -> values.Pair:
    models = models_of(settings.models)
    return values.Pair(
        slm=settings.models.slm,
        llm=settings.models.llm,
        slm_parameters=models.parameters("slm"),
        llm_parameters=models.parameters("llm"),
        slm_hash=models.hashes("slm")["slm"],
    )


def _selection(plan: Plan) -> values.Selection:
    found = Artefact(plan.run, SelectionStage.name).finished()["summary"]
    table = tuple(
        _picked(values.Trial, row, seeds=tuple(_picked(values.SeedTrial, seed) for seed in row["seeds"]))
        for row in found["table"]
    )
    return _picked(values.Selection, found, table=table)


def _deployed(plan: Plan) -> tuple[values.Deployed, ...] | None:
    """The recipe of every seed with its evidence; None if the run chose none."""
    manifest = finished(plan.run, ChoiceStage.name)
    if manifest is None:
        return None
    found = []
    for seed in plan.settings.train.seeds:
        chosen = manifest["summary"][f"seed-{seed}"]
        tested = tuple(
            _picked(
                values.Tested,
                row,
                **{name: (row[name]["mean"], row[name]["low"]) for name in ("minus_greedy", "minus_direct")},
            )
            for row in chosen["tested"]
        )
        found.append(_picked(values.Deployed, chosen["tested"][0], seed=seed, label=chosen["label"], tested=tested))
    return tuple(found)


@final
class _Rolled:
    """Agreement of a run's and its variants' scores with the rollouts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[Path, list[dict[str, Any]]] = {}

    @cached_property
    def states(self) -> list[Judged]:
        """The run's own held-out states."""
        return judged_states(self._plan.settings, self._plan.run)

    @cached_property
    def _benchmarks(self) -> dict[str, list[Judged]]:
        """The states of the benchmarks that were rolled out, by name."""
        places = benchmark_runs(self._plan.settings, self._plan.run).items()
        return {
            name: judged_states(settings, folder)
            for name, (settings, folder) in places
            if finished(folder, AgreementStage.name)
        }

    def agreement(self) -> tuple[values.Agreement, ...]:
        """All scores of the run, on the validation problems' states and on the benchmarks'."""
        found = [_picked(values.Agreement, row) for row in agreement_rows(self.states)]
        for name, states in self._benchmarks.items():
            found += [_picked(values.Agreement, row, benchmark=name) for row in agreement_rows(states)]
        return tuple(found)

    def coverage(self) -> tuple[values.Coverage, ...]:
        """Coverage at the validation problems' states, then at every benchmark's."""
        known = [(None, self.states), *self._benchmarks.items()]
        return tuple(
            _picked(values.Coverage, row, benchmark=name) for name, states in known for row in coverage_rows(states)
        )

    def choices(self) -> tuple[values.Choice, ...]:
        """How often the chosen candidate leads to success, by kind of event, at every quantile."""
        found = []
        for variant in TABLES["quantiles"].rows(self._plan):
            if variant.method != OURS:
                continue
            labels = {"FutureBridge": variant.label}
            if variant.key == OURS:
                labels |= {"SLM": "the SLM's choice", "LLM": "the LLM's choice"}
            rows = [row for row in self._rows(variant) if row["score"] in labels]
            found += [_picked(values.Choice, row, label=labels[row["score"]], quantile=variant.x) for row in rows]
        return tuple(found)

    def _rows(self, variant: Variant) -> list[dict[str, Any]]:
        """The rows of a variant's reranker, and of the models at its quantile, cached; empty if it was not judged."""
        if variant.path not in self._known:
            own = variant.key == OURS and variant.inside is None
            folder = self._plan.run if own else self._plan.run / variant.path
            self._known[variant.path] = []
            if finished(folder, AgreementStage.name) is not None:
                settings = settings_of_variant(self._plan.settings, variant)
                states = self.states if own else judged_states(settings, folder)
                names = ("SLM", "LLM", "FutureBridge") if variant.key == OURS else ("FutureBridge",)
                self._known[variant.path] = agreement_rows(states, names)
        return self._known[variant.path]


def _future_quality(plan: Plan) -> values.FutureQuality | None:
    """Pairwise accuracy of the target by kind of future and horizon, on the held-out states that have all kinds."""
    made = [variant for variant in TABLES["futures"].rows(plan) if not variant.borrowed]
    folders = [plan.run / variant.path for variant in made]
    if any(finished(folder, ScoreStage.name) is None for folder in folders):
        return None
    horizons, states = plan.settings.train.horizons, 0
    won, pairs = np.zeros((2, len(folders), len(horizons)))
    for shard in Artefact(plan.run, RolloutStage.name).shards("validation"):
        rolled = Examples(plan.run, shard).rollouts
        for quality, folder in enumerate(folders):
            for state, group in Examples(folder, shard).groups.items():
                one = rolled.get(state)
                if one is None or (matrix := matrix_of(group, one)) is None:
                    continue
                states += quality == 0
                for column, horizon in enumerate(horizons):
                    score = matrix[:, :horizon].double().mean(1)
                    found = statistics.pairwise_agreement(score.numpy(), one.correct.numpy())
                    won[quality, column] += found[0]
                    pairs[quality, column] += found[1]
    return values.FutureQuality(
        states=states,
        horizons=horizons,
        qualities=tuple(variant.label for variant in made),
        pairwise=tuple(
            tuple(float(part / whole) if whole else None for part, whole in zip(*row, strict=True))
            for row in zip(won, pairs, strict=True)
        ),
    )


def _trajectory(plan: Plan) -> values.Trajectory | None:
    """The held-out SLM trajectory with the most admitted states in the first shard."""
    run, settings = plan.run, plan.settings
    decode = models_of(settings.models).tokenizer.decode
    shard = Artefact(run, RolloutStage.name).shards("validation")[0]
    examples = Examples(run, shard)
    if not examples.states or not examples.rollouts:
        return None
    owners = [state.trajectory.problem.id for state in examples.states.values()]
    trajectory = examples.trajectories[max(examples.trajectories, key=owners.count)]
    learned = _learned(plan, shard)
    events = []
    for state in (one.state for one in examples.rollouts.values()):
        if state.trajectory is trajectory:
            pool = state.pool
            scores = learned.get(state.id, pool.slm_logprob.tolist())
            events.append(
                values.Choosing(
                    step=len(state.output),
                    chosen=decode([int(pool.ids[int(np.argmax(scores))])]),
                    slm=decode([int(pool.ids[int(pool.slm_logprob.argmax())])]),
                )
            )
    return values.Trajectory(
        problem=decode(trajectory.tokens[: trajectory.prompt_length].tolist(), skip_special_tokens=True),
        tokens=tuple(decode([token]) for token in trajectory.output.tolist()),
        entropy=tuple(trajectory.entropy.tolist()),
        threshold=frozen_policy(run).threshold,
        events=tuple(events),
    )


def _learned(plan: Plan, shard: str) -> dict[str, list[float]]:
    """Scores of the first seed's reranker by state; empty if it was not compared with the rollouts."""
    if finished(plan.run, AgreementStage.name) is None:
        return {}
    seed = f"seed-{plan.settings.train.seeds[0]}"
    return {row["state"]: row[seed] for row in Artefact(plan.run, AgreementStage.name).table(shard)}


def _worked_event(plan: Plan) -> values.WorkedEvent | None:
    """The first held-out state with a usable future where the choices of LLM and FutureBridge differ in outcome."""
    run, settings = plan.run, plan.settings
    decode = models_of(settings.models).tokenizer.decode
    for shard in Artefact(run, RolloutStage.name).shards("validation"):
        learned, examples = _learned(plan, shard), Examples(run, shard)
        for name, one in examples.rollouts.items():
            state, pool, scores = one.state, one.state.pool, learned.get(name)
            group = examples.groups.get(name)
            if scores is None or group is None or matrix_of(group, one) is None:
                continue
            if bool(one.correct[int(np.argmax(scores))] == one.correct[int(pool.llm_logprob.argmax())]):
                continue
            problem, future = state.trajectory.problem, examples.futures()[name]
            compatibility = group.compatibility(plan.horizon)
            assert compatibility is not None
            return values.WorkedEvent(
                problem=problem.id,
                prompt=problem.text,
                prefix=decode(state.output.tolist(), skip_special_tokens=True),
                gold=problem.answer,
                entropy=state.entropy,
                future=decode(future.tokens[: plan.horizon].tolist(), skip_special_tokens=True),
                candidates=tuple(
                    values.Candidate(
                        token=decode([int(pool.ids[k])]),
                        source={1: "SLM", 2: "LLM", 3: "both"}[int(pool.sources[k])],
                        p_slm=float(pool.slm_logprob[k].exp()),
                        p_llm=float(pool.llm_logprob[k].exp()),
                        compatibility=float(compatibility[k]),
                        score=float(scores[k]),
                        rollout=one.texts[k],
                        correct=bool(one.correct[k]),
                    )
                    for k in range(len(pool))
                ),
            )
    return None


def _costs(plan: Plan) -> values.Costs:
    beside, deployment = published(plan.settings), None
    offline = tuple(
        _picked(values.OfflineCost, row, published=beside.get("offline", {}).get(row["stage"]))
        for row in offline_rows([kind(plan.settings, plan.run) for kind in OFFLINE])
    )
    if finished(plan.run, DeploymentStage.name) is not None:
        deployment = tuple(
            _picked(values.DeploymentCost, row, published=beside.get("deployment", {}).get(row["key"]))
            for row in deployment_rows(DeploymentStage(plan.settings, plan.run))
        )
    return values.Costs(offline=offline, deployment=deployment)


def published(settings: PaperSettings) -> dict[str, dict[str, float]]:
    """The paper's figures by table and row, if the run's settings and first benchmark are the same as the paper's."""
    text = (resources.files("benchmarks.paper") / "published.yaml").read_text(encoding="utf-8")
    timed = settings.evaluate.benchmarks[0]
    return {
        name: table["rows"]
        for name, table in yaml.safe_load(text).items()
        if is_published(settings) and table.get("benchmark", timed) == timed
    }


def is_published(settings: PaperSettings) -> bool:
    """Whether models, data and settings are the paper's, so that its figures may be shown beside the run's."""
    paper = PaperSettings(models=ModelSettings(slm="Qwen/Qwen3-1.7B", llm="Qwen/Qwen3-32B"))
    free = {"per_shard", "token_budget", "microbatches", "checkpoint_steps"}
    sections = ("problems", "collect", "futures", "score", "train", "evaluate")
    same = all(
        getattr(settings, name).model_dump(exclude=free) == getattr(paper, name).model_dump(exclude=free)
        for name in sections
    )
    return same and (settings.models.slm, settings.models.llm) == (paper.models.slm, paper.models.llm)
