"""The low-latency decoder on a GPU: graphs against eager runs, tokens against the plain decoder, no sync in a step."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_checks import DEVICE, needs_memory, second_device
from test_scorer_gpu import qwen3, random_model
from torch import Tensor
from transformers import PreTrainedModel

from fb_core import (
    CollaborativeDecoder,
    CompatibilityScorer,
    Engine,
    FutureBridgeSelector,
    LLMPreference,
    LocalLLM,
    RandomChoice,
    RequestPolicy,
    SLMPreference,
    TokenReranker,
)
from fb_core.decode.decoder import LowLatencyDecoder
from fb_core.decode.pair import Pair
from fb_core.decode.selectors import ValueSelector
from fb_core.rerank.value_head import ValueHead
from fb_core.runtime.kv_pages import pages_of
from fb_core.runtime.paged_model import PagedModel, Part
from fb_core.runtime.plain import Stop, lockstep
from fb_core.runtime.step import DecodeStep, Wanted
from fb_kernels._runtime import backend, precision

pytestmark = pytest.mark.gpu
SMALL = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def model(dtype: torch.dtype, device: str = DEVICE, **overrides: int) -> PreTrainedModel:
    """Small by default; it never ends by itself."""
    made = random_model(qwen3(**SMALL | overrides), dtype, device)
    made.generation_config.eos_token_id = made.config.eos_token_id = None
    return made


def tokens(count: int, device: str = DEVICE, vocabulary: int = 1000) -> Tensor:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(count)).to(device)


def reranker(slm: PreTrainedModel) -> TokenReranker:
    made = TokenReranker.from_base(slm, rank=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made.eval()


def tokens_are_the_plain_decoders(device: str = DEVICE) -> None:
    slm, llm = model(torch.float32, device), model(torch.float32, device, num_hidden_layers=3)
    for selector in (LLMPreference(), FutureBridgeSelector(reranker(slm))):
        policy = RequestPolicy(-math.inf)
        fast = LowLatencyDecoder(slm, llm, selector, policy, max_length=400)
        slow = CollaborativeDecoder(slm, LocalLLM(llm), selector, policy)
        for ids in (tokens(5, device), tokens(300, device), tokens(40, device)):
            got, want = fast.generate(ids, 24), slow.generate(ids, 24)
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert [event.pool for event in got.events] == [event.pool for event in want.events]
            assert len(want.events) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_batch_invariant_mode_an_engine_reports_what_the_scorer_says(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "INVARIANT", True)
    slm = model(dtype)
    prompts = [tokens(count).tolist() for count in (5, 130, 64, 300, 1, 129)]
    with Engine(
        Pair(slm, None), RandomChoice(0), RequestPolicy(9.0), pool="slm", max_batch=4, max_length=400
    ) as engine:
        handles = [engine.submit(prompt, 40, ranking=True) for prompt in prompts]
        written = [list(handle) for handle in handles]
    ids = [[token.id for token in own] for own in written]
    scorer = CompatibilityScorer(slm)
    together = scorer.logprobs_many([(prompt, [own]) for prompt, own in zip(prompts, ids, strict=True)])
    for prompt, own, reported, (row,) in zip(prompts, ids, written, together, strict=True):
        (alone,) = scorer.logprobs(prompt, [own])
        assert torch.equal(row, alone)
        assert torch.tensor([token.ranked.taken for token in reported]).equal(alone.cpu())


@pytest.mark.parametrize("where", ["current", "other"])
def test_small_tokens_are_the_plain_decoders(where: str) -> None:
    tokens_are_the_plain_decoders(DEVICE if where == "current" else second_device())


def valued_tokens_are_the_plain_decoders(device: str = DEVICE) -> None:
    """The value after the captured rerank."""
    slm, llm = model(torch.float32, device), model(torch.float32, device, num_hidden_layers=3)
    policy = RequestPolicy(-math.inf)
    selector = ValueSelector(FutureBridgeSelector(reranker(slm)), ValueHead((0.3,) * 14))
    fast = LowLatencyDecoder(slm, llm, selector, policy, max_length=400, max_batch=3)
    slow = CollaborativeDecoder(slm, LocalLLM(llm), selector, policy)
    asked = [tokens(5, device), tokens(300, device), tokens(40, device)]
    got, want = fast.generate_many(asked, 48), slow.generate_many(asked, 48)
    assert [one.token_ids.tolist() for one in got] == [one.token_ids.tolist() for one in want]
    steps = [[event.step for event in one.events] for one in want]
    assert [[event.step for event in one.events] for one in got] == steps
    assert any(steps)


def test_small_valued_tokens_are_the_plain_decoders() -> None:
    valued_tokens_are_the_plain_decoders()


def test_small_no_operation_of_a_step_or_rerank_misses_its_compiled_kernel() -> None:
    """Under "cuda" an op refuses what its kernel does not take."""
    slm = model(torch.bfloat16)
    with backend.override("auto,skinny_linear=cuda,branch_attention_qkv=cuda,topk_entropy=cuda,commit=cuda"):
        decoder = LowLatencyDecoder(
            slm, LocalLLM(slm), FutureBridgeSelector(reranker(slm)), RequestPolicy(-math.inf), max_length=100
        )
        assert len(decoder.generate(tokens(9), 12).events) == 8


def started(slm: PreTrainedModel, length: int, ids: Tensor, vocabulary: int = 1000) -> DecodeStep:
    """A step with one sequence."""
    paged = PagedModel(slm, length, pages_of(length))
    taken = paged.pages.take(ids.tolist(), length)
    assert taken is not None
    paged.extend([Part(ids[:-1].tolist(), 0, taken[0])])
    step = DecodeStep(paged, vocabulary, 64, frozenset(), 1)
    step.put(0, ids.tolist(), taken[0], length, math.inf)
    step.resume(0, 0)
    return step


def test_small_continuations_over_pages_are_the_plain_loops() -> None:
    slm = model(torch.float32)
    asked = [tokens(count) for count in (1, 5, 64, 65, 130)]
    stop = Stop(frozenset(), 20, None)
    rows = lockstep(slm, asked, stop, lambda step: step.logits.argmax(-1).tolist(), 1 << 16)
    assert [new.tolist() for new in LocalLLM(slm).complete_many(asked, 20)] == [row.new for row in rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_small_replays_are_the_eager_steps(dtype: torch.dtype) -> None:
    """Bit for bit, over 50 steps."""
    slm = model(dtype)
    steps = [started(slm, 200, tokens(70)) for _ in range(2)]
    steps[1].model.graphs.ready = lambda key, compute: compute  # type: ignore[method-assign]
    seen: list[list] = [[], []]
    for step, found in zip(steps, seen, strict=True):
        for _ in range(50):
            step.run(1)
            found.append((step.outcomes(1), step.logits.clone()))
    for graph, eager in zip(*seen, strict=True):
        assert graph[0] == eager[0]
        assert torch.equal(graph[1], eager[1])
    assert steps[0].model.graphs.nbytes > 0


@pytest.mark.parametrize("ranked", [False, True])
def test_small_a_warm_step_never_syncs(ranked: bool) -> None:
    step = started(model(torch.bfloat16), 200, tokens(9))
    for _ in range(2):  # a graph for each place of the ring
        step.run(1, Wanted(ranked))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step.run(1, Wanted(ranked))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for outcome in (*step.outcomes(1), *step.outcomes(1)):
        assert (outcome.ranked is not None) == ranked
        if outcome.ranked is not None:
            assert outcome.ranked.ids[0] == outcome.token
            assert sorted(outcome.ranked.logprobs, reverse=True) == outcome.ranked.logprobs


def test_small_other_weights_are_captured_anew() -> None:
    slm = model(torch.bfloat16)
    decoder = LowLatencyDecoder(slm, LocalLLM(slm), SLMPreference(), RequestPolicy(math.inf), max_length=100)
    first = decoder.generate(tokens(9), 12).token_ids.tolist()
    with torch.no_grad():
        for parameter in slm.parameters():
            parameter.mul_(-1.5)
    changed = decoder.generate(tokens(9), 12).token_ids.tolist()
    assert changed != first
    fresh = LowLatencyDecoder(slm, LocalLLM(slm), SLMPreference(), RequestPolicy(math.inf), max_length=100)
    assert fresh.generate(tokens(9), 12).token_ids.tolist() == changed


def test_real_sizes_decode() -> None:
    """Qwen3-1.7B's shapes: the first tokens are the model's own greedy ones, in float32 as in bfloat16's logits."""
    needs_memory(12)
    slm = random_model(qwen3(), torch.bfloat16)
    ids = tokens(256, vocabulary=151_936)
    step = started(slm, 300, ids, 151_936)
    step.run(1)
    with torch.no_grad():
        plain = slm(ids[None], logits_to_keep=1).logits[0].float()
        truth = slm.float()(ids[None], logits_to_keep=1).logits[0]
    error, native = (float((x - truth).abs().max()) for x in (step.logits, plain))
    assert error <= 2 * native + 0.05
