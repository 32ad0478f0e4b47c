"""R2R decodes: the LLM writes the tokens that the router, or an entropy switch, hands to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.paper.r2r.network import R2RRouter, features_of
from fb_core._util import check_count
from fb_core.decode.asking import candidate_pool
from fb_core.decode.decoder import Generation
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy, gate
from fb_core.events import LARGE, Event
from fb_core.llm.local import LLM, Ids
from fb_core.models.facts import CausalLM, Tokenizer, fingerprint, max_positions
from fb_core.models.tokens import check_max_new_tokens, checked_prompts
from fb_core.runtime.plain import Step, Stop, lockstep

Mode = Literal["token", "events", "entropy"]


def r2r(
    slm: CausalLM,
    llm: LLM | CausalLM,
    router: R2RRouter | None,
    prompts: Sequence[Ids],
    max_new_tokens: int = 4096,
    *,
    threshold: float,
    mode: Mode = "token",
    policy: RequestPolicy | None = None,
    max_events: int | None = None,
    tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None,
    batch_tokens: int = 65536,
) -> list[Generation]:
    """Decode many prompts greedily, routed tokens by the LLM and all others by the SLM.

    Args:
        slm: the small model, in eval mode, used by one thread at a time.
        llm: the large one.
        router: trained for this SLM, in eval mode; None in mode "entropy".
        prompts: [P] int64 each, of any lengths.
        max_new_tokens: maximum tokens of a generation.
        threshold: of the router's probability, or of the entropy in nats in mode "entropy"; reaching it routes.
        mode: "token" asks the router at every token; "events" only where the policy would ask the LLM; "entropy" is the
            switch without a router.
        policy: for mode "events" only.
        max_events: maximum events of a generation, after which the SLM decodes alone; None for no limit.
        tokenizer: as in `CollaborativeDecoder`.
        batch_tokens: maximum tokens of one batch, padding and new ones included.

    Returns:
        One generation per prompt, in order. Each routed token is an event: its pool has the SLM's token and the LLM's
        (one entry if they agree), and the LLM's is chosen. In mode "events" an admitted state that the router leaves to
        the SLM is an event too: its pool has the SLM's token alone, its llm_logprob is NaN, and the LLM was not asked.

    Raises:
        TypeError: as `CollaborativeDecoder`, or a router that is not an R2RRouter.
        ValueError: as `CollaborativeDecoder` and its `generate`, an unknown mode, a policy without its mode or the
            reverse, a router of another SLM or in training mode, or a NaN threshold.
        OSError: the LLM did not answer.
    """
    if mode not in ("token", "events", "entropy"):
        raise ValueError(f"mode: expected 'token', 'events' or 'entropy', got {mode!r}; 'token' is the method's own")
    if (policy is not None) != (mode == "events"):
        raise ValueError(
            f"policy: expected one in mode 'events' only, got {policy} in mode {mode!r}; add or drop the policy"
        )
    if not isinstance(threshold, int | float) or math.isnan(threshold):
        raise ValueError(f"threshold: expected a number, got {threshold!r}; use inf to never route")
    pair = Pair(slm, llm, tokenizer)
    large = pair.large()
    check_count("max_events", 0 if max_events is None else max_events, 0)
    check_count("batch_tokens", batch_tokens, 1)
    _check_router(router, mode, slm)
    check_max_new_tokens(max_new_tokens)
    checked = checked_prompts("prompts", prompts, slm, room=1)
    asks = policy or Switch(threshold if mode == "entropy" else -math.inf)
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


def _check_router(router: R2RRouter | None, mode: Mode, slm: CausalLM) -> None:
    if mode == "entropy":
        if router is not None:
            raise ValueError("router: expected None in mode 'entropy', got a router; drop it or use another mode")
        return
    if not isinstance(router, R2RRouter):
        raise TypeError(f"router: expected an R2RRouter in mode {mode!r}, got {type(router).__name__}; train one first")
    if router.training:
        raise ValueError("router: expected it in eval mode, got training mode; call .eval() first")
    if router.projection.weight.device != slm.device:
        raise ValueError(
            f"router: expected it on the SLM's device {slm.device}, got {router.projection.weight.device}; move it "
            f"with .to('{slm.device}')"
        )
    if router.base != fingerprint(slm):
        raise ValueError(
            f"router: expected one made for this SLM, got one for other weights than this {type(slm).__name__}'s; "
            "train one on its features"
        )
