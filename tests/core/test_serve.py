"""The server over HTTP, with OpenAI's own client: real processes, real sockets."""

import asyncio
import copy
import json
import os
import re
import signal
import socket
import urllib.request
from collections import Counter, defaultdict
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
import torch
from dialects import byte_tokenizer
from limits import HANG
from pydantic import ValidationError
from serving import MODEL, THRESHOLD, Server, service_of, until
from starlette.testclient import TestClient
from tiny import tiny

from fb_core.apps.serve.app import Application
from fb_core.apps.serve.protocol import OFF, ChatRequest, CompletionRequest, Piece
from fb_core.apps.serve.run import listen, load_server
from fb_core.apps.settings.pair import ServeSettings
from fb_core.decode.decoder import LowLatencyDecoder
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import FutureBridgeSelector, LLMPreference
from fb_core.rerank.reranker import TokenReranker
from fb_core.runtime.sampling import Sampling


def test_completions_are_the_decoders(server, problems, expected):
    client = server.client()
    for problem, want in zip(problems, expected, strict=True):
        for prompt in (problem.prompt, list(problem.prompt_ids)):
            got = client.completions.create(model=MODEL, prompt=prompt, max_tokens=60)
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
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=60, n=2, seed=5)
    assert [choice.message.content for choice in whole.choices] == [expected[0].text] * 2
    pieces = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=60, stream=True, stream_options={"include_usage": True}
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


def test_stop_strings_limits_and_overrides(server, problems, expected):
    text = expected[0].text

    def asked(**options):
        return server.client().completions.create(
            **{"model": MODEL, "prompt": problems[0].prompt, "max_tokens": 60} | options
        )

    def events(answer):
        return answer.choices[0].model_extra["futurebridge"]["events"]

    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = asked(stop=[stop, "never"])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert "".join(piece.choices[0].text for piece in asked(stop=stop, stream=True)) == text[: text.index(stop)]
    short = asked(max_tokens=5)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 5
    quiet = asked(extra_body={"futurebridge": {"max_events": 0}})
    assert events(quiet) == []
    for recipe, wanted in (("greedy", quiet.choices[0].text), ("direct", text)):
        assert asked(extra_body={"futurebridge": {"recipe": recipe}}).choices[0].text == wanted
    assert len(events(asked(max_tokens=9, extra_body={"futurebridge": {"threshold": -1.0}}))) == 8


def test_ends_are_ignored_and_unlikely_tokens_dropped_where_that_is_asked(server, problems, expected):
    """`ignore_eos`, `min_p` (at 1 it leaves the likeliest token) and `min_tokens`, in an answer and in a stream."""
    want = expected[0].token_ids.tolist()
    for stream in (False, True):
        body = {"model": MODEL, "prompt": problems[0].prompt, "max_tokens": len(want) + 9, "stream": stream}
        more = {"ignore_eos": True, "return_token_ids": True, "min_p": 1}
        pieces = server.client().completions.create(**body, temperature=3, seed=2, extra_body=more)
        choices = [piece.choices[0] for piece in (pieces if stream else [pieces])]
        ids = [token for choice in choices for token in choice.token_ids]
        assert (ids[: len(want)], len(ids)) == (want, len(want) + 9)
        assert choices[-1].finish_reason == "length"
        more = {"min_tokens": len(want) + 4, "return_token_ids": True}
        pieces = server.client().completions.create(**body, temperature=0, extra_body=more)
        ids = [token for piece in (pieces if stream else [pieces]) for token in piece.choices[0].token_ids]
        assert want[-1] not in ids[: len(want) + 4]
        assert len(ids) > len(want) + 4


