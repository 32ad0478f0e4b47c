"""What clients may do to a server over HTTP without holding up others: heads, bodies, prompts, answers, leaving."""

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest
from limits import HANG
from serving import service_of, until
from test_engine import Slow

from fb_core.apps.serve import connection, run
from fb_core.apps.serve import service as serving
from fb_core.apps.serve.app import Application, _parts
from fb_core.apps.serve.protocol import CompletionRequest, Piece, ScoreRequest, Shape, TokenLogprobs
from fb_core.apps.serve.run import Server as Uvicorn
from fb_core.apps.serve.run import listen, on_loopback
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import LLMPreference
from fb_core.runtime.detokenizer import Name


@pytest.fixture(scope="module")
def problem(problems):
    return problems[0]


@contextmanager
def here(service, **options):
    """The server in this process, on a socket of its own; yields its URL."""
    listening, url = listen("127.0.0.1", 0)
    running = Uvicorn(Application(service, **options), 0)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: running.started)
        yield url
    finally:
        running.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def hanging(pair, **options):
    """A service whose large model answers only once it is told to, and that model."""
    slow = Slow(pair.llm)
    with Engine(Pair(pair.slm, slow), LLMPreference(), RequestPolicy(-1.0), max_length=256) as engine:
        try:
            yield service_of(engine, pair.world.tokenizer), slow
        finally:
            slow.go.set()


def connected(url):
    return socket.create_connection(httpx.URL(url).netloc.decode().split(":"), timeout=60)


def raw(path, body=None, *headers):
    """The bytes of a request."""
    text = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(text)}", "", ""]).encode() + text


def received(client):
    """All that comes until the server closes."""
    got = b""
    with suppress(ConnectionError):
        while part := client.recv(65536):
            got += part
    return got


def counted(url, path, status):
    """How many requests of a path got that status, by the server's metrics."""
    text = httpx.get(f"{url}/metrics", timeout=HANG).text
    found = re.search(rf'requests_total\{{path="{path}",status="{status}"\}} (\d+)', text)
    return int(found[1]) if found else 0


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"X-A: " + b"a" * 1000 + b"\r\n", b"a" * 1000, b"a:b\r\n"])
def test_a_head_without_end_is_refused_and_counted(server, line):
    before, sent = counted(server.url, "other", 431), 0
    with connected(server.url) as client, suppress(ConnectionError):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + (b"X-A: " if line[0] == 97 else b""))
        while sent < 8 << 20:
            client.sendall(line * 16)
            sent += 16 * len(line)
    assert sent < 8 << 20
    until(lambda: counted(server.url, "other", 431) == before + 1)


@pytest.mark.parametrize("headers", [["X-A: b"] * 101, ["X-A: " + "b" * 17000], ["X-A: " + "b" * 200] * 90])
def test_a_whole_head_that_is_too_large_is_refused(server, headers):
    with connected(server.url) as client:
        client.sendall(raw("/health", None, *headers))
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["message"].startswith("headers: ")
    assert httpx.get(f"{server.url}/health", headers={f"x-{n}": "a" * 100 for n in range(90)}).status_code == 200


def test_what_is_no_request_is_refused_in_openais_form_and_counted(server):
    before = counted(server.url, "other", 400)
    for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/1.1\r\n\r\n", b"hello\r\n\r\n"):
        with connected(server.url) as client:
            client.sendall(nonsense)
            head, _, body = received(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert counted(server.url, "other", 400) == before + 3


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        *((b"", b""), (b"POST /v1/completions HT", b"HTTP/1.1 408 ")),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: b\r\n", b"HTTP/1.1 408 "),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 408 "),
    ],
)
def test_a_request_that_does_not_come_is_not_waited_for(pair, monkeypatch, sent, answer):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.4)
    with hanging(pair) as (service, _), here(service) as url:
        with connected(url) as client:
            client.sendall(sent)
            assert received(client).startswith(answer)
        with connected(url) as client:  # a byte from time to time does not help
            began = time.monotonic()
            with suppress(ConnectionError):
                for byte in [*(sent or b"GET"), *b"x" * 1000]:
                    client.sendall(bytes([byte]))
                    time.sleep(0.01)
            assert time.monotonic() - began < 5


