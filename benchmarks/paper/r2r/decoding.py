"""R2R decodes: the LLM writes the tokens that the router, or an entropy switch, hands to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.paper.r2r.network import R2RRouter, features_of
from fb_core.decode.asking import candidate_pool
from fb_core.decode.decoder import Generation
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy, gate
from fb_core.events import LARGE, Event
from fb_core.llm.local import LLM, Ids
from fb_core.models.facts import CausalLM, Tokenizer, max_positions
from fb_core.models.tokens import check_max_new_tokens, checked_prompts
from fb_core.runtime.plain import Step, Stop, lockstep


def r2r(
    slm: CausalLM,
    llm: LLM | CausalLM,
    router: R2RRouter | None,
    prompts: Sequence[Ids],
    max_new_tokens: int = 4096,
    *,
    threshold: float,
    policy: RequestPolicy | None = None,
    max_events: int | None = None,
    tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None,
    batch_tokens: int = 65536,
) -> list[Generation]:
    """Decode many prompts greedily, routed tokens by the LLM and all others by the SLM.

    The router is asked at every token or, with a policy, only where that would ask the LLM. Without a router the
    entropy is held against the threshold. Reaching it routes.

    Each routed token is an event: its pool has the SLM's token and the LLM's (one entry if they agree), and the LLM's
    is chosen. With a policy an admitted state that the router leaves to the SLM is an event too: its pool has the
    SLM's token alone, its llm_logprob is NaN, and the LLM was not asked.
    """
    pair = Pair(slm, llm, tokenizer)
    large = pair.large()
    check_max_new_tokens(max_new_tokens)
    checked = checked_prompts("prompts", prompts, slm, room=1)
    asks = policy or Switch(threshold if router is None else -math.inf)
    most = math.inf if max_events is None else max_events
    seen: list[Tensor] = []  # the hidden states [B, D] of the step

    def choose(step: Step) -> list[int]:
        logits, hidden = step.logits[:, : pair.vocabulary], seen.pop()
        seen.clear()
        entropy, indices = gate(asks, step, logits, most)
        tokens: list[int] = logits.argmax(-1).tolist()  # the first of equal ones
        if router is not None and indices:
            features = features_of(slm, hidden[indices], logits[indices], router.logits_size)
            routed = (router.probability(features) >= threshold).tolist()
            if policy is not None:
                for index in (index for index, go in zip(indices, routed, strict=True) if not go):
                    step.rows[index].events.append(Event.alone(step.index, entropy[index], logits[index]))
            indices = [index for index, go in zip(indices, routed, strict=True) if go]
        if indices:
            states = [torch.tensor(step.rows[index].tokens) for index in indices]
            pools = candidate_pool(logits[indices], large, states, "joint", 1, 1)
            for index, pool in zip(indices, pools, strict=True):
                event = Event.of(step.index, entropy[index], pool, int((pool.sources & LARGE).argmax()))
                step.rows[index].events.append(event)
                tokens[index] = event.token
        return tokens

    stop = Stop(pair.ends, max_new_tokens, max_positions(slm))
    head = slm.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, -1])):
        rows = lockstep(slm, checked, stop, choose, batch_tokens)
    generations = []
    for row in rows:
        new = torch.tensor(row.new, device=slm.device)
        generations.append(Generation(new, row.events, pair.text(new)))
    return generations


@dataclass(frozen=True)
class Switch(RequestPolicy):
    """Asks where the entropy of the whole distribution reaches the threshold."""

    def entropy(self, logits: Tensor) -> Tensor:
        """Nats [...] over all of logits [..., V]."""
        return torch.special.entr(logits.softmax(-1)).sum(-1)

    def asks(self, entropy: Tensor) -> Tensor:
        """Whether the entropy reaches the threshold; equality asks too."""
        return entropy >= self.threshold
