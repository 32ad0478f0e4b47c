"""Every request of `ServerLLM` to vLLM's own server, and a run from `collect` to `serve` with the large model on it.

`make test-servers` runs it; `make test` does not collect it. The model is SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG
from serving import Server
from test_served_stages import assert_alike
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.servers.live_server import VLLM
from fb_core import (
    CollaborativeDecoder,
    LLMPreference,
    LocalLLM,
    LowLatencyDecoder,
    RequestPolicy,
    ServerError,
    ServerLLM,
)
from fb_core.apps.pipeline.commands import run_command
from fb_core.apps.settings.run import RunSettings
from fb_core.llm import protocols as dialects
from fb_core.llm import remote as server
from tests.real.test_smollm2 import QUESTIONS, TEXTS, prompt

KEY = "sk-0123456789"
CONTEXT = 2048  # tokens of a sequence of the server's
TOLERANCE = {"rtol": 0.0, "atol": 2e-4}
THRESHOLD = 0.5  # nats; the small model of the decoders is the first 16 layers of the large one


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_DELAY", 0.01)


@pytest.fixture(scope="module")
def local(large: PreTrainedModel) -> LocalLLM:
    return LocalLLM(large)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    return [prompt(tokenizer, question) for question in QUESTIONS]


def connect(vllm: VLLM, local: LocalLLM, **options: Any) -> ServerLLM:
    given = {"vocabulary": local.vocabulary, "ends": local.ends, "timeout": HANG, "api_key": KEY, "retries": 1}
    return ServerLLM(vllm.url, **given | options)


# --- the requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["logprob_token_ids", "prompt_logprobs"])
def test_candidates_and_asked_ids_are_those_of_the_model_in_process(
    vllm: VLLM, local: LocalLLM, prompts: list[Tensor], route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an answer's end and in its middle."""
    states = [torch.cat([ids, new[:n]]) for ids in prompts for new in [local.complete(ids, 12)] for n in (0, 3, 12)]
    asked = [[*local.ends, local.vocabulary - 1, 7 * n, 7 * n] for n in range(len(states))]
    llm = connect(vllm, local)
    if route == "prompt_logprobs":
        monkeypatch.setattr(dialects, "PATIENCE", 0)
        llm._dialect.ignored = 1
    wanted = local.candidates_many(states, 8, asked)
    for found, expected in zip(llm.candidates_many(states, 8, asked), wanted, strict=True):
        assert found.ids.tolist() == expected.ids.tolist()
        torch.testing.assert_close(found.logprob, expected.logprob, **TOLERANCE)
        torch.testing.assert_close(found.score_logprob, expected.score_logprob, **TOLERANCE)
    assert llm._dialect.ignored == (0 if route == "logprob_token_ids" else 1 + len(states))


def test_completions_are_greedy_decoding_up_to_the_end(vllm: VLLM, local: LocalLLM, prompts: list[Tensor]) -> None:
    wanted = local.complete_many(prompts, 40)
    assert {int(new[-1]) in local.ends for new in wanted} == {True, False}
    for found, expected in zip(connect(vllm, local).complete_many(prompts, 40), wanted, strict=True):
        assert found.tolist() == expected.tolist()
    (comma,) = {int(new[2]) for new in wanted[:1]}
    assert connect(vllm, local, ends=[comma]).complete(prompts[0], 40).tolist() == wanted[0][:3].tolist()


def test_samples_repeat_with_their_seed_and_differ_by_number(
    vllm: VLLM, local: LocalLLM, prompts: list[Tensor]
) -> None:
    llm = connect(vllm, local)

    def drawn(seed: int, n: int = 4, **options: Any) -> list[list[list[int]]]:
        settings = {"temperature": 1.5, "top_p": 0.95, "top_k": 0} | options
        return [
            [new.tolist() for new in group] for group in llm.sample_many(prompts[1:3], n, 12, seed=seed, **settings)
        ]

    first = drawn(3)
    assert first == drawn(3) != drawn(4)
    assert [len({tuple(sample) for sample in samples}) for samples in first] == [4, 4]
    greedy = [[new.tolist()] * 2 for new in local.complete_many(prompts[1:3], 12)]
    assert drawn(0, 2, top_k=1) == drawn(0, 2, top_p=1e-6) == greedy


