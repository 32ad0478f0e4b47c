"""What a run found, gathered from its finished stages and variants into plain values for the report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fb_core import statistics
from fb_core.config import AVERAGE, ModelSettings, RunSettings
from fb_core.experiment.experiment import (
    PROBLEM,
    QUALITIES,
    SWEPT,
    TABLES,
    UNSEEN,
    Rows,
    Table,
    chosen_horizon,
    settings_of_variant,
)
from fb_core.experiment.recommendation import advice
from fb_core.experiment.variants import Variant
from fb_core.stages.agreement import (
    AgreementStage,
    agreement_rows,
    coverage_rows,
    judged_states,
    matrix_of,
)
from fb_core.stages.artefacts import Artefact, digest
from fb_core.stages.calibration import CalibrationStage
from fb_core.stages.comparison import CompareStage
from fb_core.stages.deploy import frozen_policy
from fb_core.stages.deployment import DeploymentStage, deployment_rows, offline_rows
from fb_core.stages.evaluation import benchmark_problems
from fb_core.stages.examples import Examples
from fb_core.stages.futures import FutureStage
from fb_core.stages.inputs import models_of, splits_of
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.router import RouterLabelStage, RouterStage
from fb_core.stages.samples import OwnFutureStage, SampleStage
from fb_core.stages.scores import ScoreStage
from fb_core.stages.selection import RerankerStage, SelectionStage
from fb_core.stages.states import PolicyStage, StateStage
from fb_core.stages.training import TrainStage
from fb_core.stages.trajectories import TrajectoryStage
from fb_core.statistics import Interval

OFFLINE = (
    TrajectoryStage,
    PolicyStage,
    StateStage,
    FutureStage,
    OwnFutureStage,
    SampleStage,
    ScoreStage,
    RolloutStage,
    CalibrationStage,
    TrainStage,
    SelectionStage,
    RerankerStage,
    RouterLabelStage,
    RouterStage,
)
OWN_ROW = {
    "pools": ("joint pool", None),
    "futures": ("all states with a verified future", None),
    "scope": ("adapter on the candidate alone", None),
    "repairs": ("FutureBridge, as published", None),
}  # FutureBridge's own row of a table of variants

Outcomes = dict[str, dict[str, float]]  # share of right runs by benchmark and problem


@dataclass(frozen=True)
class Tried:
    """A variant's benchmark rows; events, LLM calls and tokens are means by benchmark."""

    outcomes: Outcomes
    events: dict[str, float]
    calls: dict[str, float]
    tokens: dict[str, float]
    written: dict[tuple[str, str, int | None], list[int]]  # token ids by benchmark, problem and seed


def findings(settings: RunSettings, run: Path) -> dict[str, Any]:
    """All that a run's folder holds, by section; what was not run is None.

    Args:
        settings: of the run.
        run: its folder, trained at least.

    Raises:
        ValueError: not trained yet, or damaged.
    """
    rows = Rows(settings, run, chosen_horizon(run))
    tried = {
        variant.path: _tried(settings, run, variant)
        for table in TABLES
        for variant in (*rows.of(table), *rows.references())
    }
    if settings.models.llm_server is None:  # a server may round differently from call to call
        _check_one_token_takeover(tried)
    models, policy = models_of(settings.models), frozen_policy(run)
    selection = Artefact(run, SelectionStage.name).finished()["summary"]
    rolled = _finished(run, RolloutStage.name) is not None
    judged = judged_states(settings, run) if rolled else None
    made = Artefact(run, TrainStage.name).finished()
    return {
        "name": run.name,
        "settings": settings.model_dump(mode="json"),
        "pair": {
            "slm": settings.models.slm,
            "llm": settings.models.llm,
            "slm_parameters": models.parameters("slm"),
            "llm_parameters": models.parameters("llm"),
            "slm_hash": models.hashes("slm")["slm"],
        },
        "test_sets": {
            name: digest([[problem.text, problem.answer] for problem in problems])
            for name, problems in benchmark_problems(settings).items()
        },
        "policy": {**vars(policy), "quantile": settings.collect.quantile},
        "selection": {**selection, "problems": len(splits_of(settings.problems)["validation"])},
        "filters": Artefact(run, ScoreStage.name).finished()["counts"],
        "seeds": list(settings.train.seeds),
        "rows": list(_rows(settings, run, rows, tried)),
        "agreement": judged and [*agreement_rows(judged), *_agreement_of_repairs(settings, run, rows)],
        "choices": list(_choices(settings, run, rows)) if rolled else None,
        "coverage": judged and coverage_rows(judged),
        "future_quality": _future_quality(settings, run, rows) if rolled else None,
        "trajectory": _trajectory(settings, run) if rolled else None,
        "worked_event": _worked_event(settings, run) if rolled else None,
        "calibration": _calibration(settings, run, rows),
        "advice": advice(settings, run) if rolled else None,
        "costs": _costs(settings, run, rows),
        "machine": f"{', '.join(made['cost']['devices'])}; {os.cpu_count()} CPU cores; torch {torch.__version__}",
        "commit": made["made_by"][-1].get("commit"),
        "made": made["made_by"][-1],
    }


