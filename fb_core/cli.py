"""The `futurebridge` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Future-compatibility reranking.")


@app.callback()
def _root() -> None:
    """Future-compatibility reranking for a small and a large language model."""


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the fresh problems.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for results.json, report.md and plots.")] = Path("demo-results"),
    retrain: Annotated[bool, typer.Option("--retrain", help="First train the model pairs again from nothing.")] = False,
) -> None:
    """Run the whole method on tiny trained SLM/LLM pairs and compare it with its rivals."""
    from fb_core.config import DemoSettings
    from fb_core.demo.run import run_demo

    run_demo(DemoSettings(seed=seed), out, retrain=retrain)


@app.command()
def env() -> None:
    """What is installed, which implementation of each op will run, and why."""
    from fb_kernels.env import report

    typer.echo(report())


def main() -> None:
    """Entry point: errors that a user can mend come as one line."""
    try:
        app()
    except (ValueError, TypeError, OSError) as problem:
        typer.secho(f"futurebridge: {problem}", fg="red", err=True)
        raise SystemExit(2) from None
