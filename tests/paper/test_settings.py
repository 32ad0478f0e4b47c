"""The published settings as literals: what a run, a reranker and a decoder do where nothing is said."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from fb_core import CollaborativeDecoder, RequestPolicy, TokenReranker
from fb_core.apps.settings.run import RunSettings
from fb_core.rerank.training import Optimisation
from fb_kernels import compatibility_targets

RUN = {
    "problems.validation": 750,
    "problems.train": "math-train",
    "collect.max_new_tokens": 4096,
    "collect.top_k": 64,
    "collect.quantile": 0.99,
    "collect.max_states": 8,
    "collect.slm_k": 8,
    "futures.max_new_tokens": 4096,
    "futures.llm_k": 8,
    "score.pool": "joint",
    "score.horizon": 128,
    "train.horizons": (16, 32, 64, 128),
    "train.seeds": (0, 1, 2),
    "train.temperature": 0.5,
    "train.alpha": 1.0,
    "train.scope": "candidate",
    "train.rank": 16,
    "train.lora_alpha": 32.0,
    "train.dropout": 0.05,
    "train.learning_rate": 2e-4,
    "train.weight_decay": 0.01,
    "train.warmup": 0.03,
    "train.clip": 1.0,
    "train.groups_per_step": 32,
    "train.epochs": 3,
    "selection.problems": None,
    "evaluate.benchmarks": ("gsm8k", "math-500", "olympiadbench", "aime-2024", "aime-2025"),
    "evaluate.max_new_tokens": 4096,
    "evaluate.max_events": 8,
}
DECODER = {"pool": "joint", "slm_k": 8, "llm_k": 8, "max_events": 8}
STEP = {"learning_rate": 2e-4, "weight_decay": 0.01, "betas": (0.9, 0.999), "warmup": 0.03, "clip": 1.0}
FUNCTIONS: list[tuple[Callable, dict[str, Any]]] = [
    (CollaborativeDecoder, DECODER),
    (RequestPolicy, {"top_k": 64}),
    (TokenReranker.from_base, {"rank": 16, "alpha": 32, "dropout": 0.05, "scope": "candidate"}),
    (Optimisation, STEP | {"groups_per_step": 32, "epochs": 3}),
    (compatibility_targets, {"temperature": 0.5, "alpha": 1.0, "local": None}),
]


@pytest.mark.parametrize("key", RUN)
def test_a_run_that_says_nothing_is_the_papers(key: str) -> None:
    made = RunSettings.model_validate({"models": {"slm": "small", "llm": "large"}})
    assert attrgetter(key)(made) == RUN[key]


@pytest.mark.parametrize(("function", "wanted"), FUNCTIONS, ids=lambda x: getattr(x, "__qualname__", ""))
def test_a_function_that_is_told_nothing_does_the_papers(function: Callable, wanted: dict[str, Any]) -> None:
    found = inspect.signature(function).parameters
    assert {name: found[name].default for name in wanted} == wanted
