"""Direct LLM score: at every admitted state the LLM's likeliest candidate, which is one token of its own.

Definition: of the joint pool the candidate with the largest log p_T is appended. The LLM's argmax is always among them,
so this equals one-token takeover, where the LLM's argmax is appended whatever the SLM proposes. They may differ only
where candidates tie exactly for the largest log p_T: here the first in the pool wins, there the lowest id.
"""

from __future__ import annotations

from typing import Any

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder
from fb_core.llm import LLM
from fb_core.policy import RequestPolicy
from fb_core.selectors import LLMPreference


def direct(slm: hf.CausalLM, llm: LLM | hf.CausalLM, policy: RequestPolicy, **options: Any) -> CollaborativeDecoder:
    """The LLM's likeliest candidate of the joint pool.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        policy: when to ask.
        options: others of `CollaborativeDecoder`.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`.
    """
    return CollaborativeDecoder(slm, llm, LLMPreference(), policy, pool="joint", **options)


def one_token_takeover(
    slm: hf.CausalLM, llm: LLM | hf.CausalLM, policy: RequestPolicy, **options: Any
) -> CollaborativeDecoder:
    """The LLM's argmax over the whole vocabulary.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        policy: when to ask.
        options: others of `CollaborativeDecoder`.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`.
    """
    return CollaborativeDecoder(slm, llm, LLMPreference(), policy, pool="llm", llm_k=1, **options)