def test_a_body_of_tiny_chunks_is_refused(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(server.url) as client:
        client.sendall(head + b"1\r\n \r\n" * 4096)
        client.sendall(b"1\r\n \r\n" * 2)
        assert received(client).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("held", [False, True])
def test_the_connection_that_has_waited_longest_makes_room(pair, monkeypatch, held):
    """By their number any that waits, an idle one too; by bytes one of those that hold some."""
    monkeypatch.setattr(run, "_raise_file_limit", lambda: 16)  # 8 connections
    monkeypatch.setattr(connection, "HELD", 100_000)
    part = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n" + b" " * 40_000
    with hanging(pair) as (service, _), here(service) as url:
        clients = []
        for _ in range(4 if held else 12):
            clients.append(connected(url))
            clients[-1].sendall(part if held else b"")
            assert httpx.get(f"{url}/health").status_code == 200
        assert received(clients[0]) == b""
        clients[-1].sendall(b" " * 50_000 if held else raw("/health"))
        assert clients[-1].recv(65536).startswith(b"HTTP/1.1 400" if held else b"HTTP/1.1 200")
        for client in clients:
            client.close()


def test_a_request_that_still_comes_at_the_end_is_told_of_it(pair, caplog):
    with hanging(pair) as (service, _):
        with here(service) as url:
            client = connected(url)
            client.sendall(raw("/v1/completions", {"prompt": "1"})[:-1])
            until(lambda: "requests" in httpx.get(f"{url}/metrics").text)
        assert received(client).startswith(b"HTTP/1.1 503 ")
        client.close()
    assert "Traceback" not in caplog.text


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("apart", "stream", "count"), [(False, False, 60), (False, True, 2), (True, False, 2), (True, True, 60)]
)
def test_pipelined_requests_are_cancelled_with_their_connection(pair, problem, caplog, apart, stream, count):
    body = {"prompt": problem.prompt, "max_tokens": 40, "stream": stream}
    with hanging(pair) as (service, slow), here(service) as url:
        with connected(url) as client:
            client.sendall(raw("/v1/completions", body) * (1 if apart else count))
            until(lambda: slow.asked)
            if apart:
                for _ in range(count - 1):
                    client.sendall(raw("/v1/completions", body))
                    time.sleep(0.01)
        until(lambda: service.requests == 0 and service.engine.load.running == 0)
        assert len(slow.asked) == 1
        until(lambda: counted(url, "/v1/completions", 499) == 1)
    assert "Traceback" not in caplog.text


def test_pipelined_requests_are_answered_one_after_another(server, problem):
    first, second = ({"prompt": problem.prompt, "max_tokens": count} for count in (3, 5))
    with connected(server.url) as client:
        client.sendall(raw("/v1/completions", first) + raw("/v1/completions", second, "Connection: close"))
        got = received(client)
    assert [int(n) for n in re.findall(rb'"completion_tokens": ?(\d+)', got)] == [3, 5]


def test_what_a_client_sends_ahead_is_bounded(pair, problem):
    body = {"prompt": problem.prompt, "max_tokens": 40}
    with hanging(pair) as (service, slow), here(service) as url, connected(url) as client:
        client.sendall(raw("/v1/completions", body))
        until(lambda: slow.asked)
        with pytest.raises(ConnectionError):
            client.sendall(raw("/v1/completions", body | {"user": "x" * 60000}) * 1000)
        until(lambda: service.requests == 0)


# --- prompts and answers ----------------------------------------------------------------------------------------------


def test_prompts_that_can_never_fit_hold_up_no_short_one(server, problem):
    """20 clients send a megabyte each and leave at once; the longest wait of a short prompt beside them is short."""

    def send_and_leave(client):
        with client:
            client.sendall(raw("/v1/completions", {"prompt": "1+" * 500_000, "max_tokens": 1}))

    for client in [connected(server.url) for _ in range(20)]:
        threading.Thread(target=send_and_leave, args=(client,)).start()
    waits, body = [], {"prompt": problem.prompt, "max_tokens": 1}
    for _ in range(10):
        began = time.monotonic()
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG).status_code == 200
        waits.append(time.monotonic() - began)
    assert max(waits) < 5


def test_a_prompt_is_not_tokenized_once_its_client_has_left(pair, problem):
    with hanging(pair) as (service, _), here(service) as url:
        held, seen, prompts = threading.Event(), [], service.prompts
        service.prompts = lambda request: seen.append(request) or prompts(request)
        service.turns.thread.submit(held.wait)
        clients = [connected(url) for _ in range(20)]
        for client in clients:
            client.sendall(raw("/v1/completions", {"prompt": problem.prompt, "max_tokens": 1}))
        until(lambda: service.requests == 20)
        for client in clients:
            client.close()
        until(lambda: service.requests == 0)
        held.set()
        until(lambda: counted(url, "/v1/completions", 499) == 20)
        service.turns.thread.submit(int).result(60)
        assert seen == []


