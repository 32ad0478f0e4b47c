"""Direct LLM score: at every admitted state the LLM's likeliest candidate, which is one token of its own.

Definition: of the joint pool the candidate with the largest log p_T is appended. The LLM's argmax is always among them,
so this equals one-token takeover, where the LLM's argmax is appended whatever the SLM proposes; ties go to the lowest
id in both.
"""

from __future__ import annotations

from fb_core.methods import Method
from fb_core.selectors import LLMPreference

METHOD = Method(
    name="direct",
    label="Direct LLM score",
    decode=lambda run, _: run.decoder(LLMPreference(), pool="joint").generate_many,
    timed=("fast",),
)
