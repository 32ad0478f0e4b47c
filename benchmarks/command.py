"""A benchmark as a command with `-h`: `run(main)` where a module is run."""

from __future__ import annotations

from collections.abc import Callable

import typer

HELP = {"help_option_names": ["-h", "--help"]}


def run(main: Callable[..., None], example: str) -> None:
    """Run a function with its arguments from the command line; its help ends with an example."""
    app = typer.Typer(add_completion=False, context_settings=HELP)
    app.command(epilog=f"Example: python -m {example}")(main)
    app()
