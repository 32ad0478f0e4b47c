"""Advice from rollouts before any training: which recipe to train, judged at the states where it would decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fb_core import statistics
from fb_core.calibrated import calibrate, calibration_terms
from fb_core.config import RunSettings
from fb_core.reranker import FEATURES, candidate_features
from fb_core.stages.agreement import KINDS, Judged, agreement_rows, coverage_rows, judged_states
from fb_core.stages.artefacts import Artefact
from fb_core.stages.calibration import rolled_out_terms
from fb_core.stages.examples import Examples, Group
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.scores import ScoreStage
from fb_core.stages.states import StateStage
from fb_core.statistics import Interval

CHANCE = 0.5  # pairwise accuracy of random scores
DEPLOYED = "as deployed"  # name of the target's score extended to all admitted states


class Recipe(NamedTuple):
    """A way to train and deploy: its label, its settings, and its scores [K] of a state's candidates (None: none)."""

    label: str
    options: str
    scores: Callable[[Judged], Tensor | None]


def recommend(settings: RunSettings, run: Path, states: Sequence[Judged] | None = None) -> list[str]:
    """Sentences on which states would be trained on, how good each score is where it would decide, and what to choose.

    Everything is counted at all admitted held-out states, as in deployment, not only at those that pass the training
    filters. A state without a usable future has no target, so its pairs count one half and its choice is random.

    Args:
        settings: of the run; the longest horizon of its sweep is used.
        run: its folder, scored and rolled out; a reranker is not needed.
        states: its judged states, if the caller has them.

    Raises:
        ValueError: the run has no rollouts or scores.
    """
    ScoreStage(settings, run).folder.finished()
    states, horizon = judged_states(settings, run) if states is None else states, max(settings.train.horizons)
    counts = RolloutStage(settings, run).folder.finished()["counts"]
    there = StateStage(settings, run).folder.finished()["counts"].get("train states", 0)
    target = f"Direct-B_{horizon}"
    return [
        *_kept(states, target),
        *_target(states, target),
        *_kinds(states, target),
        *_recipes(states, _known(settings, run, target)),
        *_pools(states),
        *_calibration(settings, counts, there),
    ]


def _kept(states: Sequence[Judged], target: str) -> list[str]:
    """How many admitted states pass the filters, by kind of event, and the shares of each kind before and after."""
    kept = [state for state in states if target in state.scores]
    if not kept:
        return []
    by_kind, shares = [], []
    for kind in KINDS[1:]:
        admitted = sum(state.rolled.kind == kind for state in states)
        left = sum(state.rolled.kind == kind for state in kept)
        if admitted:
            by_kind.append(f"{kind} {left} of {admitted} ({left / admitted:.0%})")
            shares.append(f"{kind} {left / len(kept):.0%} and {admitted / len(states):.0%}")
    return [
        f"{len(kept)} of {len(states)} admitted held-out states ({len(kept) / len(states):.0%}) have a usable future: "
        f"{', '.join(by_kind)}. Shares of the events trained on, and of those decided in deployment: "
        f"{', '.join(shares)}."
    ]


def _target(states: Sequence[Judged], target: str) -> list[str]:
    rows = {row["score"]: row for row in agreement_rows(_deployed(states, target)) if row["kind"] == "all"}
    if target not in rows or rows[target]["pairwise"] is None:
        return [
            "No held-out state has both a usable future and candidates with different outcomes, so nothing is known of "
            f"{target}."
        ]
    known, deployed = rows[target]["pairwise"], rows[DEPLOYED]["pairwise"]
    figures = (
        f"pairwise accuracy is {_words(known)} at the {rows[target]['states']} states that have this target and "
        f"{_words(deployed)} at all {rows[DEPLOYED]['states']}, where pairs without it count one half"
    )
    if known.high < CHANCE:
        return [
            f"{target} ranks candidates in the wrong order: {figures}. The LLM writes futures that this SLM cannot "
            "carry out. Do not train on it alone."
        ]
    if deployed.low <= CHANCE:
        return [
            f"{target} is not significantly better than chance in deployment: {figures}. Roll out more states, or ask "
            "less often."
        ]
    return [f"{target} ranks candidates as their rollouts do: {figures}."]