def test_samples_follow_the_truncated_distribution(vllm: VLLM, local: LocalLLM, prompts: list[Tensor]) -> None:
    ids, temperature, top_p, top_k, n = prompts[2], 2.0, 0.8, 8, 300
    ranked = local.candidates(ids, top_k)
    chances = (ranked.logprob.double() / temperature).softmax(0)
    kept = int((chances.cumsum(0) - chances < top_p).sum())
    wanted = (chances[:kept] / chances[:kept].sum()).tolist()
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": 7}
    (drawn,) = connect(vllm, local).sample_many([ids], n, 1, **settings)
    counts = [sum(int(sample) == token for sample in drawn) for token in ranked.ids[:kept].tolist()]
    assert sum(counts) == n
    for count, chance in zip(counts, wanted, strict=True):
        assert count / n == pytest.approx(chance, abs=4 * (chance * (1 - chance) / n) ** 0.5)


def test_its_tokenizer_is_ours(vllm: VLLM, local: LocalLLM, tokenizer: PreTrainedTokenizerBase) -> None:
    connect(vllm, local).check_tokenizer(tokenizer)
    connect(vllm, local).check_tokenizer(tokenizer, TEXTS)
    for flavour in ("sglang", "llama.cpp"):
        with pytest.raises(ValueError, match=f"flavour: expected 'vllm', as {vllm.url} answers, got '{flavour}'"):
            connect(vllm, local, flavour=flavour).check_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("options", "length", "k", "asked", "message"),
    [
        ({}, CONTEXT, 3, 1, "status 400: .*max_tokens"),
        ({}, 9, 65, 1, "status 400: .*logprobs of 65, which is greater than max allowed: 64"),
        ({}, 9, 3, 200, "status 400: .*logprob_token_ids of length .*greater than max allowed: 128"),
        ({"model": "another"}, 9, 3, 1, "status 404: .*`another` does not exist"),
        ({"api_key": "sk-another"}, 9, 3, 1, "status 401: .*check the flavour, the api_key"),
    ],
)
def test_what_it_refuses_is_an_error_that_says_why(
    vllm: VLLM, local: LocalLLM, options: dict[str, Any], length: int, k: int, asked: int, message: str
) -> None:
    with pytest.raises(ServerError, match=message) as raised:
        connect(vllm, local, **options).candidates([7] * length, k, range(100, 100 + asked))
    assert "sk-" not in str(raised.value)
    assert len(connect(vllm, local).complete([7] * (CONTEXT - 1), 1)) == 1


def test_many_at_once_get_their_own_candidates(vllm: VLLM, local: LocalLLM, prompts: list[Tensor]) -> None:
    """In one batch, vLLM pads the likely ids of questions beside one of given ids."""
    states = [state[: len(state) - cut] for state in prompts for cut in range(6)]
    given = [list(range(100 + i, 104 + i)) for i in range(len(states))]
    wanted = local.candidates_many(states, 4, given)
    llm = connect(vllm, local, in_flight=16)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: llm.candidates_many(states, 4, given), range(8)):
            for each, expected in zip(found, wanted, strict=True):
                torch.testing.assert_close(each.logprob, expected.logprob, **TOLERANCE)
                torch.testing.assert_close(each.score_logprob, expected.score_logprob, **TOLERANCE)


# --- decoders ---------------------------------------------------------------------------------------------------------


def decoded(kind: type[CollaborativeDecoder], slm: PreTrainedModel, llm: Any, selector: Any, **options: Any) -> Any:
    return kind(slm, llm, selector, RequestPolicy(THRESHOLD), slm_k=4, llm_k=4, max_events=4, **options)


@pytest.mark.parametrize("kind", [CollaborativeDecoder, LowLatencyDecoder])
def test_decoding_is_that_with_the_model_in_process(
    vllm: VLLM, local: LocalLLM, small: PreTrainedModel, prompts: list[Tensor], kind: type[CollaborativeDecoder]
) -> None:
    served = decoded(kind, small, connect(vllm, local), LLMPreference()).generate_many(prompts, 16)
    within = decoded(kind, small, local, LLMPreference()).generate_many(prompts, 16)
    for found, wanted in zip(served, within, strict=True):
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        assert wanted.events
        for event, expected in zip(found.events, wanted.events, strict=True):
            assert (event.step, event.pool, event.choice) == (expected.step, expected.pool, expected.choice)
            assert event.llm_logprob == pytest.approx(expected.llm_logprob, abs=1e-3)


