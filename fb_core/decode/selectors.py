"""What picks one candidate of a pool: the models' own preferences, chance, the reranker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fb_core.events import Pool
from fb_core.models.facts import CausalLM, empty_cache, fingerprint
from fb_core.models.packed import Prefix, cached_prefix, check_packed_forward
from fb_core.rerank.merged_reranker import MergedReranker
from fb_core.rerank.reranker import TokenReranker
from fb_core.rerank.value_head import ValueHead
from fb_core.runtime.paged_model import PagedModel
from fb_core.runtime.plain import last_logits
from fb_core.runtime.sampling import seeded


@dataclass(frozen=True, eq=False)
class State:
    """The point in a sequence where a token is to be chosen."""

    tokens: Tensor  # [P] int64, prompt and prefix
    step: int  # number of tokens generated so far
    entropy: float  # nats
    prefix: Prefix | None = None  # the frozen SLM's KV of exactly these tokens: views, valid until the next step


class Selector(ABC):
    """Picks one candidate of a pool."""

    def check_slm(self, slm: CausalLM) -> None:  # noqa: B027
        """Called when a decoder is made. Raises ValueError if the selector was made for another small model."""

    @abstractmethod
    def choose(self, state: State, pool: Pool) -> int:
        """The index of the candidate to append."""

    def choose_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[tuple[int, Tensor | None]]:
        """(index, scores[K] or None) for every state; the index is that of `choose`."""
        return [(self.choose(state, pool), None) for state, pool in zip(states, pools, strict=True)]


class ScoringSelector(Selector):
    """Picks the candidate with the highest score, ties to the first in the pool."""

    @abstractmethod
    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        """float32 [K] for every pool; higher is better."""

    def best(self, scores: Tensor, pool: Pool) -> Tensor:
        """The index of the highest score."""
        return scores.argmax()

    def choose(self, state: State, pool: Pool) -> int:
        """The index of the highest score."""
        return self.choose_many([state], [pool])[0][0]

    def choose_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[tuple[int, Tensor | None]]:
        """(index of the highest score, scores) for every state; ValueError for a NaN score."""
        scores = self.scores_many(states, pools)
        if not scores:
            return []
        read = torch.stack(
            [x for s, pool in zip(scores, pools, strict=True) for x in (self.best(s, pool), s.isnan().any())]
        )
        best, wrong = read.view(-1, 2).T.tolist()  # one read for all
        if any(wrong):
            raise ValueError(
                f"{type(self).__name__}: expected scores that are numbers, got {scores[wrong.index(1)].tolist()}; "
                "check its model"
            )
        return list(zip(best, scores, strict=True))


class LLMPreference(ScoringSelector):
    """The LLM's likeliest candidate, ties to the lowest id: its argmax on the joint pool, "S2T" on the SLM's pool."""

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        """The candidates' log p_T."""
        return [pool.llm_logprob for pool in pools]

    def best(self, scores: Tensor, pool: Pool) -> Tensor:
        """The index of the highest score, ties to the lowest id, as the LLM itself breaks them."""
        return pool.ids.where(scores == scores.max(), pool.ids.max() + 1).argmin()


class SLMPreference(ScoringSelector):
    """The SLM's most likely candidate: plain greedy decoding wherever the pool holds the SLM's token."""

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        """The candidates' log p_S."""
        return [pool.slm_logprob for pool in pools]


class RandomChoice(Selector):
    """A uniformly random candidate: a function of the seed and the state's tokens alone, independent of the batch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def choose(self, state: State, pool: Pool) -> int:
        """The same index for the same seed and tokens."""
        return seeded(self.seed, state.tokens.tolist()).randrange(len(pool))


def _check_kind(name: str, given: object, kind: type, remedy: str) -> None:
    """TypeError if a selector is made of something else."""
    if not isinstance(given, kind):
        raise TypeError(f"{name}: expected type {kind.__name__}, got {type(given).__name__}; pass {remedy}")


class ValueSelector(ScoringSelector):
    """The candidate of the highest worth, according to a head that was fitted to rollouts on the selector's scores."""

    def __init__(self, selector: ScoringSelector, head: ValueHead) -> None:
        _check_kind("selector", selector, ScoringSelector, "one such as FutureBridgeSelector(reranker)")
        _check_kind("head", head, ValueHead, "one from fit_value")
        self.selector = selector
        self.head = head

    def check_slm(self, slm: CausalLM) -> None:
        """As the other selector's."""
        self.selector.check_slm(slm)

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        """What the candidates are worth."""
        base = self.selector.scores_many(states, pools)
        return [self.head(pool, scores, state.entropy) for state, pool, scores in zip(states, pools, base, strict=True)]


class FutureBridgeSelector(ScoringSelector):
    """The candidate from which the reranker expects the SLM to continue best.

    The reranker is made on the decoder's own SLM. In scope "candidate" it reads the decoder's cache; all states of a
    step are scored in one forward.
    """

    def __init__(self, reranker: TokenReranker) -> None:
        if not hasattr(reranker, "scores_many"):
            raise TypeError(
                f"reranker: expected type TokenReranker, got {type(reranker).__name__}; pass one from from_pretrained"
            )
        self.reranker = reranker

    def check_slm(self, slm: CausalLM) -> None:
        """ValueError if the reranker was made on a model with other weights, or cannot read this one's cache."""
        base = self.reranker.base
        if base is not slm and fingerprint(base) != fingerprint(slm):
            raise ValueError(
                f"selector: expected a reranker made on the decoder's own SLM, got one made on a {type(base).__name__} "
                "with other weights or architecture; make or load it on this SLM"
            )
        if self.reranker.scope == "candidate":
            if base is not slm:
                check_packed_forward(slm)
            cache = empty_cache(slm)
            last_logits(slm, torch.zeros(1, 2, dtype=torch.int64, device=slm.device), cache=cache)
            cached_prefix(cache, slm, 2)

    @torch.no_grad()
    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        """The reranker's scores; ValueError if it is in training mode."""
        if not states:
            return []
        if self.reranker.training:
            raise ValueError("reranker: expected it in eval mode, got training mode; call .eval() first")
        return self._scores(states, pools)

    def _scores(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        reranker = self.reranker
        prefixes = [state.prefix for state in states if state.prefix is not None]
        if reranker.scope == "candidate" and len(prefixes) == len(states):
            return reranker.scores_many(prefixes, [pool.ids for pool in pools])
        return [reranker.scores(state.tokens, pool.ids) for state, pool in zip(states, pools, strict=True)]


class MergedSelector(FutureBridgeSelector):
    """A `FutureBridgeSelector` whose `MergedReranker` runs over the decoder's own buffers."""

    def __init__(self, reranker: TokenReranker, model: PagedModel) -> None:
        super().__init__(reranker)
        self.merged_reranker = MergedReranker(reranker, model)

    def _scores(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        prefixes = [state.prefix for state in states if state.prefix is not None]
        return self.merged_reranker.scores_many(prefixes, [pool.ids for pool in pools])
