"""How a variant is made: its settings, and a folder whose unchanged stages are links to the run's."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fb_core.config import RunSettings
from fb_core.experiment.tables import Changes, Plan, Variant
from fb_core.methods import EXTERNAL
from fb_core.stages.artefacts import Artefact
from fb_core.stages.stage import Stage, run_stage


def plan_of(settings: RunSettings, run: Path) -> Plan:
    """The plan of a run's variants; raises ValueError where it is not trained."""
    return Plan(settings, run, int(Artefact(run, "selection").finished()["summary"]["horizon"]))


def changed(settings: RunSettings, changes: Changes) -> RunSettings:
    """The settings with parts of their sections changed; raises ValueError where they do not fit together."""
    values = settings.model_dump()
    for section, parts in changes.items():
        values[section] |= parts
    return RunSettings.model_validate(values)


def settings_of_variant(settings: RunSettings, variant: Variant) -> RunSettings:
    """The run's settings with the variant's changes, and with its method alone."""
    if variant.inside is not None:
        settings = settings_of_variant(settings, variant.inside)
    method = variant.method or ""
    name = method.removeprefix(EXTERNAL)
    external = {name: settings.compare.external[name]} if method.startswith(EXTERNAL) else {}
    compare = {"methods": (method,) if method and not external else (), "external": external}
    return changed(settings, {**variant.changes, "compare": compare})


def work_through(kinds: Sequence[type[Stage]], settings: RunSettings, folder: Path, run: Path) -> None:
    """Do what is left of a variant's stages; a stage that the run has finished under the same identity is linked.

    Args:
        kinds: the stages in order.
        settings: the variant's.
        folder: the variant's.
        run: the folder of what it varies.

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
            path.symlink_to(os.path.relpath(run / kind.name, folder), target_is_directory=True)
        else:
            run_stage(stage)