class Killing(LLMPreference):
    """Kills the server when it has chosen for the first time."""

    def __init__(self, vllm: VLLM) -> None:
        self.vllm = vllm

    def choose_many(self, states: Any, pools: Any) -> list[int]:
        self.vllm.kill()
        return super().choose_many(states, pools)


def test_a_killed_server_is_an_error_or_marked_and_the_next_one_is_taken(
    vllm: VLLM, local: LocalLLM, small: PreTrainedModel, prompts: list[Tensor]
) -> None:
    llm, refused = connect(vllm, local), r"ConnectionRefusedError.*, 2 times; check that the server runs"
    wanted = llm.candidates(prompts[0], 4)
    try:
        marked = decoded(LowLatencyDecoder, small, llm, Killing(vllm), on_llm_error="slm").generate(prompts[0], 16)
        with pytest.raises(ServerError, match=refused):
            decoded(LowLatencyDecoder, small, llm, LLMPreference()).generate(prompts[0], 16)
    finally:
        vllm.start()
    first, *rest = marked.events
    assert first.error is None
    assert rest
    assert all(re.search(refused, event.error or "") for event in rest)
    assert llm.candidates(prompts[0], 4).ids.tolist() == wanted.ids.tolist()


# --- a run ------------------------------------------------------------------------------------------------------------

TURN = "<|im_end|>\n<|im_start|>"
SHOWN = "".join(
    f"{a} + {b} = {a + b}{TURN}assistant\nThe answer is \\boxed{{{a + b}}}.{TURN}user\n"
    for a, b in ((2, 3), (4, 1), (3, 5), (6, 2))
)


def test_a_run_from_collect_to_serve(
    vllm: VLLM,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is small and large model both: that futures and pools come from the server is what is tested."""
    monkeypatch.setenv("LARGE_KEY", KEY)
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10) if (7 * a + b) % 3 == 0][:16]
    rows = [{"problem": f"{a} + {b} = {a + b}", "answer": str(a + b)} for a, b in sums]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    large = {"url": vllm.url, "flavour": "vllm", "api_key_variable": "LARGE_KEY", "timeout": HANG}
    values: dict[str, Any] = {
        "models": {"slm": str(folder), "llm": str(folder), "device": "cpu", "dtype": "float32"},
        "problems": {
            "train": str(tmp_path / "problems.jsonl"),
            "held_out": [],
            "validation": 4,
            "prompt": SHOWN + "{problem}",
        },
        "collect": {"max_new_tokens": 16, "quantile": 0.5, "slm_k": 3, "max_states": 2},
        "futures": {"max_new_tokens": 16, "llm_k": 3},
        "score": {"horizon": 4},
        "train": {"horizons": [4], "seeds": [0], "rank": 4, "epochs": 1, "groups_per_step": 4},
        "verify": {"workers": 1},
    }
    here = RunSettings.model_validate(values)
    served = RunSettings.model_validate(values | {"models": values["models"] | {"llm_server": large}})
    for command in ("collect", "futures"):
        run_command(command, here, tmp_path / "here", show=str)
    for command in ("collect", "futures", "score", "train"):
        run_command(command, served, tmp_path / "served", show=str)
    for stage in ("states", "futures"):
        assert_alike(tmp_path / "here", tmp_path / "served", stage)
    of = {"llm": folder, "server": vllm.url, "flavour": "vllm", "api_key_variable": "LARGE_KEY"}
    adapter = tmp_path / "served" / "reranker" / "seed-0"
    ours = Server(slm=folder, adapter=adapter, max_length=512, device="cpu", dtype="float32", **of)
    try:
        with ours.client() as client:
            answer = client.with_options(timeout=HANG).chat.completions.create(
                model=str(folder),
                messages=[{"role": "user", "content": SHOWN + "4 + 4 = 8"}],
                max_tokens=16,
                extra_body={"futurebridge": {"threshold": 0.0, "max_events": 3, "recipe": "futurebridge"}},
            )
    finally:
        ours.end()
    assert answer.usage.large_model["calls"] == 3
    assert answer.choices[0].message.content
