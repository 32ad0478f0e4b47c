"""A run's result at work: its request policy, its rerankers, and what its methods have to decode with."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fb_core.config import RunSettings
from fb_core.decoding import CollaborativeDecoder
from fb_core.methods import Generate, method
from fb_core.policy import RequestPolicy
from fb_core.recipe import Deployed
from fb_core.reranker import TokenReranker
from fb_core.selectors import FutureBridgeSelector, Selector, overridden
from fb_core.stages.artefacts import Artefact
from fb_core.stages.inputs import models_of, span_of, verifier_of

if TYPE_CHECKING:
    from fb_core.spans import Span
    from fb_core.stages.router import Router
    from fb_core.verify import Verifier

POLICY, RERANKER, DEPLOYED_STAGE = "policy", "reranker", "deployed"  # stages
TOGETHER = 64  # prompts that decode at once


def frozen_policy(run: Path) -> RequestPolicy:
    """The request policy of a run; raises ValueError where it is not finished."""
    folder = Artefact(run, POLICY)
    folder.finished()
    return RequestPolicy(**json.loads(folder.read("policy", "jsonl")))


def deployed_digest(run: Path) -> list[str]:
    """What identifies a deployed run: its policy and rerankers; raises ValueError where they are not finished."""
    return [Artefact(run, stage).finished()["digest"] for stage in (POLICY, RERANKER)]


def chosen_digest(run: Path) -> str:
    """What identifies the recipes that a run chose; raises ValueError where it made no choice."""
    digest: str = Artefact(run, DEPLOYED_STAGE).finished()["digest"]
    return digest


def chosen_reranker(settings: RunSettings, run: Path, seed: int) -> TokenReranker:
    """The reranker that a run chose, of one seed; raises ValueError where it is not finished or damaged."""
    adapters, shard = Artefact(run, RERANKER), f"seed-{seed}"
    if adapters.receipt(shard) is None:
        raise ValueError(f"{adapters.path}: expected {shard}, got none; run `futurebridge train`")
    slm = models_of(settings.models).slm
    return TokenReranker.from_pretrained(adapters.path / shard, slm, scope=settings.train.scope)


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


class Context:
    """What a run has for a method; files and models are read when it asks for them.

    Args:
        settings: of the run.
        run: its folder.
        method: the method's name, as it was asked for.
        max_length: decoders run in the fast loop, with room for prompts and answers of so many tokens; None for the
            plain one.
        max_batch: prompts that it runs together.

    Attributes:
        models: the run's `Models`.
        batched: options of all that decodes in batches.
    """

    def __init__(
        self, settings: RunSettings, run: Path, method: str = "", max_length: int | None = None, max_batch: int = 1
    ) -> None:
        self.settings, self.run, self.method = settings, run, method
        self.models = models_of(settings.models)
        self.batched = {"tokenizer": self.models.tokenizer, "batch_tokens": settings.models.batch_tokens}
        self.options: dict[str, Any] = {**self.batched, "max_length": max_length, "max_batch": max_batch}

    @cached_property
    def policy(self) -> RequestPolicy:
        """When the LLM is asked."""
        return frozen_policy(self.run)

    @property
    def span(self) -> Span:
        """How much the LLM offers at an event."""
        return span_of(self.settings.futures.span, self.models.tokenizer)

    @property
    def verifier(self) -> Verifier:
        """Judges answers."""
        return verifier_of(self.settings.verify)

    def reranker(self, seed: int) -> TokenReranker:
        """The chosen one of a seed."""
        return chosen_reranker(self.settings, self.run, seed)

    def router(self, seed: int) -> Router:
        """The trained one of a seed."""
        from fb_core.stages.router import read_router

        return read_router(self.settings, self.run, seed)

    def decoder(self, selector: Selector, *, ask: bool = True, **options: Any) -> CollaborativeDecoder:
        """The run's models, policy, candidates and budget under a selector; without an LLM unless it is to be asked."""
        settings, llm = self.settings, self.models.llm if ask else None
        given: dict[str, Any] = {
            "slm_k": settings.collect.slm_k,
            "llm_k": settings.futures.llm_k,
            "max_events": settings.evaluate.max_events,
        }
        return CollaborativeDecoder(self.models.slm, llm, selector, self.policy, **self.options, **(given | options))

    def by_recipe(self, deployed: Deployed, reranker: TokenReranker | None) -> CollaborativeDecoder:
        """The decoder by a recipe, with the reranker of its scores where one decides."""
        models, selector = self.models, deployed.recipe.selector(reranker, deployed.value)
        if selector is None:
            return CollaborativeDecoder(models.slm, None, None, deployed.policy, **self.options, max_events=0)
        return CollaborativeDecoder(
            models.slm, models.llm, selector, deployed.policy, **self.options, **deployed.options
        )

    def chosen(self, seed: int) -> CollaborativeDecoder:
        """The decoder by the recipe that the run chose for its reranker of a seed.

        Raises:
            ValueError: the run made no choice.
        """
        adapters, shard = Artefact(self.run, DEPLOYED_STAGE), f"seed-{seed}"
        if adapters.receipt(shard) is None:
            raise ValueError(
                f"{adapters.path}: expected {shard}, got none; set problems.certification and run `futurebridge train`"
            )
        deployed = Deployed.load(adapters.path / shard)
        assert deployed is not None
        reranker = None
        if deployed.recipe.trained:
            scope = self.settings.train.scope
            reranker = TokenReranker.from_pretrained(adapters.path / shard, self.models.slm, scope=scope).eval()
        return self.by_recipe(deployed, reranker)

    def deployed(self, reranker: TokenReranker) -> CollaborativeDecoder:
        """The decoder with a reranker, as the settings deploy it: under the LLM where that is certain enough."""
        selector = overridden(FutureBridgeSelector(reranker), self.settings.evaluate.certainty)
        return self.decoder(selector, ask=needs_llm(self.settings), span=self.span, **pool_options(self.settings))


def generator(
    name: str,
    settings: RunSettings,
    run: Path,
    seed: int | None,
    max_length: int | None = None,
    max_batch: int = 1,
) -> Generate:
    """What decodes prompts by a method.

    Args:
        name: of the method, or a checkpoint's behind `fb_core.methods.EXTERNAL`.
        settings: of the run.
        run: its folder.
        seed: of a method that runs once a seed.
        max_length: as for `Context`.
        max_batch: likewise.

    Raises:
        ValueError: a reranker or router that is not trained; a checkpoint that is not there, or has another tokenizer.
    """
    return method(name).decode(Context(settings, run, name, max_length, max_batch), seed)


def together_of(settings: RunSettings, length: int) -> int:
    """How many prompts decode at once, each with its answer of so many tokens at most."""
    return max(1, min(TOGETHER, settings.models.batch_tokens // length))


def seed_of(name: str, settings: RunSettings) -> int | None:
    """The run's first seed where a method runs once a seed."""
    return settings.train.seeds[0] if method(name).seeded else None


def label_of(name: str, settings: RunSettings) -> str:
    """What a method is called in tables."""
    return method(name).label.format(name=name, votes=settings.compare.votes)