def _kinds(states: Sequence[Judged], target: str) -> list[str]:
    """Pairwise accuracy of each score by kind of event, each with its number of states."""
    rows = {(row["kind"], row["score"]): row for row in agreement_rows(_deployed(states, target))}
    found = []
    for kind in KINDS[1:]:
        if (kind, "SLM") not in rows:
            continue
        own, large, future, deployed = (rows.get((kind, name)) for name in ("SLM", "LLM", target, DEPLOYED))
        assert own is not None
        assert large is not None
        assert deployed is not None
        where = f"At {kind} events ({own['states']} held-out states)"
        if own["pairwise"] is None:
            found.append(f"{where}, no pair of candidates differs in outcome.")
            continue
        if future is None or future["pairwise"] is None:
            of_future = f"{target} unknown"
        else:
            of_future = (
                f"{target} {_words(future['pairwise'])} at the {future['states']} states that have it, "
                f"{_words(deployed['pairwise'])} in deployment"
            )
        of_models = f"the LLM's own score {_words(large['pairwise'])}, the SLM's {_words(own['pairwise'])}"
        said = f"{where}, pairwise accuracy: {of_future}, {of_models}"
        if (0 if future is None else future["states"]) < own["states"] / 2:
            said += (
                ". Most of these states are not trained on, so the plain recipe decides there without having learned it"
            )
        found.append(f"{said}.")
    return found


def _deployed(states: Sequence[Judged], target: str) -> list[Judged]:
    """The states with the target's score under the name `DEPLOYED`; where there is none, all candidates score 0."""
    return [
        replace(
            state,
            scores={**state.scores, DEPLOYED: state.scores.get(target, [torch.zeros(len(state.rolled.correct))])},
        )
        for state in states
    ]


def _known(settings: RunSettings, run: Path, target: str) -> list[Recipe]:
    """The recipes that can be judged before training; the first is advised unless another is significantly better."""
    horizon, certainty = max(settings.train.horizons), settings.experiment.certainty
    shards = Artefact(run, ScoreStage.name).shards("train")
    trained = (group for shard in shards for group in Examples(run, shard).groups.values())
    weights = _feature_weights(trained, horizon)

    def future(state: Judged) -> Tensor | None:
        return state.scores[target][0] if target in state.scores else None

    def features(state: Judged) -> Tensor:
        known, pool = future(state), state.rolled.state.pool
        if known is not None:
            return known
        return candidate_features(pool.slm_logprob, pool.llm_logprob, pool.sources).double() @ weights

    def override(scores: Callable[[Judged], Tensor]) -> Callable[[Judged], Tensor]:
        def overridden(state: Judged) -> Tensor:
            llm = state.rolled.state.pool.llm_logprob
            return llm if bool(llm.max().exp() > certainty) else scores(state)

        return overridden

    with_features = f"train.features: [{', '.join(FEATURES)}], evaluate.certainty: {certainty:g}"
    found = [
        Recipe("candidate features with the override", with_features, override(features)),
        Recipe("the plain recipe", "no options", future),
    ]
    terms, outcomes = rolled_out_terms(run, horizon)
    mixed = sum(bool(outcome.any() and not outcome.all()) for outcome in outcomes)
    if mixed >= settings.rollouts.minimum_mixed:
        theta = calibrate(terms, outcomes, minimum_mixed=settings.rollouts.minimum_mixed).theta

        def calibrated(state: Judged) -> Tensor:
            known, pool = future(state), state.rolled.state.pool
            own = calibration_terms(
                None if known is None else known.float(), pool.llm_logprob, pool.slm_logprob
            ).double()
            return own @ torch.tensor(theta, dtype=torch.float64)

        label = "the calibrated target with features and override"
        fitted = f"train.target: calibrated, here of {len(terms)} rolled-out training states"
        found.append(Recipe(label, f"{fitted}, {with_features}", override(calibrated)))
    return found


