"""Direct LLM score: at every admitted state the LLM's likeliest candidate.

Definition: the candidate of the joint pool with the largest log p_T is appended. The LLM's argmax is always in the
pool, so this equals one-token takeover, which appends the LLM's argmax whatever the SLM proposes; ties go to the lowest
id in both.
"""

from __future__ import annotations

from benchmarks.paper.methods import Method

METHOD = Method.named("direct", timed=("fast",))
