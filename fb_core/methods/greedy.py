"""SLM greedy: the small model by itself.

Definition: the next token is the argmax of p_S, ties to the lowest id, until the end-of-sequence token or the length
limit. It is a `CollaborativeDecoder` that never asks: the same loops and batches, and ids beyond the tokenizer's never
count.
"""

from __future__ import annotations

import math
from typing import Any

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder
from fb_core.methods import Method
from fb_core.policy import RequestPolicy


def alone(slm: hf.CausalLM, **options: Any) -> CollaborativeDecoder:
    """The decoder that never asks; raises as `CollaborativeDecoder`, whose options it takes."""
    return CollaborativeDecoder(slm, None, None, RequestPolicy(math.inf), max_events=0, **options)


METHOD = Method(
    name="greedy",
    label="Greedy",
    decode=lambda run, _: alone(run.models.slm, **run.options).generate_many,
    timed=("fast", "plain"),
)
