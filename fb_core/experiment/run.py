"""`futurebridge experiment`: the peers and the ablations, one thing changed at a time over the same logged states."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from multiprocessing import get_all_start_methods, get_context, parent_process
from pathlib import Path

import torch
from rich.progress import TimeElapsedColumn

from fb_core.config import SETTINGS, RunSettings
from fb_core.experiment.tables import TABLES, Plan, Table, Variant
from fb_core.experiment.variants import plan_of, settings_of_variant
from fb_core.files import write_file
from fb_core.methods import method
from fb_core.progress import Board
from fb_core.report.findings import OURS
from fb_core.stages.agreement import AgreementStage
from fb_core.stages.artefacts import json_bytes
from fb_core.stages.benchmark_states import judge_benchmarks
from fb_core.stages.commands import Command, run_command, stages_of
from fb_core.stages.comparison import CompareStage
from fb_core.stages.deploy import DEPLOYED_STAGE
from fb_core.stages.deployment import DeploymentStage
from fb_core.stages.inside import link, work_through
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.router import RouterLabelStage, RouterStage
from fb_core.stages.samples import SampleStage
from fb_core.stages.stage import Stage, run_stage

PREPARED: tuple[Command, ...] = ("collect", "futures", "score", "train", "rollouts")  # of the run itself
COSTS = "costs"  # has no variants: it times the run's own methods
SHARED: tuple[tuple[type[Stage], ...], ...] = (
    (RouterLabelStage, RouterStage),
    (SampleStage,),
)  # made once, then linked
PROBLEM = "problem.json"  # why a variant could not be made, in its folder
LOG = "log.txt"
Done = Callable[[Variant, str | None], None]  # a variant, and why it could not be made if so


def run_experiment(
    tables: Sequence[str],
    settings: RunSettings,
    run: Path,
    workers: int | None = None,
    show: Callable[[str], None] = print,
) -> None:
    """Make every row of some tables, several at a time; what is finished stays, what could not be made is said.

    Args:
        tables: names among `TABLES`, and `COSTS`.
        settings: of the run.
        run: its folder.
        workers: processes, one thread each; None for one a core, or a single one where there is a GPU.
        show: takes finished stages' reports in Markdown.

    Raises:
        ValueError: settings, models or files that do not fit the run, or another recipe than the published one.
        OSError: no room, no model, no server, or a worker that was ended; what is finished is kept.
    """
    if settings.train.features or settings.evaluate.certainty is not None or settings.futures.span.tokens != 1:
        raise ValueError(
            "experiment: expected the published recipe, to which every row is compared, got train.features, "
            "evaluate.certainty or futures.span; name a configuration without them, such as qwen3-1.7b-published"
        )
    for command in PREPARED:
        prepare(command, settings, run, show)
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
            board.say("experiment", text, always=problem is not None)
            board.show("variants", len(finished), len(made))

        for step in steps:
            _work(step, settings, run, workers, done)
    if COSTS in tables:  # alone, on an idle machine
        _attempt([DeploymentStage], settings, run, show)
    write_file(run / SETTINGS, settings.model_dump_json(indent=1).encode())


def prepare(command: Command, settings: RunSettings, run: Path, show: Callable[[str], None] = print) -> None:
    """One of the commands `PREPARED`, whose files the variants link to; after the last the rerankers are judged."""
    run_command(command, settings, run, show=show)
    if command == "rollouts":
        _finish([AgreementStage], settings, run, show)
        judge_benchmarks(settings, run, show=show)


def waves(tables: Iterable[Table], plan: Plan) -> Iterator[list[tuple[Variant, bool]]]:
    """What some tables and the references are made of, those that others are inside of before these.

    Yields:
        variants that can be made at once, each with whether its reranker is held against the rollouts.
    """
    made = {variant.path: variant for variant in plan.references()}
    judged = set()
    for table in tables:
        rows = {variant.path: variant for variant in table.rows(plan) if not variant.borrowed}
        made |= rows
        judged |= {path for path, variant in rows.items() if table.judged and variant.method == OURS}
    for variant in list(made.values()):
        while (outer := variant.inside) is not None:
            if variant.path in judged:
                judged.add(outer.path)
            variant = made.setdefault(outer.path, outer)
    for depth in sorted({len(path.parts) for path in made}):
        wave = [variant for path, variant in made.items() if len(path.parts) == depth]
        wave.sort(key=lambda variant: variant.method is not None)  # others wait for those without
        yield [(variant, variant.path in judged) for variant in wave]


def _finish(kinds: Sequence[type[Stage]], settings: RunSettings, run: Path, show: Callable[[str], None]) -> None:
    for kind in kinds:
        stage = kind(settings, run)
        show(stage.report(run_stage(stage)))


def _attempt(kinds: Sequence[type[Stage]], settings: RunSettings, run: Path, show: Callable[[str], None]) -> None:
    """As `_finish`, but what cannot be made is said: rows that need it say so in their turn."""
    try:
        _finish(kinds, settings, run, show)
    except ValueError as problem:
        show(f"**not made**: {problem}")


def _work(wave: Sequence[tuple[Variant, bool]], settings: RunSettings, run: Path, workers: int, done: Done) -> None:
    values = settings.model_dump_json()
    if workers == 1:  # where the models are already
        for variant, judge in wave:
            done(variant, make(variant, values, run, judge))
        return
    with processes(workers) as pool:
        jobs = {pool.submit(make, variant, values, run, judge): variant for variant, judge in wave}
        try:
            for job in as_completed(jobs):
                done(jobs[job], job.result())
        except BrokenProcessPool:
            raise OSError(
                f"experiment: expected {workers} worker processes to finish, got one ended from outside, perhaps for "
                "memory; run it again with fewer --workers, what is finished is kept"
            ) from None


def processes(workers: int | None) -> ProcessPoolExecutor:
    """One-threaded processes that end with this one: forked, where that can be, from one that has imported this."""
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(workers, context, begin)


def begin() -> None:
    """A worker's own: one thread, and no life beyond the process that it works for."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def make(variant: Variant, values: str, run: Path, judge: bool) -> str | None:
    """Make a variant, perhaps in a process of its own.

    Args:
        variant: what is changed.
        values: the run's settings as JSON.
        run: its folder.
        judge: whether its rerankers, or those inside it, are held against the rollouts.

    Returns:
        why it could not be made, None where it was.
    """
    settings = settings_of_variant(RunSettings.model_validate_json(values), variant)
    folder = run / variant.path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROBLEM).unlink(missing_ok=True)
    with (folder / LOG).open("a") as log, redirect_stdout(log):  # a line a shard
        try:
            parent = run if variant.inside is None else run / variant.inside.path
            if variant.method == "deployed":  # what the run chose among its rerankers
                link(DEPLOYED_STAGE, folder, parent)
            work_through(_stages(variant, settings, judge), settings, folder, parent)
        except ValueError as problem:
            traceback.print_exc(file=log)
            write_file(folder / PROBLEM, json_bytes({"problem": str(problem)}))
            return str(problem)
    return None


def _stages(variant: Variant, settings: RunSettings, judge: bool) -> list[type[Stage]]:
    """All stages up to a variant's rows."""
    trained = variant.method in (OURS, None)
    commands: tuple[Command, ...] = ("collect", "futures", "score", "train") if trained else ("collect",)
    kinds = [kind for command in commands for kind in stages_of(command, settings)]
    if judge:
        kinds += [RolloutStage, *([AgreementStage] if variant.method is not None else [])]
    if variant.method is not None and method(variant.method).routed:
        kinds += [RouterLabelStage, RouterStage]
    if variant.method is not None:
        kinds.append(CompareStage)
    return kinds
