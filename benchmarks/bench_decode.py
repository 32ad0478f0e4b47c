"""Deployment at batch one: a greedy step, whole generations, and a rerank event."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, PreTrainedModel, Qwen3Config, StaticCache

from benchmarks import harness, peers, shapes
from benchmarks.harness import OURS, Goal, Implementation
from benchmarks.servers.live_server import LlamaCpp, write_gguf
from benchmarks.shapes import CANDIDATES
from fb_core import FutureBridgeSelector, LocalLLM, RequestPolicy, Selector, SLMPreference, TokenReranker
from fb_core.decode.decoder import LowLatencyDecoder
from fb_core.decode.loop import PairLoop
from fb_core.models.packed import Prefix
from fb_core.runtime.kv_pages import pages_of
from fb_core.runtime.paged_model import Part
from fb_core.runtime.plain import with_cache
from fb_core.score.scorer import CompatibilityScorer
from fb_kernels._runtime.timing import Timing

NEVER = RequestPolicy(math.inf)
READ = "the weights, read by a sum"
STEPS = 32 if shapes.ON_GPU else 8  # per timed call
NEW = 64  # new tokens per call of generate
PROMPT = 64


@pytest.fixture(scope="module")
def endless() -> PreTrainedModel:
    return shapes.random_model(Qwen3Config(**shapes.SLM), 0)


def tokens(model: PreTrainedModel, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator).to(model.device)


def decoder(model: PreTrainedModel, selector: Selector | None = None) -> LowLatencyDecoder:
    """With buffers of the default size."""
    return LowLatencyDecoder(model, LocalLLM(model), selector or SLMPreference(), NEVER)


@torch.no_grad()
def next_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """float [1, V]: logits of the token after ids."""
    return model(ids[None], logits_to_keep=1).logits[0]


class HuggingFace:
    """Greedy steps by the model's own forward over a cache, which is reset after every call."""

    def __init__(self, model: PreTrainedModel, context: Tensor, *, static: bool = False) -> None:
        self.model, self.context = model, context
        mode = "max-autotune" if shapes.ON_GPU else "default"
        self.forward = torch.compile(model, mode=mode, fullgraph=True) if static else model
        if static:
            self.cache = StaticCache(config=model.config, max_cache_len=len(context) + STEPS)
        else:
            self.cache = DynamicCache()
        self.argument = with_cache(model, self.cache)
        with torch.no_grad():
            model(context[None, :-1], logits_to_keep=1, **self.argument)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        token, held, first = self.context[-1:], len(self.context) - 1, None
        for step in range(STEPS):
            positions = torch.arange(held + step, held + step + 1, device=token.device)
            out = self.forward(
                token[None], cache_position=positions, position_ids=positions[None], **self.argument
            ).logits[0]
            first = out.clone() if first is None else first
            token = out.argmax(-1)
        if isinstance(self.cache, DynamicCache):
            self.cache.crop(-STEPS)
        else:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(held)
        assert first is not None
        return first


class Ours:
    """The same steps over the engine's pages."""

    def __init__(self, loop: PairLoop | None, context: Tensor) -> None:
        assert loop is not None
        self.step, self.context = loop.step, context.tolist()
        taken = loop.model.pages.take(self.context, loop.model.length)
        assert taken is not None
        self.pages, held = taken
        loop.model.extend([Part(self.context[held:-1], held, self.pages)])
        self.step.put(0, self.context, self.pages, loop.model.length, math.inf)

    def again(self) -> None:
        """Go back to the end of the context."""
        self.step.resume(0, 0, self.context[-1], len(self.context) - 1)

    def next(self) -> float:
        """Run one more step; returns its entropy."""
        while self.step.enqueued <= self.step.ahead:
            self.step.run(1)
        return self.step.outcomes(1)[0].entropy

    def once(self) -> Tensor:
        """The logits of one step."""
        self.again()
        self.step.run(1)
        return self.step.logits.clone()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        while self.step.enqueued:
            self.step.outcomes(1)
        begun, first = self.step.begun, self.once()
        for _ in range(STEPS - self.step.ahead):
            self.next()
        assert self.step.begun - begun == STEPS
        return first


def settled(model: PreTrainedModel, wide: PreTrainedModel, ids: Tensor, new: Tensor) -> int:
    """How many greedy tokens after ids come before the first near tie: two largest logits that rounding may swap."""
    sequence = torch.cat([ids, new])[None, :-1]
    with torch.no_grad():
        plain, truth = (
            lm(sequence.to(lm.device), logits_to_keep=len(new)).logits[0].double().cpu() for lm in (model, wide)
        )
    top = truth.topk(2).values
    near = (top[:, 0] - top[:, 1] <= 2 * harness.max_error(plain, truth)).nonzero()
    return int(near[0]) if len(near) else len(new)


