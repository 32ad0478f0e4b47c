"""R2R's entropy switch: no router, the LLM's token wherever the entropy reaches the run's own threshold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fb_core.methods import Generate, Method
from fb_core.methods.r2r import SOURCE
from fb_core.methods.r2r.decoding import r2r

if TYPE_CHECKING:
    from fb_core.stages.deploy import Context


def decode(run: Context, seed: int | None) -> Generate:
    """At the threshold of the run's policy."""
    models = run.models
    return partial(r2r, models.slm, models.llm, None, threshold=run.policy.threshold, mode="entropy", **run.batched)


METHOD = Method(name="r2r-entropy", label="R2R's entropy switch", source=SOURCE, decode=decode)
