"""A run inside a run: some settings changed, in a folder whose unchanged stages are links to the run's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fb_core.config import RunSettings
from fb_core.recipe import Trained
from fb_core.reranker import FEATURES
from fb_core.stages.artefacts import Artefact
from fb_core.stages.stage import Stage, run_stage

FOLDER = "variants"  # inside a run's
Changes = Mapping[str, Mapping[str, Any]]
TRAINED: Mapping[Trained, Mapping[str, Any]] = {  # settings of the training
    "features": {"features": FEATURES},
    "calibrated": {"target": "calibrated"},
    "calibrated-features": {"target": "calibrated", "features": FEATURES},
}


def training_changes(horizon: int, **train: Any) -> Changes:
    """Of a reranker of one horizon: with its own target, and without what the run's own target alone takes."""
    if "target" in train:
        train = {"alpha": 1.0, "hindsight": 0, **train}
    elif train.keys() & {"alpha", "hindsight", "temperature"}:
        train = {"target": "future", **train}
    return {"train": {"horizons": (horizon,), **train}}


def changed(settings: RunSettings, changes: Changes) -> RunSettings:
    """The settings with parts of their sections changed; raises ValueError where they do not fit together."""
    values = settings.model_dump()
    for section, parts in changes.items():
        values[section] |= parts
    return RunSettings.model_validate(values)


def work_through(kinds: Sequence[type[Stage]], settings: RunSettings, folder: Path, run: Path) -> None:
    """Do what is left of some stages of a run inside another; what that one has finished alike is linked.

    Args:
        kinds: the stages in order.
        settings: of the inner run.
        folder: its own.
        run: the folder of the outer one.

    Raises:
        ValueError: as `run_stage`.
        OSError: as `run_stage`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        stage, path = kind(settings, folder), folder / kind.name
        if path.is_symlink():
            continue
        finished = Artefact(run, kind.name).manifest()
        same = finished is not None and finished["complete"] and not path.exists()
        if finished is not None and same and finished["identity"] == json.loads(json.dumps(stage.identity())):
            link(kind.name, folder, run)
        else:
            run_stage(stage)


def link(stage: str, folder: Path, run: Path) -> None:
    """Have a stage of the outer run in an inner one's folder."""
    if not (folder / stage).is_symlink():
        (folder / stage).symlink_to(os.path.relpath(run / stage, folder), target_is_directory=True)