@pytest.mark.parametrize("context", shapes.CONTEXTS)
def test_decode_step(compare: Callable, endless: PreTrainedModel, context: int) -> None:
    ids = tokens(endless, context)
    expected = next_logits(copy.deepcopy(endless).to(shapes.WIDE), ids)
    plain = next_logits(endless, ids)
    runs: dict[str, Callable[[], Tensor]] = {
        OURS: Ours(decoder(endless).loop, ids),
        "HF eager": HuggingFace(endless, ids),
        "HF static cache + compile": HuggingFace(endless, ids, static=True),
    }
    compare(
        "decode_step",
        f"P={context}, mean of {STEPS} steps",
        {name: Implementation(run, expected, compiled="compile" in name) for name, run in runs.items()},
        rounds=10,
        tolerance=harness.allowed_error(plain, expected),
        timing=Timing.EAGER,
        dtype=shapes.DTYPE,
        skipped={},
        per=STEPS,
    )


@pytest.mark.parametrize("size", ["small", "slm"])
def test_generate(compare: Callable, endless: PreTrainedModel, size: str) -> None:
    """Tokens per second against `model.generate`, prompt included."""
    model = shapes.random_model(Qwen3Config(**shapes.SMALL), 1) if size == "small" else endless
    ids = tokens(model, PROMPT)
    fast = decoder(model)
    mask = torch.ones_like(ids[None])

    def theirs() -> Tensor:
        return model.generate(ids[None], attention_mask=mask, max_new_tokens=NEW, do_sample=False)[0, PROMPT:]

    wide = copy.deepcopy(model).to(shapes.WIDE)
    expected = wide.generate(ids[None], attention_mask=mask, max_new_tokens=NEW, do_sample=False)[0, PROMPT:]
    expected = expected[: settled(model, wide, ids, expected)]
    runs = {OURS: lambda: fast.generate(ids, NEW).token_ids, "HF generate": theirs}
    config = model.config
    compare(
        "generate",
        f"hidden {config.hidden_size} x {config.num_hidden_layers}, V={config.vocab_size}, "
        f"{PROMPT} + {NEW} tokens, time of one",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=10,
        tolerance=0.0,
        timing=Timing.EAGER,
        dtype=shapes.DTYPE,
        goals=[Goal("HF generate", 1.5)],
        per=NEW,
        notes=[f"tokens compared, up to the first near tie: {len(expected)} of {NEW}"],
    )