REFUSED = {  # name: what it may not be, beside other fields that the request then has
    "frequency_penalty": [0.5, False],
    "presence_penalty": [-1],
    "logit_bias": [{"5": 1}],
    "echo": [1],
    "prompt_logprobs": [21, -1, {"prompt_logprobs": 1, "stream": True}],
    "best_of": [2],
    "suffix": ["x"],
    "tool_choice": ["required"],
    "response_format": [{"response_format": {"type": "json_object"}}],
    "temperature": [-0.5, "hot"],
    "top_p": [0, 1.5],
    "top_k": [-2],
    "min_p": [1.1],
    "min_tokens": [-1, 10, 1 << 70, {"min_tokens": 2, "stop": "x"}, {"min_tokens": 2, "stop_token_ids": [7]}],
    "detokenize": [1],
    "bad_words": [["x"]],
    "stream_options": [{"stream_options": {"include_usage": True}}],
    "stream_options.continuous_usage_stats": [
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ],
    "stream_options.all": [{"stream": True, "stream_options": {"all": 1}}],
    "max_tokens": [1 << 63, 0, "9", {"max_tokens": -1, "echo": True}],
    "guided_json": [{"guided_json": {}}],
    "logprobs": [21, True, {"prompt": [[1, 4]] * 16, "n": 16, "logprobs": 20, "max_tokens": 50}],
    "logprob_token_ids": [
        *({"logprob_token_ids": ids, "logprobs": 1} for ids in ([], [-1], [10**6], ["a"], [3] * 129)),
        {"logprob_token_ids": [3]},
    ],
    "n": [1000, {"prompt": [[1, 4]] * 17, "n": 16}],
    "stop": [["a"] * 17, "a" * 257, [7]],
    "prompt": [
        *([10**6], [], [[]], [[1], "a"], [10**30], [-1], [[1, True]], 7, "no word of it", [[1, 4]] * 257),
        *("1" * 2049, ["1", "é" * 1025], [4] * 128),
    ],
    "futurebridge": [7],
    "futurebridge.max_events": [{"futurebridge": {"max_events": 99}}],
    "futurebridge.recipe": [{"futurebridge": {"recipe": name}} for name in ("futurebridge", "magic")],
    "futurebridge.threshold": [{"futurebridge": {"threshold": "high"}}],
    "futurebridge.thresholds": [{"futurebridge": {"thresholds": 1}}],
}
ASKED = {"role": "user", "content": "1"}


def said(content, **more):
    return {"messages": [ASKED | {"content": content} | more]}


REFUSED_CHATS = {
    "max_completion_tokens": [
        *({"max_tokens": most, "max_completion_tokens": new} for most, new in ((None, 1 << 63), (3, 3))),
    ],
    "messages": [[ASKED] * 4097, [], [ASKED | {"content": "1" * 1025}] * 2],
    "messages.0.annotations": [said("1", annotations=[1])],
    "messages.1.tool_calls.0.function.arguments": [
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"arguments": wrong}}]}]}
        for wrong in ("{", "[1]", "7", 7, "[" * 5000)
    ],
    "top_logprobs": [2],
    "messages.0.role": [said("1", role="tool")],
    "messages.0.content": [
        *(said(None), said(7), said([{"type": "text", "text": 7}]), said([{"type": "text"}])),
        said([{"type": "image_url", "image_url": {"url": "x"}}]),
    ],
    "messages.0.name": [said("1", name=7)],
    "messages.0": [said("1", tool_calls=[])],
}


def requests(path, table):
    """(path, fields, name) of every refused request; a value alone is of the name itself."""
    for name, values in table.items():
        for value in values:
            yield path, value if isinstance(value, dict) and name != "logit_bias" else {name: value}, name


