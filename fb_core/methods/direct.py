"""Direct LLM score: at every admitted state the LLM's likeliest candidate, a token of its own or a span of them.

Definition: of the joint pool the candidate with the largest log p_T is appended. The LLM's argmax is always among them,
so this equals one-token takeover, where the LLM's argmax is appended whatever the SLM proposes; ties go to the lowest
id in both. Where the run's settings let the LLM write on behind it, that is appended, too.
"""

from __future__ import annotations

from fb_core.methods import Method
from fb_core.selectors import LLMPreference

METHOD = Method(
    name="direct",
    label="Direct LLM score",
    decode=lambda run, _: run.decoder(LLMPreference(), pool="joint", span=run.span).generate_many,
    timed=("fast",),
)
