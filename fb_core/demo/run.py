"""`futurebridge demo`: worlds in parallel processes, progress bars, and what is written."""

from __future__ import annotations

import json
import os
import platform
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import TimeElapsedColumn

from fb_core.config import DemoSettings, WorldSettings
from fb_core.demo import pairs, report
from fb_core.progress import Board


def run_demo(settings: DemoSettings, out: Path, *, retrain: bool = False) -> dict[str, Any]:
    """Run every world, write results.json, report.md and plots into `out`, and print the report.

    Args:
        settings: seed and sizes.
        out: folder for what is written; made if missing.
        retrain: first make the model pairs again from nothing, into `out`/weights, and use them.
    """
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "weights" if retrain else None
    if weights is not None:
        _retrain(weights, [world.name for world in settings.worlds])
    worlds = _run_worlds(settings, weights)
    results = {
        "settings": settings.model_dump(exclude={"worlds"}),
        "worlds": worlds,
        "seconds": round(time.perf_counter() - began, 1),
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}",
    }
    _write(out / "results.json", json.dumps(results, indent=1))
    text = report.markdown(results)
    _write(out / "report.md", text)
    figures = report.plots(results, out)
    console = Console()
    console.print(Markdown(text))
    console.print("Written: " + ", ".join(str(path) for path in (out / "results.json", out / "report.md", *figures)))
    return results


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _show(board: Board, line: str, stage: str, done: int, of: int) -> None:
    """`line` (a world, a model) is at `done` of `of` in `stage`."""
    board.show(line, done, of, stage)
    board.say(line, stage)


def _retrain(folder: Path, worlds: Sequence[str]) -> None:
    with Board(TimeElapsedColumn(), transient=True) as board:
        pairs.retrain(folder, worlds=worlds, progress=lambda model, done, of: _show(board, model, "training", done, of))


def _run_worlds(settings: DemoSettings, weights: Path | None) -> list[dict[str, Any]]:
    """One single-threaded process a world: on models this small more threads cost time."""
    context = get_context("spawn")
    workers = min(len(settings.worlds), os.cpu_count() or 1)
    with (
        Board(TimeElapsedColumn(), transient=True) as board,
        context.Manager() as manager,
        ProcessPoolExecutor(workers, context) as executor,
    ):
        messages: Any = manager.Queue()
        jobs = [executor.submit(_run_world, settings, world, weights, messages) for world in settings.worlds]
        while not all(job.done() for job in jobs) or not messages.empty():
            try:
                _show(board, *messages.get(timeout=0.2))
            except queue.Empty:
                continue
        return [job.result() for job in jobs]


def _run_world(settings: DemoSettings, world: WorldSettings, weights: Path | None, messages: Any) -> dict[str, Any]:
    from fb_core.demo.experiment import run_world

    torch.set_num_threads(1)
    return run_world(
        pairs.load_pair(world.name, weights),
        settings,
        world,
        lambda stage, done, of: messages.put((f"{world.name} world", stage, done, of)),
    )
