"""A run inside another: some settings changed, in a folder where unchanged stages are links to the outer run's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.run import Stage, run_stage
from fb_core.apps.settings.run import RunSettings

FOLDER = "variants"  # inside a run's


def work_through(
    kinds: Sequence[type[Stage]],
    settings: RunSettings,
    folder: Path,
    run: Path,
    instead: Mapping[type[Stage], type[Stage]] = MappingProxyType({}),
) -> None:
    """Do what is left of an inner run's stages, in order; one that the outer run has finished identically is linked."""
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
