"""The method on a real pretrained model: what random tiny models hold, held by real weights and a real vocabulary.

`make test-real` runs it; `make test` does not collect it. The small model is the large one's first 16 layers, unhealed:
what it says makes little sense, and every promise here is about equality, not about sense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.servers.live_server import LlamaCpp
from fb_core import (
    BranchGroup,
    CollaborativeDecoder,
    CompatibilityScorer,
    FutureBridgeSelector,
    LLMPreference,
    LocalLLM,
    LowLatencyDecoder,
    Optimisation,
    RequestPolicy,
    RerankerRun,
    ServerLLM,
    Sweep,
    TokenReranker,
    TrainingGroup,
    TrainingTrajectory,
    group_targets,
)

QUESTIONS = (
    "What is the capital of France?",
    "Mia has 6 boxes with 34 pens each and gives 57 pens to Tom. How many pens does Mia have left?",
    "Write one sentence about the sea.",
    "Is 91 a prime number? Answer yes or no.",
)
TEXTS = (
    "6*34=204, 1234567890 and 3.14159",
    "  two spaces,\ttab\nnewline\r\n\n\nthree",
    "naïve café, Größe, 東京, Привет, مرحبا, 😀👩‍👩‍👧 ½ ² ٣",
    "<|im_start|>user\nhi 42<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>12<|im_end|>",
    "don't we'll I'VE x_1 = f(10)[2];  // 100%",
    "\\boxed{147}",
)
# llama.cpp rounds what meets four-bit weights to eight bits, transformers does not.
PROBABILITY, NATS = 0.06, 0.75
NEVER = RequestPolicy(math.inf)


def prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> Tensor:
    chat = [{"role": "user", "content": question}]
    made = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return made["input_ids"][0]


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    return [prompt(tokenizer, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def live(gguf_file: Path) -> Iterator[LlamaCpp]:
    with LlamaCpp(gguf_file) as there:
        yield there


@pytest.fixture(scope="module")
def server(live: LlamaCpp, large: PreTrainedModel) -> ServerLLM:
    ends = [large.generation_config.eos_token_id]
    return ServerLLM(live.url, "llama.cpp", vocabulary=large.config.vocab_size, ends=ends, timeout=120.0)


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_what_the_file_says(gguf_file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    fields = gguf.GGUFReader(gguf_file).fields
    words = fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(len(words)))) == words
    assert tokenizer.eos_token == "<|im_end|>" == words[fields["tokenizer.ggml.eos_token_id"].contents()]
    assert tokenizer.bos_token_id == fields["tokenizer.ggml.bos_token_id"].contents()
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents()
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode("0123456789")) == 10
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x 34")) == ["x", "Ġ", "3", "4"]


def test_a_saved_model_ends_where_its_tokenizer_does(
    large: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert large.generation_config.eos_token_id == tokenizer.eos_token_id
    assert LocalLLM(large).ends == {tokenizer.eos_token_id}


@pytest.mark.parametrize("text", TEXTS)
def test_llama_cpp_has_the_same_ids(server: ServerLLM, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    server.check_tokenizer(tokenizer, [text])
    assert tokenizer.decode(tokenizer.encode(text)) == text


# --- the scorer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["small", "large"])
def test_scores_are_those_of_full_forwards(
    request: pytest.FixtureRequest, which: str, prompts: list[Tensor], large: PreTrainedModel
) -> None:
    """Every state of an answer's first tokens, packed together."""
    model, writer = request.getfixturevalue(which), LocalLLM(large)
    answer = writer.complete(prompts[1], 24)
    tokens = torch.cat([prompts[1], answer])
    states = range(len(prompts[1]), len(tokens) - 12, 4)
    pools = [writer.candidates(tokens[:position], 5).ids for position in states]
    groups = [
        BranchGroup(position, pool, tokens[position + 1 : position + 9])
        for position, pool in zip(states, pools, strict=True)
    ]
    assert len(groups) >= 3
    for group, found in zip(groups, CompatibilityScorer(model).score_trajectory(tokens, groups), strict=True):
        rows = []
        for candidate in group.candidates:
            ids = torch.cat([tokens[: group.position], candidate[None], group.future])
            logprob = model(ids[None], use_cache=False).logits[0].log_softmax(-1)[group.position : -1]
            rows.append(logprob.gather(1, group.future[:, None])[:, 0])
        torch.testing.assert_close(found, torch.stack(rows), rtol=1e-4, atol=1e-3)


# --- the loops --------------------------------------------------------------------------------------------------------


def generated(model: PreTrainedModel, ids: Tensor, most: int) -> list[int]:
    made = model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=most, do_sample=False)
    return made[0, len(ids) :].tolist()


@pytest.mark.parametrize("which", ["small", "large"])
def test_greedy_decoding_is_generate(request: pytest.FixtureRequest, which: str, prompts: list[Tensor]) -> None:
    """In both loops and in `LocalLLM`, alone and together, up to the end that the large model writes."""
    model = request.getfixturevalue(which)
    wanted = [generated(model, ids, 40) for ids in prompts]
    assert any(new[-1] == model.generation_config.eos_token_id for new in wanted) == (which == "large")
    for kind in (CollaborativeDecoder, LowLatencyDecoder):
        decoder = kind(model, None, None, NEVER, max_events=0)
        assert [found.token_ids.tolist() for found in decoder.generate_many(prompts, 40)] == wanted
    assert [new.tolist() for new in LocalLLM(model).complete_many(prompts, 40)] == wanted


@pytest.fixture(scope="module")
def policy(small: PreTrainedModel, prompts: list[Tensor]) -> RequestPolicy:
    """Calibrated on what the small model writes."""
    entropies = []
    for ids in prompts:
        whole = torch.tensor([*ids, *generated(small, ids, 24)])
        logits = small(whole[None], use_cache=False).logits[0, len(ids) - 1 : -1]
        entropies.append(RequestPolicy(0.0).entropy(logits))
    return RequestPolicy.calibrate(torch.cat(entropies), quantile=0.8)


