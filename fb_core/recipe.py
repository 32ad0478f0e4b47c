"""The recipe that decides at events: chosen by training on evidence, saved with the adapter, loaded to decode."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fb_core import hf
from fb_core.policy import AskHead, RequestPolicy
from fb_core.pool import PoolKind
from fb_core.reranker import DESCRIPTION, TokenReranker, read_description, replace_file
from fb_core.selectors import (
    FutureBridgeSelector,
    LLMPreference,
    ScoringSelector,
    Selector,
    SLMPreference,
    ValueSelector,
    overridden,
)
from fb_core.value import Form, ValueHead

Trained = Literal["features", "calibrated", "calibrated-features"]
Wanted = Literal["chosen", "published"]
THRESHOLD = 1.0  # nats, if no other is given and there is no adapter
PUBLISHED = "published"  # folder of the published recipe's adapter, inside that of another one
ASK, WEIGHT = "ask.safetensors", "weight"
LARGEST = (1 << 31) - 1
_FROZEN = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Recipe(BaseModel):
    """How a pair decides at an event, and whether it asks at all.

    Attributes:
        scores: what ranks the candidates: "slm" log p_S, "llm" log p_T (the direct LLM score), "own" the run's own
            reranker, as published; the others are rerankers with candidate features or a calibrated target.
        value: the head that turns scores into worth; None for the scores themselves.
        certainty: the LLM's token is taken if its probability is above this; None for never.
        ask: whether the LLM is asked only where the SLM's state predicts that it is worth it.
    """

    model_config = _FROZEN

    scores: Literal["slm", "llm", "own", "features", "calibrated", "calibrated-features"] = "own"
    value: Form | None = None
    certainty: float | None = Field(default=None, ge=0, le=1)
    ask: bool = False

    @property
    def greedy(self) -> bool:
        """Whether it is the SLM alone, which never asks the LLM."""
        return self.scores == "slm" and self.value is None and self.certainty is None

    @property
    def trained(self) -> bool:
        """Whether a reranker decides."""
        return self.scores not in ("slm", "llm")

    @property
    def plain(self) -> bool:
        """Whether the run's own reranker decides, without heads; the LLM may still override it."""
        return self.scores == "own" and self.value is None and not self.ask

    @property
    def label(self) -> str:
        """The recipe in words; no two recipes have the same."""
        if self.greedy:
            return "SLM greedy"
        words = [{"slm": "SLM's token", "llm": "direct LLM score", "own": "plain"}.get(self.scores, self.scores)]
        words += [] if self.value is None else [{"gate": "gate", "listwise": "listwise value"}[self.value]]
        words += [] if self.certainty is None else [f"override {self.certainty:g}"]
        return " + ".join([*words, *(["ask gate"] if self.ask else [])])

    def selector(self, reranker: TokenReranker | None = None, value: ValueHead | None = None) -> Selector | None:
        """The selector; None for the recipe that never asks.

        Args:
            reranker: the one whose scores the recipe uses, if it uses one.
            value: the recipe's head, if it has one.
        """
        if self.greedy:
            return None
        scoring: ScoringSelector = LLMPreference() if self.scores == "llm" else SLMPreference()
        if self.trained:
            assert reranker is not None
            scoring = FutureBridgeSelector(reranker)
        if self.value is not None:
            assert value is not None
            scoring = ValueSelector(scoring, value)
        return overridden(scoring, self.certainty)


GREEDY, DIRECT = Recipe(scores="slm"), Recipe(scores="llm")


class Difference(BaseModel):
    """A mean paired difference in accuracy, and its lower bound at the level of the test."""

    model_config = _FROZEN

    mean: float
    low: float


class Evidence(BaseModel):
    """The evidence that a recipe was chosen on.

    Attributes:
        problems: number of certification problems, not used for anything before.
        delta: how far below greedy decoding and the direct LLM score it may be, as a share of the problems.
        level: 1 minus the largest probability that any recipe that is worse than that passes its test, per adapter.
        tests: number of recipes among which that error was divided.
        accuracy: on these problems.
        minus_greedy: paired difference to the SLM alone; its bound uses the error divided by `tests`.
        minus_direct: paired difference to the direct LLM score, likewise.
        calls: of the LLM, per problem.
        llm_tokens: that the LLM chose or wrote, per problem.
        words: why it was chosen, in a sentence.
    """

    model_config = _FROZEN

    problems: int
    delta: float
    level: float
    tests: int
    accuracy: float
    minus_greedy: Difference
    minus_direct: Difference
    calls: float
    llm_tokens: float
    words: str


