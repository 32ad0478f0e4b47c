"""Counts past what 64 bits hold get the sentence of other bad counts, at every door."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import tiny

from fb_core import (
    CollaborativeDecoder,
    CompatibilityScorer,
    Engine,
    LLMPreference,
    LocalLLM,
    RequestPolicy,
    ServerLLM,
    TokenReranker,
)
from fb_core._util import check_count
from fb_core.apps.settings.pair import PairSettings
from fb_core.decode.pair import Pair
from fb_core.models.checkpoints import load_model
from fb_core.rerank.training import Optimisation

POLICY = RequestPolicy(1.0)


def decoder(**options):
    return CollaborativeDecoder(tiny("qwen3"), tiny("qwen3", 2), LLMPreference(), POLICY, **options)


def engine(**options):
    return Engine(Pair(tiny("qwen3"), tiny("qwen3", 2)), LLMPreference(), POLICY, **options)


DOORS = [
    *((name, lambda count, name=name: decoder(**{name: count})) for name in ("slm_k", "llm_k", "max_events")),
    *((name, lambda count, name=name: engine(**{name: count})) for name in ("max_batch", "max_length", "kv_memory")),
    *((name, lambda count, name=name: engine(**{name: count})) for name in ("batch_tokens", "prefill_tokens")),
    ("max_new_tokens", lambda count: decoder().generate([3], count)),
    ("rank", lambda count: TokenReranker.from_base(tiny("qwen3"), rank=count)),
    ("top_k", lambda count: RequestPolicy(1.0, count)),
    ("batch_tokens", lambda count: LocalLLM(tiny("qwen3"), batch_tokens=count)),
    ("k", lambda count: LocalLLM(tiny("qwen3")).candidates([3], count)),
    ("n", lambda count: LocalLLM(tiny("qwen3")).sample_many([[3]], count, 4)),
    ("token_budget", lambda count: CompatibilityScorer(tiny("qwen3")).logprobs_many([([3], [[4]])], count)),
    ("in_flight", lambda count: ServerLLM("http://127.0.0.1:9", vocabulary=9, in_flight=count)),
    *((name, lambda count, name=name: Optimisation(**{name: count})) for name in ("epochs", "groups_per_step")),
]


@pytest.mark.parametrize(("name", "call"), DOORS)
def test_a_count_past_64_bits_is_refused_as_others_are(name, call):
    for count, got in ((-1, "-1"), (1 << 63, "an int of 64 bits"), (10**5000, "an int of 16610 bits")):
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {got}; [^\n]+$"):
            call(count)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: decoder(max_events=1 << 31), "max_events:"),
        (lambda: PairSettings(slm="a", llm="b", max_events=1 << 31), "max_events\n.*less than 2147483648"),
        (lambda: engine(max_batch=10**8), "max_batch:"),
        (lambda: engine(max_batch=99, kv_memory=1 << 60), "kv_memory:"),
        (lambda: load_model("demo", "cuda:99"), "device:"),
    ],
)
def test_what_no_tensor_and_no_device_holds_is_refused_before_anything_is_made(call, words, monkeypatch):
    monkeypatch.setattr("fb_core.decode.loop.free_memory", lambda device, whole=False: 10**6)
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("count", [True, 2.0, "2", None, 0])
def test_what_no_count_is(count):
    with pytest.raises(ValueError, match=r"^rows:"):
        check_count("rows", count, 1, "say how many")
    check_count("rows", (1 << 63) - 1, 1)
    assert type(check_count("rows", np.int64(3), 1)) is int
