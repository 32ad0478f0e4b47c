"""S2T: the small model proposes, the large one selects.

Definition (scripts/evaluate_s2t.py, policy "teacher_rerank"): at every admitted state, the one of the SLM's `slm_k`
likeliest tokens with the largest p_T is appended, ties to the lowest id.

Here the request policy admits states, as for every method. The software asks where KL(p_S || p_T) over the SLM's 64
largest is above a quantile, which needs the LLM at every step, or where their entropy is above one. It never asks
within the first three tokens, and has no event budget. It collects with 16 candidates and evaluates with 8.

S2T-Local, the same selection distilled into the SLM, is FutureBridge's own reranker on the SLM's pool with another
target and loss: `benchmarks.paper.s2t_local`.
"""

from __future__ import annotations

from benchmarks.paper.methods import Method

METHOD = Method.named(
    "s2t",
    source='Ye et al., "Select to Think: Unlocking SLM Potential with Local Sufficiency", arXiv 2604.26940, '
    "YeRona/Select-to-Think",
    timed=("fast",),
)