@pytest.fixture(scope="module")
def reranker(
    small: PreTrainedModel, large: PreTrainedModel, prompts: list[Tensor], tmp_path_factory: pytest.TempPathFactory
) -> TokenReranker:
    """Trained for real on a few states of the small model's own answers, saved, and read again."""
    writer, scorer, trajectories = LocalLLM(large), CompatibilityScorer(small), []
    for ids in prompts:
        tokens = torch.tensor([*ids, *generated(small, ids, 12)])
        positions = range(len(ids), len(tokens), 3)
        groups = []
        for position in positions:
            prefix = tokens[:position]
            own = LocalLLM(small).candidates(prefix, 3).ids
            pool = torch.unique(torch.cat([own, writer.candidates(prefix, 3).ids]))
            future = writer.complete(prefix, 8)  # unverified: nothing is claimed of what it makes
            scored = scorer.score(prefix, pool, future[:4])
            (target,) = group_targets([scored], [scored.shape[1]])[1]
            groups.append(TrainingGroup(position, pool, target[:, 0]))
        trajectories.append(TrainingTrajectory(tokens, groups))
    made = TokenReranker.from_base(small, rank=8)
    sweep = Sweep([RerankerRun(made)], trajectories, Optimisation(learning_rate=2e-3, epochs=6, groups_per_step=8))
    losses = [sweep.advance()[0] for _ in range(sweep.total)]
    assert losses[-1] < losses[0] - 0.05, losses
    folder = tmp_path_factory.mktemp("adapter")
    made.save_pretrained(folder)
    return TokenReranker.from_pretrained(folder, small)


def test_both_loops_write_the_same_with_events_and_a_trained_adapter(
    small: PreTrainedModel,
    large: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policy: RequestPolicy,
    reranker: TokenReranker,
    prompts: list[Tensor],
) -> None:
    selector = FutureBridgeSelector(reranker)
    options = {"slm_k": 4, "llm_k": 4, "max_events": 6, "tokenizer": tokenizer}
    plain = CollaborativeDecoder(small, LocalLLM(large), selector, policy, **options)
    fast = LowLatencyDecoder(small, large, selector, policy, max_batch=len(prompts), **options)
    wanted, found = plain.generate_many(prompts, 40), fast.generate_many(prompts, 40)
    events = [event for generation in wanted for event in generation.events]
    assert len(events) >= 8
    assert {source for event in events for source in event.sources} == {1, 2, 3}  # the SLM's, the LLM's, both's
    assert any(event.choice != 0 for event in events)  # not merely the small model's own token
    for one, other in zip(wanted, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.text == other.text
        for mine, theirs in zip(one.events, other.events, strict=True):
            assert (mine.step, mine.pool, mine.sources, mine.choice) == (
                theirs.step,
                theirs.pool,
                theirs.sources,
                theirs.choice,
            )
            assert mine.entropy == pytest.approx(theirs.entropy, abs=1e-3)
            assert mine.scores == pytest.approx(theirs.scores, abs=1e-2)


# --- llama.cpp with the file itself -----------------------------------------------------------------------------------


def test_llama_cpps_candidates_are_the_models_to_what_it_rounds(
    server: ServerLLM, large: PreTrainedModel, prompts: list[Tensor]
) -> None:
    local = LocalLLM(large)
    states = [torch.cat([ids, new[:n]]) for ids in prompts for new in [local.complete(ids, 12)] for n in (0, 3, 7)]
    wanted = local.candidates_many(states, 8)
    found = server.candidates_many(states, 8, [one.ids for one in wanted])
    clear = [one.logprob[0].exp() - one.logprob[1].exp() > 2 * PROBABILITY for one in wanted]
    assert sum(clear) >= 6
    for mine, theirs, sure in zip(wanted, found, clear, strict=True):
        torch.testing.assert_close(theirs.score_logprob, mine.logprob, rtol=0.0, atol=NATS)
        torch.testing.assert_close(theirs.score_logprob.exp(), mine.logprob.exp(), rtol=0.0, atol=PROBABILITY)
        assert not sure or mine.ids[0] == theirs.ids[0]


def test_llama_cpp_answers_by_token_ids(
    server: ServerLLM, tokenizer: PreTrainedTokenizerBase, prompts: list[Tensor]
) -> None:
    begun = torch.cat([prompts[0], torch.tensor(tokenizer.encode("The capital of"))])
    answer = server.complete(begun, 40)
    assert int(answer[-1]) == tokenizer.eos_token_id
    assert tokenizer.decode(answer, skip_special_tokens=True) == " France is Paris."


def test_the_fast_loop_asks_llama_cpp(
    server: ServerLLM,
    small: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policy: RequestPolicy,
    prompts: list[Tensor],
) -> None:
    """Both loops again, candidates from the server; at every event its own first token is taken."""
    options = {"slm_k": 4, "llm_k": 4, "max_events": 4, "tokenizer": tokenizer}
    plain = CollaborativeDecoder(small, server, LLMPreference(), policy, **options)
    fast = LowLatencyDecoder(small, server, LLMPreference(), policy, **options)
    served = 0
    for ids in prompts[:2]:
        wanted, found = plain.generate(ids, 24), fast.generate(ids, 24)
        assert wanted.token_ids.tolist() == found.token_ids.tolist()
        served += len(wanted.events)
        for event in wanted.events:
            state = torch.cat([ids, wanted.token_ids[: event.step]])
            assert int(server.candidates(state, 1).ids[0]) == event.pool[event.choice]
    assert served >= 4