@pytest.mark.parametrize("chat", [False, True])
def test_a_large_answer_holds_up_nobody_and_its_copies_are_equal(server, pair, chat):
    """As many log-probs as are allowed: others are answered while it is computed, written and sent."""
    prompts = [each.prompt for each in pair.world.problems(16, 3, "validation")]
    own = {"logprobs": 20, "prompt": prompts}
    if chat:
        own = {"logprobs": True, "top_logprobs": 20, "messages": [{"role": "user", "content": prompts[0]}]}
    body, url = {"n": 16, "max_tokens": 48} | own, f"{server.url}/v1/{'chat/' if chat else ''}completions"
    waits = []
    with ThreadPoolExecutor(1) as other, httpx.Client(timeout=HANG) as client:
        asked = other.submit(httpx.post, url, json=body, timeout=HANG)
        while not asked.done():
            began = time.monotonic()
            assert client.get(f"{server.url}/health").status_code == 200
            waits.append(time.monotonic() - began)
    choices = asked.result().json()["choices"]
    assert [choice.pop("index") for choice in choices] == list(range(16 if chat else 256))
    for first in range(0, len(choices), 16):
        assert all(choice == choices[first] for choice in choices[first : first + 16])
    alone = httpx.post(url, json=body | {"n": 1}, timeout=HANG).json()["choices"]
    for one, among in zip(alone, choices[::16], strict=True):
        assert one["finish_reason"] == among["finish_reason"] == "stop"
        assert (one["message"] == among["message"]) if chat else (one["text"] == among["text"])
    assert max(waits) < 0.6  # written in one go it was 1.1


LARGE = {
    "begin": CompletionRequest(prompt=[[1, *[4] * 60]] * 200, max_tokens=1, temperature=1),
    "score": ScoreRequest(prefix="1;", continuations=["2"] * 4000),
}


@pytest.mark.parametrize("way", LARGE)
def test_a_large_request_lets_a_small_one_go_ahead(pair, problem, way):
    """Nothing of it runs on the event loop, and in the thread it gives way."""

    async def small_first(service):
        large = asyncio.ensure_future(getattr(service, way)(LARGE[way]))
        await asyncio.sleep(0)
        small = await service.begin(CompletionRequest(prompt=problem.prompt, max_tokens=1))
        ahead = not large.done()
        for reply in (small, await large):
            service.end_of(reply)
        return ahead

    with hanging(pair) as (service, _):
        assert asyncio.run(small_first(service))
        assert service.requests == 0


def test_an_answer_is_encoded_in_small_parts():
    choice = {"index": 0, "logprobs": {"tokens": ["é"] * 999, "top_logprobs": [{"a": -1.5}] * 999}, "events": []}
    value = {"choices": [choice, choice], "usage": {}, "prompt_logprobs": [None, *[{"5": {"rank": 1}}] * 500]}
    parts = list(_parts(value))
    assert json.loads("".join(parts)) == value
    assert max(map(len, parts)) < 2000


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_whole_answer_is_the_streamed_one(chat, count):
    a, e = Name("a", b"a"), Name("é", "é".encode())
    tokens = [TokenLogprobs(a, -1.0, [(a, -1.0), (e, -2.0)], offset) for offset in range(count)]
    shape = Shape("m", chat=chat, stream=False, copies=3)
    streaming = Shape("m", chat=chat, stream=True, copies=1)
    for piece in (Piece("x é", (), tokens, "stop"), Piece("", (), tokens[:1], "length")):
        choices = shape.choices(1, piece, [5])
        assert [choice["index"] for choice in choices] == [3, 4, 5]
        assert shape.fields(choices, {"total_tokens": 1})["usage"] == {"total_tokens": 1}
        (streamed,) = streaming.choices(0, piece, [5], False)
        text = streamed.get("delta", {}).get("content", "") if chat else streamed["text"]
        for choice in choices:
            assert (choice["message"]["content"] if chat else choice["text"]) == piece.text == text
            assert choice["logprobs"] == streamed["logprobs"]
            assert choice["finish_reason"] == piece.finish


