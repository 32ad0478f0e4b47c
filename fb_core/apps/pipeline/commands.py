"""The commands of a run, and the stages that each of them runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from fb_core._util import write_file
from fb_core.apps.pipeline.choose import CHOICE, RerankerStage, SelectionStage, weakness
from fb_core.apps.pipeline.collect import PolicyStage, StateStage, TrajectoryStage
from fb_core.apps.pipeline.evaluate import EvaluateStage
from fb_core.apps.pipeline.futures import FutureStage
from fb_core.apps.pipeline.models import verifier_of
from fb_core.apps.pipeline.rollouts import RolloutStage
from fb_core.apps.pipeline.run import Engine, Stage, plan, run_stage
from fb_core.apps.pipeline.scores import ScoreStage
from fb_core.apps.pipeline.train import TrainStage
from fb_core.apps.settings.run import SETTINGS, RunSettings

Command = Literal["collect", "futures", "score", "train", "evaluate"]
COMMANDS: tuple[Command, ...] = get_args(Command)

log = logging.getLogger(__name__)


def stages_of(command: Command, settings: RunSettings) -> tuple[type[Stage], ...]:
    """The stages that a command runs under these settings, in order."""
    stages: dict[Command, tuple[type[Stage], ...]] = {
        "collect": (TrajectoryStage, PolicyStage, StateStage),
        "futures": (FutureStage,),
        "score": (ScoreStage,),
        "train": (TrainStage, SelectionStage, RerankerStage),
        "evaluate": (EvaluateStage,),
    }
    if command == "train" and settings.problems.certification:
        return (*stages[command], RolloutStage, *CHOICE)
    return stages[command]


def run_command(
    command: Command,
    settings: RunSettings,
    run: Path,
    engine: Engine = "local",
    *,
    dry_run: bool = False,
    show: Callable[[str], None] = print,
) -> None:
    """Do what is left of a command's stages.

    The engine "ray" takes the stages whose shards are independent. With `dry_run`, only show what would be done; `show`
    takes that plan, or each finished stage's report, in Markdown. ValueError for settings, models or files that do not
    fit the run, OSError without disk space, model or server; finished work is kept.
    """
    is_main = int(os.environ.get("RANK", "0")) == 0  # under `accelerate launch` the other processes only help to train
    works, certification, choice = is_main and not dry_run, settings.problems.certification, settings.choice
    if command == "train" and certification and settings.score.pool != "joint":
        raise ValueError(
            f'score.pool: expected "joint" with problems.certification, since rollouts are of the joint pool, got '
            f'"{settings.score.pool}"; set problems.certification to 0 to choose no recipe'
        )
    if works and command == "collect" and certification:
        words = weakness(certification, choice.delta, choice.level)
        if words and TrajectoryStage(settings, run).folder.manifest() is None:  # later the problems are set aside
            log.warning(words)
    if works and command != "score":
        verifier_of(settings.verify).prepare()
    for kind in stages_of(command, settings):
        stage = kind(settings, run)
        if is_main:
            show(plan(stage) if dry_run else stage.report(run_stage(stage, engine)))
        elif kind is TrainStage and not dry_run:
            run_stage(stage, is_main=False)
    if works:
        write_file(run / SETTINGS, settings.model_dump_json(indent=1, include=set(RunSettings.model_fields)).encode())
