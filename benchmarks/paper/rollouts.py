"""Rollouts of held-out states, which scores and pools are judged by."""

from __future__ import annotations

from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline.rollouts import RolloutStage


class HeldOutRolloutStage(RolloutStage):
    """Rollouts of all candidates of a share of the validation states."""

    settings: PaperSettings
    name = "held-out-rollouts"
    command = "python -m benchmarks.paper rollouts"
    slice = ("experiment.validation_states", "rollouts.seed", "collect.slm_k", "collect.max_new_tokens", "verify")
    split = "validation"

    @property
    def share(self) -> float:
        return self.settings.experiment.validation_states


def token_kind(text: str) -> str:
    """The kind of an event by the text of the SLM's likeliest token: "digit", "word", or "mark" for anything else."""
    stripped = text.strip()
    if any(character.isdigit() for character in stripped):
        return "digit"
    return "word" if stripped.isalpha() else "mark"
