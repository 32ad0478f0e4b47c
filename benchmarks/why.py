"""Why does the published recipe fail in some of the demo's worlds? `python -m benchmarks.why`.

Fixed before the first cell was made: the demo's worlds at their own request quantile and plans at 0.9 too (`CELLS`);
seeds 0 and 1, which draw all problems and initialise the reranker; 400 test problems; the horizon H that the shipped
runs chose on validation problems (docs/experiments); scale 1, the shipped number of training problems, and in two of
the cells 4 and 12 times as many, with as many more steps and nothing else changed. All else is as shipped. All of this
is reported for every cell, by the kind of the SLM's likeliest token (a digit, a word):

- the states on the SLM's trajectories for the test problems: how well scores order the candidates as the SLM's rollouts
  do, at all states and at those with a usable future, how often the best of a score is the SLM's own likeliest token,
  and how often pools hold a right candidate. States whose candidates differ in outcome are counted as mixed;
- the training states, and those of them with a usable future, which the reranker is trained on;
- the test problems decoded: greedily, by the direct LLM score, by the reranker, by one of these at digits and another
  elsewhere, and by an oracle. At every event the oracle asks the LLM for its own continuation, as the futures of
  training are made, and takes it whether or not its answer is right. Candidates are scored by B_H, the SLM's mean
  log-prob of the H tokens after the continuation's first, whose place each candidate takes. So it decodes with the
  target itself; what the LLM writes for it is not counted.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks import command, evidence
from benchmarks.paper.agreement import Judged, agreement_rows, coverage_rows, judged_states
from benchmarks.paper.benchmark_states import judge_states
from benchmarks.paper.rollouts import token_kind
from benchmarks.paper.settings import PaperSettings
from fb_core.apps.demo import SETTINGS
from fb_core.apps.pipeline.choose import RerankerStage, SelectionStage
from fb_core.apps.pipeline.collect import PolicyStage, StateStage, TrajectoryStage
from fb_core.apps.pipeline.decode import ASKED, DecodeStage, Trial
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.futures import FutureStage
from fb_core.apps.pipeline.models import DEPLOYED, Context, Generate, Models, benchmark_problems, models_of
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.pipeline.run import Stage, run_stage
from fb_core.apps.pipeline.scores import ScoreStage
from fb_core.apps.pipeline.train import TrainStage
from fb_core.apps.settings.base import change
from fb_core.decode.selectors import (
    FutureBridgeSelector,
    LLMPreference,
    ScoringSelector,
    Selector,
    SLMPreference,
    State,
)
from fb_core.events import Pool
from fb_core.score.scorer import BranchGroup, CompatibilityScorer

SEEDS = (0, 1)
CELLS = {("plans", 0.94): (1,), ("plans", 0.9): (1, 4, 12), ("helpful", 0.92): (1,), ("control", 0.92): (1, 4, 12)}
HORIZONS = {"plans": 8, "helpful": 4, "control": 16}
OUT = Path("runs", "why")
RECORDS = Path("docs", "evidence", "why.json")
TRAINED: tuple[type[Stage], ...] = (TrajectoryStage, PolicyStage, StateStage, FutureStage, ScoreStage)
TRAINED += (TrainStage, SelectionStage, RerankerStage)
TARGET, ANY = "Direct-B", "Direct-B, any future"  # B_H of usable futures, and of all
DECODERS = {  # labels; those after "published" are of the reranker or another at digits and elsewhere
    "greedy": "SLM greedy",
    "direct": "direct LLM score",
    "published": "published recipe",
    "llm-at-digits": "the reranker, at digits the direct LLM score",
    "slm-at-digits": "the reranker, at digits the SLM's likeliest",
    "llm-elsewhere": "the direct LLM score, at digits the reranker",
    "oracle": "oracle: the target itself, of any future",
}


def settings_of(world: str, seed: int, quantile: float, scale: int) -> PaperSettings:
    """The settings of a cell."""
    shipped = PaperSettings.of_config(SETTINGS[world])
    aside = shipped.problems.validation + shipped.problems.certification
    limit = aside + scale * ((shipped.problems.limit or 0) - aside)
    return change(
        shipped,
        {
            "problems": {"seed": seed, "limit": limit},
            "collect": {"quantile": quantile},
            "train": {"seeds": (seed,), "horizons": (HORIZONS[world],)},
            "experiment": {"benchmark_problems": shipped.evaluate.limit},
        },
    )


def kind_of(models: Models, pool: Sequence[int]) -> str:
    """The kind of an event by its pool, which begins with the SLM's likeliest token."""
    return token_kind(models.tokenizer.decode([pool[0]]))


