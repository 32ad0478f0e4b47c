"""What a report shows of a run: its tables, and the rows of every other section, read from its finished stages."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.paper.agreement import AgreementStage, agreement_rows, coverage_rows, judged_states, matrix_of
from benchmarks.paper.benchmark_states import benchmark_runs
from benchmarks.paper.futures import OwnFutureStage, SampleStage
from benchmarks.paper.published import Published
from benchmarks.paper.r2r.stages import RouterLabelStage, RouterStage
from benchmarks.paper.rollouts import HeldOutRolloutStage, token_kind
from benchmarks.paper.rows import DEPLOYED, Run, decoded, finished, long_table, results, timed
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import PUBLISHED, TABLES, Plan, Table, plan_of, settings_of_variant
from fb_core.apps.pipeline.choose import CHOICE, ChoiceStage, RerankerStage, SelectionStage
from fb_core.apps.pipeline.collect import PolicyStage, StateStage, TrajectoryStage
from fb_core.apps.pipeline.decode import Row
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.futures import FutureStage
from fb_core.apps.pipeline.models import frozen_policy, models_of
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.pipeline.rollouts import RolloutStage
from fb_core.apps.pipeline.run import Stage
from fb_core.apps.pipeline.scores import FILTERS, ScoreStage
from fb_core.apps.pipeline.train import TrainStage
from fb_core.score.targets import pairwise_agreement

OFFLINE: tuple[type[Stage], ...] = (
    TrajectoryStage,
    PolicyStage,
    StateStage,
    FutureStage,
    OwnFutureStage,
    SampleStage,
    ScoreStage,
    HeldOutRolloutStage,
    RolloutStage,
    TrainStage,
    SelectionStage,
    RerankerStage,
    *CHOICE,
    RouterLabelStage,
    RouterStage,
)
COMPARED = (DEPLOYED, PUBLISHED)  # with greedy decoding, problem by problem

Part = list[dict[str, Any]]


def gather(settings: PaperSettings, run: Path, tables: Mapping[str, Table] = TABLES) -> Run:
    """What the report shows of a trained run; what was not run is left out."""
    plan, policy, models = plan_of(settings, run), frozen_policy(run), models_of(settings.models)
    made = Artefact(run, TrainStage.name).finished()
    rows, paper = long_table(plan, tables), Published(settings)
    parts = {
        "changes": changed_outcomes(plan),
        "filter": filtered(plan),
        "certification": certification(plan),
        "offline": offline(plan),
    }
    if finished(run, HeldOutRolloutStage.name):
        parts |= {"agreement": agreement(plan), "coverage": coverage(plan)}
        parts["future_quality"] = future_quality(plan)
    return Run(
        name=run.name,
        pair={
            **{which: getattr(settings.models, which) for which in ("slm", "llm")},
            **{f"{which}_parameters": models.parameters(which) for which in ("slm", "llm")},
        },
        policy={"threshold": policy.threshold, "quantile": settings.collect.quantile, "top_k": policy.top_k},
        seeds=settings.train.seeds,
        rows=tuple(rows),
        results=tuple(results(plan, rows, tables)),
        timed=tuple(replace(timing, published=paper.row("deployment", timing.key)) for timing in timed(plan, rows)),
        parts={name: part for name, part in parts.items() if part},
        settings=settings.model_dump(mode="json"),
        about={
            "reranker": f"horizon {plan.horizon}, chosen on validation problems",
            "machine": f"{', '.join(made['cost']['devices'])}; {os.cpu_count()} CPU cores; torch {torch.__version__}",
            **{name: str(version) for name, version in made["made_by"][-1].items()},
        },
        published=paper.words(),
        published_costs=paper.words(*made["cost"]["devices"]),
    )


def filtered(plan: Plan) -> Part:
    """The states left after each condition of the filter; empty if they were not scored."""
    if (manifest := finished(plan.run, ScoreStage.name)) is None:
        return []
    counts, paper = manifest["counts"], Published(plan.settings)
    return [
        {
            "condition": words,
            "states": counts.get(name, 0),
            "share": counts.get(name, 0) / max(1, counts["admitted"]),
            "published": paper.states(name),
        }
        for name, words in FILTERS.items()
    ]


def certification(plan: Plan) -> Part:
    """Every recipe that was tested for a seed's adapter, with the reason for the choice; empty if none was."""
    manifest = finished(plan.run, ChoiceStage.name)
    chosen = manifest["summary"] if manifest else {}
    return [
        {"seed": seed, **row}
        for seed in plan.settings.train.seeds
        if f"seed-{seed}" in chosen
        for row in chosen[f"seed-{seed}"]["tested"]
    ]


def agreement(plan: Plan) -> Part:
    """How well scores predict outcomes: on validation problems, at other quantiles, and on the benchmarks."""
    rows = [{"where": "validation", **row} for row in agreement_rows(judged_states(plan.settings, plan.run))]
    for variant in TABLES["quantiles"].rows(plan):
        folder = plan.run / variant.path
        if variant.key == PUBLISHED and variant.inside is not None and finished(folder, AgreementStage.name):
            states = judged_states(settings_of_variant(plan.settings, variant), folder)
            where = f"validation, quantile {variant.x:g}"
            rows += [{"where": where, **row} for row in agreement_rows(states, ("SLM", "LLM", "reranker"))]
    for name, (settings, folder) in _benchmarks(plan):
        rows += [{"where": name, **row} for row in agreement_rows(judged_states(settings, folder))]
    for row in rows:
        if row["kind"] == "all" and (figures := Published(plan.settings).row("agreement", row["score"])):
            row["published, %"] = figures.get("pairwise" if row["where"] == "validation" else row["where"])
    return rows


