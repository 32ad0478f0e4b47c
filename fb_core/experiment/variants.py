"""A run with one thing changed: a folder inside the run's own, whose unchanged stages are links to the run's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fb_core.config import RunSettings
from fb_core.stages.artefacts import Artefact
from fb_core.stages.stage import Stage, run_stage

Changes = Mapping[str, Mapping[str, Any]]
FOLDER = "variants"  # inside a run's


@dataclass(frozen=True)
class Variant:
    """What is changed, and how its row is called.

    Attributes:
        key: of its folder.
        label: of its row.
        changes: settings by section.
        method: that decodes the benchmarks, None for none: then others vary it in their turn.
        x: the number that is varied, if it is one.
        inside: the variant that it varies, if not the run itself.
    """

    key: str
    label: str
    changes: Changes = field(default_factory=dict)
    method: str | None = "futurebridge"
    x: float | None = None
    inside: Variant | None = None

    @property
    def place(self) -> Variant | None:
        """The variant among those it is inside of that only others vary; None where there is none."""
        if self.inside is None or self.inside.method is None:
            return self.inside
        return self.inside.place

    @property
    def path(self) -> Path:
        """Its folder inside the run's."""
        return (Path() if self.inside is None else self.inside.path) / FOLDER / self.key


def changed(settings: RunSettings, changes: Changes) -> RunSettings:
    """The settings with parts of their sections changed; raises ValueError where they do not fit together."""
    values = settings.model_dump()
    for section, parts in changes.items():
        values[section] |= parts
    return RunSettings.model_validate(values)


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
