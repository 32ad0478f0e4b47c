"""The published recipe: at every admitted state the candidate that the SLM is expected to continue from best.

Definition: of the pool that the reranker was trained on, the candidate with the reranker's highest score; the run chose
the reranker on validation problems, one per seed.
"""

from __future__ import annotations

from benchmarks.paper.methods import Method

METHOD = Method.named("published", seeded=True, timed=("fast", "plain"))
