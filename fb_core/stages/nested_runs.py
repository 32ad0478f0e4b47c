"""A run inside another: some settings changed, in a folder where unchanged stages are links to the outer run's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fb_core.config import RunSettings
from fb_core.recipe import Trained
from fb_core.reranker import FEATURES
from fb_core.stages.artefacts import Artefact
from fb_core.stages.run import run_stage
from fb_core.stages.stage import Stage

FOLDER = "variants"  # inside a run's
Changes = Mapping[str, Mapping[str, Any]]
Settings = TypeVar("Settings", bound=RunSettings)
TRAINED: Mapping[Trained, Mapping[str, Any]] = {  # changed settings of `train`
    "features": {"features": FEATURES},
    "calibrated": {"target": "calibrated"},
    "calibrated-features": {"target": "calibrated", "features": FEATURES},
}


def training_changes(horizon: int, **train: Any) -> Changes:
    """The changes for a reranker of one horizon; options that do not fit its target are reset."""
    if "target" in train:
        train = {"alpha": 1.0, "hindsight": 0, **train}
    elif train.keys() & {"alpha", "hindsight", "temperature"}:
        train = {"target": "future", **train}
    return {"train": {"horizons": (horizon,), **train}}


def changed(settings: Settings, changes: Changes) -> Settings:
    """The settings with some changed; raises ValueError if they do not fit together."""
    values = settings.model_dump()
    for section, parts in changes.items():
        values[section] |= parts
    return type(settings).model_validate(values)


def work_through(
    kinds: Sequence[type[Stage]],
    settings: RunSettings,
    folder: Path,
    run: Path,
    instead: Mapping[type[Stage], type[Stage]] = MappingProxyType({}),
) -> None:
    """Do what is left of some stages of an inner run; a stage that the outer run has finished identically is linked.

    Args:
        kinds: the stages, in order.
        settings: of the inner run.
        folder: of the inner run.
        run: folder of the outer run.
        instead: stages that take the place of others.

    Raises:
        ValueError: as `run_stage`.
        OSError: as `run_stage`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        stage, path = instead.get(kind, kind)(settings, folder, instead), folder / kind.name
        if path.is_symlink():
            continue
        finished = Artefact(run, kind.name).manifest()
        same = finished is not None and finished["complete"] and not path.exists()
        if finished is not None and same and finished["identity"] == json.loads(json.dumps(stage.identity())):
            link(kind.name, folder, run)
        else:
            run_stage(stage)


def link(stage: str, folder: Path, run: Path) -> None:
    """Link a stage of the outer run into an inner run's folder."""
    if not (folder / stage).is_symlink():
        (folder / stage).symlink_to(os.path.relpath(run / stage, folder), target_is_directory=True)