class AtDigits(Selector):
    """One selector where the SLM's likeliest token is a digit, another elsewhere."""

    def __init__(self, models: Models, digits: Selector, elsewhere: Selector) -> None:
        self.models, self.selectors = models, {True: digits, False: elsewhere}

    def choose(self, state: State, pool: Pool) -> int:
        return self.choose_many([state], [pool])[0][0]

    def choose_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[tuple[int, Tensor | None]]:
        digits = [kind_of(self.models, pool.ids.tolist()) == "digit" for pool in pools]
        chosen: dict[int, tuple[int, Tensor | None]] = {}
        for wanted, selector in self.selectors.items():
            own = [place for place, digit in enumerate(digits) if digit == wanted]
            choices = selector.choose_many([states[place] for place in own], [pools[place] for place in own])
            chosen.update(zip(own, choices, strict=True))
        return [chosen[place] for place in range(len(pools))]


class Oracle(ScoringSelector):
    """B_H of what the LLM writes from each state."""

    def __init__(self, models: Models, horizon: int) -> None:
        self.models, self.horizon = models, horizon

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        prefixes = [state.tokens for state in states]
        written = self.models.llm.complete_many(prefixes, self.horizon + 1)
        return compatibility(self.models.scorer, prefixes, pools, written, self.horizon)


def compatibility(
    scorer: CompatibilityScorer,
    prefixes: Sequence[Tensor],
    pools: Sequence[Pool],
    written: Sequence[Tensor],
    horizon: int,
) -> list[Tensor]:
    """B_H [K] of every pool, of a shorter continuation as far as it goes; of a single token, that token is best."""
    groups = [
        (prefix, [BranchGroup(len(prefix), pool.ids, new[1 : horizon + 1])] if len(new) > 1 else [])
        for prefix, pool, new in zip(prefixes, pools, written, strict=True)
    ]
    return [
        matrices[0].mean(1) if matrices else (pool.ids == new[0]).float()
        for matrices, pool, new in zip(scorer.score_trajectories(groups), pools, written, strict=True)
    ]


class DecodersStage(DecodeStage):
    """The test problems by every decoder."""

    name = "decoders"
    command = "python -m benchmarks.why"
    slice = (*DEPLOYED, *ASKED, "train.horizons", "train.seeds")
    reads = (PolicyStage, RerankerStage)

    @cached_property
    def trials(self) -> dict[str, Trial]:
        ((benchmark, problems),) = benchmark_problems(self.settings).items()
        (seed,) = self.settings.train.seeds
        return {name: Trial(benchmark, name, seed, "batch", problems) for name in DECODERS}

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        context, name = Context(self.settings, self.run, max_length, max_batch), trial.method
        if name in ("greedy", "direct", "published"):
            return context.decoder_named(name, trial.seed).generate_many
        (horizon,), models = self.settings.train.horizons, context.models
        if name == "oracle":
            return context.decoder(Oracle(models, horizon), pool="joint").generate_many
        assert trial.seed is not None
        reranker, llm = FutureBridgeSelector(context.reranker(trial.seed)), LLMPreference()
        at: dict[str, tuple[Selector, Selector]] = {
            "llm-at-digits": (llm, reranker),
            "slm-at-digits": (SLMPreference(), reranker),
            "llm-elsewhere": (reranker, llm),
        }
        return context.decoder(AtDigits(models, *at[name]), pool="joint").generate_many


def make(world: str, scale: int, settings: PaperSettings, out: Path) -> None:
    """Make a cell; may run in a worker process."""
    (seed,), quantile = settings.train.seeds, settings.collect.quantile
    about = {"world": world, "seed": seed, "quantile": quantile, "scale": scale}
    run = out / "runs" / evidence.name_of(about)

    def work() -> dict[str, Any]:
        for kind in TRAINED:
            run_stage(kind(settings, run))
        judge_states(settings, run / "tests")
        stage = DecodersStage(settings, run)
        run_stage(stage)
        return about | record(settings, run, stage)

    evidence.keep(out / "cells" / f"{run.name}.json", run, work)
    shutil.rmtree(run, ignore_errors=True)


