"""FutureBridge: at every admitted state the candidate that the SLM is expected to continue from best.

Definition: of the pool that the reranker was trained on, the candidate with its highest score, as the run chose it on
validation problems, one a seed; where the run says so, the LLM's own token wherever it is certain of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fb_core.methods import Generate, Method

if TYPE_CHECKING:
    from fb_core.stages.deploy import Context


def decode(run: Context, seed: int | None) -> Generate:
    """By the reranker of the seed."""
    assert seed is not None
    return run.deployed(run.reranker(seed)).generate_many


METHOD = Method(name="futurebridge", label="FutureBridge", decode=decode, seeded=True, timed=("fast", "plain"))
