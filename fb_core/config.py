"""Settings, checked by pydantic."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WorldSettings(BaseModel):
    """How the method is run in one world of the demo.

    Attributes:
        quantile: of the request policy, chosen on validation problems.
        horizon: future tokens that make the target.
        short_horizon: a horizon too short to see what matters, shown beside it.
        sweep: other quantiles at which the whole recipe is repeated.
        own_future: also train on the SLM's own verified futures, the repair of a world whose LLM futures mislead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    train_problems: int = Field(default=700, ge=1)
    validation_problems: int = Field(default=150, ge=1)
    test_problems: int = Field(default=400, ge=1)
    quantile: float = Field(ge=0, le=1)
    horizon: int = Field(default=16, ge=1)
    short_horizon: int = Field(default=4, ge=1)
    sweep: tuple[float, ...] = ()
    own_future: bool = False

    @model_validator(mode="after")
    def _short_is_shorter(self) -> WorldSettings:
        if self.short_horizon > self.horizon:
            raise ValueError(
                f"short_horizon: expected at most the horizon {self.horizon}, got {self.short_horizon}; shorten it"
            )
        return self


class DemoSettings(BaseModel):
    """The demo: which worlds, and what they share.

    Attributes:
        seed: of the fresh problems; reranker and samples follow it.
        pool_k: candidates asked of each model.
        max_events: admitted states a trajectory, and events a problem.
        certainty: probability from which the override takes the LLM's token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    pool_k: int = Field(default=4, ge=1)
    max_events: int = Field(default=8, ge=0)
    certainty: float = Field(default=0.9, gt=0, le=1)
    temperature: float = Field(default=0.5, gt=0)
    rank: int = Field(default=16, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    epochs: int = Field(default=3, ge=1)
    votes: int = Field(default=8, ge=1)
    worlds: tuple[WorldSettings, ...] = (
        WorldSettings(name="plans", quantile=0.94, horizon=16, train_problems=1000, sweep=(0.90, 0.92, 0.96)),
        WorldSettings(name="control", quantile=0.92, horizon=24, train_problems=500, own_future=True),
        WorldSettings(name="helpful", quantile=0.92, horizon=24, train_problems=500, sweep=(0.90,)),
    )


class PairSettings(BaseModel):
    """A pair at work in a terminal.

    Attributes:
        slm: folder or hub id of the small model.
        llm: of the large one; with a server, the name by which the server knows it, if it wants one.
        server: URL of an inference server to ask instead.
        flavour: which server it is.
        adapter: folder of a reranker; without one the LLM's own preference decides.
        threshold: entropy in nats above which the LLM is asked.
        max_length: tokens of prompt and answer at most, which memory is set aside for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slm: str
    llm: str | None = None
    server: str | None = None
    flavour: Literal["vllm", "sglang", "llama.cpp"] = "vllm"
    adapter: str | None = None
    threshold: float = 1.0
    max_new_tokens: int = Field(default=512, ge=1)
    max_events: int = Field(default=8, ge=0)
    max_length: int = Field(default=8192, ge=2)
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    @model_validator(mode="after")
    def _some_llm(self) -> PairSettings:
        if self.llm is None and self.server is None:
            raise ValueError("llm: expected --llm or --server, got neither; say where candidates come from")
        return self
