"""`futurebridge demo`: trains and evaluates the shipped pairs by the ordinary commands, and shows what came out."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import TimeElapsedColumn
from rich.text import Text

from fb_core._util import write_file
from fb_core.apps.cli.explain import find_rows, print_rows
from fb_core.apps.demo import SETTINGS, pairs
from fb_core.apps.pipeline.commands import Command, run_command
from fb_core.apps.pipeline.evaluate import EvaluateStage, tables_of
from fb_core.apps.pipeline.files import Artefact, json_bytes
from fb_core.apps.pipeline.models import LABELS, models_of
from fb_core.apps.processes import processes
from fb_core.apps.progress import Board
from fb_core.apps.settings.base import change
from fb_core.apps.settings.run import RunSettings

COMMANDS: tuple[Command, ...] = ("collect", "futures", "score", "train", "evaluate")
LOG = "log.txt"


def demo_settings(seed: int) -> dict[str, RunSettings]:
    """The shipped worlds by name, with fresh problems of a seed and one reranker."""
    shipped = {name: RunSettings.load(file) for name, file in SETTINGS.items()}
    return {
        name: change(
            world, {"problems": {"seed": seed}, "train": {"seeds": (seed,), "horizons": (world.score.horizon,)}}
        )
        for name, world in shipped.items()
    }


def run_demo(worlds: Mapping[str, RunSettings], out: Path, *, retrain: bool = False) -> dict[str, Any]:
    """Run every world, write results.json and accuracy.png into `out`, and print the tables and one problem.

    `out` holds one run per world; finished work is not repeated. With `retrain`, the model pairs are first trained from
    scratch into `out`/weights, and used. Returns the rows of every world's evaluation by its name, as in results.json.
    ValueError if `out` holds a run with other settings, OSError without disk space or if a worker was killed.
    """
    out.mkdir(parents=True, exist_ok=True)
    if retrain:
        worlds = _retrain(worlds, out / "weights")
    after = "-retrained" if retrain else ""
    runs = {name: out / "runs" / f"{name}-seed-{world.problems.seed}{after}" for name, world in worlds.items()}
    _work_through({runs[name]: world for name, world in worlds.items()})
    console, stage = Console(), EvaluateStage.name
    results = {name: Artefact(run, stage).finished()["summary"]["table"] for name, run in runs.items()}
    tables = tables_of([row for rows in results.values() for row in rows])
    console.print(Markdown(tables) if console.is_terminal else Text(tables), soft_wrap=not console.is_terminal)
    files = {"results.json": json_bytes(results), "accuracy.png": _plot(results)}
    _explain_one(worlds, runs, console)
    for name, data in files.items():
        write_file(out / name, data)
    console.print("Written: " + ", ".join(str(out / name) for name in files))
    return results


def _explain_one(worlds: Mapping[str, RunSettings], runs: Mapping[str, Path], console: Console) -> None:
    """Print the first problem that FutureBridge solves and greedy decoding does not, if there is one."""
    for name, run in runs.items():
        ours = "deployed" if worlds[name].problems.certification else "published"
        right: dict[str, set[str]] = {}
        for row in EvaluateStage(worlds[name], run).rows():
            right.setdefault(row.problem, set()).update({row.method} if row.correct else ())
        solved = [problem for problem, by in right.items() if ours in by and "greedy" not in by]
        if solved:
            rows, tokenizer = find_rows(run, solved[0]), models_of(worlds[name].models).tokenizer
            print_rows([row for row in rows if row.method in ("greedy", ours)], tokenizer, console)
            return


def _plot(results: Mapping[str, list[dict[str, Any]]]) -> bytes:
    """Accuracies with intervals as a PNG, one panel per world; greedy decoding is a dashed line."""
    figure = Figure(figsize=(3.2 * len(results), 2.4), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    labels = list(LABELS.values())
    for panel, (name, rows) in zip(panels, results.items(), strict=True):
        for row in rows:
            mean, low, high = (100 * part for part in row["accuracy"])
            colour = "#d55e00" if row["method"] in (LABELS["deployed"], LABELS["published"]) else "#0072b2"
            height = labels.index(row["method"])
            panel.errorbar(mean, height, xerr=[[mean - low], [high - mean]], fmt="o", color=colour, capsize=2)
            if row["method"] == LABELS["greedy"]:
                panel.axvline(mean, color="#5d6670", linestyle="--", linewidth=1)
        panel.set_title(name, loc="left", fontsize=9)
        panel.set_xlabel("accuracy, %")
        panel.set_yticks(range(len(labels)), labels)
        panel.set_ylim(len(labels) - 0.5, -0.5)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _retrain(worlds: Mapping[str, RunSettings], weights: Path) -> dict[str, RunSettings]:
    """The worlds' settings with newly trained pairs, which are ordinary checkpoints."""
    with Board(TimeElapsedColumn(), transient=True) as board:

        def show(step: tuple[str, int, int]) -> None:
            model, done, of = step
            board.show(model, done, of)
            board.say(model, "training")

        pairs.retrain(weights, worlds=set(worlds), progress=show)
    retrained = {}
    for name, world in worlds.items():
        slm, llm = map(str, pairs.folders(name, weights))
        retrained[name] = change(world, {"models": {"slm": slm, "llm": llm, "device": "cpu", "dtype": "float32"}})
    return retrained


def _work_through(runs: Mapping[Path, RunSettings]) -> None:
    """Do all runs, in one-threaded processes, one per core."""
    with (
        Board(TimeElapsedColumn(), transient=True) as board,
        ThreadPoolExecutor(len(runs)) as threads,  # one thread per run waits for its commands
        processes(os.cpu_count(), __name__) as pool,
    ):
        jobs = [threads.submit(_run_all, pool, board, settings, run) for run, settings in runs.items()]
        try:
            for job in jobs:
                job.result()
        except KeyboardInterrupt:  # not after the stages that run, which may take minutes
            for worker in active_children():
                worker.kill()
            raise
        except BrokenProcessPool:
            raise OSError(
                "demo: expected its worker processes to finish, got one that was killed, perhaps for lack of memory; "
                "run it again, finished work is kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _run_all(pool: Executor, board: Board, settings: RunSettings, run: Path) -> None:
    """The commands of one run, one after the other."""
    values = settings.model_dump_json()
    board.show(run.name, 0, len(COMMANDS))
    for done, command in enumerate(COMMANDS, 1):
        pool.submit(_run, command, values, run).result()
        board.show(run.name, done, len(COMMANDS), command)
        board.say(run.name, f"{command}, {done}/{len(COMMANDS)}")


def _run(command: Command, values: str, run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / LOG).open("a", encoding="utf-8") as log, redirect_stdout(log):  # progress lines
        run_command(command, RunSettings.model_validate_json(values), run)