@pytest.mark.parametrize(
    ("path", "changes", "name"), [*requests("completions", REFUSED), *requests("chat/completions", REFUSED_CHATS)]
)
def test_what_is_not_supported_is_refused_by_the_clients_name(server, problems, path, changes, name):
    chat = {"messages": [{"role": "user", "content": problems[0].prompt}]}
    body = {"max_tokens": 9} | ({"prompt": problems[0].prompt} if path == "completions" else chat) | changes
    answer = httpx.post(f"{server.url}/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, name, "invalid_request_error")
    assert error["message"].startswith(f"{name}: ")


def test_parameters_that_want_nothing_change_nothing(server, problems, expected):
    """What clients send without being asked: defaults, nulls and labels."""
    defaults = {name: value for name, (value, *_) in OFF.items()}
    defaults |= {"stream_options": None, "guided_json": None, "truncate_prompt_tokens": None}
    labels = {"metadata": {"run": "7"}, "user": "someone", "store": False, "n": None, "stream": None, "seed": None}
    nothing = dict.fromkeys(OFF) | {"stop": None, "stream_options": None, "model": None, "futurebridge": None}
    url, prompt = f"{server.url}/v1", problems[0].prompt
    only = ({"add_special_tokens": True}, {"add_special_tokens": False, "echo": False})
    for more in (defaults | labels, nothing):
        text = httpx.post(
            f"{url}/completions", json={"prompt": prompt, "max_tokens": 60, "logprobs": None} | more | only[0]
        )
        assert text.json()["choices"][0]["text"] == expected[0].text
        messages = [{"role": "user", "content": prompt, "name": None, "annotations": [], "refusal": None}]
        body = {"messages": messages, "logprobs": False} | more | only[1]
        chat = httpx.post(f"{url}/chat/completions", json=body)
        assert chat.json()["choices"][0]["message"]["content"] == expected[0].text
    body = {"prompt": prompt, "stream": True, "stream_options": {"continuous_usage_stats": False}}
    assert httpx.post(f"{url}/completions", json=body).status_code == 200
    parts = [{"type": "text", "text": prompt[:3]}, {"type": "text", "text": prompt[3:]}]
    got = server.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert got.choices[0].message.content == expected[0].text
    sent_back = got.choices[0].message.model_dump() | {"content": prompt}  # with what was null in it
    again = server.client().chat.completions.create(model=MODEL, messages=[sent_back])
    assert again.choices[0].message.content == expected[0].text


def gathered(client, *, stream, **options):
    """(texts, ends, numbers of events) by choice, and the usage, of a completion as a whole or in pieces."""
    options = {"model": MODEL, "max_tokens": 60} | options
    if stream:
        *pieces, last = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
        usage, choices = last.usage, [choice for piece in pieces for choice in piece.choices]
    else:
        whole = client.completions.create(**options)
        usage, choices = whole.usage, whole.choices
    texts, ends, events = defaultdict(str), {}, Counter()
    for choice in choices:
        texts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason or ends.get(choice.index)
        events[choice.index] += len((choice.model_extra or {}).get("futurebridge", {"events": []})["events"])
    places = range(len(texts))
    return [texts[n] for n in places], [ends[n] for n in places], [events[n] for n in places], usage


@pytest.mark.parametrize("stream", [False, True])
def test_drawn_answers_are_the_decoders(server, pair, problems, stream):
    """Each prompt's `n` answers are the samples that the decoder draws for it; so for equal prompts, text and chats."""
    client, asked = server.client(), [list(problem.prompt_ids) for problem in (*problems[:2], problems[0])]
    sampling = Sampling(temperature=1.5, top_p=0.9, top_k=0, seed=7)
    settings = {"max_length": 256, "tokenizer": pair.world.tokenizer}
    decoder = LowLatencyDecoder(pair.slm, pair.llm, LLMPreference(), RequestPolicy(THRESHOLD), **settings)
    want = decoder.generate_many([ids for ids in asked for _ in range(3)], 60, sampling=sampling)
    assert len({each.text for each in want}) > 2
    drawn = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
    got, _, _, usage = gathered(client, stream=stream, prompt=asked, n=3, **drawn)
    assert got == [each.text for each in want]
    assert usage.prompt_tokens == sum(map(len, asked))
    assert usage.completion_tokens == sum(len(each.token_ids) for each in want)
    messages = [{"role": "user", "content": problems[0].prompt}]
    chat = client.chat.completions.create(messages=messages, model=MODEL, max_tokens=60, **drawn)
    assert chat.choices[0].message.content == want[0].text


def test_what_clients_send_by_default_is_drawn_anew_each_time(server, problems):
    """LangChain's and Open WebUI's requests name a temperature and no seed; the latter offer tools."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": problems[0].prompt}], "max_tokens": 60}
    asked |= {"top_p": 1, "stream": True, "logprobs": True, "top_logprobs": 2, "tools": tools}
    texts = set()
    for temperature in (0.7, 2.0, 2.0, 2.0):
        pieces = server.client().chat.completions.create(**asked, temperature=temperature)
        choices = [piece.choices[0] for piece in pieces]
        texts.add("".join(choice.delta.content or "" for choice in choices))
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
        assert all(token.logprob <= token.top_logprobs[0].logprob + 1e-6 for token in tokens)
    assert len(texts) > 1


def test_what_openais_clients_send_in_messages_is_understood(server, problems, expected):
    """A developer is the system, and a name is a label."""
    client, prompt = server.client(), problems[0].prompt

    def said(*messages):
        answer = client.chat.completions.create(model=MODEL, messages=list(messages), max_tokens=60)
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    user = {"role": "user", "content": prompt}
    assert said({**user, "name": "Ada"}) == said(user) == (expected[0].text, len(problems[0].prompt_ids))
    assert said({**user, "role": "developer"}) == said({**user, "role": "system"}) == said(user)


def test_a_chat_template_gets_what_a_message_holds(pair):
    template = "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }} {{ m.tool_calls }};{% endfor %}"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1]}'}}
    known = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": [1]}}}
    messages = [
        {"role": "developer", "content": "a", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    with Engine(Pair(tiny("qwen3"), None), None, RequestPolicy(9.0), max_events=0, max_length=64) as engine:
        service = service_of(engine, tokenizer)
        (ids,) = service.prompts(ChatRequest(messages=messages))
        assert tokenizer.decode(ids) == f"system Ada a ;assistant   {[known]};"
        tokenizer.chat_template = None
        for silent in ({"content": None}, {}, {"content": None, "tool_calls": [call]}, {"tool_calls": None}):
            messages[1] = {"role": "assistant", **silent}  # it called a tool, and said nothing
            (ids,) = service.prompts(ChatRequest(messages=messages))
            assert tokenizer.decode(ids, skip_special_tokens=True) == "a\n"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_answered_each_as_alone(server, problems, expected, stream):
    texts, ids = [p.prompt for p in problems[:3]], [list(p.prompt_ids) for p in problems[:3]]
    for prompt in (texts, ids, texts[:1], ids[:1]):
        got, ends, events, usage = gathered(server.client(), stream=stream, prompt=prompt, n=2)
        want = [each for each in expected[: len(prompt)] for _ in range(2)]
        assert got == [each.text for each in want]
        assert set(ends) == {"stop"}
        assert events == [len(each.events) for each in want]
        assert usage.prompt_tokens == sum(len(p.prompt_ids) for p in problems[: len(prompt)])
        assert usage.completion_tokens == sum(len(each.token_ids) for each in want)
        assert usage.model_extra["large_model"]["calls"] == sum(each.usage.calls for each in want) // 2


def test_log_probs_are_the_small_models(server, pair, problems, expected):
    """Of a completion and of a chat, whole and in pieces, beside a float64 forward."""
    client, problem, want = server.client(), problems[0], expected[0]
    whole = torch.tensor([*problem.prompt_ids, *want.token_ids.tolist()])
    exact = copy.deepcopy(pair.slm).double()(whole[None]).logits[0, len(problem.prompt_ids) - 1 : -1]
    rows = exact.detach()[:, : len(pair.world.tokenizer)].log_softmax(-1)
    names = [pair.world.tokenizer.decode([token]) for token in range(rows.shape[1])]
    likely = [float(row[token]) for row, token in zip(rows, want.token_ids, strict=True)]
    tops = [{names[int(i)]: float(row[i]) for i in row.topk(3).indices} for row in rows]

    options = {"model": MODEL, "prompt": problem.prompt, "max_tokens": 60, "logprobs": 3}
    got = client.completions.create(**options)
    one = got.choices[0].logprobs
    assert one.tokens == [names[int(token)] for token in want.token_ids]
    assert one.token_logprobs == pytest.approx(likely, abs=1e-4)
    for top, known, token, value in zip(one.top_logprobs, tops, one.tokens, likely, strict=True):
        assert top == pytest.approx(known | {token: value}, abs=1e-4)
    spelt = [
        name
        for name, offset in zip(one.tokens, one.text_offset, strict=True)
        if got.choices[0].text[offset:].startswith(name)
    ]
    assert spelt == one.tokens[:-1]  # the end is no text
    pieces = [piece.choices[0] for piece in client.completions.create(**options, stream=True)]
    assert [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens] == one.tokens
    assert "".join(piece.text for piece in pieces) == got.choices[0].text
    assert any(value < max(top.values()) for value, top in zip(likely, tops, strict=True))  # the large model's choice

    messages = [{"role": "user", "content": problem.prompt}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=3)
    entries = chat.choices[0].logprobs.content
    assert [(entry.token, bytes(entry.bytes).decode()) for entry in entries] == [(name, name) for name in one.tokens]
    assert [entry.logprob for entry in entries] == pytest.approx(likely, abs=1e-4)
    assert [{top.token: top.logprob for top in entry.top_logprobs} for entry in entries] == [
        pytest.approx(top, abs=1e-4) for top in tops
    ]
    none = client.completions.create(**options | {"logprobs": 0}).choices[0].logprobs
    assert [list(top) for top in none.top_logprobs] == [[token] for token in none.tokens]

    given = [5, 3, 5, int(want.token_ids[0])]
    more = {"logprob_token_ids": given, "return_tokens_as_token_ids": True}
    asked = client.completions.create(**options, extra_body=more).choices[0].logprobs
    assert asked.tokens == [f"token_id:{token}" for token in want.token_ids]
    for top, row, token in zip(asked.top_logprobs, rows, want.token_ids.tolist(), strict=True):
        assert top == pytest.approx({f"token_id:{own}": float(row[own]) for own in (token, *given)}, abs=1e-4)
    entries = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, extra_body=more)
    for entry, top in zip(entries.choices[0].logprobs.content, asked.top_logprobs, strict=True):
        assert {each.token: each.logprob for each in entry.top_logprobs} == pytest.approx(top, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [0] * 4000}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [0] * 4000}]}),
        (ChatRequest, {"messages": [{f"a{n}": n for n in range(4000)}]}),
        (CompletionRequest, {f"a{n}": n for n in range(4000)}),
    ],
)
def test_the_first_error_of_a_body_is_the_last(kind, body):
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() <= 2


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"", b"[]", b'{"prompt": "\xff"}', b'{"a":' * 5000),
        b'{"prompt": "1;", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_request_are_refused(server, body):
    answer = httpx.post(f"{server.url}/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)


def test_health_models_metrics_and_other_paths(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert [model.id for model in server.client().models.list()] == ["demo:plans"]
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("tokens_total", "events_total", "requests_total", "waiting", "running", "asking", "kv_pages_used"):
        assert f"futurebridge_{name}" in text
    assert server.client().models.retrieve(MODEL).id == MODEL
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    named = set(re.findall(r"futurebridge_\w+", dashboard))
    assert len(named) > 12
    assert named <= set(re.findall(r"futurebridge_\w+", text)) | {"futurebridge_request_seconds_bucket"}


def test_every_error_has_openais_form(server, problems):
    client, prompt = server.client(), problems[0].prompt
    with pytest.raises(openai.NotFoundError) as other:
        client.completions.create(model="gpt-4", prompt=prompt)
    assert (other.value.code, other.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    for method, path, status in (
        *(("GET", "/v1/nothing", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)),
        ("DELETE", "/v1/models", 405),
    ):
        answer = httpx.request(method, f"{server.url}{path}")
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert path in answer.json()["error"]["message"]
    assert "POST" in httpx.get(f"{server.url}/v1/completions").headers["Allow"]
    metrics = httpx.get(f"{server.url}/metrics").text
    for status in (404, 405):
        (count,) = re.findall(rf'requests_total\{{path="other",status="{status}"\}} (\d+)', metrics)
        assert int(count) >= 2
    long = httpx.post(f"{server.url}/v1/completions", content=b"x" * (2 << 20))
    assert (long.status_code, long.json()["error"]["type"]) == (413, "invalid_request_error")


def test_an_address_in_use_is_one_sentence_that_names_the_option():
    listening, _ = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    with listening, pytest.raises(OSError, match=f"^--port: .*127.0.0.1:{port} "):
        listen("127.0.0.1", port)
    with pytest.raises(OSError, match=r"^--host:"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize("key", ["", "abc\r", " abc", "a\nb", "schl\xfcssel", "\udcff", None])
def test_a_key_that_no_client_can_send_is_refused(monkeypatch, key):
    if key is not None:
        monkeypatch.setenv("OUR_KEY", key)
    with pytest.raises(ValueError, match=r"^key_variable:.*" + ("OUR_KEY" if key is None else "letters")):
        load_server(ServeSettings(slm=MODEL, llm=MODEL, key_variable="OUR_KEY"), loopback=True)


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "https://a.example/b", "a.example", "https://A.example", "", "https://a:443"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ValidationError, match="origin as browsers send it"):
        ServeSettings(slm=MODEL, llm=MODEL, allowed_origin=origin)
    for right in ("*", "https://a.example", "http://127.0.0.1:3000", "http://[::1]:3000", "chrome-extension://abc"):
        assert ServeSettings(slm=MODEL, llm=MODEL, allowed_origin=right).allowed_origin == right


def test_no_piece_waits_for_the_clients_acknowledgement():
    listening, _ = listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_that_goes_away_frees_its_place(server, problems):
    body = {"model": MODEL, "prompt": problems[0].prompt, "max_tokens": 200}
    for stream in (True, False):
        asked = {"json": body | {"stream": stream}, "timeout": 0.02}
        with suppress(httpx.TimeoutException), httpx.stream("POST", f"{server.url}/v1/completions", **asked) as gone:
            next(gone.iter_lines())
    until(lambda: "futurebridge_kv_pages_used 0.0" in httpx.get(f"{server.url}/metrics").text)


def test_a_key_a_queue_and_a_graceful_end(problems, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "secret")
    running = Server(fresh=True, key_variable="OUR_KEY", queue=1, max_batch=1, max_length=100)
    body = {"model": MODEL, "prompt": problems[0].prompt, "max_tokens": 80}
    url, key = f"{running.url}/v1/completions", {"Authorization": "Bearer secret"}
    assert httpx.post(url, json=body).status_code == 401
    assert urllib.request.urlopen(f"{running.url}/health").status == 200
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda _: httpx.post(url, json=body, headers=key, timeout=60), range(16)))
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 429)
    messages = [{"role": "user", "content": problems[0].prompt}]  # no limit in it: as many tokens as there is room for
    chat = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": messages}, headers=key, timeout=HANG)
    assert chat.status_code == 200
    seen = []
    with httpx.stream("POST", url, json=body | {"stream": True}, headers=key, timeout=60) as stream:
        lines = stream.iter_lines()
        seen.append(next(lines))
        os.kill(running.process.pid, signal.SIGTERM)
        seen += [line for line in lines if line]
    assert seen[-1] == "data: [DONE]"
    status, log = running.end()
    assert status in (0, -signal.SIGTERM)  # which it passes on when all is done
    assert {line["status"] for line in log} >= {200, 401}
    assert not any(problems[0].prompt in json.dumps(line) for line in log)


def test_a_request_chooses_between_the_servers_reranker_and_other_recipes(pair, problems, expected, tmp_path):
    reranker = TokenReranker.from_base(pair.slm).eval()
    with torch.no_grad():
        reranker.head.copy_(-pair.slm.get_output_embeddings().weight[5])
    reranker.save_pretrained(tmp_path)
    policy, options = RequestPolicy(THRESHOLD), {"max_length": 256, "tokenizer": pair.world.tokenizer}
    decoder = LowLatencyDecoder(pair.slm, pair.llm, FutureBridgeSelector(reranker), policy, **options)
    own = decoder.generate(list(problems[0].prompt_ids), 60)
    assert own.text != expected[0].text
    running = Server(adapter=tmp_path)
    try:
        for recipe, wanted in (("futurebridge", own), (None, own), ("direct", expected[0])):
            found = running.client().completions.create(
                model=MODEL, prompt=problems[0].prompt, max_tokens=60, extra_body={"futurebridge": {"recipe": recipe}}
            )
            assert found.choices[0].text == wanted.text
            events = found.choices[0].model_extra["futurebridge"]["events"]
            assert [event["choice"] for event in events] == [event.choice for event in wanted.events]
    finally:
        running.end()


@pytest.fixture
def engine(pair):
    with Engine(Pair(pair.slm, pair.llm), LLMPreference(), RequestPolicy(THRESHOLD), max_length=256) as made:
        yield made


def test_health_is_that_of_the_engine(pair, engine):
    with TestClient(Application(service_of(engine, pair.world.tokenizer))) as client:
        assert client.get("/health").status_code == 200
        engine.close()
        answer = client.get("/health")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


async def read_late(service, problem, *, end=False):
    """The pieces of an answer that the engine had done before any of it came here."""
    reply = await service.begin(CompletionRequest(prompt=problem.prompt, max_tokens=60))
    reply.answers[0].handle.result(60)
    if end:
        service.end()
    await asyncio.sleep(0)
    return [piece async for piece in reply.pieces()]


def test_an_answer_that_the_end_cuts_is_no_whole_one(pair, problems, engine):
    with pytest.raises(CancelledError):
        asyncio.run(read_late(service_of(engine, pair.world.tokenizer), problems[0], end=True))


def test_what_has_come_meanwhile_is_one_piece(pair, problems, expected, engine):
    (_, piece), end = asyncio.run(read_late(service_of(engine, pair.world.tokenizer), problems[0]))
    assert end == (0, Piece(finish="stop"))
    assert piece.text == expected[0].text
    assert [event["step"] for event in piece.events] == [event.step for event in expected[0].events]
