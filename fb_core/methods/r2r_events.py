"""R2R at admitted events: the router is asked only where the request policy would ask the LLM, and no more often."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fb_core.methods import Generate, Method
from fb_core.methods.r2r import SOURCE
from fb_core.methods.r2r.decoding import r2r

if TYPE_CHECKING:
    from fb_core.stages.deploy import Context


def decode(run: Context, seed: int) -> Generate:
    """Decoding with the seed's router, under the run's policy and event budget."""
    models, router = run.models, run.router(seed)
    routed = partial(r2r, models.slm, models.llm, router.network, threshold=router.threshold, mode="events")
    return partial(routed, policy=run.policy, max_events=run.settings.evaluate.max_events, **run.batched)


METHOD = Method(
    name="r2r-events", label="R2R at admitted events", source=SOURCE, decode=decode, seeded=True, routed=True
)
