"""A pair, its selector and its policy from the settings of a command."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from fb_core.apps.demo import checkpoint
from fb_core.apps.settings.pair import PairSettings
from fb_core.decode.deployment import deployment_of, thinking_of
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import Selector
from fb_core.llm.local import LLM
from fb_core.llm.remote import ServerLLM, key_in
from fb_core.models.checkpoints import load_model
from fb_core.models.facts import CausalLM, Tokenizer, known_ids

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """All that a decoder or an engine is made from."""

    pair: Pair
    tokenizer: Tokenizer
    selector: Selector | None
    policy: RequestPolicy
    options: dict[str, Any]  # of a decoder or an engine
    thinking: bool  # of a chat's answers


def load(settings: PairSettings) -> Loaded:
    """Read models, tokenizers and adapter.

    ValueError for models or settings that do not fit together, OSError if a model, adapter or server is not there.
    """
    slm, tokenizer = load_model(checkpoint(settings.slm, "slm"), settings.device, settings.dtype)
    overrides = settings.model_dump(include={"recipe", "threshold", "max_events"})
    deployment = deployment_of(settings.adapter, slm, **overrides)
    thinking = thinking_of(settings.adapter) if settings.thinking is None else settings.thinking
    if deployment.selector is None:
        log.warning(
            "%s: training chose greedy decoding, so the small model answers alone: %s is neither loaded nor asked; "
            "set recipe to published to decode with the reranker",
            *(settings.adapter, settings.llm or settings.server),
        )
        return Loaded(Pair(slm, None, tokenizer), tokenizer, *deployment, thinking)
    llm, other = _llm(settings, tokenizer)
    return Loaded(Pair(slm, llm, (tokenizer, other)), tokenizer, *deployment, thinking)


def _llm(settings: PairSettings, tokenizer: Tokenizer) -> tuple[LLM | CausalLM, Tokenizer]:
    if settings.server is None:
        assert settings.llm is not None
        return load_model(checkpoint(settings.llm, "llm"), settings.device, settings.dtype)
    server = ServerLLM(
        settings.server,
        settings.flavour,
        model=settings.llm,
        vocabulary=known_ids(tokenizer),
        api_key=key_in(settings.api_key_variable),
    )
    server.check_tokenizer(tokenizer)
    return server, tokenizer