def coverage(plan: Plan) -> Part:
    """How often pools hold a candidate from which the SLM succeeds, on validation problems and on the benchmarks."""
    sources = [("validation", (plan.settings, plan.run)), *_benchmarks(plan)]
    rows = [{"where": name, **row} for name, source in sources for row in coverage_rows(judged_states(*source))]
    for row in rows:
        if figures := Published(plan.settings).row("coverage", row["pool"]):
            row["published"] = {"size": figures["size"], "coverage, %": figures.get(row["where"])}
    return rows


def _benchmarks(plan: Plan) -> Iterator[tuple[str, tuple[PaperSettings, Path]]]:
    """The benchmarks whose states were judged."""
    for name, (settings, folder) in benchmark_runs(plan.settings, plan.run).items():
        if finished(folder, AgreementStage.name):
            yield name, (settings, folder)


def future_quality(plan: Plan) -> Part:
    """Pairwise accuracy of the target by kind of future and horizon, on the held-out states that it was scored at."""
    made = [variant for variant in TABLES["futures"].rows(plan) if variant.key.startswith("future-")]
    folders = [plan.run / variant.path for variant in made]
    if any(finished(folder, ScoreStage.name) is None for folder in folders):
        return []
    horizons, states = plan.settings.train.horizons, [0] * len(folders)
    won, pairs = np.zeros((2, len(folders), len(horizons)))
    for shard in Artefact(plan.run, HeldOutRolloutStage.name).shards():
        rolled = Examples(plan.run, shard).rollouts(HeldOutRolloutStage.name)
        for quality, folder in enumerate(folders):
            for state, group in Examples(folder, shard).groups.items():
                rollout = rolled.get(state)
                if rollout is None or (matrix := matrix_of(group, rollout)) is None:
                    continue
                states[quality] += 1
                for column, horizon in enumerate(horizons):
                    score = matrix[:, :horizon].double().mean(1)
                    agreeing, comparable = pairwise_agreement(score.numpy(), rollout.correct.numpy())
                    won[quality, column] += agreeing
                    pairs[quality, column] += comparable
    shares = np.divide(won, pairs, out=np.full_like(won, np.nan), where=pairs > 0)
    return [
        {"future": variant.label, "states": count}
        | {
            f"{horizon}": None if np.isnan(share) else float(share)
            for horizon, share in zip(horizons, row, strict=True)
        }
        for variant, count, row in zip(made, states, shares, strict=True)
    ]


def changed_outcomes(plan: Plan) -> Part:
    """How many verdicts differ from greedy decoding's, and how many do not.

    The changed ones are counted by the kind of the first event at which the SLM's own token was not taken, if there is
    one.
    """
    rows = {key: list(decoded(plan, plan.method(key))) for key in ("greedy", *COMPARED)}
    greedy = {(row.benchmark, row.problem): row for row in rows["greedy"]}
    tokenizer = models_of(plan.settings.models).tokenizer
    changes = Counter[tuple[str, str, str]]()
    for key in COMPARED if greedy else ():
        for row in rows[key]:
            first, change, kind = greedy[row.benchmark, row.problem], "none", ""
            if row.correct != first.correct:
                step = parting_event(first, row)
                change = "wrong → right" if row.correct else "right → wrong"
                kind = "no event" if step is None else token_kind(tokenizer.decode([first.tokens[step]]))
            changes[plan.method(key).label, change, kind] += 1
    names = ("method", "change", "kind of event", "answers")
    return [dict(zip(names, (*what, count), strict=True)) for what, count in sorted(changes.items())]


def parting_event(greedy: Row, row: Row) -> int | None:
    """The step of the event at which a text departs from greedy decoding's; None if it departs elsewhere or never."""
    steps = enumerate(zip_longest(greedy.tokens, row.tokens))
    parting = next((step for step, (token, other) in steps if token != other), len(row.tokens))
    at_event = any(event.step == parting for event in row.events)
    return parting if at_event and parting < len(greedy.tokens) else None


def offline(plan: Plan) -> Part:
    """Units, seconds of work and GPU hours of every finished stage, from its receipts, beside the paper's."""
    rows, paper = [], Published(plan.settings)
    for kind in OFFLINE:
        if (manifest := finished(plan.run, kind.name)) is not None:
            stage = kind(plan.settings, plan.run)
            about = {"stage": stage.name, "units": _units(stage, manifest), "unit": stage.unit}
            rows.append(about | manifest["cost"] | {"published": paper.hours(stage.name)})
    return rows


def _units(stage: Stage, manifest: dict[str, Any]) -> int:
    """The number of units that a finished stage worked on; rollouts and samples are of some states only."""
    counts: dict[str, int] = manifest["counts"]
    if isinstance(stage, RolloutStage):
        return counts["states"]
    return counts["sampled"] if isinstance(stage, SampleStage) else sum(stage.shards().values())
