"""SLM greedy: the small model by itself.

Definition: the next token is the argmax of p_S, ties to the lowest id, until the end-of-sequence token or the length
limit. It is a `CollaborativeDecoder` that never asks: the same loops and batches, and ids beyond the tokenizer's never
count.
"""

from __future__ import annotations

from benchmarks.paper.methods import Method

METHOD = Method.named("greedy", timed=("fast", "plain"))
