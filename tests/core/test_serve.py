"""The server over HTTP, with OpenAI's own client: real processes, real sockets."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from fb_core.decoding import LowLatencyDecoder
from fb_core.demo.pairs import load_pair
from fb_core.policy import RequestPolicy
from fb_core.selectors import LLMPreference
from fb_core.serve.text import Text

THRESHOLD = 0.6


class Server:
    """`futurebridge serve` as a process of its own."""

    def __init__(self, *options, env=None):
        command = [sys.executable, "-m", "fb_core", "serve", "--slm", "demo:plans", "--llm", "demo:plans"]
        command += ["--threshold", str(THRESHOLD), "--port", "0", "--max-length", "256", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        line = self.process.stdout.readline()
        found = re.search(r"at (http://\S+)/v1", line)
        assert found, line + self.process.stderr.read()
        self.url = found[1]

    def client(self, kind=openai.OpenAI, **options):
        return kind(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def end(self, how=signal.SIGTERM):
        """Its exit status and what it logged."""
        self.process.send_signal(how)
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, [json.loads(line) for line in log.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.end()


@pytest.fixture(scope="module")
def pair():
    return load_pair("plans")


@pytest.fixture(scope="module")
def problems(pair):
    return pair.world.problems(12, 3, "validation")


@pytest.fixture(scope="module")
def expected(pair, problems):
    decoder = LowLatencyDecoder(
        pair.slm, pair.llm, LLMPreference(), RequestPolicy(THRESHOLD), max_length=256, tokenizer=pair.world.tokenizer
    )
    return [decoder.generate(list(problem.prompt_ids), 60) for problem in problems]


def test_completions_are_the_decoders(server, problems, expected):
    client = server.client()
    for problem, want in zip(problems, expected, strict=True):
        for prompt in (problem.prompt, list(problem.prompt_ids)):
            got = client.completions.create(model="demo:plans", prompt=prompt, max_tokens=60)
            assert got.choices[0].text == want.text
            assert got.choices[0].finish_reason == "stop"
            assert got.usage.prompt_tokens == len(problem.prompt_ids)
            assert got.usage.completion_tokens == len(want.token_ids)
            assert got.usage.model_extra["large_model"] == {"calls": want.usage.calls, "tokens": want.usage.appended}
            events = got.choices[0].model_extra["futurebridge"]["events"]
            assert [(event["step"], event["pool"], event["choice"]) for event in events] == [
                (event.step, event.pool, event.choice) for event in want.events
            ]
    assert any(want.events for want in expected)


def test_a_chat_streams_what_it_answers_whole(server, problems, expected):
    client = server.client()
    messages = [{"role": "user", "content": problems[0].prompt}]
    whole = client.chat.completions.create(model="any", messages=messages, max_completion_tokens=60, n=2, seed=5)
    assert [choice.message.content for choice in whole.choices] == [expected[0].text] * 2
    pieces = list(
        client.chat.completions.create(
            model="any", messages=messages, max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == expected[0].text
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-1].usage.completion_tokens == len(expected[0].token_ids)
    heard = [
        event
        for piece in pieces[:-1]
        for event in (piece.choices[0].model_extra or {}).get("futurebridge", {}).get("events", [])
    ]
    assert [event["step"] for event in heard] == [event.step for event in expected[0].events]


def test_many_clients_get_their_own_answers(server, problems, expected):
    async def ask():
        async with server.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(
                *(client.completions.create(model="m", prompt=p.prompt, max_tokens=60) for p in problems * 4)
            )

    got = asyncio.run(ask())
    assert [one.choices[0].text for one in got] == [want.text for want in expected] * 4


def test_stop_strings_limits_and_overrides(server, problems, expected):
    client, text = server.client(), expected[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.completions.create(model="m", prompt=problems[0].prompt, max_tokens=60, stop=[stop, "never"])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = client.completions.create(model="m", prompt=problems[0].prompt, max_tokens=60, stop=stop, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text[: text.index(stop)]
    short = client.completions.create(model="m", prompt=problems[0].prompt, max_tokens=5)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 5
    quiet = client.completions.create(
        model="m", prompt=problems[0].prompt, max_tokens=60, extra_body={"futurebridge": {"max_events": 0}}
    )
    assert quiet.choices[0].model_extra["futurebridge"]["events"] == []
    always = client.completions.create(
        model="m", prompt=problems[0].prompt, max_tokens=9, extra_body={"futurebridge": {"threshold": -1.0}}
    )
    assert len(always.choices[0].model_extra["futurebridge"]["events"]) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty: expected a parameter that this server heeds"),
        ({"logprobs": 3}, "logprobs: expected a parameter"),
        ({"temperature": 0.7}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": [10**6]}, "input_ids"),
        ({"prompt": []}, "input_ids: expected at least one token"),
        ({"futurebridge": {"max_events": 99}}, "expected at most the engine's 8"),
        ({"futurebridge": {"threshold": "high"}}, "futurebridge.threshold"),
        ({"prompt": 7}, "prompt"),
    ],
)
def test_what_is_not_heeded_is_refused_by_name(server, problems, changes, words):
    body = {"model": "m", "prompt": problems[0].prompt, "max_tokens": 9} | changes
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_health_models_metrics_and_other_paths(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert [model.id for model in server.client().models.list()] == ["demo:plans"]
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("tokens_total", "events_total", "requests_total", "waiting", "running", "asking", "kv_pages_used"):
        assert f"futurebridge_{name}" in text
    assert httpx.get(f"{server.url}/v1/nothing").status_code == 404
    assert httpx.post(f"{server.url}/v1/completions", content=b"{").status_code == 400
    assert httpx.post(f"{server.url}/v1/completions", content=b"x" * (2 << 20)).status_code == 413


def test_a_client_that_goes_away_frees_its_place(server, problems):
    body = {"model": "m", "prompt": problems[0].prompt, "max_tokens": 200, "stream": True}
    for stream in (True, False):
        try:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body | {"stream": stream}, timeout=0.02
            ) as gone:
                next(gone.iter_lines())
        except httpx.TimeoutException:
            pass
    stop = time.monotonic() + 30
    while "futurebridge_kv_pages_used 0.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < stop
        time.sleep(0.05)


def test_a_key_a_queue_and_a_graceful_end(problems, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "secret")
    running = Server("--key-variable", "OUR_KEY", "--queue", "1", "--max-batch", "1")
    body = {"model": "m", "prompt": problems[0].prompt, "max_tokens": 200}
    url, key = f"{running.url}/v1/completions", {"Authorization": "Bearer secret"}
    assert httpx.post(url, json=body).status_code == 401
    assert urllib.request.urlopen(f"{running.url}/health").status == 200
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda _: httpx.post(url, json=body, headers=key, timeout=60), range(16)))
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 429)
    seen = []
    with httpx.stream("POST", url, json=body | {"stream": True}, headers=key, timeout=60) as stream:
        lines = stream.iter_lines()
        seen.append(next(lines))
        running.process.send_signal(signal.SIGTERM)
        seen += [line for line in lines if line]
    assert seen[-1] == "data: [DONE]"
    status, log = running.end()
    assert status in (0, -signal.SIGTERM)  # which it passes on when all is done
    assert {line["status"] for line in log} >= {200, 401}
    assert not any(problems[0].prompt in json.dumps(line) for line in log)


def test_text_comes_in_whole_characters_and_stops_where_it_is_told(pair):
    tokenizer = pair.world.tokenizer
    ids = tokenizer("29*9+7*7+9;29*9+7*7+9;")["input_ids"][1:]
    whole = tokenizer.decode(ids)
    for stops, want in (([], whole), (["7+9;29"], whole[: whole.index("7+9;29")]), (["9;9", "x"], whole)):
        text = Text(tokenizer, stops)
        pieces = [text.add(token) for token in ids]
        assert "".join([*pieces, text.end()]) == want
        assert text.stopped == (want != whole)
