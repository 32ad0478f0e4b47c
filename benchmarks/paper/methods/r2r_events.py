"""R2R at admitted events: the router is asked only where the request policy would ask the LLM, and no more often."""

from __future__ import annotations

from functools import partial

from benchmarks.paper.methods import Context, Method
from benchmarks.paper.methods.r2r import SOURCE
from benchmarks.paper.r2r.decoding import r2r
from benchmarks.paper.r2r.stages import read_router
from fb_core.apps.pipeline.models import Generate


def decode(run: Context, seed: int) -> Generate:
    """Decoding with the seed's router, under the run's policy and event budget."""
    models, router = run.models, read_router(run.run, run.models, seed, run.compare.recall)
    routed = partial(r2r, models.slm, models.llm, router.network, threshold=router.threshold)
    return partial(routed, policy=run.policy, max_events=run.settings.evaluate.max_events, **run.batched)


METHOD = Method(
    name="r2r-events",
    label="R2R at admitted events",
    source=SOURCE,
    decode=decode,
    seeded=True,
    routed=True,
    timed=("plain",),
)
