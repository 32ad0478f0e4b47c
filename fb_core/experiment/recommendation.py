"""What rollouts say before training costs GPU hours: which recipe to train, judged at the states of deployment."""

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

CHANCE = 0.5  # of a pair
DEPLOYED = "as deployed"  # the target's score at every admitted state


class Recipe(NamedTuple):
    """A way to train and deploy, and the scores [K] that it uses; None for a state that it has no scores for."""

    label: str
    options: str
    scores: Callable[[Judged], Tensor | None]


def recommend(settings: RunSettings, run: Path, states: Sequence[Judged] | None = None) -> list[str]:
    """Sentences on what would be trained, where it would decide, what each score is worth there, and what to choose.

    Everything is counted at all admitted held-out states, as in deployment, not only at those that pass the training
    filters. A state without a usable future has no target, so its pairs count one half and its choice is random.

    Args:
        settings: of the run; the longest horizon of its sweep is used.
        run: its folder, scored and rolled out; a reranker is not needed.
        states: its judged states, if they are known already.

    Raises:
        ValueError: no rollouts or scores.
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
    """What the filters leave of the admitted states, by kind of event, and so of what is trained and decided."""
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
        f"{', '.join(by_kind)}. Of the events trained on and of those decided in deployment are: {', '.join(shares)}."
    ]


def _target(states: Sequence[Judged], target: str) -> list[str]:
    rows = {row["score"]: row for row in agreement_rows(_deployed(states, target)) if row["kind"] == "all"}
    if target not in rows or rows[target]["pairwise"] is None:
        return [f"No held-out state has both a usable future and candidates of different outcome: {target} is unknown."]
    known, deployed = rows[target]["pairwise"], rows[DEPLOYED]["pairwise"]
    figures = (
        f"{_words(known)} of pairs at the {rows[target]['states']} states that have it, {_words(deployed)} at all "
        f"{rows[DEPLOYED]['states']}, where the others' pairs count half"
    )
    if known.high < CHANCE:
        return [
            f"{target} orders candidates the wrong way round, {figures}: the LLM writes what this SLM cannot carry "
            "out. Do not train on it alone."
        ]
    if deployed.low <= CHANCE:
        return [f"{target} is not told from chance in deployment, {figures}: roll out more states, or ask less often."]
    return [f"{target} orders candidates as their rollouts do, {figures}."]


def _kinds(states: Sequence[Judged], target: str) -> list[str]:
    """What each score is worth by kind of event, every one with the states that it rests on."""
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
            found.append(f"{where} no pair of candidates differs in outcome.")
            continue
        if future is None or future["pairwise"] is None:
            of_future = f"{target} unknown"
        else:
            of_future = (
                f"{target} {_words(future['pairwise'])} at the {future['states']} that have it, "
                f"{_words(deployed['pairwise'])} in deployment"
            )
        of_models = f"the LLM's own score {_words(large['pairwise'])}, the SLM's {_words(own['pairwise'])}"
        said = f"{where}: {of_future}, {of_models}"
        if (0 if future is None else future["states"]) < own["states"] / 2:
            said += ". Most of them are not trained on: there the plain recipe decides what it has not learned"
        found.append(f"{said}.")
    return found


def _deployed(states: Sequence[Judged], target: str) -> list[Judged]:
    """The states with the target's score at all of them under `DEPLOYED`, one for all candidates where it has none."""
    return [
        replace(
            state,
            scores={**state.scores, DEPLOYED: state.scores.get(target, [torch.zeros(len(state.rolled.correct))])},
        )
        for state in states
    ]


def _known(settings: RunSettings, run: Path, target: str) -> list[Recipe]:
    """The recipes that can be judged before any training, the one to take in doubt first."""
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
        Recipe("the plain recipe", "no option", future),
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
    """Float64 [F] by which candidate features alone come closest to the target, by least squares in the group."""
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
    """How often each recipe's choice leads to success at all admitted states, and which one that speaks for."""
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
    why = "significantly better here" if better else "nothing is significantly better here"
    return [
        f"Choices that lead to success without later help, at all {len(states)} admitted held-out states of "
        f"{len(problems)} problems: {figures}. With later help a choice may be worth more: the validation problems of "
        "`train` decide.",
        f"Take {chosen.label} ({chosen.options}), {why}: {others}.",
    ]


def _problem(state: Judged) -> str:
    return state.rolled.state.trajectory.problem.id


def _success(state: Judged, scores: Tensor | None) -> float:
    """Of the candidate with the best score; of a random one where there are none."""
    outcome = state.rolled.correct
    return float(outcome.double().mean()) if scores is None else float(outcome[int(scores.argmax())])


def _pools(states: Sequence[Judged]) -> list[str]:
    by_pool = {row["pool"]: row["coverage"] for row in coverage_rows(states)}
    if not by_pool:
        return []
    figures = ", ".join(f"{name} {_words(share)}" for name, share in by_pool.items())
    return [f"Coverage, the share of states with a candidate from which the SLM succeeds: {figures}."]


def _calibration(settings: RunSettings, counts: dict[str, int], there: int) -> list[str]:
    """How many of the training states that are there would have to be rolled out."""
    held_out, mixed = counts.get("validation states", 0), counts.get("validation mixed", 0)
    needed = settings.rollouts.minimum_mixed
    if not mixed:
        return ["No held-out state has candidates of different outcome: a calibration is not possible."]
    states = math.ceil(needed * held_out / mixed)
    said = (
        f"A calibration needs {needed} training states with candidates of different outcome; as {mixed} of {held_out} "
        f"held-out states have them, about {states} rolled-out states"
    )
    if states > there:
        return [f"{said}, more than the {there} there are: collect more."]
    return [f"{said}, a share of {states / there:.2g} (rollouts.train is {settings.rollouts.train:g})."]


def _words(interval: Interval) -> str:
    return "{:.0f}% [{:.0f}, {:.0f}]".format(*(100 * part for part in interval))