def _finished(run: Path, stage: str) -> dict[str, Any] | None:
    """The manifest of a finished stage, None of any other."""
    manifest = Artefact(run, stage).manifest()
    return manifest if manifest is not None and manifest["complete"] else None


def _tried(settings: RunSettings, run: Path, variant: Variant) -> Tried | None:
    """What a variant made of the benchmarks, None where it was not tried."""
    if _finished(run / variant.path, CompareStage.name) is None:
        return None
    outcomes: dict[str, dict[str, list[bool]]] = {}
    events: dict[str, list[int]] = {}
    calls: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    written = {}
    for row in CompareStage(settings_of_variant(settings, variant), run / variant.path).rows():
        by_problem = outcomes.setdefault(row["benchmark"], {})
        by_problem.setdefault(row["problem"], []).append(row["verdict"] == "correct")
        events.setdefault(row["benchmark"], []).append(len(row["steps"]))
        calls.setdefault(row["benchmark"], []).append(row["calls"])
        tokens.setdefault(row["benchmark"], []).append(len(row["tokens"]))
        written[row["benchmark"], row["problem"], row["seed"]] = row["tokens"]
    shares = {
        name: {problem: float(np.mean(runs)) for problem, runs in found.items()} for name, found in outcomes.items()
    }
    sampled = variant.method == "majority"  # its samples are not kept
    return Tried(shares, _means(events), _means(calls), {} if sampled else _means(tokens), written)


