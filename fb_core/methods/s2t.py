"""S2T: the small model proposes, the large one selects.

Source: Ye et al., "Select to Think: Unlocking SLM Potential with Local Sufficiency", arXiv 2604.26940, and its software
YeRona/Select-to-Think (scripts/evaluate_s2t.py, policy "teacher_rerank"). Definition: at every admitted state, of the
SLM's `slm_k` likeliest tokens the one with the largest p_T is appended, ties to the SLM's order.

Here the request policy admits states, as for every method. The software asks where KL(p_S || p_T) over the SLM's 64
largest is above a quantile, which takes the LLM at every step, or where their entropy is; never within the first three
tokens, and as often as it likes. It collects with 16 candidates and evaluates with 8.
"""

from __future__ import annotations

from typing import Any

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder
from fb_core.llm import LLM
from fb_core.policy import RequestPolicy
from fb_core.selectors import LLMPreference


def s2t(slm: hf.CausalLM, llm: LLM | hf.CausalLM, policy: RequestPolicy, **options: Any) -> CollaborativeDecoder:
    """The LLM's likeliest of the SLM's candidates.

    Args:
        slm: the small model, in eval mode.
        llm: the large one; it is asked about the SLM's candidates alone.
        policy: when to ask.
        options: others of `CollaborativeDecoder`, `slm_k` among them.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`.
    """
    return CollaborativeDecoder(slm, llm, LLMPreference(), policy, pool="slm", **options)
