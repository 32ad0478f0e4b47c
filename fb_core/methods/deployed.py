"""FutureBridge as deployed: the recipe that `train` chose on held-out problems, with its evidence.

Definition: of greedy decoding, the direct LLM score, and rerankers under overrides, value heads and gates ahead of the
LLM, the one that validation and certification chose (`fb_core.stages.choice`), one a seed.
"""

from __future__ import annotations

from fb_core.methods import Method

METHOD = Method(
    name="deployed",
    label="FutureBridge, as deployed",
    decode=lambda run, seed: run.chosen(seed).generate_many,
    seeded=True,
    timed=("fast", "plain"),
)