def _means(counts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {name: float(np.mean(found)) for name, found in counts.items()}


def _check_one_token_takeover(tried: Mapping[Path, Tried | None]) -> None:
    by_name = {path.name: found for path, found in tried.items() if len(path.parts) == 2 and found is not None}
    direct, one_token = by_name.get("direct"), by_name.get("one-token-takeover")
    if direct is not None and one_token is not None:
        assert direct.written == one_token.written, "the LLM's argmax is in the joint pool"


def _rows(settings: RunSettings, run: Path, rows: Rows, tried: Mapping[Path, Tried | None]) -> Iterator[dict[str, Any]]:
    """The rows of all tables, a benchmark each."""
    references = {variant.key: variant for variant in rows.references()}
    ours = references["futurebridge"]
    for table in TABLES:
        members = rows.of(table)
        if not any(tried[variant.path] is not None or _problem(run, variant) for variant in members):
            continue
        if table == "quantiles":
            members = _with_own_quantile(settings, rows, members)
        elif table != "methods":
            members = _with_own_row(settings, table, members, ours, rows.horizon)
        for variant in members:
            at = variant.place
            compared = {
                name: reference if at is None or name == "greedy" else _beside(reference, at)
                for name, reference in references.items()
            }
            if table == "futures":  # greedy ones with the greedy one, samples with the right sample
                compared["verified"] = members[0]
                if variant.key in ("future-unverified", "future-incorrect"):
                    compared["sampled"] = members[1]
            yield from _row(settings, run, table, variant, tried, compared)
        if table == "methods":
            yield from _repaired(settings, run, rows, tried, references)
            for name, note in UNSEEN.items():
                if name not in settings.compare.external:
                    for benchmark in settings.evaluate.benchmarks:
                        yield {"table": table, "benchmark": benchmark, "key": name, "label": name, "note": note}


def _beside(reference: Variant, inside: Variant) -> Variant:
    """A reference method at another quantile."""
    return Variant(reference.key, reference.label, {}, reference.method, inside.x, inside)


def _with_own_quantile(settings: RunSettings, rows: Rows, members: Sequence[Variant]) -> list[Variant]:
    """The rows of all quantiles in order, those of the run's own among them."""
    wanted = ["takeover", "s2t", "direct", "futurebridge", *SWEPT]
    own = {variant.key: variant for variant in (*rows.of("methods"), *rows.references(), *rows.of("repairs"))}
    found = [own[key] for key in wanted if key in own]
    quantile = settings.collect.quantile
    return sorted([*members, *found], key=lambda variant: quantile if variant.x is None else variant.x)


def _with_own_row(
    settings: RunSettings, table: Table, members: Sequence[Variant], ours: Variant, horizon: int
) -> list[Variant]:
    """The rows of an ablation with the run's own among them."""
    train = settings.train
    numbers = {
        "horizons": (f"H = {horizon}", float(horizon)),
        "alpha": (f"alpha = {train.alpha:g}", train.alpha),
        "temperature": (f"temperature {train.temperature:g}", train.temperature),
    }
    label, x = {**OWN_ROW, **numbers}[table]
    own = Variant(ours.key, label, ours.changes, ours.method, x)
    if x is None:
        return [*members, own] if table == "futures" else [own, *members]
    return sorted([*members, own], key=lambda variant: variant.x or 0.0)


def _row(
    settings: RunSettings,
    run: Path,
    table: str,
    variant: Variant,
    tried: Mapping[Path, Tried | None],
    compared: Mapping[str, Variant],
) -> Iterator[dict[str, Any]]:
    """A variant's row for every benchmark, and for their average where there are several."""
    found, seeds = tried.get(variant.path), list(settings.train.seeds)
    quantile = settings.collect.quantile if variant.x is None else variant.x
    place = run if variant.place is None else run / variant.place.path
    at: dict[str, Any] = {}
    if table == "quantiles":
        known = _finished(place, PolicyStage.name) is not None
        at = {"quantile": quantile, "threshold": frozen_policy(place).threshold if known else None}
    about = {"table": table, "key": variant.key, "label": variant.label, "x": variant.x, **at}
    names = settings.evaluate.benchmarks
    for benchmark in (*names, AVERAGE) if len(names) > 1 else names:
        row = {**about, "benchmark": benchmark}
        if found is None:
            yield {**row, "note": _problem(run, variant) or "not run"}
            continue
        members = names if benchmark == AVERAGE else (benchmark,)
        own = [found.outcomes[name] for name in members]
        differences = {}
        for key, other in compared.items():
            theirs = tried.get(other.path)
            if theirs is not None and other.path != variant.path:
                differences[f"minus_{key}"] = _difference(own, [theirs.outcomes[name] for name in members])
        repeated = len({seed for _, _, seed in found.written} - {None})
        yield {
            **row,
            "seeds": seeds if repeated else [],
            "problems": sum(map(len, own)),
            "accuracy": statistics.average_interval([list(one.values()) for one in own]),
            **differences,
            "events": float(np.mean([found.events[name] for name in members])),
            "calls": float(np.mean([found.calls[name] for name in members])),
            "tokens": float(np.mean([found.tokens[name] for name in members])) if found.tokens else None,
        }


def _difference(own: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> Interval:
    assert [one.keys() for one in own] == [other.keys() for other in theirs]
    paired = [[other[problem] for problem in one] for one, other in zip(own, theirs, strict=True)]
    return statistics.average_interval([list(one.values()) for one in own], paired)


def _problem(run: Path, variant: Variant) -> str | None:
    """Why a variant could not be made, if it could not."""
    path = run / variant.path / PROBLEM
    return json.loads(path.read_text())["problem"] if path.is_file() else None


def _repaired(
    settings: RunSettings,
    run: Path,
    rows: Rows,
    tried: Mapping[Path, Tried | None],
    references: Mapping[str, Variant],
) -> Iterator[dict[str, Any]]:
    """The row of the repaired recipe that is best on the validation problems."""
    validated = [
        (variant, max(row["accuracy"] for row in manifest["summary"]["table"]))
        for variant in rows.of("repairs")
        if (manifest := _finished(run / variant.path, SelectionStage.name)) and tried[variant.path]
    ]
    if not validated:
        return
    best, accuracy = max(validated, key=lambda pair: pair[1])
    note = f"the best of {len(validated)} repairs on validation problems, {100 * accuracy:.1f}% there"
    for row in _row(settings, run, "methods", best, tried, references):
        yield {**row, "key": "repaired", "label": f"FutureBridge, repaired: {best.label}", "note": note}


def _agreement_of_repairs(settings: RunSettings, run: Path, rows: Rows) -> Iterator[dict[str, Any]]:
    for variant in rows.of("repairs"):
        where = ", on states of its own" if "collect" in variant.changes else ""
        for row in _judged(settings, run, variant, "FutureBridge"):
            yield {**row, "score": f"FutureBridge, {variant.label}{where}"}


def _choices(settings: RunSettings, run: Path, rows: Rows) -> Iterator[dict[str, Any]]:
    """What the candidate chosen at an event leads to, by kind of event, at every quantile."""
    local = {"SLM": ("greedy", "the SLM's choice"), "LLM": ("direct", "the LLM's choice")}
    for variant in _with_own_quantile(settings, rows, rows.of("quantiles")):
        if variant.key not in ("futurebridge", *SWEPT):
            continue
        about = {**(local if variant.key == "futurebridge" else {}), "FutureBridge": (variant.key, variant.label)}
        for row in _judged(settings, run, variant, *about):
            key, label = about[row["score"]]
            quantile = settings.collect.quantile if variant.x is None else variant.x
            yield {**row, "key": key, "label": label, "quantile": quantile}


def _judged(settings: RunSettings, run: Path, variant: Variant, *names: str) -> list[dict[str, Any]]:
    """What rollouts say of a variant's scores, nothing where they were not held against any."""
    own = variant.key == "futurebridge" and variant.inside is None
    folder = run if own else run / variant.path
    if _finished(folder, AgreementStage.name) is None:
        return []
    return agreement_rows(judged_states(settings_of_variant(settings, variant), folder), names)


def _future_quality(settings: RunSettings, run: Path, rows: Rows) -> dict[str, Any] | None:
    """Agreement of every quality's target with the rollouts, by horizon, on the held-out states that have them all."""
    made = {variant.key: run / variant.path for variant in rows.of("futures")}
    folders = {kind: made[f"future-{kind}"] for kind in QUALITIES}
    if any(_finished(folder, ScoreStage.name) is None for folder in folders.values()):
        return None
    horizons, states = settings.train.horizons, 0
    tallies = {kind: [(0.0, 0)] * len(horizons) for kind in QUALITIES}
    for shard in Artefact(run, RolloutStage.name).shards("validation"):
        rolled = Examples(run, shard).rollouts
        for kind, folder in folders.items():
            for state, group in Examples(folder, shard).groups.items():
                one = rolled.get(state)
                if one is None or (matrix := matrix_of(group, one)) is None:
                    continue
                states += kind == next(iter(QUALITIES))
                for column, horizon in enumerate(horizons):
                    score = matrix[:, :horizon].double().mean(1)
                    won, pairs = statistics.pairwise_agreement(score.numpy(), one.correct.numpy())
                    before = tallies[kind][column]
                    tallies[kind][column] = (before[0] + won, before[1] + pairs)
    return {
        "states": states,
        "horizons": list(horizons),
        "qualities": list(QUALITIES.values()),
        "pairwise": [[won / pairs if pairs else None for won, pairs in tallies[kind]] for kind in QUALITIES],
    }


def _trajectory(settings: RunSettings, run: Path) -> dict[str, Any] | None:
    """The held-out SLM trajectory of the first shard with the most admitted states."""
    decode = models_of(settings.models).tokenizer.decode
    shard = Artefact(run, RolloutStage.name).shards("validation")[0]
    examples = Examples(run, shard)
    states, rolled = examples.states, examples.rollouts
    if not states or not rolled:
        return None
    owners = [state.trajectory.problem.id for state in states.values()]
    chosen = max(examples.trajectories, key=owners.count)
    trajectory = examples.trajectories[chosen]
    reranked = _finished(run, AgreementStage.name) is not None
    table = {row["state"]: row for row in Artefact(run, AgreementStage.name).table(shard)} if reranked else {}
    events = []
    for state in (one.state for one in rolled.values()):
        if state.trajectory is trajectory:
            pool = state.pool
            known = table[state.id][f"seed-{settings.train.seeds[0]}"] if state.id in table else pool.slm_logprob
            events.append(
                {
                    "step": len(state.output),
                    "chosen": decode([int(pool.ids[int(np.argmax(known))])]),
                    "slm": decode([int(pool.ids[int(pool.slm_logprob.argmax())])]),
                }
            )
    prompt = trajectory.tokens[: trajectory.prompt_length].tolist()
    return {
        "problem": decode(prompt, skip_special_tokens=True),
        "tokens": [decode([token]) for token in trajectory.output.tolist()],
        "entropy": trajectory.entropy.tolist(),
        "threshold": frozen_policy(run).threshold,
        "events": events,
    }


def _worked_event(settings: RunSettings, run: Path) -> dict[str, Any] | None:
    """The first held-out state with a usable future where the picks of LLM and FutureBridge differ in outcome."""
    if _finished(run, AgreementStage.name) is None:
        return None
    horizon, seed = chosen_horizon(run), f"seed-{settings.train.seeds[0]}"
    decode = models_of(settings.models).tokenizer.decode
    for shard in Artefact(run, RolloutStage.name).shards("validation"):
        learned = {row["state"]: row[seed] for row in Artefact(run, AgreementStage.name).table(shard)}
        examples = Examples(run, shard)
        for name, one in examples.rollouts.items():
            state, pool, scores = one.state, one.state.pool, learned[name]
            if matrix_of(group := examples.groups.get(name), one) is None:
                continue
            picks = int(np.argmax(scores)), int(pool.llm_logprob.argmax())
            if bool(one.correct[picks[0]] == one.correct[picks[1]]):
                continue
            problem, future = state.trajectory.problem, examples.futures()[name]
            assert group is not None
            compatibility = group.compatibility(horizon)
            assert compatibility is not None
            return {
                "problem": problem.id,
                "prompt": problem.text,
                "prefix": decode(state.output.tolist(), skip_special_tokens=True),
                "gold": problem.answer,
                "entropy": state.entropy,
                "future": decode(future.tokens[:horizon].tolist(), skip_special_tokens=True),
                "candidates": [
                    {
                        "token": decode([int(pool.ids[k])]),
                        "source": {1: "SLM", 2: "LLM", 3: "both"}[int(pool.sources[k])],
                        "p_slm": float(pool.slm_logprob[k].exp()),
                        "p_llm": float(pool.llm_logprob[k].exp()),
                        "compatibility": float(compatibility[k]),
                        "score": float(scores[k]),
                        "rollout": one.texts[k],
                        "correct": bool(one.correct[k]),
                    }
                    for k in range(len(pool))
                ],
            }
    return None


def _calibration(settings: RunSettings, run: Path, rows: Rows) -> dict[str, Any] | None:
    """Of the row with the calibrated target."""
    (variant,) = (variant for variant in rows.of("repairs") if variant.key == "calibrated")
    manifest = _finished(run / variant.path, CalibrationStage.name)
    if manifest is None:
        return None
    return {**manifest["summary"][f"h{rows.horizon}"], "minimum_mixed": settings.rollouts.minimum_mixed}


def _costs(settings: RunSettings, run: Path, rows: Rows) -> dict[str, Any]:
    offline, deployment = offline_rows([kind(settings, run) for kind in OFFLINE]), None
    if _finished(run, DeploymentStage.name) is not None:
        deployment = deployment_rows(DeploymentStage(settings, run))
    beside = published(settings)
    for name, key, rows_here in (("offline", "stage", offline), ("deployment", "key", deployment or [])):
        for row in rows_here:
            row["published"] = beside.get(name, {}).get(row[key])
    return {"offline": offline, "deployment": deployment}


def published(settings: RunSettings) -> dict[str, dict[str, float]]:
    """The paper's figures by table and row that may stand beside a run's, where its settings and benchmark agree."""
    text = (resources.files("fb_core.report") / "published.yaml").read_text(encoding="utf-8")
    timed = settings.evaluate.benchmarks[0]
    return {
        name: table["rows"]
        for name, table in yaml.safe_load(text).items()
        if is_published(settings) and table.get("benchmark", timed) == timed
    }


def is_published(settings: RunSettings) -> bool:
    """Whether models, data and settings are the paper's, so that its figures may stand beside ours."""
    paper = RunSettings(models=ModelSettings(slm="Qwen/Qwen3-1.7B", llm="Qwen/Qwen3-32B"))
    free = {"per_shard", "token_budget", "microbatches", "checkpoint_steps"}
    sections = ("problems", "collect", "futures", "score", "train", "evaluate")
    same = all(
        getattr(settings, name).model_dump(exclude=free) == getattr(paper, name).model_dump(exclude=free)
        for name in sections
    )
    return same and (settings.models.slm, settings.models.llm) == (paper.models.slm, paper.models.llm)
