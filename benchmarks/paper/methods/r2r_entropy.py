"""R2R's entropy switch: no router, the LLM's token wherever the entropy reaches the run's own threshold."""

from __future__ import annotations

from functools import partial

from benchmarks.paper.methods import Method
from benchmarks.paper.methods.r2r import SOURCE
from benchmarks.paper.r2r.decoding import r2r

METHOD = Method(
    name="r2r-entropy",
    label="R2R's entropy switch",
    source=SOURCE,
    decode=lambda run, _: partial(
        r2r, run.models.slm, run.models.llm, None, threshold=run.policy.threshold, **run.batched
    ),
    timed=("plain",),
)
