"""A run's result at work: its request policy, its rerankers and the decoders that they are deployed in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fb_core.config import Method, RunSettings
from fb_core.decoding import CollaborativeDecoder
from fb_core.engine import LowLatencyDecoder
from fb_core.llm import LLM
from fb_core.methods.s2t_local import NoLLM
from fb_core.policy import RequestPolicy
from fb_core.reranker import TokenReranker
from fb_core.selectors import FutureBridgeSelector, LLMPreference, Selector, SLMPreference, overridden
from fb_core.stages.artefacts import Artefact
from fb_core.stages.inputs import models_of

POLICY, RERANKER = "policy", "reranker"  # stages
LLM_CHOOSES: dict[Method, str] = {"s2t": "slm", "direct": "joint"}  # from which pool
FAST: tuple[Method, ...] = ("greedy", *LLM_CHOOSES, "futurebridge")  # methods that run on LowLatencyDecoder


def frozen_policy(run: Path) -> RequestPolicy:
    """The request policy of a run; raises ValueError where it is not finished."""
    folder = Artefact(run, POLICY)
    folder.finished()
    return RequestPolicy(**json.loads(folder.read("policy", "jsonl")))


def deployed_digest(run: Path) -> list[str]:
    """What identifies a deployed run: its policy and rerankers; raises ValueError where they are not finished."""
    return [Artefact(run, stage).finished()["digest"] for stage in (POLICY, RERANKER)]


def chosen_reranker(settings: RunSettings, run: Path, seed: int) -> TokenReranker:
    """The reranker that a run chose, of one seed; raises ValueError where it is not finished or damaged."""
    adapters, shard = Artefact(run, RERANKER), f"seed-{seed}"
    if adapters.receipt(shard) is None:
        raise ValueError(f"{adapters.path}: expected {shard}, got none; run `futurebridge train`")
    slm = models_of(settings.models).slm
    return TokenReranker.from_pretrained(adapters.path / shard, slm, scope=settings.train.scope)


def reranker_selector(settings: RunSettings, reranker: TokenReranker) -> Selector:
    """The reranker, or the LLM where it is as certain as the settings want."""
    return overridden(FutureBridgeSelector(reranker), settings.evaluate.certainty)


def needs_llm(settings: RunSettings) -> bool:
    """Whether a deployed reranker makes use of the LLM: not where it ranks the SLM's own candidates by itself."""
    own = settings.score.pool in ("slm", "slm-wide")
    return not own or bool(settings.train.features) or settings.evaluate.certainty is not None


def pool_options(settings: RunSettings) -> dict[str, Any]:
    """`pool`, `slm_k`, `llm_k` and `max_events` of a decoder on the pools that the settings train on."""
    slm_k, llm_k, kind = settings.collect.slm_k, settings.futures.llm_k, settings.score.pool
    return {
        "pool": "slm" if kind == "slm-wide" else kind,
        "slm_k": slm_k + llm_k if kind == "slm-wide" else slm_k,
        "llm_k": llm_k,
        "max_events": settings.evaluate.max_events,
    }


def deployed_decoder(settings: RunSettings, run: Path, reranker: TokenReranker) -> CollaborativeDecoder:
    """The loop with a reranker, as the settings deploy it at the run's policy; it takes many prompts at once."""
    models = models_of(settings.models)
    llm: LLM = models.llm if needs_llm(settings) else NoLLM()
    return CollaborativeDecoder(
        models.slm,
        llm,
        reranker_selector(settings, reranker),
        frozen_policy(run),
        **pool_options(settings),
        tokenizer=models.tokenizer,
        batch_tokens=settings.models.batch_tokens,
    )


def fast_decoder(
    settings: RunSettings, run: Path, method: Method, max_length: int, seed: int | None = None
) -> LowLatencyDecoder:
    """The loop for one prompt at a time of a method of `FAST`; "futurebridge" has the reranker of a seed."""
    models = models_of(settings.models)
    llm, options = models.llm, pool_options(settings)
    policy = RequestPolicy(math.inf) if method == "greedy" else frozen_policy(run)
    selector: Selector
    if method == "greedy":
        selector = SLMPreference()
        options["max_events"] = 0  # the LLM is not kept in step
    elif method in LLM_CHOOSES:
        selector = LLMPreference()
        options |= {"slm_k": settings.collect.slm_k, "pool": LLM_CHOOSES[method]}
    else:
        assert method == "futurebridge", method
        assert seed is not None
        selector = reranker_selector(settings, chosen_reranker(settings, run, seed))
        llm = llm if needs_llm(settings) else NoLLM()
    return LowLatencyDecoder(
        models.slm, llm, selector, policy, max_length=max_length, tokenizer=models.tokenizer, **options
    )
