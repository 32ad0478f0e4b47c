import gc
import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from concurrent.futures import CancelledError
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from dialects import FAMILY, OLD, SEED, byte_tokenizer
from dialects import served as served_model
from limits import HANG
from test_llm import BAD_CALLS, lists
from tiny import EOS, V, prompts, tiny

from fb_core import ServerError, ServerLLM
from fb_core.apps.cli import main as cli
from fb_core.apps.settings.pair import PairSettings
from fb_core.apps.settings.run import RunSettings, ServerSettings
from fb_core.decode.decoder import CollaborativeDecoder
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import LLMPreference, SLMPreference
from fb_core.llm import protocols as dialects
from fb_core.llm.local import LocalLLM

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
SERVED = [("vllm", ""), ("vllm", OLD), ("sglang", "")]  # llama.cpp's own server is asked in test_live_server.py
served = pytest.mark.parametrize(("flavour", "prefix"), SERVED, ids=["vllm", "vllm-old", "sglang"])
stand_ins = pytest.mark.parametrize("flavour", ["vllm", "sglang"])
flavours = pytest.mark.parametrize("flavour", ["vllm", "sglang", "llama.cpp"])


@pytest.fixture(scope="module")
def url():
    """Of a server of the tiny model in all dialects."""
    with served_model() as address:
        yield address


@pytest.fixture(scope="module")
def local():
    return LocalLLM(tiny(FAMILY, SEED))


