"""Makes the tables: the compared methods and the ablations, each a change to the same logged states."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from pathlib import Path

import torch
from rich.progress import TimeElapsedColumn

from benchmarks.paper.agreement import AgreementStage
from benchmarks.paper.benchmark_states import judge_benchmarks
from benchmarks.paper.comparison import CompareStage, DeploymentStage
from benchmarks.paper.futures import OtherScoreStage, SampleStage, made_for
from benchmarks.paper.methods import method
from benchmarks.paper.nested_runs import link, work_through
from benchmarks.paper.r2r.stages import RouterLabelStage, RouterStage
from benchmarks.paper.rollouts import HeldOutRolloutStage
from benchmarks.paper.s2t_local import SelectionTrainStage
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import PROBLEM, PUBLISHED, TABLES, Plan, Table, Variant, plan_of, settings_of_variant
from fb_core._util import write_file
from fb_core.apps.pipeline.commands import Command, run_command, stages_of
from fb_core.apps.pipeline.files import json_bytes
from fb_core.apps.pipeline.models import DEPLOYED_STAGE
from fb_core.apps.pipeline.run import Stage, run_stage
from fb_core.apps.pipeline.scores import ScoreStage
from fb_core.apps.pipeline.train import TrainStage
from fb_core.apps.processes import processes
from fb_core.apps.progress import Board

PREPARED: tuple[Command, ...] = ("collect", "futures", "score", "train")  # run before any variant
COSTS = "costs"  # a table without variants: it times the run's own methods
SHARED: tuple[tuple[type[Stage], ...], ...] = (
    (RouterLabelStage, RouterStage),
    (SampleStage,),
)  # made once, then linked by the variants
LOG = "log.txt"
Done = Callable[[Variant, str | None], None]  # (variant, why it could not be made or None)


def run_tables(
    tables: Sequence[str],
    settings: PaperSettings,
    run: Path,
    workers: int | None = None,
    show: Callable[[str], None] = print,
) -> None:
    """Make every row of some tables, several at a time; finished rows are kept, and failures are reported.

    By default there is a process per core, with one thread each, or a single one if there is a GPU.
    """
    prepare(settings, run, show)
    steps = list(waves([TABLES[name] for name in tables if name != COSTS], plan_of(settings, run)))
    made = [variant for step in steps for variant, _ in step]
    needed = {kind for v in made for kind in _stages(v, settings_of_variant(settings, v), False)}
    if COSTS in tables and any(method(name).routed for name in settings.compare.methods):
        needed.add(RouterStage)
    for kinds in SHARED:
        if needed & set(kinds):
            _attempt(kinds, settings, run, show)
    if workers is None:
        workers = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    finished: list[Variant] = []
    with Board(TimeElapsedColumn()) as board:
        board.show("variants", 0, len(made))

        def done(variant: Variant, problem: str | None) -> None:
            finished.append(variant)
            became = "done" if problem is None else f"not made: {problem}"
            text = f"{variant.name}: {became}, {len(finished)}/{len(made)} variants"
            board.say("tables", text, always=problem is not None)
            board.show("variants", len(finished), len(made))

        for step in steps:
            _work(step, settings, run, workers, done)
    if COSTS in tables:  # last, when nothing else runs beside it
        _attempt([DeploymentStage], settings, run, show)
    settings.keep(run)


def prepare(settings: PaperSettings, run: Path, show: Callable[[str], None] = print) -> None:
    """Run what the variants link to, and judge the rerankers."""
    for command in PREPARED:
        run_command(command, settings, run, show=show)
    _finish([HeldOutRolloutStage, AgreementStage], settings, run, show)
    judge_benchmarks(settings, run, show)


def waves(tables: Iterable[Table], plan: Plan) -> Iterator[list[tuple[Variant, bool]]]:
    """The variants of some tables and of the references, in the order in which they depend on each other.

    Those of a wave can be made at the same time; each has whether its reranker is compared with the rollouts.
    """
    made = {variant.path: variant for variant in plan.references()}
    judged = set()
    for table in tables:
        rows = {variant.path: variant for variant in table.rows(plan) if not variant.borrowed}
        made |= rows
        judged |= {path for path, variant in rows.items() if table.judged and variant.method == PUBLISHED}
    for variant in list(made.values()):
        while (outer := variant.inside) is not None:
            if variant.path in judged:
                judged.add(outer.path)
            variant = made.setdefault(outer.path, outer)
    for depth in sorted({len(path.parts) for path in made}):
        wave = [variant for path, variant in made.items() if len(path.parts) == depth]
        wave.sort(key=lambda variant: variant.method is not None)  # first those that other variants build on
        yield [(variant, variant.path in judged) for variant in wave]


def _finish(kinds: Sequence[type[Stage]], settings: PaperSettings, run: Path, show: Callable[[str], None]) -> None:
    for kind in kinds:
        stage = kind(settings, run)
        show(stage.report(run_stage(stage)))


def _attempt(kinds: Sequence[type[Stage]], settings: PaperSettings, run: Path, show: Callable[[str], None]) -> None:
    """As `_finish`, but a failure is only shown; the rows that need these stages report it again."""
    try:
        _finish(kinds, settings, run, show)
    except ValueError as problem:
        show(f"**not made**: {problem}")


def _work(wave: Sequence[tuple[Variant, bool]], settings: PaperSettings, run: Path, workers: int, done: Done) -> None:
    values = settings.model_dump_json()
    if workers == 1:  # in this process, which has the models loaded
        for variant, judge in wave:
            done(variant, make(variant, values, run, judge))
        return
    with processes(workers, __name__) as pool:
        jobs = {pool.submit(make, variant, values, run, judge): variant for variant, judge in wave}
        try:
            for job in as_completed(jobs):
                done(jobs[job], job.result())
        except BrokenProcessPool:
            raise OSError(
                f"tables: expected {workers} worker processes to finish, got one that was killed, perhaps for lack "
                "of memory; run it again with fewer --workers, finished work is kept"
            ) from None


def make(variant: Variant, values: str, run: Path, judge: bool) -> str | None:
    """Make a variant, maybe in a worker process; returns why it could not be made, or None.

    `judge` compares its rerankers, or those of variants inside it, with the rollouts.
    """
    settings = settings_of_variant(PaperSettings.model_validate_json(values), variant)
    folder = run / variant.path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROBLEM).unlink(missing_ok=True)
    with (folder / LOG).open("a") as log, redirect_stdout(log):  # progress lines
        try:
            parent = run if variant.inside is None else run / variant.inside.path
            if variant.method == "deployed":  # decodes with the recipe that the run chose
                link(DEPLOYED_STAGE, folder, parent)
            work_through(_stages(variant, settings, judge), settings, folder, parent, instead(settings))
        except ValueError as problem:
            traceback.print_exc(file=log)
            write_file(folder / PROBLEM, json_bytes({"problem": str(problem)}))
            return str(problem)
    return None


def with_futures(command: Command, settings: PaperSettings) -> list[type[Stage]]:
    """The stages of a command, those that make other futures before the scores."""
    other = made_for(settings.samples.future) if command == "score" else ()
    return [*other, *stages_of(command, settings)]


def instead(settings: PaperSettings) -> Mapping[type[Stage], type[Stage]]:
    """The stages that take the place of others under these settings."""
    others: dict[type[Stage], type[Stage]] = {}
    if settings.samples.future != "llm":
        others[ScoreStage] = OtherScoreStage
    if settings.experiment.target == "select":
        others[TrainStage] = SelectionTrainStage
    return others


def _stages(variant: Variant, settings: PaperSettings, judge: bool) -> list[type[Stage]]:
    """All stages that a variant's rows need, in order."""
    trained = variant.method in (PUBLISHED, None)
    commands: tuple[Command, ...] = ("collect", "futures", "score", "train") if trained else ("collect",)
    kinds = [kind for command in commands for kind in with_futures(command, settings)]
    if judge:
        kinds += [HeldOutRolloutStage, *([AgreementStage] if variant.method is not None else [])]
    if variant.method is not None and method(variant.method).routed:
        kinds += [RouterLabelStage, RouterStage]
    if variant.method is not None:
        kinds.append(CompareStage)
    return kinds
