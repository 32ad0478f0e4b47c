"""Every method by its name, on the same prompts, with the same request policy and budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fb_core.config import RunSettings
from fb_core.decoding import Generation
from fb_core.methods import preferences
from fb_core.methods.direct import direct, one_token_takeover
from fb_core.methods.external import external, load_external
from fb_core.methods.greedy import greedy
from fb_core.methods.majority import majority
from fb_core.methods.r2r import r2r
from fb_core.methods.s2t import s2t
from fb_core.methods.spec_reason import CHATML_JUDGE, JUDGE, SpecReasonGeneration, spec_reason
from fb_core.methods.takeover import takeover
from fb_core.stages.deploy import chosen_reranker, deployed_decoder, frozen_policy
from fb_core.stages.inputs import models_of, verifier_of
from fb_core.stages.router import read_router

EXTERNAL = "external:"  # in front of the name of a checkpoint's method
ROUTED = ("r2r", "r2r-events")  # methods with a router
SEEDED = ("majority", "random", "futurebridge", *ROUTED)  # methods that run once a seed

LABELS = {
    "greedy": "Greedy",
    "majority": "Maj@{votes}",
    "takeover": "Takeover",
    "one-token-takeover": "One-token takeover",
    "s2t": "S2T",
    "direct": "Direct LLM score",
    "slm-preference": "SLM preference",
    "random": "Random choice",
    "r2r": "R2R",
    "r2r-events": "R2R at admitted events",
    "r2r-entropy": "R2R's entropy switch",
    "spec-reason": "SpecReason",
    "futurebridge": "FutureBridge",
}

Generate = Callable[[Sequence[Tensor], int], Sequence[Generation]]


class Usage(NamedTuple):
    """What one generation asked of the LLM."""

    calls: int  # requests
    pool: float | None  # candidates an event, on average
    appended: int  # tokens chosen at events
    suffix: int  # tokens that the LLM wrote beyond those


def generator(method: str, settings: RunSettings, run: Path, seed: int | None) -> Generate:
    """What decodes prompts by a method.

    Args:
        method: one of `LABELS`, or a checkpoint's name behind `EXTERNAL`.
        settings: of the run.
        run: its folder.
        seed: of a method that runs once a seed.

    Raises:
        ValueError: a reranker or router that is not trained; a checkpoint that is not there, or has another tokenizer.
    """
    models = models_of(settings.models)
    slm, tokenizer = models.slm, models.tokenizer
    shared: dict[str, Any] = {"tokenizer": tokenizer, "batch_tokens": settings.models.batch_tokens}
    budget: dict[str, Any] = {
        "slm_k": settings.collect.slm_k,
        "llm_k": settings.futures.llm_k,
        "max_events": settings.evaluate.max_events,
        **shared,
    }
    if method.startswith(EXTERNAL):
        path = settings.compare.external[method.removeprefix(EXTERNAL)]
        model = load_external(path, tokenizer, settings.models.device, settings.models.dtype)
        return partial(external, model, tokenizer, batch_tokens=settings.models.batch_tokens)
    policy = frozen_policy(run)
    match method, seed:
        case "greedy", None:
            return partial(greedy, slm, **shared)
        case "majority", int():
            return partial(_majority, settings, seed)
        case "takeover", None:
            return partial(takeover, slm, models.llm, policy, tokenizer=tokenizer)
        case "one-token-takeover", None:
            return one_token_takeover(slm, models.llm, policy, max_events=budget["max_events"], **shared).generate_many
        case "s2t", None:
            return s2t(slm, models.llm, policy, **budget).generate_many
        case "direct", None:
            return direct(slm, models.llm, policy, **budget).generate_many
        case "slm-preference", None:
            return preferences.slm_preference(slm, models.llm, policy, **budget).generate_many
        case "random", int():
            return preferences.random_choice(slm, models.llm, policy, seed=seed, **budget).generate_many
        case "r2r", int():
            router = read_router(settings, run, seed)
            return partial(r2r, slm, models.llm, router.network, threshold=router.threshold, **shared)
        case "r2r-events", int():
            router, most = read_router(settings, run, seed), budget["max_events"]
            options = {"mode": "events", "policy": policy, "max_events": most, **shared}
            return partial(r2r, slm, models.llm, router.network, threshold=router.threshold, **options)
        case "r2r-entropy", None:
            return partial(r2r, slm, models.llm, None, threshold=policy.threshold, mode="entropy", **shared)
        case "spec-reason", None:
            judge = settings.compare.judge or (CHATML_JUDGE if "<|im_end|>" in tokenizer.get_vocab() else JUDGE)
            options = {"delimiter": settings.compare.delimiter, "judge_template": judge}
            return partial(spec_reason, slm, models.llm, tokenizer=tokenizer, **options)
        case "futurebridge", int():
            return deployed_decoder(settings, run, chosen_reranker(settings, run, seed)).generate_many
    raise AssertionError((method, seed))


def _majority(settings: RunSettings, seed: int, prompts: Sequence[Tensor], max_new_tokens: int) -> list[Generation]:
    """The winning answers as texts; the tokens of the samples are not kept."""
    models, verifier = models_of(settings.models), verifier_of(settings.verify)
    answers = majority(
        models.local_slm, prompts, verifier, models.tokenizer, settings.compare.votes, max_new_tokens, seed
    )
    texts = ["" if answer is None else f"\\boxed{{{answer}}}" for answer in answers]
    return [Generation(torch.zeros(0, dtype=torch.int64), [], text) for text in texts]


def usage(method: str, generation: Generation) -> Usage:
    """What a method's generation asked of the LLM."""
    events, tokens = generation.events, len(generation.token_ids)
    pool = float(np.mean([len(event.pool) for event in events])) if events else None
    if isinstance(generation, SpecReasonGeneration):
        theirs = [step for step in generation.steps if step.writer == "llm"]
        return Usage(len(generation.steps) + len(theirs), None, 0, sum(step.length for step in theirs))
    if method == "takeover":
        return Usage(len(events), None, len(events), tokens - events[0].step - 1 if events else 0)
    calls = sum(not all(map(math.isnan, event.llm_logprob)) for event in events)  # NaN where nobody was asked
    return Usage(calls, pool, calls if method in ROUTED else len(events), 0)
