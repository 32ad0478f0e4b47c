"""How an adapter decides at events: the recipe that training chose, saved with the adapter, loaded to decode."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fb_core._util import write_file
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import FutureBridgeSelector, LLMPreference, Selector, ValueSelector
from fb_core.events import PoolKind
from fb_core.models.facts import CausalLM
from fb_core.rerank.reranker import DESCRIPTION, TokenReranker, read_description
from fb_core.rerank.value_head import ValueHead

RecipeName: TypeAlias = Literal["greedy", "direct", "published", "value"]
"""The SLM alone, which never asks; the LLM's likeliest candidate; the reranker's scores; the value of those scores."""

LABELS: dict[RecipeName, str] = {
    "greedy": "SLM greedy",
    "direct": "direct LLM score",
    "published": "published recipe",
    "value": "value",
}
Wanted = Literal["chosen", "published"]
THRESHOLD = 1.0  # nats, if no other is given and there is no adapter
LARGEST = (1 << 31) - 1
_FROZEN = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Difference(BaseModel):
    """A mean paired difference in accuracy, and its lower bound at the level of the test."""

    model_config = _FROZEN

    mean: float
    low: float


class Evidence(BaseModel):
    """The evidence that a recipe was chosen on."""

    model_config = _FROZEN

    problems: int  # number of certification problems, not used for anything before
    delta: float  # how far below greedy decoding and the direct LLM score it may be, as a share of the problems
    level: float  # 1 - the largest probability that any recipe worse than that passes its test, per adapter
    tests: int  # number of recipes among which that error was divided
    accuracy: float
    minus_greedy: Difference  # paired difference to the SLM alone; its bound uses the error divided by `tests`
    minus_direct: Difference  # the same to the direct LLM score
    calls: float  # of the LLM, per problem
    llm_tokens: float  # that the LLM chose or wrote, per problem
    words: str  # why it was chosen


class Pools(BaseModel):
    """The pool options of `CollaborativeDecoder`."""

    model_config = _FROZEN

    pool: PoolKind
    slm_k: int = Field(ge=1, le=LARGEST)
    llm_k: int = Field(ge=1, le=LARGEST)
    max_events: int = Field(ge=0, le=LARGEST)


class Deployed(BaseModel):
    """A recipe with everything that it decodes with, except the adapter, in whose description it is stored."""

    model_config = _FROZEN

    name: RecipeName
    value: ValueHead | None  # the head of "value"
    threshold: float  # nats above which it asks
    top_k: int = Field(ge=1, le=LARGEST)  # number of largest logits that the entropy is taken over
    pools: Pools
    evidence: Evidence | None = None  # what it was chosen on; None if there was no choice
    thinking: bool = False  # whether the answers that it was trained on begin with thinking

    @model_validator(mode="after")
    def _agrees(self) -> Deployed:
        if (self.value is not None) != (self.name == "value"):
            raise ValueError(f"name {self.name} with{'out' * (self.value is None)} a head")
        RequestPolicy(self.threshold, self.top_k)  # refuses a threshold that is NaN
        return self

    @property
    def policy(self) -> RequestPolicy:
        """When it asks."""
        return RequestPolicy(self.threshold, self.top_k)

    def selector(self, reranker: TokenReranker | None) -> Selector | None:
        """What picks at events; None for "greedy", which never asks. "published" and "value" need the reranker."""
        if self.name == "greedy":
            return None
        if self.name == "direct":
            return LLMPreference()
        assert reranker is not None
        scoring = FutureBridgeSelector(reranker)
        return scoring if self.value is None else ValueSelector(scoring, self.value)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save it in the description of the adapter in a folder; raises ValueError if there is none."""
        path = Path(folder)
        description = read_description(path) | {"recipe": json.loads(self.model_dump_json())}
        write_file(path / DESCRIPTION, json.dumps(description, indent=2).encode())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Deployed | None:
        """Load what `save` wrote; None if the adapter has no recipe.

        Raises:
            ValueError: no adapter there, a damaged recipe, or one that there is no more.
        """
        path = Path(folder)
        recipe = read_description(path).get("recipe")
        if recipe is None:
            return None
        try:
            return cls.model_validate_json(json.dumps(recipe), strict=True)
        except ValidationError as problem:
            first = problem.errors()[0]
            where, words = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            got = f"{where}: {words}" if where else words
            raise ValueError(
                f"{path / DESCRIPTION}: expected a recipe ({', '.join(get_args(RecipeName))}) as `train` writes it, "
                f"got {got[:300]}; run `train` again"
            ) from None


class Deployment(NamedTuple):
    """What a decoder or an engine is made with, in addition to the pair."""

    selector: Selector | None
    policy: RequestPolicy
    options: dict[str, Any]  # `max_events`; pool, slm_k and llm_k too if the recipe has them


def deployment_of(
    adapter: str | None,
    slm: CausalLM,
    *,
    recipe: Wanted = "chosen",
    threshold: float | None = None,
    max_events: int | None = None,
) -> Deployment:
    """How to decode with an adapter's folder: by the recipe that `train` wrote into it, or as published.

    Args:
        adapter: the folder; if None, the LLM's likeliest candidate is taken.
        slm: the small model.
        recipe: "chosen" for the recipe that the folder names, or the reranker's scores if it names none; "published"
            for these scores, as in the paper.
        threshold: nats, instead of the recipe's; needed with a folder that names none.
        max_events: instead of the recipe's, which is the maximum.

    Raises:
        ValueError: an adapter that is missing, damaged or made for another model, or no threshold.
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
            selector = FutureBridgeSelector(_reranker(Path(adapter), slm))
        policy = RequestPolicy(THRESHOLD if threshold is None else threshold)
        return Deployment(selector, policy, {"max_events": 8 if max_events is None else max_events})
    assert adapter is not None
    options, policy = deployed.pools.model_dump(), deployed.policy
    if recipe == "published":
        selector = FutureBridgeSelector(_reranker(Path(adapter), slm))
    else:
        reranks = deployed.name in ("published", "value")
        selector = deployed.selector(_reranker(Path(adapter), slm) if reranks else None)
    if selector is None:
        options["max_events"] = 0
    if threshold is not None:
        policy = RequestPolicy(threshold, policy.top_k)
    if max_events is not None:
        options["max_events"] = min(max_events, options["max_events"])
    return Deployment(selector, policy, options)


def thinking_of(adapter: str | None) -> bool:
    """Whether the answers that an adapter was trained on begin with thinking; False without one."""
    deployed = None if adapter is None else Deployed.load(adapter)
    return deployed is not None and deployed.thinking


def _reranker(folder: Path, slm: CausalLM) -> TokenReranker:
    """The reranker in a folder, in the scope that it was trained in."""
    scope = read_description(folder).get("scope")
    return TokenReranker.from_pretrained(folder, slm, scope="sequence" if scope == "sequence" else "candidate").eval()
