"""SLM greedy: the small model by itself.

Definition: the next token is the argmax of p_S, ties to the lowest id, until the end-of-sequence token or the length
limit. It is a `CollaborativeDecoder` that never asks: the same batches, and ids beyond the tokenizer's never count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder, Generation
from fb_core.llm import Ids
from fb_core.policy import RequestPolicy
from fb_core.selectors import SLMPreference


def greedy(
    slm: hf.CausalLM,
    prompts: Sequence[Ids],
    max_new_tokens: int = 4096,
    *,
    tokenizer: hf.Tokenizer | None = None,
    batch_tokens: int = 65536,
) -> list[Generation]:
    """Decode many prompts by the SLM alone.

    Args:
        slm: the small model, in eval mode.
        prompts: [P] int64 each, of any lengths.
        max_new_tokens: the most tokens of a generation.
        tokenizer: ids beyond it never count, and texts are decoded by it; None for all of the model's ids, no texts.
        batch_tokens: the most tokens, padding and new ones included, that one batch may hold.

    Returns:
        One generation a prompt, in order, without events.

    Raises:
        TypeError: as `CollaborativeDecoder` and its `generate`.
        ValueError: as `CollaborativeDecoder` and its `generate`.
    """
    never, unasked = RequestPolicy(math.inf), slm
    decoder = CollaborativeDecoder(slm, unasked, SLMPreference(), never, tokenizer=tokenizer, batch_tokens=batch_tokens)
    return decoder.generate_many(prompts, max_new_tokens)
