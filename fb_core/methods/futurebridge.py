"""FutureBridge: at every admitted state the candidate that the SLM is expected to continue from best.

Definition: of the pool that the reranker was trained on, the candidate with its highest score, as the run chose it on
validation problems, one a seed; where the run says so, the LLM's own token wherever it is certain of it.
"""

from __future__ import annotations

from fb_core.methods import Method

METHOD = Method(
    name="futurebridge",
    label="FutureBridge",
    decode=lambda run, seed: run.deployed(run.reranker(seed)).generate_many,
    seeded=True,
    timed=("fast", "plain"),
)