def record(settings: PaperSettings, run: Path, stage: DecodersStage) -> dict[str, Any]:
    """What is reported of a cell."""
    states, models = judged(settings, run / "tests"), models_of(settings.models)
    usable = [state for state in states if TARGET in state.scores]
    own = [
        {"kind": kind, "score": name, "states": len(first), "share": float(np.mean(first))}
        for kind in ("word", "digit")
        for name in ("LLM", TARGET, ANY, "reranker")
        if (first := [s.scores[name][0].argmax().item() == 0 for s in states if s.kind == kind and name in s.scores])
    ]
    trained, usably = Counter[str](), Counter[str]()
    for shard in Artefact(run, ScoreStage.name).shards("train"):
        examples = Examples(run, shard)
        kinds = {name: kind_of(models, state.pool.ids.tolist()) for name, state in examples.states.items()}
        trained.update(kinds.values())
        usably.update(kinds[name] for name in examples.groups)
    rows: dict[str, list[Any]] = {}
    for row in stage.rows():
        rows.setdefault(row.method, []).append(row)
    contents = {
        "horizon": settings.train.horizons[0],
        "training states": trained,
        "training groups": usably,
        "agreement": agreement_rows(states),
        "agreement at usable": agreement_rows(usable),
        "own token first": own,
        "coverage": [row | {"kind": kind} for kind, some in by_kind(states).items() for row in coverage_rows(some)],
        "rows": {
            name: evidence.row_of(decoded)
            | {"events": Counter(kind_of(models, event.pool) for row in decoded for event in row.events)}
            for name, decoded in rows.items()
        },
    }
    return json.loads(json.dumps(contents), parse_float=lambda digits: round(float(digits), 6))


def judged(settings: PaperSettings, run: Path) -> list[Judged]:
    """The rolled-out test states with the scores of `agreement`, and B_H of any future."""
    states, models = judged_states(settings, run), models_of(settings.models)
    (horizon,) = settings.train.horizons
    shards = Artefact(run, FutureStage.name).shards()
    futures = {name: own for shard in shards for name, own in Examples(run, shard).futures().items()}
    rolled = [state.rolled.state for state in states]
    written = [torch.cat([torch.tensor([own.first]), own.tokens]) for own in (futures[state.id] for state in rolled)]
    scores = compatibility(
        models.scorer, [state.prefix for state in rolled], [state.pool for state in rolled], written, horizon
    )
    return [
        replace(state, scores={name.partition("_")[0]: own for name, own in state.scores.items()} | {ANY: [score]})
        for state, score in zip(states, scores, strict=True)
    ]


def by_kind(states: Sequence[Judged]) -> dict[str, list[Judged]]:
    """All states, and those of each kind."""
    return {kind: [state for state in states if kind in ("all", state.kind)] for kind in ("all", "word", "digit")}


def order(cell: Mapping[str, Any]) -> tuple[int, int, int]:
    """Where a cell stands in the file and on the page."""
    return (list(CELLS).index((cell["world"], cell["quantile"])), cell["scale"], cell["seed"])


def main(
    out: Annotated[Path, typer.Option(help="Folder for runs and finished cells.")] = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    write: Annotated[bool, typer.Option("--report", help="Only write docs/evidence from the finished cells.")] = False,
) -> None:
    """Make every cell that is still missing, those of few training problems first."""
    if write:
        evidence.write_cells(sorted(evidence.finished_cells(RECORDS, out), key=order), RECORDS)
        return
    evidence.committed(RECORDS, out)
    cells = sorted((scale, seed, *at) for at, scales in CELLS.items() for scale in scales for seed in SEEDS)
    jobs = {
        (f"{world} {quantile:g}, x{scale}", seed): partial(
            make, world, scale, settings_of(world, seed, quantile, scale), out
        )
        for scale, seed, world, quantile in cells
    }
    evidence.make_all("benchmarks.why", jobs, out, workers)


if __name__ == "__main__":
    command.run(main, "benchmarks.why --workers 2")
