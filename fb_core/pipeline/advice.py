"""What rollouts say before the GPU hours are spent: whether this pair's futures teach, and what else would."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fb_core.config import RunSettings
from fb_core.pipeline.agreement import agreement_rows, coverage_rows, judged_states
from fb_core.pipeline.collect import StateStage
from fb_core.pipeline.rollouts import RolloutStage
from fb_core.pipeline.score import ScoreStage
from fb_core.statistics import Interval

CHANCE = 0.5  # of a pair


def advice(settings: RunSettings, run: Path) -> list[str]:
    """Sentences about the target, the local scores and the pools, each with its figures, and what they suggest.

    Args:
        settings: of the run; the longest horizon of its sweep is looked at.
        run: its folder, scored and rolled out; a reranker is not needed.

    Raises:
        ValueError: no rollouts or scores.
    """
    ScoreStage(settings, run).folder.finished()
    states = judged_states(settings, run)
    rows = {(row["kind"], row["score"]): row for row in agreement_rows(states)}
    target = f"Direct-B_{max(settings.train.horizons)}"
    kinds = [kind for kind, score in rows if score == "SLM" and kind != "all"]
    said = [*_target(rows, target), *(line for kind in kinds for line in _kind(rows, target, kind))]
    said += _pools(coverage_rows(states))
    counts = RolloutStage(settings, run).folder.finished()["counts"]
    there = StateStage(settings, run).folder.finished()["counts"].get("train states", 0)
    return said + _calibration(settings, counts, there)


def _target(rows: dict[tuple[str, str], dict[str, Any]], target: str) -> list[str]:
    found = _of(rows, "all", target)
    if found is None:
        return [f"No held-out state has both a usable future and candidates of different outcome: {target} is unknown."]
    if found.high < CHANCE:
        return [
            f"{target} orders candidates the wrong way round, {_words(found)} of pairs: the LLM writes what this SLM "
            "cannot carry out. Do not train on it as it is; use the SLM's own future (score.future: own) or the "
            "calibrated target (train.target: calibrated)."
        ]
    if found.low <= CHANCE:
        return [
            f"{target} is not told from chance, {_words(found)} of pairs: roll out more states, try a longer horizon, "
            "or the calibrated target (train.target: calibrated)."
        ]
    return [f"{target} orders candidates as their rollouts do, {_words(found)} of pairs: the plain recipe can learn."]


def _kind(rows: dict[tuple[str, str], dict[str, Any]], target: str, kind: str) -> list[str]:
    """Where a score that deployment has for nothing beats the target, or the target it."""
    states = rows[kind, "SLM"]["states"]
    future, large = (_of(rows, kind, name) for name in (target, "LLM"))
    where = f"At {kind} events ({states} held-out states)"
    if large is None:
        return [f"{where} no pair of candidates differs in outcome."]
    if future is None:
        return [f"{where}: {target} unknown, the LLM's own score {_words(large)} of pairs in order."]
    where += f": {target} {_words(future)}, the LLM's own score {_words(large)} of pairs in order"
    if large.low > future.high:
        return [
            f"{where}. The reranker does not see that score: give it candidate features (train.features), or let a "
            "certain LLM decide (evaluate.certainty)."
        ]
    if future.low > large.high:
        return [f"{where}. Here the future knows more than the LLM."]
    return [f"{where}; neither is better beyond chance."]


def _pools(coverage: Sequence[dict[str, Any]]) -> list[str]:
    by_pool = {row["pool"]: row["coverage"] for row in coverage}
    if not by_pool:
        return []
    figures = ", ".join(f"{name} {100 * share.mean:.1f}%" for name, share in by_pool.items())
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


def _of(rows: dict[tuple[str, str], dict[str, Any]], kind: str, score: str) -> Interval | None:
    row = rows.get((kind, score))
    return None if row is None else row["pairwise"]


def _words(interval: Interval) -> str:
    return "{:.0f}% [{:.0f}, {:.0f}]".format(*(100 * part for part in interval))