def check(found, wanted):
    assert found.ids.tolist() == wanted.ids.tolist()
    assert (found.ids.dtype, found.logprob.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(found.logprob, wanted.logprob, **TOLERANCE)
    if wanted.score_logprob is None:
        assert found.score_logprob is None
    else:
        assert found.score_logprob.dtype == torch.float32
        torch.testing.assert_close(found.score_logprob, wanted.score_logprob, **TOLERANCE)


@served
def test_candidates_equal_those_of_the_model_in_process(url, local, flavour, prefix):
    llm = ServerLLM(url + prefix + "/", flavour, vocabulary=V)
    asked = prompts(4, 1, 20, 9)
    scored = [[7, 3, 3], [], [int(local.candidates(asked[2], 1).ids)], list(range(20))]
    for ids, score_ids in zip(asked, scored, strict=True):
        check(llm.candidates(ids, 5, score_ids), local.candidates(ids, 5, score_ids))
        check(llm.candidates(ids.tolist(), 1), local.candidates(ids, 1))
    for found, wanted in zip(
        llm.candidates_many(asked, 8, [torch.tensor(ids, dtype=torch.long) for ids in scored]),
        local.candidates_many(asked, 8, scored),
        strict=True,
    ):
        check(found, wanted)
    for found, wanted in zip(llm.candidates_many(asked, 3), local.candidates_many(asked, 3), strict=True):
        check(found, wanted)
    assert llm.candidates_many([], 3) == llm.complete_many([], 3) == []


def test_k_is_clamped_to_the_vocabulary(url, local):
    (ids,) = prompts(6)
    check(ServerLLM(url, "sglang", vocabulary=V).candidates(ids, 1000, [9]), local.candidates(ids, 1000, [9]))


@served
def test_completions_equal_those_of_the_model_in_process(url, flavour, prefix):
    model = tiny(FAMILY, SEED)
    asked = prompts(4, 6, 1, 9, 12, seed=1)
    whole = LocalLLM(model).complete_many(asked, 12)
    ends = {EOS, int(whole[0][3]), int(whole[3][5])}
    model.generation_config.eos_token_id = sorted(ends)
    local, llm = LocalLLM(model), ServerLLM(url + prefix, flavour, vocabulary=V, ends=ends)
    assert llm.ends == local.ends
    wanted = local.complete_many(asked, 12)
    assert {len(new) for new in wanted} > {12}
    for ids, found, expected in zip(asked, llm.complete_many(asked, 12), wanted, strict=True):
        assert found.tolist() == expected.tolist()
        assert found.dtype == torch.int64
        assert llm.complete(ids, 1).tolist() == expected[:1].tolist()


@served
def test_branches_equal_those_of_the_model_in_process(url, local, flavour, prefix):
    prefixes, branches = prompts(4, 6, 1, seed=1), [[5, EOS, 9], [], torch.tensor([7])]
    wanted = local.complete_branches(prefixes, branches, 8)
    found = ServerLLM(url + prefix, flavour, vocabulary=V, ends=[EOS]).complete_branches(prefixes, branches, 8)
    assert lists(found) == lists(wanted)
    assert len(wanted[0][1]) == 0 < len(wanted[0][0])


@stand_ins
def test_samples_repeat_with_their_seed(url, local, flavour):
    asked, settings = prompts(3, 8, 5), {"temperature": 1.5, "top_p": 0.95, "top_k": 0}
    llm = ServerLLM(url, flavour, vocabulary=V, ends=[EOS])
    first = llm.sample_many(asked, 4, 6, seed=3, **settings)
    assert lists(first) == lists(llm.sample_many([ids.tolist() for ids in asked], 4, 6, seed=3, **settings))
    assert lists(first) != lists(llm.sample_many(asked, 4, 6, seed=4, **settings))
    assert lists(llm.sample_many(asked[1:2], 2, 6, seed=3, **settings)) == [lists(first)[1][:2]]
    for samples in lists(first):
        assert len(samples) == 4 == len({tuple(sample) for sample in samples})
        for sample in samples:
            assert len(sample) == 6 or sample[-1] == EOS
            assert EOS not in sample[:-1]
    assert {sample.dtype for samples in first for sample in samples} == {torch.int64}
    greedy = [[new] * 2 for new in local.complete_many(asked, 6)]
    assert lists(llm.sample_many(asked, 2, 6, top_k=1)) == lists(greedy)
    assert llm.sample_many([], 2, 6) == []


@stand_ins
def test_samples_follow_the_truncated_distribution(url, local, flavour):
    (ids,) = prompts(5)
    temperature, top_p, top_k, n = 3.0, 0.8, 8, 400
    ranked = local.candidates(ids, V)
    chances = (ranked.logprob.double() / temperature).softmax(0)[:top_k]
    if flavour != "sglang":
        chances = chances / chances.sum()
    kept = int((chances.cumsum(0) - chances < top_p).sum())
    assert kept == (8 if flavour == "sglang" else 5)  # 2 if the temperature came last
    wanted = (chances[:kept] / chances[:kept].sum()).tolist()
    llm = ServerLLM(url, flavour, vocabulary=V)
    (drawn,) = llm.sample_many([ids], n, 1, temperature=temperature, top_p=top_p, top_k=top_k, seed=7)
    counts = [sum(int(sample) == token for sample in drawn) for token in ranked.ids[:kept].tolist()]
    assert sum(counts) == n
    for count, chance in zip(counts, wanted, strict=True):
        assert count / n == pytest.approx(chance, abs=4 * (chance * (1 - chance) / n) ** 0.5)


@pytest.mark.parametrize("pool", ["joint", "slm", "llm"])
@served
def test_decoding_with_a_server_gives_the_tokens_of_the_model_in_process(url, local, flavour, prefix, pool):
    slm = tiny("qwen3", 1)
    asked = prompts(5, 9, 2, seed=3)

    def decode(llm):
        selector = SLMPreference() if pool == "llm" else LLMPreference()
        decoder = CollaborativeDecoder(slm, llm, selector, RequestPolicy(1.5), pool=pool, slm_k=4, llm_k=4)
        return decoder.generate_many(asked, 10)

    events = 0
    for found, wanted in zip(decode(ServerLLM(url + prefix, flavour, vocabulary=V)), decode(local), strict=True):
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        events += len(wanted.events)
        for event, expected in zip(found.events, wanted.events, strict=True):
            assert (event.step, event.pool, event.choice) == (expected.step, expected.pool, expected.choice)
            assert event.llm_logprob == pytest.approx(expected.llm_logprob, abs=1e-4)
    assert events > 3


@stand_ins
def test_tokenizers_are_compared(url, flavour):
    llm = ServerLLM(url, flavour, vocabulary=300)
    llm.check_tokenizer(byte_tokenizer())
    llm.check_tokenizer(byte_tokenizer(swapped=True), ["other bytes", ""])
    with pytest.raises(ValueError, match=r"tokenizer: .*'a!b'"):
        llm.check_tokenizer(byte_tokenizer(swapped=True), ["a b", "a!b"])
    with pytest.raises(ValueError, match=r"tokenizer: .*259"):
        ServerLLM(url, flavour, vocabulary=V).check_tokenizer(byte_tokenizer())


def one_of(flavour):
    """A server that speaks one dialect alone, with the other endpoints that its software has."""
    tokens = {"count": 1, "max_model_len": 128, "tokens": [7, 8]}
    plain = {"choices": [{"index": 0, "text": "x", "logprobs": {"top_logprobs": [{"x": -0.5}]}, "token_ids": None}]}
    knows = {
        "vllm": {
            "/v1/completions": {"choices": [FITS["vllm"]["choices"][0] | {"token_ids": [7]}]},
            "/tokenize": tokens,
        },
        "sglang": {"/generate": FITS["sglang"] | {"output_ids": [7]}, "/v1/completions": plain, "/tokenize": tokens},
        "llama.cpp": {"/completion": FITS["llama.cpp"] | {"tokens": [7]}, "/v1/completions": plain},
        None: {"/tokenize": tokens, "/v1/completions": plain},
    }[flavour]

    def answer(handler):
        if handler.path == "/tokenize" and flavour == "llama.cpp":
            says({"tokens": [7, 8] if "content" in handler.server.asked[-1] else []})(handler)
        elif handler.path in knows and (handler.path != "/tokenize" or "prompt" in handler.server.asked[-1]):
            says(knows[handler.path])(handler)
        else:
            says({"detail": "Not Found"}, 404)(handler)

    return answer


class Words:
    """A tokenizer to which every text is the ids 7 and 8."""

    all_special_tokens = ()

    def get_vocab(self):
        return {str(token): token for token in range(V)}

    def __call__(self, texts, add_special_tokens):
        return SimpleNamespace(input_ids=[[7, 8] for _ in texts])


@pytest.mark.parametrize("given", ["vllm", "sglang", "llama.cpp"])
@pytest.mark.parametrize("real", ["vllm", "sglang", "llama.cpp"])
def test_a_server_of_another_flavour_is_recognised(real, given):
    with scripted(one_of(real)) as there:
        llm = ServerLLM(there.url, given, vocabulary=V, timeout=30.0, retries=0)
        if given == real:
            llm.check_tokenizer(Words())
            assert len(there.asked) <= 7
        else:
            with pytest.raises(ValueError, match=f"flavour: expected '{real}'.*got '{given}'"):
                llm.check_tokenizer(Words())


def test_a_server_of_no_known_flavour_keeps_the_error_of_its_own():
    for answer, flavour, words in (
        (one_of(None), "llama.cpp", "/tokenize, got status 404"),
        (says({"error": "no such key"}, 401), "sglang", "status 401: .*flavour, the api_key"),
    ):
        with scripted(answer) as there, pytest.raises(ServerError, match=words):
            ServerLLM(there.url, flavour, vocabulary=V, timeout=30.0, retries=0).check_tokenizer(Words())
    with pytest.raises(ServerError, match="ConnectionRefusedError"):
        ServerLLM(closed_url(), retries=0, vocabulary=V).check_tokenizer(Words())


def closed_url():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def test_a_server_of_another_flavour_or_limit_is_named(url):
    for flavour, path in (("sglang", "/nowhere"), ("llama.cpp", OLD)):
        with pytest.raises(ServerError, match=r"http://127.*status 404"):
            ServerLLM(url + path, flavour, vocabulary=V).candidates([5], 3)
    with pytest.raises(ServerError, match=r"status 400: .*greater than max allowed"):
        ServerLLM(url, vocabulary=V).candidates([5], 30)


class Scripted(ThreadingHTTPServer):
    """Answers its requests by a list of functions of a handler, the last one again and again."""

    daemon_threads = True

    def __init__(self, answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.asked = []  # what was posted
        self.connections = set()
        self.lock = threading.Lock()
        self.open = self.most = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # the client hangs up on purpose


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        self.fields = fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scripted = self.server
        with scripted.lock:
            answer = scripted.answers[min(len(scripted.asked), len(scripted.answers) - 1)]
            scripted.asked.append(fields)
            scripted.connections.add(self.client_address)
            scripted.open += 1
            scripted.most = max(scripted.most, scripted.open)
        try:
            answer(self)
        finally:
            with scripted.lock:
                scripted.open -= 1

    def reply(self, status, body, length=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def scripted(*answers):
    with Scripted(answers) as scripted:
        thread = threading.Thread(target=scripted.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield scripted
        finally:
            scripted.shutdown()
            thread.join()


def says(body, status=200):
    return lambda handler: handler.reply(status, body if isinstance(body, bytes) else json.dumps(body).encode())


def probs(*pairs):
    """As llama.cpp."""
    top = [{"id": token, "logprob": value} for token, value in pairs]
    return {"completion_probabilities": [{"top_logprobs": top}]}


FINE = probs((4, -1.5), (3, -0.5), (9, -1.5))
KEPT = {"output_ids": [7]}  # as SGLang, to which connections are kept


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("fb_core.llm.http.FIRST_DELAY", 0.01)


def ask(url, k=3, score_ids=None, flavour="llama.cpp", **options):
    return ServerLLM(url, flavour, **{"vocabulary": V, "timeout": HANG} | options).candidates([5, 6], k, score_ids)


def test_candidates_are_sorted_ties_to_the_lowest_id_and_rounding_is_cut():
    with scripted(says(probs((4, -1.5), (3, 2e-4), (9, -math.inf), (2, -1.5)))) as there:
        found = ask(there.url, 4, [9, 4])
    assert found.ids.tolist() == [3, 2, 4, 9]
    assert found.logprob.tolist() == [0.0, -1.5, -1.5, -math.inf]
    assert found.score_logprob.tolist() == [-math.inf, -1.5]


@pytest.mark.parametrize(
    "failure",
    [
        *(says(b"no", status) for status in (500, 503, 429)),
        lambda handler: handler.connection.shutdown(socket.SHUT_RDWR),
        lambda handler: handler.reply(200, b'{"completion', 100) or handler.connection.shutdown(socket.SHUT_RDWR),
        lambda handler: handler.wfile.write(b"what is this\r\n\r\n"),
        lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    ],
    ids=["500", "503", "429", "closed", "truncated", "no-http", "bad-chunk"],
)
def test_passing_failures_are_tried_again_and_lasting_ones_end(failure):
    with scripted(failure, failure, says(FINE)) as there:
        assert ask(there.url).ids.tolist() == [3, 4, 9]
        assert len(there.asked) == 3
    with scripted(failure) as there:
        with pytest.raises(ServerError, match=f"{there.url}: .*/completion, .*, 3 times"):
            ask(there.url, retries=2)
        assert len(there.asked) == 3


def test_nobody_listens():
    with pytest.raises(ServerError, match=r"ConnectionRefusedError.*, 2 times"):
        ask(closed_url(), retries=1)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 301])
def test_refusals_are_not_repeated_and_quote_the_server(status):
    with scripted(says({"error": "n_probs is too large"}, status)) as there:
        with pytest.raises(ServerError, match=f"status {status}: .*too large"):
            ask(there.url)
        assert len(there.asked) == 1


def trickle(handler):
    """A byte of a header each 0.02 seconds."""
    for _ in range(1000):
        handler.wfile.write(b"X")
        time.sleep(0.02)


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: time.sleep(1.0),
        lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\n") and trickle(handler),
        lambda handler: handler.reply(200, b"", 10**6) or trickle(handler),
    ],
    ids=["silent", "slow-header", "slow-body"],
)
def test_slow_answers_end_at_the_timeout(answer):
    with scripted(answer) as there:
        with pytest.raises(ServerError, match=r"TimeoutError.*, 2 times; .*raise timeout"):
            ask(there.url, timeout=0.2, retries=1)
        assert len(there.asked) <= 2  # a busy server may not have begun the last