@pytest.mark.skipif(shapes.ON_GPU, reason="llama.cpp is a peer on CPUs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_beside_llama_cpp(compare: Callable, tmp_path: Path, dtype: torch.dtype) -> None:
    """Greedy tokens of a Llama, prompt included; the floor is the time in which a sum reads the weights."""
    single, new = shapes.random_model(LlamaConfig(**shapes.LLAMA), 0), 128
    model = copy.deepcopy(single).to(dtype)
    ids = tokens(model, PROMPT)
    greedy = {"attention_mask": torch.ones_like(ids[None]), "max_new_tokens": new, "do_sample": False}

    def truth(lm: PreTrainedModel) -> Tensor:
        wide = copy.deepcopy(lm).to(shapes.WIDE)
        written = wide.generate(ids[None], **greedy)[0, PROMPT:]
        return written[: settled(lm, wide, ids, written)]

    expected = truth(model)
    ours, in_single = (LowLatencyDecoder(lm, None, None, NEVER, max_events=0) for lm in (model, single))
    weights = torch.ones(sum(weight.nbytes for weight in model.parameters()) // 4)
    runs = {
        OURS: Implementation(lambda: ours.generate(ids, new).token_ids, expected),
        "HF generate": Implementation(lambda: model.generate(ids[None], **greedy)[0, PROMPT:], expected),
        READ: Implementation(lambda: torch.stack([weights.sum() for _ in range(new)]), weights.sum().expand(new)),
    }
    goals, skipped = [Goal(READ, 0.8), Goal("llama.cpp", 1.1)], {}
    if dtype != torch.float32:
        runs["fb, float32"] = Implementation(lambda: in_single.generate(ids, new).token_ids, truth(single))
        goals.append(Goal("fb, float32", 1.7))
    with ExitStack() as stack:
        try:
            file = tmp_path / "model.gguf"
            write_gguf(file, model)
            live = stack.enter_context(LlamaCpp(file, slots=1, threads=torch.get_num_threads(), exact=False))
            asked = {"prompt": ids.tolist(), "n_predict": new, "temperature": 0, "samplers": ["temperature"]}
            asked |= {"cache_prompt": False, "ignore_eos": True, "return_tokens": True}
            runs["llama.cpp"] = Implementation(
                lambda: torch.tensor(live.post("/completion", asked)["tokens"]), expected
            )
        except ImportError as reason:
            skipped["llama.cpp"] = str(reason)
        compare(
            "generate",
            f"SmolLM2-135M's shapes in {str(dtype).removeprefix('torch.')}, {PROMPT} + {new} tokens, time of one",
            runs,
            rounds=5,
            tolerance=0.0,
            dtype=dtype,
            skipped=skipped,
            goals=goals,
            per=new,
            notes=[f"tokens compared, up to the first near tie: {len(expected)} of {new}"],
        )


def some_candidates(model: PreTrainedModel) -> Tensor:
    ids = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(1))[:CANDIDATES]
    return ids.to(model.device)


Event = tuple[PeftModel, Tensor, Tensor, Tensor]  # adapted model, head, prefix, candidates


def rerank_truth(
    slm: PreTrainedModel, reranker: TokenReranker, prefix: Tensor, candidates: Tensor
) -> tuple[Event, Event, Tensor]:
    """(arguments of the PEFT peers, the same in the wide dtype, the scores in the wide dtype)."""
    head, adapted = reranker.head.detach(), copy.deepcopy(reranker.adapted).to(shapes.WIDE)
    wide = (adapted, head.to(shapes.WIDE), prefix, candidates)
    expected = peers.rerank_cached_forwards(*wide, peers.prefill(copy.deepcopy(slm).to(shapes.WIDE), prefix))
    return (reranker.adapted, head, prefix, candidates), wide, expected


@pytest.mark.parametrize("context", shapes.CONTEXTS)
def test_rerank_event(compare: Callable, endless: PreTrainedModel, context: int) -> None:
    reranker = peers.as_trained(endless)
    ids = tokens(endless, context)
    loop = decoder(endless, FutureBridgeSelector(reranker)).loop
    assert loop is not None
    merged, ours = loop.merged_reranker, Ours(loop, ids)
    assert merged is not None
    candidates = some_candidates(endless)
    prefix = peers.prefill(endless, ids)
    state, wide, expected = rerank_truth(endless, reranker, ids, candidates)
    plain = peers.rerank_repeated_cache(*state, prefix)
    logits = next_logits(copy.deepcopy(endless).to(shapes.WIDE), ids)
    views = [Prefix(loop.model.kv, 0, context, tuple(ours.pages[: pages_of(context)]))]
    ours.once()  # writes the last token's keys
    compare(
        "rerank_event",
        f"K={CANDIDATES} P={context} (deployed)",
        {
            OURS: Implementation(lambda: merged.scores_many(views, [candidates])[0], expected),
            "one greedy step": Implementation(
                ours.once, logits, tolerance=harness.allowed_error(next_logits(endless, ids), logits)
            ),
            "PEFT over the repeated cache": Implementation(
                partial(peers.rerank_repeated_cache, *state, prefix), expected
            ),
            "PEFT, K full forwards": Implementation(
                partial(peers.rerank_full_forwards, *state), peers.rerank_full_forwards(*wide[:-1], candidates[:1])
            ),
        },
        rounds=20 if shapes.ON_GPU else 7,
        tolerance=max(harness.allowed_error(plain, expected), 1e-4),
        timing=Timing.EAGER,
        dtype=shapes.DTYPE,
        goals=[Goal("one greedy step", 1 / 1.2 if shapes.ON_GPU else 0.5)],
    )


@pytest.mark.parametrize("p", shapes.CACHED)
def test_rerank_over_a_cache(compare: Callable, endless: PreTrainedModel, p: int) -> None:
    """The same event outside the fast loop: `TokenReranker.scores` over a transformers cache."""
    reranker = peers.as_trained(endless)
    prefix = tokens(endless, p)
    candidates = some_candidates(endless)
    cache = peers.prefill(endless, prefix)
    state, wide, expected = rerank_truth(endless, reranker, prefix, candidates)
    others = {
        "K forwards over the cache": partial(peers.rerank_cached_forwards, *state, cache),
        "repeated cache": partial(peers.rerank_repeated_cache, *state, cache),
        "expanded cache": partial(peers.rerank_expanded_cache, *state, cache),
    }
    plain = tuple(run() for run in others.values())  # the error of only 13 values would be chance
    runs = {OURS: torch.no_grad()(partial(reranker.scores, prefix, candidates, cache=cache)), **others}
    implementations = {name: Implementation(run, expected) for name, run in runs.items()}
    implementations["K full forwards (scope sequence)"] = Implementation(
        partial(peers.rerank_full_forwards, *state), peers.rerank_full_forwards(*wide[:-1], candidates[:1])
    )
    compare(
        "rerank_event",
        f"K={CANDIDATES} P={p} (cached)",
        implementations,
        rounds=30 if shapes.ON_GPU else 5,
        tolerance=max(harness.allowed_error(plain, (expected,) * len(plain)), 1e-4),
        dtype=endless.dtype,
    )


def test_host_of_a_group(compare: Callable) -> None:
    """28 layers so narrow that a group takes the time of the host alone: Python, checks and launches."""
    width = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = shapes.random_model(Qwen3Config(num_hidden_layers=28, vocab_size=256, head_dim=32, **width), 0)
    group = tokens(model, 16), torch.arange(4, device=model.device), tokens(model, 4, 1)
    expected = peers.full_forwards(copy.deepcopy(model).to(shapes.WIDE), *group)
    ours, repeated = partial(CompatibilityScorer(model).score, *group), partial(peers.repeated_cache, model, *group)
    runs = {OURS: Implementation(ours, expected), "repeated cache": Implementation(repeated, expected)}
    allowed = harness.allowed_error(repeated(), expected)
    compare("host_time", "28 layers D=64 K=4 P=16 H=4", runs, rounds=30, tolerance=allowed, timing=Timing.EAGER)
