"""Why does the published recipe fail in some of the demo's worlds? `python -m benchmarks.why`.

Fixed before the first cell was made: the demo's worlds at their own request quantile and plans at 0.9 too (`CELLS`);
seeds 0 and 1, which draw all problems and initialise the reranker; 400 test problems; the horizon H that the shipped
runs chose on validation problems (docs/experiments); scale 1, the shipped number of training problems, and in two of
the cells 4 and 12 times as many, with as many more steps. (The split then draws other validation problems, so the
request threshold differs a little.) All else is as shipped. All of this is reported for every cell, by the kind of the
SLM's likeliest token (a digit, a word):

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
from fb_core.apps.pipeline.decode import ASKED, DecodeStage, Trial, read_rows
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.futures import FutureStage
from fb_core.apps.pipeline.models import DEPLOYED, Context, Generate, Models, benchmark_problems, models_of
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.pipeline.run import Stage, run_stage
from fb_core.apps.pipeline.scores import ScoreStage
from fb_core.apps.pipeline.train import TrainStage
from fb_core.apps.settings.base import Changes, change
from fb_core.decode.selectors import FutureBridgeSelector, LLMPreference, ScoringSelector, SLMPreference, State
from fb_core.events import Pool
from fb_core.score.scorer import BranchGroup

SEEDS = (0, 1)
CELLS = {("plans", 0.94): (1,), ("plans", 0.9): (1, 4, 12), ("helpful", 0.92): (1,), ("control", 0.92): (1, 4, 12)}
HORIZONS = {"plans": 8, "helpful": 4, "control": 16}
OUT = Path("runs", "why")
RECORDS = Path("docs", "evidence", "why.json")
TRAINED: tuple[type[Stage], ...] = (TrajectoryStage, PolicyStage, StateStage, FutureStage, ScoreStage)
TRAINED += (TrainStage, SelectionStage, RerankerStage)
TARGET, ANY = "Direct-B", "Direct-B, any future"  # B_H of usable futures, and of all
DECODERS = {  # label, what scores the candidates at digits and elsewhere
    "greedy": ("SLM greedy", "", ""),
    "direct": ("the LLM's score", "llm", "llm"),
    "published": ("published recipe: the reranker", "reranker", "reranker"),
    "llm-at-digits": ("the reranker, at digits the LLM's score", "llm", "reranker"),
    "slm-at-digits": ("the reranker, at digits the SLM's own token", "slm", "reranker"),
    "llm-elsewhere": ("the LLM's score, at digits the reranker", "reranker", "llm"),
    "oracle": ("oracle: the target of any future", "oracle", "oracle"),
}
AGREEMENT, USABLE, OWN = "agreement", "agreement at usable", "own token first"  # parts of a record
COMPARED = {  # columns by head: part of a record, score
    "target, usable future": (USABLE, TARGET),
    "reranker, same states": (USABLE, "reranker"),
    "target, any future": (AGREEMENT, ANY),
    "reranker": (AGREEMENT, "reranker"),
}
FEW = 10  # usable states of an event; fewer say nothing
Cell = Mapping[str, Any]


def settings_of(world: str, seed: int, quantile: float, scale: int) -> PaperSettings:
    """The settings of a cell."""
    shipped = PaperSettings.of_config(SETTINGS[world])
    problems = shipped.problems
    aside = problems.validation + problems.certification
    changes: Changes = {
        "problems": {"seed": seed, "limit": aside + scale * ((problems.limit or 0) - aside)},
        "collect": {"quantile": quantile},
        "train": {"seeds": (seed,), "horizons": (HORIZONS[world],)},
        "experiment": {"benchmark_problems": shipped.evaluate.limit},
    }
    return change(shipped, changes)


def kind_of(models: Models, pool: Sequence[int]) -> str:
    """The kind of an event by its pool, which begins with the SLM's likeliest token."""
    return token_kind(models.tokenizer.decode([pool[0]]))


