"""S2T-Local: the large model's selection distilled into an adapter of the small one; no large model is deployed.

Source: Ye et al., "Select to Think: Unlocking SLM Potential with Local Sufficiency", arXiv 2604.26940, and its software
YeRona/Select-to-Think (scripts/train_s2t_local.py, scripts/evaluate_s2t.py, policy "s2t_local"). Definition: at every
admitted state the selector's favourite among the SLM's `slm_k` likeliest tokens is appended. It is trained on the SLM's
candidates (pool "slm") with the LLM's log-probabilities, in one of two ways:

- matched: as FutureBridge's reranker is, to `fb_core.methods.preferences.preference_target`;
- original: with the loss of `listwise_loss` in its default mode top1_ce, cross-entropy to the LLM's best candidate,
  MARGIN as the hinge against the best other one, and KL_WEIGHT * KL(p_T || softmax(score)), p_T renormalised over the
  candidates. Its first and last term are the cross-entropy to `original_target`, its second is `Recipe(margin=MARGIN)`.

Both have our scalar head on the candidate's hidden state, whose score has no bounds, an adapter on the attention alone,
and a frozen prefix. The software scores by the expected bin, 0 to 1, of reserved tokens' logits: its hinge never rests.
It adapts the MLPs and the reserved rows of the head as well, on the prefix (its last 511 tokens) and in greedy decoding
too; a KL term of weight 0.1 holds the prefix to the base model, which is zero where candidates alone are adapted. It
trains at a constant rate of 5e-5, four groups a step, three epochs. What admits states is as in S2T.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder
from fb_core.llm import LLM, Candidates, Ids
from fb_core.policy import RequestPolicy
from fb_core.reranker import TokenReranker
from fb_core.selectors import FutureBridgeSelector

MARGIN, KL_WEIGHT = 1.0, 0.1  # of the original loss


class NoLLM(LLM):
    """No large model: it proposes nothing, and what it thinks of a token is NaN."""

    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """No candidates, NaN for every one of `score_ids`."""
        unknown = None if score_ids is None else torch.full((len(score_ids),), math.nan)
        return Candidates(torch.empty(0, dtype=torch.int64), torch.empty(0), unknown)

    def complete(self, ids: Ids, max_new_tokens: int) -> Tensor:
        """Raises ValueError: there is nobody to write."""
        raise ValueError("llm: expected one that writes, got NoLLM; pass a LocalLLM or a ServerLLM")


def s2t_local(slm: hf.CausalLM, reranker: TokenReranker, policy: RequestPolicy, **options: Any) -> CollaborativeDecoder:
    """The selector's favourite of the SLM's candidates; `llm_logprob` of its events is NaN.

    Args:
        slm: the small model, in eval mode.
        reranker: made on the SLM without candidate features, trained in either way.
        policy: when to select.
        options: others of `CollaborativeDecoder`, `slm_k` among them.

    Raises:
        TypeError: as `CollaborativeDecoder`.
        ValueError: as `CollaborativeDecoder`, or a reranker with candidate features.
    """
    if reranker.feature_names:
        raise ValueError(
            f"reranker: expected none of the candidate features where no LLM is asked, got "
            f"{', '.join(reranker.feature_names)}; train one without feature_names"
        )
    return CollaborativeDecoder(slm, NoLLM(), FutureBridgeSelector(reranker), policy, pool="slm", **options)


def original_target(llm_logprob: Tensor) -> Tensor:
    """The target of one group whose cross-entropy is that of the original loss, up to a constant.

    -log p(best) + KL_WEIGHT * KL(p_T || p), with p = softmax(score), is the cross-entropy to
    onehot(best) + KL_WEIGHT * p_T less KL_WEIGHT * H(p_T), which no score moves.

    Args:
        llm_logprob: [K] log p_T of the candidates, nats; ties for the best go to the first.

    Returns:
        [K] in the dtype of llm_logprob; its sum is 1 + KL_WEIGHT.

    Raises:
        ValueError: no candidate, another shape, or none with a finite log-probability, or a NaN.
    """
    if llm_logprob.ndim != 1 or not len(llm_logprob) or not bool(llm_logprob.max().isfinite()):
        raise ValueError(
            f"llm_logprob: expected [K] with numbers and at least one finite, got {list(llm_logprob.shape)} "
            f"{llm_logprob.tolist()}; ask the LLM about the SLM's candidates"
        )
    target = KL_WEIGHT * llm_logprob.softmax(0)
    target[llm_logprob.argmax()] += 1.0
    return target
