"""The states of benchmark problems: the run's stages over each benchmark, in a folder of its own inside the run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.paper.agreement import AgreementStage, agreement_table
from benchmarks.paper.settings import PaperSettings
from fb_core.stages.artefacts import Artefact
from fb_core.stages.choice import ChoiceStage
from fb_core.stages.commands import Command, stages_of
from fb_core.stages.inputs import file_stem
from fb_core.stages.run import plan, run_stage
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Engine, Stage

BEFORE: tuple[Command, ...] = ("collect", "futures", "score", "rollouts")  # whose stages come before `AgreementStage`


def benchmark_runs(settings: PaperSettings, run: Path) -> dict[str, tuple[PaperSettings, Path]]:
    """Settings and folder of every benchmark's states, by the benchmark's name; empty until `train` is finished.

    Raises:
        ValueError: the run is damaged, or the names of two benchmarks differ only in punctuation.
    """
    last = ChoiceStage if settings.problems.certification else RerankerStage
    manifest = Artefact(run, last.name).manifest()
    if not settings.rollouts.benchmark_problems or manifest is None or not manifest["complete"]:
        return {}
    found: dict[str, tuple[PaperSettings, Path]] = {}
    for name in settings.evaluate.benchmarks:
        values = settings.model_dump()
        values["collect"] |= {
            "tested": str(run.resolve()),  # workers may have another working directory
            "max_new_tokens": settings.evaluate.max_new_tokens,
        }
        values["evaluate"] |= {"benchmarks": (name,)}
        folder = run / f"benchmark-{file_stem(name)}"
        if folder in (other for _, other in found.values()):
            raise ValueError(f"evaluate.benchmarks: expected names that differ, got {name!r} again; rename a file")
        found[name] = PaperSettings.model_validate(values), folder
    return found


def judge_benchmarks(
    settings: PaperSettings,
    run: Path,
    engine: Engine = "local",
    *,
    dry_run: bool = False,
    show: Callable[[str], None] = print,
) -> None:
    """Collect, score and roll out states of some problems of every benchmark, and judge the rerankers there.

    Does nothing until `train` is finished: before that no test problem is read.

    Args:
        settings: of the run.
        run: its folder.
        engine: as for `run_command`.
        dry_run: only show what would be done.
        show: takes the plan of every stage, or the agreement and coverage of every benchmark, in Markdown.

    Raises:
        ValueError: as `run_stage`.
        OSError: as `run_stage`, or a benchmark cannot be found.
    """
    for name, (chosen, folder) in benchmark_runs(settings, run).items():
        kinds: list[type[Stage]] = [kind for command in BEFORE for kind in stages_of(command, chosen)]
        kinds.append(AgreementStage)
        for kind in kinds:
            if dry_run:
                show(f"{name}, {plan(kind(chosen, folder))}")
            else:
                run_stage(kind(chosen, folder), engine)
        if not dry_run:
            show(f"**agreement on {name}**\n\n{agreement_table(chosen, folder)}")
