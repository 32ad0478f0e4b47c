"""The server over HTTP beside a large model in a process of its own that dies, stops, talks nonsense or comes back."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest
import torch
from dialects import byte_tokenizer
from limits import HANG
from serving import Server, until
from test_live_server import MERGES
from tiny import tiny

from benchmarks.servers.live_server import CONTEXT, LlamaCpp, write_gguf
from fb_core.decode.decoder import CollaborativeDecoder
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import LLMPreference

pytestmark = pytest.mark.slow
V = 3 + 256 + len(MERGES)  # all ids are the tokenizer's
THRESHOLD, NEW = 1.5, 40
ALWAYS = {"futurebridge": {"threshold": -1.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small model, and the large one for llama.cpp."""
    made, tokenizer = tmp_path_factory.mktemp("pair"), byte_tokenizer(merges=MERGES)
    tiny("llama", 1, vocab_size=V, max_position_embeddings=CONTEXT).save_pretrained(made)
    tokenizer.save_pretrained(made)
    write_gguf(made / "large.gguf", tiny("qwen3", 2, vocab_size=V, max_position_embeddings=CONTEXT), tokenizer)
    return made


@pytest.fixture(scope="module")
def llama(folder):
    there = LlamaCpp(folder / "large.gguf")
    yield there
    there.kill()


@pytest.fixture
def large(llama):
    """It runs again after each test."""
    yield llama
    if llama.process.poll() is None:
        os.kill(llama.process.pid, signal.SIGCONT)
    else:
        llama.start()


@pytest.fixture(scope="module")
def plain(folder, llama):
    """A server as it is by default."""
    with serving(folder, llama.url) as running:
        yield running


@contextmanager
def serving(folder, url, **settings):
    own = {"server": url, "flavour": "llama.cpp", "threshold": THRESHOLD, "max_length": 200}
    running = Server(slm=folder, **own | settings)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.join()


def prompts(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, V, (1 + n,), generator=generator).tolist() for n in range(count)]


def alone(asked):
    """What the prompts become in this process, one after another."""
    sizes = {"vocab_size": V, "max_position_embeddings": CONTEXT}
    slm, llm = tiny("llama", 1, **sizes), tiny("qwen3", 2, **sizes)
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(THRESHOLD))
    return [decoder.generate(ids, NEW) for ids in asked]


def stream(running, ids, **options):
    """Lines of a streamed answer, as JSON; None at the end of a whole one."""
    body = {"prompt": ids, "max_tokens": NEW, "stream": True} | options
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=HANG) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                text = line.removeprefix("data: ")
                yield None if text == "[DONE]" else json.loads(text)


def events(lines):
    choices = [choice for line in lines if line for choice in line.get("choices", [])]
    return [event for choice in choices for event in choice.get("futurebridge", {}).get("events", [])]


def gauge(running, name):
    text = httpx.get(f"{running.url}/metrics", timeout=HANG).text
    (line,) = (line for line in text.splitlines() if line.startswith(f"futurebridge_{name} "))
    return float(line.split()[1])


def test_many_clients_beside_a_large_model_elsewhere_get_what_they_get_alone(plain, large):
    asked = prompts(12)
    want = alone(asked)
    with ThreadPoolExecutor(12) as clients:
        got = list(clients.map(lambda ids: list(stream(plain, ids, n=1, logprobs=0)), asked))
    for lines, each in zip(got, want, strict=True):
        assert lines.pop() is None
        found = [(e["step"], e["pool"], e["choice"]) for e in events(lines)]
        assert found == [(e.step, e.pool, e.choice) for e in each.events]
        places = [c["logprobs"] for line in lines for c in line["choices"] if c["logprobs"]]
        assert sum(len(place["tokens"]) for place in places) == len(each.token_ids)
    assert sum(len(each.events) for each in want) > 20


@pytest.mark.parametrize("on_llm_error", ["raise", "slm"])
def test_a_large_model_that_dies_in_the_middle_of_a_stream(folder, large, plain, on_llm_error):
    (ids,) = prompts(9)[8:]
    server = nullcontext(plain) if on_llm_error == "raise" else serving(folder, large.url, on_llm_error=on_llm_error)
    with server as running:
        lines = []
        for line in stream(running, ids, futurebridge={"threshold": -1.0}):
            lines.append(line)
            if len(events(lines)) >= 2 and large.process.poll() is None:
                large.kill()
        if on_llm_error == "raise":
            assert lines[-1]["error"]["message"] == "large model: expected an answer, got none; try again later"
            assert lines[-1]["error"]["type"] == "server_error"
            assert all(line["choices"][0]["finish_reason"] is None for line in lines[:-1])
            assert all(event["error"] is None for event in events(lines[:-1]))
            with pytest.raises(openai.InternalServerError) as whole:
                running.client().completions.create(model=str(folder), prompt=ids, extra_body=ALWAYS)
            assert whole.value.status_code == 502
        else:
            assert lines[-1] is None
            errors = [event["error"] for event in events(lines)]
            assert None in errors
            assert errors[-1] == "the large model did not answer"
            assert len(errors) == 8
            text = httpx.get(f"{running.url}/metrics").text
            assert f"futurebridge_event_errors_total {float(sum(map(bool, errors)))}" in text
        assert gauge(running, "running") == 0
        assert list(stream(running, ids, futurebridge={"max_events": 0}))[-1] is None  # others are served
        large.start()
        lines = list(stream(running, ids))
        assert [(e["step"], e["choice"], e["error"]) for e in events(lines)] == [
            (e.step, e.choice, None) for e in alone([ids])[0].events
        ]


