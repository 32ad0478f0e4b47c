"""SLM preference: at every admitted state the candidate of the joint pool with the largest log p_S.

The SLM's own token is in the pool, so this is greedy decoding; what the LLM answers is not used.
"""

from __future__ import annotations

from benchmarks.paper.methods import Method
from fb_core.decode.selectors import SLMPreference

METHOD = Method(
    name="slm-preference",
    label="SLM preference",
    decode=lambda run, _: run.decoder(SLMPreference(), pool="joint").generate_many,
    timed=("fast",),
)
