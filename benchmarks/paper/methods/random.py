"""Random choice: at every admitted state a uniformly random candidate of the joint pool, by seed and tokens so far."""

from __future__ import annotations

from benchmarks.paper.methods import Method
from fb_core.decode.selectors import RandomChoice

METHOD = Method(
    name="random",
    label="Random choice",
    decode=lambda run, seed: run.decoder(RandomChoice(seed), pool="joint").generate_many,
    seeded=True,
    timed=("fast",),
)