def test_what_a_slow_reader_left_lying_comes_in_pieces(pair, problem, monkeypatch):
    async def read_late(service):
        reply = await service.begin(CompletionRequest(prompt=problem.prompt, max_tokens=60))
        reply.answers[0].handle.result(60)
        await asyncio.sleep(0)
        return [piece async for _, piece in reply.pieces() if not piece.finish], reply.answers[0].completion

    monkeypatch.setattr(serving, "PIECE", 8)
    with Engine(Pair(pair.slm, None), None, RequestPolicy(9.0), max_events=0, max_length=256) as engine:
        pieces, tokens = asyncio.run(read_late(service_of(engine, pair.world.tokenizer)))
    assert len(pieces) == -(-tokens // 8) > 1


# --- web pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/v1/completions", "/v1/chat/completions"])
def test_a_web_page_can_neither_start_work_nor_read(server, problem, path):
    ask = {"method": "POST" if "completions" in path else "GET", "url": f"{server.url}{path}", "timeout": HANG}
    own = {"messages": [{"role": "user", "content": problem.prompt}]} if "chat" in path else {"prompt": problem.prompt}
    ask["json"] = own | {"max_tokens": 2}
    for headers in (
        *({"Origin": "https://evil.example"}, {"Origin": "null", "Content-Type": "text/plain"}),
        *({"Origin": "http://localhost:1"}, {"Host": "evil.example:80", "Origin": "http://evil.example:80"}),
        *({"Host": host} for host in ("evil.example", "localhost.evil.example", "10.0.0.7", "[::1")),
    ):
        answer = httpx.request(**ask, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error"), headers
    for headers in (
        *({}, {"Origin": server.url}, {"Host": "localhost:8000", "Origin": "http://localhost:8000"}),
        *({"Host": host} for host in ("LOCALHOST", "[::1]:8000", "127.0.0.2")),
    ):
        assert httpx.request(**ask, headers=headers).status_code == 200, headers


def test_no_path_redirects_to_the_hosts_name(server):
    for path in ("/health/", "/v1/models/", "/v1/completions/", "//evil.example/health"):
        answer = httpx.get(f"{server.url}{path}", headers={"Host": "localhost"})
        assert answer.status_code == 404
        assert "location" not in answer.headers


def test_with_a_key_or_on_a_network_any_name_will_do(pair):
    for options in ({"key": "k", "loopback": True}, {}):
        with hanging(pair) as (service, _), here(service, **options) as url:
            assert httpx.get(f"{url}/health", headers={"Host": "large.example"}).status_code == 200
            page = httpx.get(f"{url}/health", headers={"Origin": "http://evil.example"})
            assert page.status_code == (200 if options else 403)


@pytest.mark.parametrize("allowed", ["https://chat.example", "*"])
def test_an_allowed_page_may_use_the_server_from_a_browser(pair, allowed):
    """It gets the headers that its browser looks for; another page does not, and the host's name still counts."""
    with hanging(pair) as (service, _):
        service.settings = service.settings.model_copy(update={"allowed_origin": allowed, "served_name": "other"})
        with here(service, loopback=True) as url:
            page = {"Origin": "https://chat.example"}
            answer = httpx.get(f"{url}/v1/models", headers=page)
            assert answer.headers["access-control-allow-origin"] == allowed
            assert answer.json()["data"][0]["id"] == "other"
            asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
            assert httpx.options(f"{url}/v1/completions", headers=page | asking).status_code == 200
            other = httpx.get(f"{url}/v1/models", headers={"Origin": "https://evil.example"})
            assert other.status_code == (200 if allowed == "*" else 403)
            assert httpx.get(f"{url}/v1/models", headers=page | {"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("::1", None, False)]
)
def test_an_open_address_without_a_key_is_warned_of(capsys, host, key, warns):
    listening, _ = listen(host, 0)
    with listening:
        assert on_loopback(listening, key) == (host == "::1")
    assert ("whoever reaches this address can use the server" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("limit", ["STALL_SECONDS", "ANSWER_SECONDS"])
def test_a_client_that_takes_nothing_is_not_kept(pair, problem, monkeypatch, limit):
    """Nor one that takes too little in all; its places in the queue are its own until then."""
    monkeypatch.setattr(connection, limit, 0.5)
    body = {"prompt": [problem.prompt] * 16, "max_tokens": 48, "n": 16, "logprobs": 20}
    with Engine(Pair(pair.slm, pair.llm), LLMPreference(), RequestPolicy(9.0), max_length=256) as engine:
        service = service_of(engine, pair.world.tokenizer)
        with here(service) as url, socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that little fits between the two
            client.connect(("127.0.0.1", httpx.URL(url).port))
            client.sendall(raw("/v1/completions", body))
            got, seen = b"", set()
            while "futurebridge_request_seconds_count 1" not in httpx.get(f"{url}/metrics", timeout=HANG).text:
                seen.add((service.requests, engine.load.running + engine.load.waiting > 0))
                got += client.recv(100) if limit == "ANSWER_SECONDS" else b""
            assert service.requests == 0
            got += received(client)
    assert (16, False) in seen
    whole = int(re.search(rb"(?i)content-length: (\d+)", got)[1])
    assert len(got) < whole