def _feature_weights(groups: Iterable[Group], horizon: int) -> Tensor:
    """Float64 [F] weights with which the candidate features alone fit the target best (least squares in the group)."""
    rows, wanted = [torch.zeros(1, len(FEATURES), dtype=torch.float64)], [torch.zeros(1, dtype=torch.float64)]
    for group in groups:
        if (compatibility := group.compatibility(horizon)) is not None:
            pool = group.state.pool
            features = candidate_features(pool.slm_logprob, pool.llm_logprob, pool.sources).double()
            rows.append(features - features.mean(0))
            score = compatibility.double() - compatibility.double().mean()
            wanted.append(score / (score.square().mean().sqrt() + 1e-6))
    return torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)[:, None], driver="gelsd").solution[:, 0]


def _recipes(states: Sequence[Judged], recipes: Sequence[Recipe]) -> list[str]:
    """How often each recipe's choice leads to success at all admitted states, and which recipe that favours."""
    if not states:
        return []
    own: list[Recipe] = [
        Recipe("the SLM's own choice", "", lambda state: state.rolled.state.pool.slm_logprob),
        Recipe("the LLM's", "", lambda state: state.rolled.state.pool.llm_logprob),
    ]
    problems = list(dict.fromkeys(_problem(state) for state in states))
    place = {problem: row for row, problem in enumerate(problems)}
    whole = np.bincount([place[_problem(state)] for state in states])
    successes = {}
    for recipe in (*own, *recipes):
        right = np.zeros(len(problems))
        for state in states:
            right[place[_problem(state)]] += _success(state, recipe.scores(state))
        successes[recipe.label] = np.minimum(right, whole)
    figures = ", ".join(f"{label} {_words(statistics.share_interval(won, whole))}" for label, won in successes.items())

    def minus(one: Recipe, other: Recipe) -> Interval:
        return statistics.paired_share_interval(successes[one.label], successes[other.label], whole)

    def points(difference: Interval) -> str:
        return "{:+.0f} pp [{:+.0f}, {:+.0f}]".format(*(round(100 * part) + 0.0 for part in difference))

    first = recipes[0]
    better = [recipe for recipe in recipes[1:] if minus(recipe, first).low > 0]
    chosen = max(better, key=lambda recipe: float(successes[recipe.label].sum()), default=first)
    others = "; ".join(f"{points(minus(chosen, other))} against {other.label}" for other in recipes if other != chosen)
    why = "It is significantly better here" if better else "No other recipe is significantly better here"
    return [
        f"Choices that lead to success without later interventions, at all {len(states)} admitted held-out states of "
        f"{len(problems)} problems: {figures}. With later interventions a choice may be worth more, so `train` decides "
        "on validation problems.",
        f"Take {chosen.label} ({chosen.options}). {why}: {others}.",
    ]


def _problem(state: Judged) -> str:
    return state.rolled.state.trajectory.problem.id


def _success(state: Judged, scores: Tensor | None) -> float:
    """Success of the candidate with the best score; the mean over all candidates if there are no scores."""
    outcome = state.rolled.correct
    return float(outcome.double().mean()) if scores is None else float(outcome[int(scores.argmax())])


def _pools(states: Sequence[Judged]) -> list[str]:
    by_pool = {row["pool"]: row["coverage"] for row in coverage_rows(states)}
    if not by_pool:
        return []
    figures = ", ".join(f"{name} {_words(share)}" for name, share in by_pool.items())
    return [f"Coverage, the share of states with a candidate from which the SLM succeeds: {figures}."]


def _calibration(settings: RunSettings, counts: dict[str, int], there: int) -> list[str]:
    """How many of the `there` training states would have to be rolled out for a calibration."""
    held_out, mixed = counts.get("validation states", 0), counts.get("validation mixed", 0)
    needed = settings.rollouts.minimum_mixed
    if not mixed:
        return ["No held-out state has candidates with different outcomes, so a calibration is not possible."]
    states = math.ceil(needed * held_out / mixed)
    said = (
        f"A calibration needs {needed} training states whose candidates differ in outcome. {mixed} of {held_out} "
        f"held-out states are of that kind, so about {states} training states have to be rolled out"
    )
    if states > there:
        return [f"{said}; there are only {there}, so collect more."]
    return [f"{said}, a share of {states / there:.2g} (rollouts.train is {settings.rollouts.train:g})."]


def _words(interval: Interval) -> str:
    return "{:.0f}% [{:.0f}, {:.0f}]".format(*(100 * part for part in interval))
