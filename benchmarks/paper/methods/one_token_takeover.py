"""One-token takeover: at every admitted state the LLM's argmax over the whole vocabulary, whatever the SLM proposes."""

from __future__ import annotations

from benchmarks.paper.methods import Method
from fb_core.decode.selectors import LLMPreference

METHOD = Method(
    name="one-token-takeover",
    label="One-token takeover",
    decode=lambda run, _: run.decoder(LLMPreference(), pool="llm", llm_k=1).generate_many,
    timed=("fast",),
)
