"""Other ways to choose from the same pool: the SLM's preference, chance, and the LLM's preference distilled.

Definitions, at every admitted state:

- SLM preference: the candidate with the largest log p_S. Where the SLM's own token is in the pool this is greedy
  decoding; on pool "llm" it is the SLM's favourite among the LLM's proposals.
- random choice: each candidate with the same probability, drawn from the seed and the tokens so far.
- distilled LLM preference: what FutureBridge's reranker says that was trained as FutureBridge's, but to
  `preference_target` of the joint pool: alpha = 0 of the hybrid target, the LLM's local preference without any future.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder
from fb_core.llm import LLM
from fb_core.policy import RequestPolicy
from fb_core.reranker import TokenReranker
from fb_core.selectors import FutureBridgeSelector, RandomChoice, SLMPreference
from fb_core.targets import group_targets


def slm_preference(
    slm: hf.CausalLM, llm: LLM | hf.CausalLM, policy: RequestPolicy, **options: Any
) -> CollaborativeDecoder:
    """The SLM's likeliest candidate.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        policy: when to ask.
        options: others of `CollaborativeDecoder`.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`.
    """
    return CollaborativeDecoder(slm, llm, SLMPreference(), policy, **options)


def random_choice(
    slm: hf.CausalLM, llm: LLM | hf.CausalLM, policy: RequestPolicy, *, seed: int, **options: Any
) -> CollaborativeDecoder:
    """A uniformly random candidate, the same for the same seed and tokens.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        policy: when to ask.
        seed: another seed, another draw.
        options: others of `CollaborativeDecoder`.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`.
    """
    return CollaborativeDecoder(slm, llm, RandomChoice(seed), policy, **options)


def distilled_preference(
    slm: hf.CausalLM, llm: LLM | hf.CausalLM, reranker: TokenReranker, policy: RequestPolicy, **options: Any
) -> CollaborativeDecoder:
    """The candidate of the joint pool that the reranker, trained to the LLM's preference, scores highest.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        reranker: made on the SLM and trained to `preference_target`.
        policy: when to ask.
        options: others of `CollaborativeDecoder`.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`.
    """
    return CollaborativeDecoder(slm, llm, FutureBridgeSelector(reranker), policy, pool="joint", **options)


def preference_target(llm_logprob: Tensor, temperature: float = 0.5) -> Tensor:
    """The soft target of one group that looks at the LLM alone: `group_targets` with alpha = 0.

    Args:
        llm_logprob: [K] log p_T of the candidates, nats.
        temperature: of the softmax over standardised log-probabilities.

    Returns:
        float32 [K] (float64 for float64 input).

    Raises:
        ValueError: as `group_targets`.
    """
    no_future = llm_logprob.new_zeros(len(llm_logprob), 1)
    return group_targets([no_future], [1], temperature=temperature, local=[llm_logprob], alpha=0.0)[1][0][:, 0]
