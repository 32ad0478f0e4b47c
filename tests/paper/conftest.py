"""A trained run whose held-out states are rolled out."""

from __future__ import annotations

from pathlib import Path

import pytest
from paper_runs import TRAINED, settings
from runs import linked

from benchmarks.paper.rollouts import HeldOutRolloutStage
from fb_core.apps.pipeline.run import run_stage


@pytest.fixture(scope="session")
def trained(undisturbed, once) -> Path:
    """Its stages are links to the run that nobody disturbed."""

    def make(folder: Path) -> None:
        run = linked(undisturbed[0]["train"], folder / "run", *TRAINED[:-1])
        run_stage(HeldOutRolloutStage(settings(), run))

    return once("trained", make) / "run"
