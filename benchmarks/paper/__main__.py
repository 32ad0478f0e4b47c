"""The paper's comparisons: `python -m benchmarks.paper tables all --config tiny`, then `report RUN ...`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import HELP
from benchmarks.paper.agreement import judge
from benchmarks.paper.benchmark_states import judge_benchmarks
from benchmarks.paper.gather import gather
from benchmarks.paper.report import write_report
from benchmarks.paper.rollouts import HeldOutRolloutStage
from benchmarks.paper.run import COSTS, run_tables
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import TABLES
from fb_core._util import escaped
from fb_core.apps.pipeline.run import run_stage

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    help="Compare a run with the paper's baselines and ablations.",
)
ConfigOption = Annotated[str, typer.Option(help="A YAML file, or a name such as tiny or qwen3-1.7b-published.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
RunOption = Annotated[Path | None, typer.Option("--run-dir", help="Folder of the run; default runs/NAME.")]


def _opened(config: str, changes: list[str] | None, run: Path | None) -> tuple[PaperSettings, Path]:
    logging.basicConfig(format="%(message)s")
    return PaperSettings.of_config(config, changes or ()), run or Path("runs") / Path(config).name.removesuffix(".yaml")


@app.command(epilog="Example: python -m benchmarks.paper tables methods --config tiny")
def tables(
    names: Annotated[list[str], typer.Argument(help=f"{', '.join((*TABLES, COSTS))}, or all.")],
    config: ConfigOption,
    changes: SetOption = None,
    run: RunOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default one per core, or one if there is a GPU.")
    ] = None,
) -> None:
    """Make tables of baselines and ablations: everything that they need, from states to benchmarks, then the report."""
    settings, folder = _opened(config, changes, run)
    choices = [*TABLES, COSTS]
    if unknown := [name for name in names if name not in ("all", *choices)]:
        raise ValueError(f"tables: expected all or some of {', '.join(choices)}, got {unknown[0]!r}; name those")
    run_tables(choices if "all" in names else names, settings, folder, workers)
    report([folder], folder / "report")


@app.command(epilog="Example: python -m benchmarks.paper report runs/tiny runs/tiny-control --out report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="Folder for the report, its figures and rows.")] = Path("report"),
) -> None:
    """Write one Markdown page that compares runs side by side."""
    written = write_report([gather(PaperSettings.of_run(run), run) for run in runs], out)
    print("Written: " + ", ".join(map(str, written)))


@app.command(epilog="Example: python -m benchmarks.paper rollouts --config tiny")
def rollouts(config: ConfigOption, changes: SetOption = None, run: RunOption = None) -> None:
    """Show how well scores predict the outcome of each candidate: at held-out states and, after `train`, benchmarks."""
    settings, folder = _opened(config, changes, run)
    stage = HeldOutRolloutStage(settings, folder)
    print(stage.report(run_stage(stage)))
    print(judge(settings, folder))
    judge_benchmarks(settings, folder)


def main() -> None:
    """Run a command; an error that a user can fix is printed as one line."""
    try:
        app()
    except (ValueError, TypeError, OSError) as problem:
        raise SystemExit(escaped(str(problem))) from None


if __name__ == "__main__":
    main()