class _Pools(BaseModel):
    """The pool options of `CollaborativeDecoder`."""

    model_config = _FROZEN

    pool: PoolKind
    slm_k: int = Field(ge=1, le=LARGEST)
    llm_k: int = Field(ge=1, le=LARGEST)
    max_events: int = Field(ge=0, le=LARGEST)


class _Ask(BaseModel):
    model_config = _FROZEN

    entropy_weight: float
    bias: float
    least: float


class _Stored(BaseModel):
    """A recipe as stored under "recipe" in an adapter's description."""

    model_config = _FROZEN

    recipe: Recipe
    value: ValueHead | None
    ask: _Ask | None
    threshold: float
    top_k: int = Field(ge=1, le=LARGEST)
    pools: _Pools
    evidence: Evidence | None
    thinking: bool = False


@dataclass(frozen=True, eq=False)
class Deployed:
    """A recipe with everything that it decodes with, except the adapter.

    Attributes:
        recipe: the recipe.
        value: its head, if it has one.
        policy: when it asks; includes the `AskHead` if it has one.
        options: `pool`, `slm_k`, `llm_k` and `max_events` of a decoder.
        evidence: what it was chosen on; None if there was no choice.
        thinking: whether the answers that it was trained on begin with thinking.
    """

    recipe: Recipe
    value: ValueHead | None
    policy: RequestPolicy
    options: dict[str, Any]
    evidence: Evidence | None
    thinking: bool = False

    def described(self) -> dict[str, Any]:
        """Everything but the `AskHead`'s weight, ready for JSON."""
        ask = self.policy.ask
        stored = _Stored(
            recipe=self.recipe,
            value=self.value,
            ask=None if ask is None else _Ask(entropy_weight=ask.entropy_weight, bias=ask.bias, least=ask.least),
            threshold=self.policy.threshold,
            top_k=self.policy.top_k,
            pools=_Pools(**self.options),
            evidence=self.evidence,
            thinking=self.thinking,
        )
        described: dict[str, Any] = json.loads(stored.model_dump_json())
        return described

    @classmethod
    def read(cls, described: Any, weight: Callable[[], Tensor]) -> Deployed:
        """From the output of `described`, and a function that loads the `AskHead`'s weight if there is one.

        Raises:
            ValueError: values that do not fit, or heads that do not belong to the recipe.
        """
        stored = _Stored.model_validate_json(json.dumps(described), strict=True)
        value = stored.value
        ask = None if stored.ask is None else AskHead(weight(), **stored.ask.model_dump())
        if (value and value.form) != stored.recipe.value or (ask is not None) != stored.recipe.ask:
            raise ValueError(f"heads that do not belong to {stored.recipe.label}")
        policy = RequestPolicy(stored.threshold, stored.top_k, ask)
        return cls(stored.recipe, value, policy, stored.pools.model_dump(), stored.evidence, stored.thinking)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save it in the description of the adapter in a folder; raises ValueError if there is none."""
        path, ask = Path(folder), self.policy.ask
        if ask is not None:
            tensors = {WEIGHT: ask.weight.detach().cpu().contiguous()}
            replace_file(path / ASK, lambda file: save_file(tensors, file, metadata={"format": "pt"}))
        description = read_description(path) | {"recipe": self.described()}
        replace_file(path / DESCRIPTION, lambda file: file.write_text(json.dumps(description, indent=2)))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Deployed | None:
        """Load what `save` wrote; None if the adapter has no recipe.

        Raises:
            ValueError: no adapter there, or a damaged recipe.
        """
        path = Path(folder)
        found = read_description(path).get("recipe")
        try:
            return None if found is None else cls.read(found, lambda: _weight(path / ASK))
        except ValueError as problem:
            got = str(problem)
            if isinstance(problem, ValidationError):
                first = problem.errors()[0]
                got = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ValueError(
                f"{path / DESCRIPTION}: expected a recipe as `train` writes it, got {got[:300]}; run `train` again"
            ) from None


def _weight(path: Path) -> Tensor:
    try:
        weight = load_file(path)[WEIGHT]
    except (OSError, KeyError, SafetensorError) as problem:
        raise ValueError(f"{problem!r} in {path.name}") from None
    if weight.dtype != torch.float32:
        raise ValueError(f"{weight.dtype} in {path.name}")
    return weight


class Deployment(NamedTuple):
    """What a decoder or an engine is made with, in addition to the pair."""

    selector: Selector | None
    policy: RequestPolicy
    options: dict[str, Any]  # `max_events`; pool, slm_k and llm_k too if the recipe has them


def deployment_of(
    adapter: str | None,
    slm: hf.CausalLM,
    *,
    recipe: Wanted = "chosen",
    certainty: float | None = None,
    threshold: float | None = None,
    max_events: int | None = None,
) -> Deployment:
    """How to decode with an adapter's folder: by the recipe that `train` wrote into it, or as published.

    Args:
        adapter: the folder; if None, the LLM's likeliest candidate is taken.
        slm: the small model.
        recipe: "chosen" for the recipe that the folder names, or the plain reranker if it names none; "published" for
            the reranker as in the paper.
        certainty: the LLM's token is taken if its probability is above this; only where no chosen recipe decides.
        threshold: nats, instead of the recipe's; needed with a folder that names none.
        max_events: instead of the recipe's, which is the maximum.

    Raises:
        ValueError: an adapter that is missing, damaged or made for another model, no threshold, or a certainty with a
            chosen recipe.
    """
    if recipe not in get_args(Wanted):
        raise ValueError(f"recipe: expected chosen or published, got {recipe!r}; leave it out for the chosen one")
    deployed = None if adapter is None else Deployed.load(adapter)
    if deployed is None:
        selector: Selector | None = LLMPreference()
        if adapter is not None:
            if threshold is None:
                raise ValueError(
                    f"threshold: expected the nats at which the adapter in {adapter} asks, got none there in "
                    f"{DESCRIPTION}; set threshold, or take an adapter that `train` wrote"
                )
            selector = overridden(FutureBridgeSelector(_reranker(Path(adapter), slm)), certainty)
        policy = RequestPolicy(THRESHOLD if threshold is None else threshold)
        return Deployment(selector, policy, {"max_events": 8 if max_events is None else max_events})
    assert adapter is not None
    folder, policy = Path(adapter), deployed.policy
    options = dict(deployed.options)
    if recipe == "published":
        inside = folder / PUBLISHED
        published = _reranker(inside if inside.is_dir() else folder, slm)
        selector = overridden(FutureBridgeSelector(published), certainty)
        policy = RequestPolicy(policy.threshold, policy.top_k)
    else:
        own = deployed.recipe
        if certainty is not None:
            if deployed.evidence is not None or not own.plain:
                raise ValueError(
                    f"certainty: expected none with the recipe in {folder} ({own.label}), got {certainty}; leave it "
                    "out, or set recipe to published"
                )
            own = own.model_copy(update={"certainty": certainty})
        selector = own.selector(_reranker(folder, slm) if own.trained else None, deployed.value)
        if own.greedy:
            options["max_events"] = 0
    if threshold is not None:
        policy = RequestPolicy(threshold, policy.top_k, policy.ask)
    if max_events is not None:
        options["max_events"] = min(max_events, options["max_events"])
    return Deployment(selector, policy, options)


def thinking_of(adapter: str | None) -> bool:
    """Whether the answers that an adapter was trained on begin with thinking; False without one."""
    deployed = None if adapter is None else Deployed.load(adapter)
    return deployed is not None and deployed.thinking


def _reranker(folder: Path, slm: hf.CausalLM) -> TokenReranker:
    """The reranker in a folder, in the scope that it was trained in."""
    scope = read_description(folder).get("scope")
    return TokenReranker.from_pretrained(folder, slm, scope="sequence" if scope == "sequence" else "candidate").eval()
