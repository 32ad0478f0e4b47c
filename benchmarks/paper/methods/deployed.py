"""FutureBridge: the recipe that `train` chose on held-out problems, with its evidence.

Definition: validation and certification (`fb_core.apps.pipeline.choose`) choose, for each seed, one of greedy decoding,
the direct LLM score, the published recipe and the value of the reranker's scores.
"""

from __future__ import annotations

from benchmarks.paper.methods import Method

METHOD = Method.named("deployed", seeded=True, timed=("fast", "plain"))
