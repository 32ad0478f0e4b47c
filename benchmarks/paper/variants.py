"""The plan of a run's variants, and the settings of each variant."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper.settings import EXTERNAL, PaperSettings
from benchmarks.paper.tables import Plan, Variant
from fb_core.stages.artefacts import Artefact
from fb_core.stages.nested_runs import changed


def plan_of(settings: PaperSettings, run: Path) -> Plan:
    """The plan of a run's variants; raises ValueError if the run is not trained."""
    return Plan(settings, run, int(Artefact(run, "selection").finished()["summary"]["horizon"]))


def settings_of_variant(settings: PaperSettings, variant: Variant) -> PaperSettings:
    """The run's settings with the variant's changes, and with only its method to compare."""
    if variant.inside is not None:
        settings = settings_of_variant(settings, variant.inside)
    method = variant.method or ""
    name = method.removeprefix(EXTERNAL)
    external = {name: settings.compare.external[name]} if method.startswith(EXTERNAL) else {}
    compare = {"methods": (method,) if method and not external else (), "external": external}
    return changed(settings, {**variant.changes, "compare": compare})