def test_a_large_model_that_stops_holds_up_those_who_ask_alone(plain, large):
    asking, other = prompts(9)[7:]
    running = plain
    with ThreadPoolExecutor(1) as client:
        list(stream(running, asking))
        os.kill(large.process.pid, signal.SIGSTOP)
        waiting = client.submit(lambda: list(stream(running, asking, **ALWAYS)))
        until(lambda: gauge(running, "asking") == 1)
        for _ in range(3):
            lines = list(stream(running, other, futurebridge={"max_events": 0}, stream_options={"include_usage": True}))
            assert lines[-1] is None
            assert lines[-2]["usage"]["completion_tokens"] > 10
        assert (gauge(running, "asking"), gauge(running, "running"), waiting.done()) == (1, 1, False)
        before = gauge(running, "tokens_total")
        os.kill(large.process.pid, signal.SIGCONT)
        assert waiting.result()[-1] is None
        assert gauge(running, "tokens_total") > before
        text = httpx.get(f"{running.url}/metrics").text
        assert "futurebridge_event_seconds_count" in text


def test_a_client_that_goes_while_its_event_waits_frees_its_place(folder, large):
    (ids,) = prompts(9)[8:]
    with serving(folder, large.url) as running:
        os.kill(large.process.pid, signal.SIGSTOP)
        for wanted in (True, False):
            body = {"prompt": ids, "max_tokens": NEW, "stream": wanted} | ALWAYS
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{running.url}/v1/completions", json=body, timeout=httpx.Timeout(HANG, read=0.5))
        until(lambda: gauge(running, "running") == gauge(running, "kv_pages_used") == 0)
        _, log = running.end()
        assert [line["status"] for line in log if line["path"] == "/v1/completions"] == [499, 499]


class Garbled(BaseHTTPRequestHandler):
    """In front of a large model: passes on so many answers whole, and then what is none."""

    protocol_version = "HTTP/1.1"
    left, url = 0, ""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = httpx.post(self.url + self.path, content=body, headers={"Content-Type": "application/json"}).content
        if self.path == "/completion":
            type(self).left -= 1
            if self.left < 0:
                answer = answer.replace(b'"logprob":-', b'"logprob":')  # chances above 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_a_large_model_that_talks_nonsense_in_the_middle_of_a_stream(folder, large):
    (ids,) = prompts(9)[8:]
    Garbled.left, Garbled.url = 10**9, large.url
    between = ThreadingHTTPServer(("127.0.0.1", 0), Garbled)
    threading.Thread(target=between.serve_forever, daemon=True).start()
    with serving(folder, f"http://127.0.0.1:{between.server_port}") as running:
        Garbled.left = 4
        lines = list(stream(running, ids, **ALWAYS))
        assert lines[-1]["error"]["type"] == "server_error"
        assert len(events(lines[:-1])) > 0
        Garbled.left = 10**9
        assert list(stream(running, ids, **ALWAYS))[-1] is None
        _, log = running.end()
        assert [line["status"] for line in log if "status" in line] == [502, 200]
        (error,) = (line for line in log if "error" in line)
        assert error["error"] == "ServerError"
    between.shutdown()


@pytest.mark.parametrize(("how", "batch"), [(signal.SIGTERM, 4), (signal.SIGINT, 1)])
def test_what_is_longer_than_the_drain_ends_with_an_error(folder, large, how, batch):
    """Though the large model never answers; with a batch of one the engine itself waits for it."""
    (ids,) = prompts(9)[8:]
    with serving(folder, large.url, drain=1, max_batch=batch) as running, ThreadPoolExecutor(2) as clients:
        os.kill(large.process.pid, signal.SIGSTOP)
        cut = clients.submit(lambda: list(stream(running, ids, **ALWAYS)))
        body = {"prompt": ids, "max_tokens": NEW, **ALWAYS}
        whole = clients.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=HANG)
        until(lambda: gauge(running, "prompt_tokens_total") == 2 * len(ids))
        status, log = running.end(how)
        for error in (cut.result()[-1]["error"], whole.result().json()["error"]):
            assert error["message"] == "server: expected to finish the answer, but it is shutting down; try again later"
            assert error["type"] == "server_error"
        assert whole.result().status_code == 503
        assert status == -how
        assert [line["status"] for line in log if line["path"] == "/v1/completions"] == [503, 503]