@pytest.mark.parametrize("chunked", [False, True])
@flavours
def test_answers_are_bounded_by_what_was_asked(flavour, chunked):
    def flood(handler):
        length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 99999999999"
        handler.wfile.write(f"HTTP/1.1 200 OK\r\n{length}\r\n\r\n".encode())
        while True:
            handler.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n" if chunked else bytes(0x10000))

    with scripted(flood) as there:
        llm = ServerLLM(there.url, flavour, vocabulary=V, timeout=HANG)
        for call, named in (
            (lambda: llm.candidates([5, 6], 3), 5 + (flavour != "vllm")),
            (lambda: llm.complete([5, 6], 4000), 2 + 4000),
            (lambda: llm.check_tokenizer(Words(), ["a text"]), 6),
        ):
            with pytest.raises(ServerError, match=f"at most {(1 << 20) + 256 * named} bytes"):
                call()


# --- hostile answers --------------------------------------------------------------------------------------------------

CANDIDATES = {"token_id:3": -0.5, "token_id:4": -1.5, "token_id:9": -1.5, "token_id:7": -3.0}
FITS = {  # 3 candidates and a score of id 7
    "vllm": {"choices": [{"index": 0, "logprobs": {"top_logprobs": [CANDIDATES]}}]},
    "sglang": {
        "meta_info": {
            "output_top_logprobs": [[[-0.5, 3, None], [-1.5, 4, None], [-1.5, 9, None]]],
            "output_token_ids_logprobs": [[[-3.0, 7, None]]],
        }
    },
    "llama.cpp": probs((3, -0.5), (4, -1.5), (9, -1.5), (7, -3.0)),
}
WRAPPED = {
    "vllm": lambda ids: {"choices": [{"token_ids": ids}]},
    "sglang": lambda ids: {"output_ids": ids},
    "llama.cpp": lambda ids: {"tokens": ids},
}
NAMES = [
    *("token_id:1_0", "token_id:03", "token_id:+3", "token_id: 3", "token_id:3 ", "token_id:-0", "token_id:"),
    *("token_id:\u0663", "token_id:\uff13", "token_id:\U0001d7db", "token_id:\u00b3", "token_id:\u0969"),
    *("token_id:3:4", "TOKEN_ID:3", "token_id:0x3", "token_id:3.0", "token_id:1e1", "token_id:3\n", "token_id:\x1b[2J"),
    *("token_id:" + "9" * 5000, "token_id:50", "token_id:-1", "token_id", "3", "", " token_id:3", "token_id:\u202e3"),
]
VALUES = [
    *(None, True, False, 0, 1, -1, 3, 49, 50, 1 << 31, 1 << 63, -(10**400), 10**400, 0.5, -0.0, 1e308, -1e308, -3.4e38),
    *(-9999.0, math.nan, math.inf, -math.inf, "", "3", "-0.5", "\x1b]0;x\x07", "\u202e", "x" * 10**5, [], {}, [[]]),
    *([None], [3], [-0.5, 3], [[-0.5, 3, None]], {"id": 3}, {"token_id:3": -0.5}, [3] * 1000, {"logprob": -1.0}),
]


