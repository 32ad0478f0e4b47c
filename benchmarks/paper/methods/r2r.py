"""R2R: a small network looks at every token the SLM is about to write and has the LLM write the divergent ones.

Definition:

- router: the SLM's last hidden state, the embedding of its likeliest token and its 100 largest logits (projected to the
  hidden size), side by side, projected to `width`, then residual blocks (layer norm, two linear layers) and one output;
- routing: where the router's probability reaches the threshold (equality routes), the LLM's argmax is appended instead
  of the SLM's; the SLM goes on after it. The entropy switch does the same with the entropy of the whole distribution;
- labels: a position where both greedy tokens differ is divergent if that changes the outcome, all others are not;
- training: AdamW on the binary cross-entropy, positives weighted by the ratio of both classes;
- threshold: the fewest routed positions whose recall on held-out labels is at least 0.95 (resource/
  default_training_config.json "optimizing", r2r/train/optimizer.py `threshold_optimal_threshold`).

Where the paper has a language model judge whether both continuations say the same, here the LLM's continuations up to
their answers are verified: divergent means wrong after the SLM's token and right after the LLM's own. Training runs a
set number of epochs, without the published early stopping on a validation set. The threshold is exact, where the
software looks at 100 values from 0.01 to 0.99.
"""

from __future__ import annotations

from functools import partial

from benchmarks.paper.methods import Context, Method
from benchmarks.paper.r2r.decoding import r2r
from benchmarks.paper.r2r.stages import read_router
from fb_core.apps.pipeline.models import Generate

SOURCE = (
    'Fu et al., "R2R: Efficiently Navigating Divergent Reasoning Paths with Small-Large Model Token Routing", '
    "arXiv 2505.21600, thu-nics/R2R"
)


def decode(run: Context, seed: int) -> Generate:
    """Decoding with the seed's router, asked at every token."""
    models, router = run.models, read_router(run.run, run.models, seed, run.compare.recall)
    return partial(r2r, models.slm, models.llm, router.network, threshold=router.threshold, **run.batched)


METHOD = Method(name="r2r", label="R2R", source=SOURCE, decode=decode, seeded=True, routed=True, timed=("plain",))