class AtDigits(ScoringSelector):
    """One selector's scores where the SLM's likeliest token is a digit, another's elsewhere."""

    def __init__(self, models: Models, digits: ScoringSelector, elsewhere: ScoringSelector) -> None:
        self.models, self.digits, self.elsewhere = models, digits, elsewhere

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        scored = (selector.scores_many(states, pools) for selector in (self.digits, self.elsewhere))
        kinds = (kind_of(self.models, pool.ids.tolist()) for pool in pools)
        return [at if kind == "digit" else other for kind, at, other in zip(kinds, *scored, strict=True)]


class Oracle(ScoringSelector):
    """B_H of what the LLM writes from each state."""

    def __init__(self, models: Models, horizon: int) -> None:
        self.models, self.horizon = models, horizon

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        prefixes = [state.tokens for state in states]
        return self.scores(prefixes, pools, self.models.llm.complete_many(prefixes, self.horizon + 1))

    def scores(self, prefixes: Sequence[Tensor], pools: Sequence[Pool], written: Sequence[Tensor]) -> list[Tensor]:
        """B_H [K], of a shorter continuation as far as it goes; of a single token, that token is best."""
        groups = [
            (prefix, [BranchGroup(len(prefix), pool.ids, new[1 : self.horizon + 1])] if len(new) > 1 else [])
            for prefix, pool, new in zip(prefixes, pools, written, strict=True)
        ]
        return [
            matrices[0].mean(1) if matrices else (pool.ids == new[0]).float()
            for matrices, pool, new in zip(self.models.scorer.score_trajectories(groups), pools, written, strict=True)
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
        context = Context(self.settings, self.run, max_length, max_batch)
        _, digits, elsewhere = DECODERS[trial.method]
        if not digits:
            return context.decoder_named(trial.method, None).generate_many
        (seed,), (horizon,) = self.settings.train.seeds, self.settings.train.horizons
        reranker, oracle = FutureBridgeSelector(context.reranker(seed)), Oracle(context.models, horizon)
        of = {"llm": LLMPreference(), "slm": SLMPreference(), "reranker": reranker, "oracle": oracle}
        selector = of[digits] if digits == elsewhere else AtDigits(context.models, of[digits], of[elsewhere])
        return context.decoder(selector, pool="joint").generate_many


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
    rows = {name: list(read_rows(stage.folder, name)) for name in stage.trials}
    contents = {
        "horizon": settings.train.horizons[0],
        "training states": trained,
        "training groups": usably,
        AGREEMENT: agreement_rows(states),
        USABLE: agreement_rows(usable),
        OWN: own,
        "coverage": [
            row | {"kind": kind}
            for kind in ("all", "word", "digit")
            for row in coverage_rows([state for state in states if kind in ("all", state.kind)])
        ],
        "rows": {
            name: evidence.row_of(decoded)
            | {"events": Counter(kind_of(models, event.pool) for row in decoded for event in row.events)}
            for name, decoded in rows.items()
        },
    }
    return json.loads(json.dumps(contents), parse_float=lambda digits: round(float(digits), 6))


def judged(settings: PaperSettings, run: Path) -> list[Judged]:
    """The rolled-out test states with the scores of `agreement`, and B_H of any future."""
    states, oracle = judged_states(settings, run), Oracle(models_of(settings.models), settings.train.horizons[0])
    shards = Artefact(run, FutureStage.name).shards()
    futures = {name: own for shard in shards for name, own in Examples(run, shard).futures().items()}
    rolled = [state.rolled.state for state in states]
    written = [torch.cat([torch.tensor([own.first]), own.tokens]) for own in (futures[state.id] for state in rolled)]
    scores = oracle.scores([state.prefix for state in rolled], [state.pool for state in rolled], written)
    return [
        replace(state, scores={name.partition("_")[0]: own for name, own in state.scores.items()} | {ANY: [score]})
        for state, score in zip(states, scores, strict=True)
    ]


# --- results ----------------------------------------------------------------------------------------------------------


def found(cell: Cell, part: str, kind: str, score: str, column: str) -> Any:
    """A value of a cell's rows, 0 without such a row; of an interval the mean."""
    value = next((row[column] for row in cell[part] if (row["kind"], row["score"]) == (kind, score)), None) or 0
    return value[0] if isinstance(value, list) else value


def shares(cells: Sequence[Cell], *at: str) -> str:
    """A share of a part in the cell of each seed, in percent."""
    return "/".join(f"{100 * found(cell, *at):.0f}" for cell in cells)  # type: ignore[arg-type]


def accuracies(cells: Sequence[Cell], name: str) -> str:
    """A decoder's accuracy in the cell of each seed, in percent."""
    rights = [cell["rows"][name]["correct"] for cell in cells]
    return "/".join(f"{100 * bits.count('1') / len(bits):.1f}" for bits in rights)


def page(records: Sequence[Cell]) -> list[str]:
    """The tables of docs/worlds.md: by kind of event, by decoder, by number of training problems."""
    cells: dict[tuple[str, float], dict[int, list[Cell]]] = {}  # by world and quantile, by scale
    for cell in sorted(records, key=lambda cell: cell["seed"]):
        cells.setdefault((cell["world"], cell["quantile"]), {}).setdefault(cell["scale"], []).append(cell)
    worlds = {f"{at[0]}, {at[1]:g}": cells[at] for at in CELLS}
    events, curve = [], []
    for (name, by_scale), scales in zip(worlds.items(), CELLS.values(), strict=True):
        for kind in ("word", "digit"):
            counted = ((AGREEMENT, "states"), (AGREEMENT, "mixed_states"), (USABLE, "states"))
            counts = [sum(found(cell, part, kind, "SLM", column) for cell in by_scale[1]) for part, column in counted]
            agreed = (shares(by_scale[1], part, kind, score, "pairwise") for part, score in COMPARED.values())
            if counts[-1] >= FEW:
                events.append([f"{name}, {kind}s", "{:,} ({:,}; {:,})".format(*counts), *agreed])
        for scale, own in sorted(by_scale.items()) if len(scales) > 1 else ():
            groups = np.mean([cell["training groups"]["digit"] for cell in own])
            parts = ((USABLE, "pairwise"), (OWN, "share"))
            digits = (shares(own, part, "digit", "reranker", column) for part, column in parts)
            curve.append([f"{name}, {scale}x", f"{groups:,.0f}", *digits, accuracies(own, "published")])
    decoded = [[of[0], *(accuracies(own[1], name) for own in worlds.values())] for name, of in DECODERS.items()]
    hours = sum(cell["processor_seconds"] for cell in records) / 3600
    seeds, problems = "/".join(map(str, SEEDS)), len(records[0]["rows"]["greedy"]["correct"])
    heads = ["training problems", "groups at digits", "pairs, usable future, %", "repeats, %", "accuracy, %"]
    return [
        f"`python -m benchmarks.why` made {len(records)} [cells](evidence/why.json) in {hours:.1f} hours of CPU time: "
        f"{problems} test problems, seed {seeds}. Pairs of candidates ordered as their rollouts are, % (50 is chance):",
        "",
        *markdown_table(["events", "states (outcomes differ; usable future)", *COMPARED], events),
        "",
        "The test problems decoded, accuracy, % (95% intervals reach 5 points at most):",
        "",
        *markdown_table(["what is taken at events", *worlds], decoded),
        "",
        "The reranker at digits by number of training problems; it *repeats* the SLM's own token:",
        "",
        *markdown_table(heads, curve),
    ]


def main(
    out: Annotated[Path, typer.Option(help="Folder for runs and finished cells.")] = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    write: Annotated[bool, typer.Option("--report", help="Only write docs/evidence from the finished cells.")] = False,
) -> None:
    """Make every cell that is still missing, those of few training problems first."""

    def jobs() -> evidence.Jobs:
        cells = sorted((scale, seed, *at) for at, scales in CELLS.items() for scale in scales for seed in SEEDS)
        return {
            (f"{world} {at:g}, x{scale}", seed): partial(make, world, scale, settings_of(world, seed, at, scale), out)
            for scale, seed, world, at in cells
        }

    evidence.make_all("benchmarks.why", jobs, RECORDS, out, workers, write)


if __name__ == "__main__":
    command.run(main, "benchmarks.why --workers 2")
