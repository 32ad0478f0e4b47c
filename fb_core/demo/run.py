"""`futurebridge demo`: runs the shipped worlds through the stages, tables and report of `futurebridge experiment`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import TimeElapsedColumn

from fb_core.config import RunSettings
from fb_core.demo import pairs
from fb_core.experiment.gather import gather
from fb_core.experiment.run import LOG, PREPARED, make, prepare, processes, waves
from fb_core.experiment.tables import TABLES, Plan, Variant
from fb_core.experiment.turned import problem_pages
from fb_core.experiment.variants import plan_of
from fb_core.progress import Board
from fb_core.report import figures
from fb_core.report.findings import Findings, findings_bytes
from fb_core.report.page import Figure
from fb_core.report.report import FIGURES, document_files, render, write_files
from fb_core.report.theme import png
from fb_core.stages.commands import Command
from fb_core.stages.inputs import DEMO
from fb_core.stages.inside import Changes, changed

QUANTILES = {"tiny": (0.9,), "tiny-helpful": (), "tiny-control": ()}  # additional quantiles; the slowest world first
METHODS = ("greedy", "majority", "random", "s2t", "direct", "takeover", "futurebridge", "deployed")
REPAIRS = ("features", "override", "features-override")
SWEPT = ("direct", "futurebridge", "override")


def _methods(plan: Plan) -> list[Variant]:
    """The compared methods, FutureBridge and its repairs."""
    rows = [row for name in ("methods", "repairs") for row in TABLES[name].rows(plan)]
    return [row for row in rows if row.key in (*METHODS, *REPAIRS) and not row.borrowed]


def _quantiles(plan: Plan) -> list[Variant]:
    return [row for row in TABLES["quantiles"].rows(plan) if row.key in SWEPT]


# No figures in the sections: the PNGs show all worlds at once.
TABLES_SHOWN = {
    "methods": replace(TABLES["methods"], rows=_methods, figure=None),
    "quantiles": replace(TABLES["quantiles"], rows=_quantiles, figure=None, judged=False),
}


def demo_settings(seed: int) -> dict[str, RunSettings]:
    """The shipped worlds by name, with fresh problems of a seed, one reranker, and fewer recipes and quantiles."""
    found = {}
    for name, others in QUANTILES.items():
        shipped = RunSettings.load(name)
        once: Changes = {
            "problems": {"seed": seed},
            "train": {"seeds": (seed,), "horizons": (shipped.score.horizon,)},
            "choice": {"trained": ("features",), "tried": 5},
            "experiment": {"quantiles": others},
        }
        found[name] = changed(shipped, once)
    return found


def run_demo(worlds: Mapping[str, RunSettings], out: Path, *, retrain: bool = False) -> tuple[Findings, ...]:
    """Run every world, write results.json and a report with its pictures into `out`, and print the summary.

    Args:
        worlds: by the names of their configurations; the slowest first.
        out: folder for the results, created if missing. It holds one run per world; finished work is not repeated.
        retrain: first train the model pairs from scratch into `out`/weights, and use them.

    Raises:
        ValueError: `out` holds a run with other settings.
        OSError: no disk space, or a worker was killed; finished work is kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    if retrain:
        worlds = _retrained(worlds, out / "weights")
    after = "-retrained" if retrain else ""
    runs = {out / "runs" / f"{name}-seed-{one.problems.seed}{after}": one for name, one in worlds.items()}
    found = _found(runs)
    pages: dict[str, bytes] = {}
    for (run, settings), one in zip(runs.items(), found, strict=True):
        pages |= problem_pages(settings, run, one)
    document, drawn = render(found, pages), _merged(found)
    pictures = {
        "accuracy.png": png(figures.forest, found),
        "agreement.png": png(figures.agreement, drawn),
        "sweep.png": png(figures.sweep, drawn, "quantiles"),
    }
    files = {"results.json": findings_bytes(found)} | document_files(document)
    write_files(pages, out)
    written = write_files(files | {name: data for name, data in pictures.items() if data}, out)
    console = Console()
    words = [block for block in document.blocks if not isinstance(block, Figure)]
    console.print(Markdown(replace(document, blocks=words, sections=document.sections[:1]).markdown(FIGURES)))
    console.print("Written: " + ", ".join(str(path) for path in written if path.parent == out))
    return found


def _merged(found: Sequence[Findings]) -> Findings:
    """The findings of all worlds as one, for figures with one panel per world."""
    agreement = [
        row.model_copy(update={"kind": " ".join(one.test_sets)})
        for one in found
        for row in one.agreement or ()
        if row.kind == "all" and row.benchmark is None
    ]
    rows = tuple(row for one in found for row in one.rows)
    return found[0].model_copy(update={"rows": rows, "agreement": tuple(agreement)})


def _retrained(worlds: Mapping[str, RunSettings], weights: Path) -> dict[str, RunSettings]:
    """The worlds' settings with newly trained pairs, which are ordinary checkpoints."""
    names = {name: one.models.slm.removeprefix(DEMO) for name, one in worlds.items()}
    with Board(TimeElapsedColumn(), transient=True) as board:

        def show(model: str, done: int, of: int) -> None:
            board.show(model, done, of)
            board.say(model, "training")

        pairs.retrain(weights, worlds=set(names.values()), progress=show)
    found = {}
    for name, one in worlds.items():
        slm, llm = map(str, pairs.folders(names[name], weights))
        found[name] = changed(one, {"models": {"slm": slm, "llm": llm, "device": "cpu", "dtype": "float32"}})
    return found


def _found(runs: Mapping[Path, RunSettings]) -> tuple[Findings, ...]:
    """The findings of all runs; one-threaded processes, one per core, share the work."""
    with (
        Board(TimeElapsedColumn(), transient=True) as board,
        ThreadPoolExecutor(len(runs)) as threads,  # one thread per run waits for its parts
        processes(os.cpu_count()) as pool,
    ):
        jobs = [threads.submit(_work, pool, board, settings, run) for run, settings in runs.items()]
        try:
            return tuple(job.result() for job in jobs)
        except BrokenProcessPool:
            raise OSError(
                "demo: expected its worker processes to finish, got one that was killed, perhaps for lack of memory; "
                "run it again, finished work is kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _work(pool: Executor, board: Board, settings: RunSettings, run: Path) -> Findings:
    """Do one run: its commands one after the other, then its variants, those of a wave at the same time."""
    values, of, done = settings.model_dump_json(), len(PREPARED), count(1)

    def show(words: str) -> None:
        now = next(done)
        board.show(run.name, now, of, words)
        board.say(run.name, f"{words}, {now}/{of}")

    board.show(run.name, 0, of)
    for command in PREPARED:
        pool.submit(_prepare, command, values, run).result()
        show(command)
    steps = list(waves(TABLES_SHOWN.values(), plan_of(settings, run)))
    of += sum(map(len, steps))
    for step in steps:
        jobs = {pool.submit(make, variant, values, run, judge): variant for variant, judge in step}
        for job in as_completed(jobs):
            problem = job.result()
            show(jobs[job].name if problem is None else f"{jobs[job].name} not made: {problem}")
    return pool.submit(gather, settings, run, TABLES_SHOWN).result()


def _prepare(command: Command, values: str, run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / LOG).open("a") as log, redirect_stdout(log):  # progress lines
        prepare(command, RunSettings.model_validate_json(values), run)
