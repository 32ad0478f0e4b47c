"""Rollouts of held-out states, which scores and pools are judged by."""

from __future__ import annotations

from benchmarks.paper.settings import PaperSettings
from fb_core.stages.rollouts import RolloutStage


class HeldOutRolloutStage(RolloutStage):
    """Rollouts of all candidates of a share of the validation states."""

    settings: PaperSettings
    name = "held-out-rollouts"
    command = "python -m benchmarks.paper rollouts"
    slice = (
        "experiment.validation_states",
        "rollouts.seed",
        "collect.slm_k",
        "collect.max_new_tokens",
        "verify",
    )
    split = "validation"

    @property
    def share(self) -> float:
        return self.settings.experiment.validation_states
