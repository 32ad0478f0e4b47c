"""Decoding with a finished run: its request policy, its rerankers, and the decoders of its methods."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from fb_core import hf
from fb_core.config import RunSettings
from fb_core.decoding import CollaborativeDecoder, Generation
from fb_core.policy import RequestPolicy
from fb_core.recipe import Deployed
from fb_core.reranker import TokenReranker
from fb_core.selectors import FutureBridgeSelector, LLMPreference, Selector
from fb_core.stages.artefacts import Artefact
from fb_core.stages.inputs import models_of

POLICY, RERANKER, DEPLOYED_STAGE = "policy", "reranker", "deployed"  # names of stages
TOGETHER = 64  # most prompts decoded at once
LABELS = {
    "greedy": "Greedy",
    "s2t": "S2T",
    "direct": "Direct LLM score",
    "futurebridge": "FutureBridge",
    "deployed": "FutureBridge, as deployed",
}

Generate: TypeAlias = Callable[[Sequence[Tensor], int], Sequence[Generation]]
"""From prompts and max_new_tokens to one generation a prompt."""


def frozen_policy(run: Path) -> RequestPolicy:
    """The request policy of a run; raises ValueError if that stage is not finished."""
    folder = Artefact(run, POLICY)
    folder.finished()
    return RequestPolicy(**json.loads(folder.read("policy", "jsonl")))


def deployed_digest(run: Path) -> list[str]:
    """Digests of a run's policy and rerankers; raises ValueError if those stages are not finished."""
    return [Artefact(run, stage).finished()["digest"] for stage in (POLICY, RERANKER)]


def chosen_digest(run: Path) -> str:
    """The digest of the recipes that a run chose; raises ValueError if it chose none."""
    digest: str = Artefact(run, DEPLOYED_STAGE).finished()["digest"]
    return digest


def chosen_reranker(settings: RunSettings, run: Path, seed: int) -> TokenReranker:
    """The chosen reranker of one seed; raises ValueError if it is not finished or is damaged."""
    adapters, shard = Artefact(run, RERANKER), f"seed-{seed}"
    if adapters.receipt(shard) is None:
        raise ValueError(f"{adapters.path}: expected {shard}, got none; run `futurebridge train`")
    slm = models_of(settings.models).slm
    return TokenReranker.from_pretrained(adapters.path / shard, slm, scope=settings.train.scope)


def needs_llm(settings: RunSettings) -> bool:
    """Whether a deployed reranker uses the LLM; it does not if it ranks only the SLM's candidates."""
    return settings.score.pool not in ("slm", "slm-wide")


def pool_options(settings: RunSettings) -> dict[str, Any]:
    """`pool`, `slm_k`, `llm_k` and `max_events` of a decoder with the pools that the settings train on."""
    slm_k, llm_k, kind = settings.collect.slm_k, settings.futures.llm_k, settings.score.pool
    return {
        "pool": "slm" if kind == "slm-wide" else kind,
        "slm_k": slm_k + llm_k if kind == "slm-wide" else slm_k,
        "llm_k": llm_k,
        "max_events": settings.evaluate.max_events,
    }


class Context:
    """What a run offers a method; files and models are read when the method asks for them.

    Args:
        settings: of the run.
        run: its folder.
        max_length: tokens of a prompt and its answer in the fast loop; None for the plain loop.
        max_batch: prompts that the fast loop decodes together.

    Attributes:
        models: the run's `Models`.
        batched: options of everything that decodes in batches.
        options: options of a decoder.
    """

    def __init__(self, settings: RunSettings, run: Path, max_length: int | None = None, max_batch: int = 1) -> None:
        self.settings, self.run = settings, run
        self.models = models_of(settings.models)
        self.batched = {"tokenizer": self.models.tokenizer, "batch_tokens": settings.models.batch_tokens}
        self.options: dict[str, Any] = {**self.batched, "max_length": max_length, "max_batch": max_batch}

    @cached_property
    def policy(self) -> RequestPolicy:
        """When the LLM is asked."""
        return frozen_policy(self.run)

    def reranker(self, seed: int) -> TokenReranker:
        """The chosen reranker of a seed."""
        return chosen_reranker(self.settings, self.run, seed)

    def decoder(self, selector: Selector, *, ask: bool = True, **options: Any) -> CollaborativeDecoder:
        """A decoder with the run's models, policy, pool sizes and budget, and a selector; with `ask=False` no LLM."""
        settings, llm = self.settings, self.models.llm if ask else None
        given: dict[str, Any] = {
            "slm_k": settings.collect.slm_k,
            "llm_k": settings.futures.llm_k,
            "max_events": settings.evaluate.max_events,
        }
        return CollaborativeDecoder(self.models.slm, llm, selector, self.policy, **self.options, **(given | options))

    def named(self, name: str, seed: int | None) -> CollaborativeDecoder:
        """The decoder of one of `LABELS`, the seed being that of its reranker, if it has one.

        Raises:
            ValueError: the reranker is not trained.
        """
        if name == "greedy":
            return alone(self.models.slm, **self.options)
        if name in ("direct", "s2t"):
            return self.decoder(LLMPreference(), pool="joint" if name == "direct" else "slm")
        assert seed is not None
        return self.chosen_decoder(seed) if name == "deployed" else self.reranking_decoder(self.reranker(seed))

    def decoder_for(self, deployed: Deployed, reranker: TokenReranker | None) -> CollaborativeDecoder:
        """The decoder of a recipe; "published" and "value" need the reranker."""
        models, selector = self.models, deployed.selector(reranker)
        if selector is None:
            return CollaborativeDecoder(models.slm, None, None, deployed.policy, **self.options, max_events=0)
        return CollaborativeDecoder(
            models.slm, models.llm, selector, deployed.policy, **self.options, **deployed.options
        )

    def chosen_decoder(self, seed: int) -> CollaborativeDecoder:
        """The decoder of the recipe that the run chose for a seed.

        Raises:
            ValueError: the run chose no recipe.
        """
        adapters, shard = Artefact(self.run, DEPLOYED_STAGE), f"seed-{seed}"
        if adapters.receipt(shard) is None:
            raise ValueError(
                f"{adapters.path}: expected {shard}, got none; set problems.certification and run `futurebridge train`"
            )
        deployed = Deployed.load(adapters.path / shard)
        assert deployed is not None
        scope = self.settings.train.scope
        reranker = TokenReranker.from_pretrained(adapters.path / shard, self.models.slm, scope=scope).eval()
        return self.decoder_for(deployed, reranker)

    def reranking_decoder(self, reranker: TokenReranker) -> CollaborativeDecoder:
        """The decoder with a reranker, as published."""
        ask = needs_llm(self.settings)
        return self.decoder(FutureBridgeSelector(reranker), ask=ask, **pool_options(self.settings))


def alone(slm: hf.CausalLM, **options: Any) -> CollaborativeDecoder:
    """The decoder that never asks; raises as `CollaborativeDecoder`, whose options it takes."""
    return CollaborativeDecoder(slm, None, None, RequestPolicy(math.inf), max_events=0, **options)


def together_of(settings: RunSettings, length: int) -> int:
    """How many prompts to decode at once, if a prompt with its answer has at most `length` tokens."""
    return max(1, min(TOGETHER, settings.models.batch_tokens // length))