def places(value, path=()):
    """The path of everything inside a JSON."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(value, path, change):
    """A copy with change(container, key) done at a path."""
    made = json.loads(json.dumps({"": value}))
    inside = made
    for key in ("", *path)[:-1]:
        inside = inside[key]
    change(inside, ("", *path)[-1])
    return made.get("")


def hostile(answer):
    """Every part of an answer replaced, dropped, doubled or renamed."""
    for path in places(answer):
        for value in VALUES:
            yield changed(answer, path, lambda inside, key, value=value: inside.__setitem__(key, value))
        if path:
            yield changed(answer, path, lambda inside, key: inside.pop(key))
            if isinstance(path[-1], int):
                yield changed(answer, path, lambda inside, key: inside.append(inside[key]))
            else:
                for name in NAMES:
                    yield changed(answer, path, lambda inside, key, name=name: inside.update({name: inside.pop(key)}))


@pytest.mark.parametrize("asked", ["candidates", "completion"])
@flavours
def test_hostile_answers_end_in_an_error_of_one_line_or_in_what_was_asked_for(flavour, asked, request):
    answers = list(hostile(FITS[flavour] if asked == "candidates" else WRAPPED[flavour]([5, 6, 7])))
    answers = answers[:: 1 if request.config.getoption("--all") else 3]
    refused = 0
    with scripted(says({})) as there:
        llm = ServerLLM(there.url, flavour, vocabulary=V, timeout=30.0, retries=0)
        for answer in answers:
            there.answers = (says(answer),)
            there.asked.clear()
            try:
                found = llm.candidates([5, 6], 3, [7]) if asked == "candidates" else llm.complete([5, 6], 4)
            except ServerError as problem:
                refused += 1
                error = str(problem)
                assert error.startswith(there.url)
                assert error.isprintable()
                assert len(error) < 1000
                continue
            ids = (found.ids if asked == "candidates" else found).tolist()
            assert all(0 <= token < V for token in ids)
            if asked == "completion":
                assert 1 <= len(ids) <= 4
                continue
            assert len(set(ids)) == 3
            assert bool((found.logprob <= 0).all() and (found.score_logprob <= 0).all())
            assert found.logprob.tolist() == sorted(found.logprob.tolist(), reverse=True)
            assert float(found.logprob[0]) > -math.log(2 * V)
    assert refused > 0.6 * len(answers)


def tops(*entries):
    """As vLLM and SGLang say one place."""
    return {"choices": [{"logprobs": {"top_logprobs": [dict(entries)]}}]}


UNFIT = [  # flavour, answer, what of it is named
    *(("llama.cpp", body, "JSON") for body in (b"", b'{"a": [', b"\xff\xfe", b"[" * 10**6, b"9" * 10**6)),
    *(("llama.cpp", body, "does not fit") for body in ([], {}, probs((4, -(10**400))))),
    *(("llama.cpp", {"completion_probabilities": body}, "does not fit") for body in ([], [None])),
    ("llama.cpp", {"completion_probabilities": [{"top_logprobs": [[1, 2]]}]}, "does not fit"),
    ("llama.cpp", probs((4, -1.5), (3, -0.5)), "3 candidates and 1 scores"),
    ("llama.cpp", probs((4, -1.5), (4, -1.5), (3, -0.5)), "token id 4 comes twice"),
    *(("llama.cpp", probs((4, x)), "log-probability") for x in (math.nan, 0.01, math.inf, None, "-1.5", True)),
    *(("llama.cpp", probs((token, -1.0)), "token id") for token in (V, -1, 1.0, "a" * 10**6, True)),
    *(("vllm", tops((name, -1.0)), "not of the form token_id") for name in ("7", "token_id:x")),
    *(("vllm", {"choices": body}, "does not fit") for body in ([{"logprobs": None}], [])),
    *(("vllm", tops(*CANDIDATES.items(), (name, -2.0)), "not of the form|id 50 is not") for name in NAMES),
    ("sglang", {"meta_info": {}}, "output_top_logprobs"),
    *(("sglang", {"meta_info": {"output_top_logprobs": [[one]]}}, "") for one in ([-1.0], [-1.0, 99, None])),
]


@pytest.mark.parametrize(("flavour", "body", "named"), UNFIT)
def test_answers_that_do_not_fit_are_named_and_final(flavour, body, named):
    with scripted(says(body)) as there:
        with pytest.raises(ServerError, match=f"{there.url}: .*{named}") as raised:
            ask(there.url, score_ids=[7], flavour=flavour)
        assert len(there.asked) == 1
    assert len(str(raised.value)) < 1000


@flavours
def test_completions_that_do_not_fit(flavour):
    for ids, named in (([], "got none"), ([5, V], "token id 50"), (None, "None"), ("56", "'56'")):
        body = says(WRAPPED[flavour](ids))
        with scripted(body) as there, pytest.raises(ServerError, match=named):
            ServerLLM(there.url, flavour, vocabulary=V).complete([5, 6], 4)
    with scripted(says(WRAPPED[flavour]([5, 6, 7, 8, 9]))) as there:
        assert ServerLLM(there.url, flavour, vocabulary=V).complete([5, 6], 4).tolist() == [5, 6, 7, 8]
        assert ServerLLM(there.url, flavour, vocabulary=V, ends=[7]).complete([5, 6], 4).tolist() == [5, 6, 7]


@pytest.mark.parametrize("value", [-math.inf, -1e308, -3.4e38, -9999.0, -4.7])
@flavours
def test_a_most_likely_token_that_nothing_speaks_for_is_no_answer(flavour, value):
    """Of 50 ids one has a fiftieth or more, which is -3.9 nats."""
    body = json.loads(re.sub(r"-[0-9.]+", json.dumps(value), json.dumps(FITS[flavour])))
    with scripted(says(body)) as there, pytest.raises(ServerError, match="most likely of 50 ids"):
        ask(there.url, score_ids=[7], flavour=flavour)


OFF = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
DRAWN = {"temperature": 1.5, "top_p": 0.9}
SENT = {
    "vllm": {"prompt": [5, 6], "max_tokens": 9, "top_k": 0, "stop_token_ids": [1], "return_token_ids": True}
    | OFF
    | DRAWN,
    "sglang": {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 9, "top_k": -1, "stop_token_ids": [1]} | OFF | DRAWN,
    },
    "llama.cpp": {
        "prompt": [5, 6],
        "n_predict": 9,
        "samplers": ["top_k", "temperature", "top_p"],
        "dynatemp_range": 0,
        "top_k": 0,
        "mirostat": 0,
        "logit_bias": [],
        "cache_prompt": True,
        "return_tokens": True,
        **DRAWN,
    },
}


@flavours
def test_what_is_sent_for_samples(flavour):
    with scripted(says(WRAPPED[flavour]([7]))) as there:
        llm = ServerLLM(there.url, flavour, vocabulary=V, ends=[EOS])
        drawn = llm.sample_many([[5, 6]], 3, 9, temperature=1.5, top_p=0.9, top_k=0, seed=2)
        assert lists(drawn) == [[[7], [7], [7]]]
    seeds = [
        fields["sampling_params"].pop("sampling_seed") if flavour == "sglang" else fields.pop("seed")
        for fields in there.asked
    ]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert there.asked == [SENT[flavour]] * 3


def test_llama_cpp_is_asked_for_more_until_the_scores_are_there():
    size = 20_000

    def top(handler):
        answer = probs(*((token, -0.001 * token) for token in range(handler.server.asked[-1]["n_probs"])))
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            entry |= {"token": " electronically", "bytes": list(b" electronically")}  # as long as the longest words
        says(answer)(handler)

    with scripted(top) as there:
        assert ask(there.url, 2, [1, 60], vocabulary=size).score_logprob.tolist() == pytest.approx([-0.001, -0.06])
        assert [fields.pop("n_probs") for fields in there.asked] == [128]
        there.asked.clear()
        assert ask(there.url, 2, [19_999], vocabulary=size).score_logprob.tolist() == pytest.approx([-19.999])
        assert [fields["n_probs"] for fields in there.asked] == [128, 2048, 20_000]
    with scripted(says(FINE)) as there:
        with pytest.raises(ServerError, match=r"no score of \[7\]"):
            ask(there.url, 3, [4, 7], vocabulary=size)
        assert len(there.asked) == 3


def leaving_out(ignored):
    """vLLM that leaves given ids out at some questions for them; id 3 has -0.1, any other its negative."""

    def answer(handler):
        fields = handler.fields
        if "prompt_logprobs" in fields:
            rows = [[None, {str(ids[-1]): {"logprob": -ids[-1], "rank": 1}}] for ids in fields["prompt"]]
            choices = [{"index": place, "prompt_logprobs": row} for place, row in enumerate(rows)]
            return says({"choices": choices[::-1]})(handler)
        number = sum("logprob_token_ids" in each for each in handler.server.asked) - 1
        given = [] if ignored(number) else fields.get("logprob_token_ids", [])
        return says(tops(("token_id:3", -0.1), *((f"token_id:{token}", -float(token)) for token in given)))(handler)

    return answer


def test_vllm_that_ignores_ids_is_soon_asked_so_no_more():
    with scripted(leaving_out(lambda number: True)) as there:
        llm = ServerLLM(there.url, model="big", vocabulary=V)
        for wanted in ([3, 9, 8], [8], [3], [8]):
            values = [-0.1 if token == 3 else -token for token in wanted]
            assert llm.candidates([5], 1, wanted).score_logprob.tolist() == pytest.approx(values)
        asked = ["logprob_token_ids" in fields for fields in there.asked]
        assert asked == [False, True, False, False, True, False, False, False, True, False]
        for _ in range(70):
            assert llm.candidates([5], 1, [8]).score_logprob.tolist() == [-8.0]
        assert ["logprob_token_ids" in fields for fields in there.asked[10:]].count(True) == 1
    assert {fields["model"] for fields in there.asked} == {"big"}
    assert {fields["temperature"] for fields in there.asked} == {0}
    assert there.asked[2]["prompt"] == [[5, 8], [5, 9]]


@pytest.mark.parametrize("bad", [{0}, {5}, {0, 1}, {3, 4, 8}])
def test_one_answer_of_vllm_without_the_ids_is_not_the_end_of_asking_for_them(bad):
    with scripted(leaving_out(bad.__contains__)) as there:
        llm = ServerLLM(there.url, vocabulary=V)
        for _ in range(10):
            assert llm.candidates([5], 1, [8]).score_logprob.tolist() == [-8.0]
        assert sum("logprob_token_ids" in fields for fields in there.asked) == 10
        assert sum("prompt_logprobs" in fields for fields in there.asked) == len(bad)


PADDING = {"token_id:3": -0.1, "token_id:0": -9999.0}  # where a question shared a batch with one of given ids, in vLLM


def test_likely_and_given_ids_are_never_asked_of_vllm_at_once():
    lock, under_way, both = threading.Lock(), [], []

    def one_batch(handler):
        fields = handler.fields
        kind = "logprob_token_ids" in fields
        with lock:
            under_way.append(kind)
        time.sleep(0.01)
        with lock:
            mixed = len(set(under_way)) == 2
            under_way.remove(kind)
        both.append(mixed)
        given = {f"token_id:{token}": -2.0 for token in fields.get("logprob_token_ids", [])}
        top = {"token_id:3": -0.1} | given if kind else PADDING if mixed else {"token_id:3": -0.1, "token_id:4": -0.2}
        says(tops(*top.items()))(handler)

    with scripted(one_batch) as there:
        llm = ServerLLM(there.url, vocabulary=V, in_flight=8)
        for _ in range(4):
            for found in llm.candidates_many([[5 + i] for i in range(12)], 2, [[8, 9]] * 12):
                assert found.ids.tolist() == [3, 4]
                assert found.score_logprob.tolist() == [-2.0, -2.0]
    assert len(both) == 96
    assert not any(both)


@pytest.mark.parametrize("padded", [1, 2, 3])
def test_padding_that_vllm_gives_for_likely_ids_is_asked_again(padded):
    def answer(handler):
        top = PADDING if len(handler.server.asked) <= padded else {"token_id:3": -0.1, "token_id:4": -0.2}
        says(tops(*top.items()))(handler)

    with scripted(answer) as there:
        llm = ServerLLM(there.url, vocabulary=V)
        if padded < 3:
            assert llm.candidates([5], 2).ids.tolist() == [3, 4]
        else:
            with pytest.raises(ServerError, match="2 candidates"):
                llm.candidates([5], 2)


@pytest.mark.parametrize("stuck", ["likely", "given"])
def test_a_question_waits_for_those_of_the_other_kind_but_for_none_that_is_stuck(monkeypatch, stuck):
    monkeypatch.setattr(dialects, "TURN", HANG)
    monkeypatch.setattr(dialects, "SOON", 0.05, raising=False)
    end = threading.Event()

    def answer(handler):
        given = "logprob_token_ids" in handler.fields
        if handler.fields["prompt"] == [7] and given == (stuck == "given"):
            end.wait(HANG)
        says(tops(("token_id:3", -0.1), *([("token_id:9", -2.0)] if given else [])))(handler)

    with scripted(answer) as there:
        llm = ServerLLM(there.url, vocabulary=V)
        llm.candidates([5], 1, [9])
        hanging = threading.Thread(target=llm.candidates, args=([7], 1, [9]), daemon=True)
        hanging.start()
        while len(there.asked) < 3 + (stuck == "given"):
            time.sleep(0.01)
        for _ in range(2):
            assert llm.candidates([5], 1, [9]).score_logprob.tolist() == [-2.0]
        end.set()
        hanging.join()


# --- sequences that are gone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "family", "how"),
    [(32, "qwen3", "hangs"), (1, "qwen3", "refuses"), (32, "gemma2", "refuses"), (1, "gemma2", "hangs")],
)
def test_requests_of_sequences_that_are_gone_are_given_up(monkeypatch, batch, family, how):
    """16 ask a large model that hangs, or says that it is busy, and leave; the next one is answered at once."""
    monkeypatch.setattr("fb_core.llm.http.FIRST_DELAY", HANG)
    up, end = threading.Event(), threading.Event()

    def answer(handler):
        if up.is_set():
            says(FINE)(handler)
        elif how == "hangs":
            end.wait()
        else:
            says(b"later", 503)(handler)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gemma2 runs in the plain loop
        with scripted(answer) as there:
            llm = ServerLLM(there.url, "llama.cpp", vocabulary=V, timeout=HANG)
            options = {"pool": "llm", "llm_k": 3, "max_batch": batch, "max_length": 60}
            pair = Pair(tiny(family), llm)
            with Engine(pair, LLMPreference(), RequestPolicy(-math.inf), **options) as engine:
                handles = [engine.submit(ids, 1) for ids in prompts(*range(5, 21))]
                stop = time.monotonic() + HANG
                while len(there.asked) < (llm._pool._max_workers if (batch, family) == (32, "qwen3") else 1):
                    assert time.monotonic() < stop
                    time.sleep(0.01)
                for handle in handles:
                    handle.cancel()
                for handle in handles:
                    with pytest.raises(CancelledError):
                        handle.result(60)
                up.set()
                assert engine.submit(prompts(9)[0], 1).result(60).token_ids.tolist() == [3]
            end.set()


@pytest.mark.parametrize("in_flight", [1, 3])
def test_at_most_so_many_requests_are_under_way_each_thread_with_one_connection(in_flight):
    together = threading.Barrier(in_flight)

    def slowly(handler):
        if len(there.asked) <= in_flight:  # the first ones are under way at the same time
            together.wait(HANG)
        time.sleep(0.03)
        says(KEPT)(handler)

    with scripted(slowly) as there:
        llm = ServerLLM(there.url, "sglang", vocabulary=V, in_flight=in_flight)
        users = [threading.Thread(target=llm.complete_many, args=([[5]] * 6, 1)) for _ in range(2)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert len(there.asked) == 12
        assert there.most == len(there.connections) == in_flight


def test_answers_come_in_the_order_of_the_prompts_and_one_failure_ends_the_call():
    class Echo(Handler):
        def do_POST(self):
            (token,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            time.sleep(0.03 if token == 10 else 0.0)
            says(b"" if token == 40 else {"tokens": [token]})(self)

    with scripted() as there:
        there.RequestHandlerClass = Echo
        llm = ServerLLM(there.url, "llama.cpp", vocabulary=V)
        asked = [[token] for token in range(10, 40)]
        assert [new.tolist() for new in llm.complete_many(asked, 1)] == asked
        with pytest.raises(ServerError, match="expected JSON"):
            llm.complete_many([[10], [40], *asked], 1)
        assert llm.complete([10], 1).tolist() == [10]


def test_a_fork_is_refused():
    llm = ServerLLM("http://127.0.0.1:9", vocabulary=9, retries=0)
    child = os.fork()
    if child == 0:
        try:
            llm.complete([1], 1)
        except ValueError as problem:
            os._exit("got a fork of it" not in str(problem))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_connections_are_kept_but_to_llama_cpp_and_one_that_the_server_closed_costs_no_retry():
    def once(handler):
        says(KEPT)(handler)
        handler.close_connection = True  # without a word of it

    for answer, flavour, connections in ((says(FINE), "llama.cpp", 3), (says(KEPT), "sglang", 1), (once, "sglang", 3)):
        with scripted(answer) as there:
            llm = ServerLLM(there.url, flavour, vocabulary=V, retries=0, in_flight=1)
            for _ in range(3):
                llm.candidates([5], 3) if flavour == "llama.cpp" else llm.complete([5], 1)
                time.sleep(0.05)
            assert len(there.connections) == connections


def test_no_cookie_is_kept():
    cookies = []

    def baked(handler):
        cookies.append(handler.headers["Cookie"])
        handler.send_response(200)
        body = json.dumps(KEPT).encode()
        for name, value in (("Set-Cookie", "sticky=1"), ("Content-Length", str(len(body)))):
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    with scripted(baked) as there:
        llm = ServerLLM(there.url, "sglang", vocabulary=V, in_flight=1)
        for _ in range(2):
            llm.complete([5], 1)
    assert cookies == [None, None]


def test_connections_close_with_the_object_or_when_told():
    closed = threading.Event()

    def wait(handler):
        says(KEPT)(handler)
        handler.rfile.read()  # until the client hangs up
        closed.set()

    with scripted(wait) as there:
        llm = ServerLLM(there.url, "sglang", vocabulary=V)
        llm.complete([5], 1)
        assert not closed.wait(0.1)
        llm.close()
        assert closed.wait(HANG)
        with pytest.raises(RuntimeError):
            llm.complete([5], 1)
        closed.clear()
        ServerLLM(there.url, "sglang", vocabulary=V).complete([5], 1)
        gc.collect()
        assert closed.wait(HANG)


SECRET = (
    *("http://me:s3cret@host", "http://s3cret@host:8000/v1", "me:s3cret@host", "ftp://me:s3cret@host"),
    *("http://me:s3cret@", "http://host/v1?api_key=s3cret", "http://host?s3cret", "http://host/#s3cret"),
    *("http://me:s3cret%40host", "http://me:s3/cret@host", "http://[me:s3cret@host", "http://me:s3cret@host:x"),
    "http://me:s3cret@host\r\nX: y",
)


@pytest.mark.parametrize("url", SECRET)
def test_what_a_url_may_hide_is_shown_nowhere(url, tmp_path, capsys, caplog, monkeypatch):
    caplog.set_level(0)
    config = tmp_path / "run.yaml"
    server_of = {"url": url, "api_key_variable": "KEY"}
    config.write_text(json.dumps({"models": {"slm": "demo:plans", "llm": "demo:plans", "llm_server": server_of}}))
    shown = []
    for make in (
        lambda: ServerLLM(url, vocabulary=V),
        lambda: PairSettings(slm="demo:plans", server=url),
        lambda: ServerSettings(url=url),
        lambda: RunSettings.load(str(config)),
    ):
        with pytest.raises(ValueError, match="url: expected") as raised:
            make()
        shown.append("".join(traceback.format_exception(raised.value)))
    run = ["--config", str(config), "--run-dir", str(tmp_path / "run")]
    pair = ["--slm", str(tmp_path), "--server", url]
    for command in (["generate", "hello", *pair], ["chat", *pair], ["score", *run], ["futures", *run, "--dry-run"]):
        monkeypatch.setattr(sys, "argv", ["futurebridge", *command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
    captured = capsys.readouterr()
    shown += [captured.out, captured.err, caplog.text]
    shown += [path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path != config]
    assert "url: expected" in captured.err
    assert not any("s3cret" in text or "s3/cret" in text for text in shown)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *(("url", url, ValueError) for url in ("ftp://host", "localhost:8000", "http://", "http://host:99999")),
        *(("url", url, ValueError) for url in ("http://host:x", "http://host/?a=b", "http://host/a\r\nX: y")),
        *(("url", url, ValueError) for url in ("http://[::1", "file:///x")),
        *(("url", None, TypeError), ("flavour", "tgi", ValueError), ("vocabulary", 0, ValueError)),
        *(("vocabulary", None, TypeError), ("ends", [V], ValueError), ("timeout", 0.0, ValueError)),
        *(("timeout", math.nan, ValueError), ("retries", -1, ValueError), ("retries", 1.5, TypeError)),
        *(("in_flight", 0, ValueError), ("api_key", b"key", TypeError)),
        *(("api_key", key, ValueError) for key in ("", "key\r\nX: y", "clé")),
    ],
)
def test_bad_settings(name, value, kind):
    with pytest.raises(kind, match=f"{name}: expected"):
        ServerLLM(**{"url": "http://localhost:1", "vocabulary": V, name: value})


@pytest.mark.parametrize(("call", "kind", "named"), BAD_CALLS)
def test_bad_arguments_send_nothing(call, kind, named):
    with scripted(says(FINE)) as there:
        with pytest.raises(kind, match=named):
            call(ServerLLM(there.url, "llama.cpp", vocabulary=V))
        assert there.asked == []


def test_https_is_spoken_to_https_servers():
    with scripted(says(FINE)) as there, pytest.raises(ServerError, match=r"SSLError: .*, 1 times"):
        ask(there.url.replace("http", "https"), retries=0)


def test_a_key_is_sent_and_never_shown(caplog):
    class Guarded(Handler):
        def do_POST(self):
            self.server.keys.append(self.headers["Authorization"])
            super().do_POST()

    key = "sk-" + "0123456789" * 5
    caplog.set_level(0)
    echo = f"who is {'x' * 290}{key}? {key}".encode()
    inside = says({"completion_probabilities": [{"top_logprobs": [{"id": key, "logprob": -1.0}]}]})
    with scripted(says(FINE)) as there:
        there.RequestHandlerClass, there.keys = Guarded, []
        llm = ServerLLM(there.url, "llama.cpp", vocabulary=V, timeout=HANG, retries=1, api_key=key)
        llm.candidates([5, 6], 3)
        assert there.keys == [f"Bearer {key}"]
        shown = [repr(llm), str(llm)]
        for answer in (
            says(echo, 401),
            says(echo, 500),
            says(echo),
            inside,
            lambda handler: handler.wfile.write(echo + b"\n"),
        ):
            there.answers = (answer,)
            with pytest.raises(ServerError) as raised:
                llm.candidates([5, 6], 3)
            shown.append("".join(traceback.format_exception(raised.value)))
        there.answers = (says(FINE),)
        ask(there.url)
        assert there.keys[-1] is None
    assert not any("sk-" in text for text in [*shown, caplog.text])
