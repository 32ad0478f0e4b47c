"""Is the listwise value over the reranker's scores enough by itself? Fresh seeds: `python -m benchmarks.value_alone`.

A cell is a run in one of the demo's worlds, at one seed and one request quantile, up to the value head. Four recipes
are tested on its certification problems as `train` tests its own: greedy decoding, the direct score, the published
reranker, and the value of its candidates. Then they decode test problems, beside takeover and the same head without
the reranker's terms. Finished cells are kept, and those of `CELLS` are not made again. `--keep` writes them there,
`--report` also writes docs/evidence_value.md from them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks import evidence
from benchmarks.evidence import PROBLEMS, PUBLISHED, QUANTILES, TAKEOVER, WORLDS, Cells
from benchmarks.paper.methods.takeover import takeover
from fb_core.config import RunSettings
from fb_core.files import write_file
from fb_core.pool import Pool
from fb_core.recipe import DIRECT, GREEDY, Recipe
from fb_core.selectors import ScoringSelector, State, ValueSelector
from fb_core.stages.artefacts import Artefact
from fb_core.stages.choice import Tried, decide
from fb_core.stages.commands import Command, stages_of
from fb_core.stages.decode import ASKED, DecodeStage, Row, Trial
from fb_core.stages.deploy import Context, Generate, frozen_policy, pool_options
from fb_core.stages.examples import Examples
from fb_core.stages.inputs import DEPLOYED, benchmark_problems, splits_of
from fb_core.stages.nested_runs import changed, work_through
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.run import run_stage
from fb_core.stages.selection import RerankerStage
from fb_core.stages.states import PolicyStage
from fb_core.stages.trajectories import TrajectoryStage
from fb_core.stages.values import ValueStage
from fb_core.value import ValueHead, fit_listwise, listwise_terms

SEEDS = tuple(range(86_011, 86_021))  # fixed before the run; no setting was chosen on them
VALUE = Recipe(value="listwise")
ALONE = "value without the reranker"
RECIPES = (GREEDY, DIRECT, PUBLISHED, VALUE)
OUT = Path("runs", "value-alone")
CELLS = Path("docs", "evidence", "value.json")  # the finished cells that are committed


class NoScores(ScoringSelector):
    """Zero for every candidate, so that a value head has nothing but log-probs, certainties and entropy."""

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        return [torch.zeros_like(pool.slm_logprob) for pool in pools]


class TestStage(DecodeStage):
    """The recipes on a cell's certification problems, then all methods on its test problems."""

    __test__ = False  # not a test for pytest to collect
    name = "tests"
    command = "evidence"
    slice = (*DEPLOYED, *ASKED, "train.seeds", "choice", "problems")
    reads = (PolicyStage, RerankerStage, RolloutStage, ValueStage)

    @property
    def seed(self) -> int:
        """The cell's seed."""
        (seed,) = self.settings.train.seeds
        return seed

    @cached_property
    def trials(self) -> dict[str, Trial]:
        held_out = splits_of(self.settings.problems)["certification"]
        ((benchmark, problems),) = benchmark_problems(self.settings).items()
        names = [recipe.label for recipe in RECIPES]
        trials = [Trial("certification", name, self.seed, "batch", held_out) for name in names]
        trials += [Trial(benchmark, name, self.seed, "batch", problems) for name in (*names, ALONE, TAKEOVER)]
        return {f"{number:02d}": trial for number, trial in enumerate(trials)}

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        if trial.method == TAKEOVER:
            context = Context(self.settings, self.run, max_length, max_batch)
            return partial(takeover, context.models.slm, context.models.llm, context.policy, **context.options)
        context = Context(self.settings, self.run, max_length=max_length, max_batch=max_batch)
        if trial.method == ALONE:
            selector = ValueSelector(NoScores(), self._without_scores)
            return context.decoder(selector, **pool_options(self.settings)).generate_many
        values = self.input(ValueStage)
        deployed = {one.deployed.recipe.label: one.deployed for one in values.candidates(self.seed)}[trial.method]
        return context.decoder_for(deployed, values.reranker(deployed.recipe, self.seed)).generate_many

    @cached_property
    def _without_scores(self) -> ValueHead:
        """The head fitted to the rollouts of the training states without scores."""
        known = [
            one
            for shard in Artefact(self.run, RolloutStage.name).shards("train")
            for one in Examples(self.run, shard, self.models.slm.device).rollouts.values()
        ]
        terms = [
            listwise_terms(one.state.pool, torch.zeros_like(one.state.pool.slm_logprob), one.state.entropy)
            for one in known
        ]
        return fit_listwise(terms, [one.correct for one in known])


def settings_of(world: str, seed: int, quantile: float, problems: int) -> RunSettings:
    """As the evidence's, without the rerankers, heads and overrides that compete there."""
    alone = {"trained": (), "certainties": (), "values": ("listwise",), "ask": False}
    return changed(evidence.settings_of(world, seed, quantile, problems), {"choice": alone})


def make(world: str, seed: int, quantiles: Sequence[float], out: Path, problems: int) -> None:
    """Make the cells of one world and seed, which share trajectories; may run in a separate process."""
    runs = {quantile: out / "runs" / evidence.name_of(world, seed, quantile) for quantile in quantiles}
    first = next(iter(runs.values()))
    for quantile, run in runs.items():
        cell = out / "cells" / f"{evidence.name_of(world, seed, quantile)}.json"
        if cell.is_file():
            continue
        settings, began = settings_of(world, seed, quantile, problems), time.process_time()
        run.mkdir(parents=True, exist_ok=True)
        with (run / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            if run != first:
                work_through([TrajectoryStage], settings_of(world, seed, quantiles[0], problems), first, first)
                work_through([TrajectoryStage], settings, run, first)
            commands: tuple[Command, ...] = ("collect", "futures", "score", "train")
            stages = [kind for command in commands for kind in stages_of(command, settings)]
            for kind in (*stages, RolloutStage, ValueStage, TestStage):
                run_stage(kind(settings, run))
            tests = TestStage(settings, run)
        found = record(settings, tests, world) | {"processor_seconds": round(time.process_time() - began, 1)}
        write_file(cell, json.dumps(found).encode())
    for run in runs.values():
        shutil.rmtree(run, ignore_errors=True)


def record(settings: RunSettings, tests: TestStage, world: str) -> dict[str, Any]:
    """The record of a cell, as the evidence's."""
    rows: dict[tuple[bool, str], list[Row]] = {}
    for row in tests.rows():
        rows.setdefault((row.benchmark == "certification", row.method), []).append(row)
    tested = [Tried.of(recipe, rows[True, recipe.label]) for recipe in RECIPES]
    recipe, shown = decide(tested, settings.choice.delta, settings.choice.level)
    return {
        "world": world,
        "seed": tests.seed,
        "quantile": settings.collect.quantile,
        "threshold": frozen_policy(tests.run).threshold,
        "deployed": recipe.label,
        "words": shown[0][1].words,
        "rows": {
            name: {
                "correct": "".join("01"[row.correct] for row in found),
                "calls": float(np.mean([row.calls for row in found])),
                "llm_tokens": float(np.mean([row.llm_tokens for row in found])),
            }
            for (certified, name), found in rows.items()
            if not certified
        },
    }


def page(cells: Cells) -> str:
    """docs/evidence_value.md."""
    choice, total = RunSettings.load(WORLDS[0]).choice, len(cells.found)
    names = {VALUE.label: "value", ALONE: ALONE, PUBLISHED.label: "published", "deployed": "the best that passed"}
    rows, differences = [], []
    for world in cells.worlds:
        for name, label in names.items():
            lost = evidence.below(cells, world, name, choice.delta)
            accuracy = evidence.percent(cells.interval(world, lambda cell, name=name: cells.correct(cell, name)))
            calls = f"{cells.mean(world, name, 'calls'):.2f}"
            gaps = f"{lost.seen} of {lost.cells} ({lost.significant})"
            rows.append([world, label, accuracy, gaps, f"{100 * lost.worst:+.1f}", calls])
        pairs = {
            "value minus the head without the reranker": (VALUE.label, ALONE),
            "value minus published": (VALUE.label, PUBLISHED.label),
        }
        for label, (one, other) in pairs.items():
            gap = cells.interval(
                world, lambda cell, one=one, other=other: cells.correct(cell, one) - cells.correct(cell, other)
            )
            differences.append([world, label, evidence.points(gap)])
    chosen = {world: {} for world in cells.worlds}  # type: dict[str, dict[str, int]]
    for cell in cells.found:
        chosen[cell["world"]][cell["deployed"]] = chosen[cell["world"]].get(cell["deployed"], 0) + 1
    counted = "; ".join(
        f"{world}: " + ", ".join(f"{name} {count}" for name, count in sorted(found.items(), key=lambda one: -one[1]))
        for world, found in chosen.items()
    )
    seeds = sorted({cell["seed"] for cell in cells.found})
    return (
        "\n".join(
            [
                "# The value of a candidate alone",
                "",
                "*Written by `python -m benchmarks.value_alone --report` from [the cells](evidence/value.json).*",
                "",
                f"{total} runs on seeds {seeds[0]} to {seeds[-1]}, which nothing was chosen on. Four recipes compete: "
                "greedy decoding, the direct LLM score, the published reranker, and *value*: a listwise head over the "
                "reranker's scores, fitted to rollouts of a share of the training states. The same head is also fitted "
                "without the reranker's terms: to log-probs, certainties and entropy alone. It does not compete.",
                "",
                *evidence.table(
                    [
                        "world",
                        "recipe",
                        "accuracy, % [95%]",
                        f"cells more than {100 * choice.delta:g} points below greedy or direct (significantly)",
                        "worst difference, pp",
                        "LLM calls per problem",
                    ],
                    rows,
                ),
                *evidence.table(["world", "difference", "points [95%]"], differences),
                f"Deployed after the test on certification problems: {counted}.",
                "",
                "## Goals",
                "",
                *evidence.goals(cells, choice.delta, choice.level),
            ]
        )
        + "\n"
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder for runs and finished cells.")] = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="Seeds; those of the evidence by default.")] = None,
    quantiles: Annotated[list[float] | None, typer.Option(help="Request quantiles.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Test problems per cell.")] = PROBLEMS,
    keep: Annotated[bool, typer.Option("--keep", help="Only write the finished cells.")] = False,
    write: Annotated[bool, typer.Option("--report", help="Only write the finished cells and the page.")] = False,
) -> None:
    """Make every cell that is still missing."""
    (out / "cells").mkdir(parents=True, exist_ok=True)
    for cell in json.loads(CELLS.read_text()) if CELLS.is_file() else ():
        name = evidence.name_of(cell["world"], cell["seed"], cell["quantile"])
        write_file(out / "cells" / f"{name}.json", json.dumps(cell).encode())
    if keep or write:
        found = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
        cells = Cells(found)
        lines = ",\n".join(json.dumps(cell, sort_keys=True) for cell in cells.found)
        write_file(CELLS, f"[\n{lines}\n]\n".encode())
        if write:
            write_file(Path("docs/evidence_value.md"), page(cells).encode())
        return
    evidence.make_all(make, seeds or SEEDS, quantiles or QUANTILES, out, problems, workers)


if __name__ == "__main__":
    typer.run(main)
