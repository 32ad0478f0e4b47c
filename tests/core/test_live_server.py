"""`ServerLLM` and the decoders against llama.cpp's own server, a process that serves a tiny model of ours.

vLLM's own server is asked in `tests/servers` (`make test-servers`); its dialect and SGLang's are tested as they are
documented, by `dialects.py`.
"""

import math
import os
import re
import signal
import threading
import time

import pytest
import torch
from dialects import byte_tokenizer
from limits import HANG
from tiny import EOS, tiny

from benchmarks.servers.live_server import CONTEXT, LlamaCpp, write_gguf
from fb_core import ServerError, ServerLLM
from fb_core.decode.decoder import CollaborativeDecoder, LowLatencyDecoder
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import LLMPreference, SLMPreference
from fb_core.events import SLM
from fb_core.llm.local import LocalLLM

V = 272
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "Ġ"), ("4", "2")]
KEY = "sk-0123456789"
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
decoders = pytest.mark.parametrize("kind", [CollaborativeDecoder, LowLatencyDecoder])


def prompts(count, longest=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (1 + n % longest,), generator=generator) for n in range(count)]


@pytest.fixture(scope="module")
def model():
    return tiny("qwen3", 2, vocab_size=V, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def local(model):
    return LocalLLM(model)


@pytest.fixture(scope="module")
def slm():
    return tiny("llama", 1, vocab_size=V, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    """The server's process; a test that kills it starts it again."""
    path = tmp_path_factory.mktemp("live") / "model.gguf"
    write_gguf(path, model, byte_tokenizer(merges=MERGES))
    there = LlamaCpp(path)
    yield there
    there.kill()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("fb_core.llm.http.FIRST_DELAY", 0.01)


def connect(live, kind=ServerLLM, **options):
    return kind(live.url, "llama.cpp", **{"vocabulary": V, "ends": [EOS], "timeout": HANG} | options)


def check(found, wanted):
    assert found.ids.tolist() == wanted.ids.tolist()
    torch.testing.assert_close(found.logprob, wanted.logprob, **TOLERANCE)
    torch.testing.assert_close(found.score_logprob, wanted.score_logprob, **TOLERANCE)


def test_tokenizers_are_compared(live):
    llm = connect(live)
    llm.check_tokenizer(byte_tokenizer(merges=MERGES))
    for other in (
        byte_tokenizer(swapped=True, merges=MERGES),
        byte_tokenizer(merges=MERGES[:-1]),
        byte_tokenizer(merges=[*MERGES, ("Ġ", "i")]),
    ):
        with pytest.raises(ValueError, match="server's ids"):
            llm.check_tokenizer(other)


def test_candidates_equal_those_of_the_model_in_process(live, local):
    llm, asked = connect(live), prompts(60)
    whole = zip(asked, local.complete_many(asked, 60), strict=True)
    asked += [torch.cat([ids, new[:-1]]) for ids, new in whole if new[-1] == EOS]
    scored = [[EOS, V - 1, n, n] for n in range(len(asked))]
    wanted = local.candidates_many(asked, 8, scored)
    text = byte_tokenizer(merges=MERGES).decode
    assert any("\N{REPLACEMENT CHARACTER}" in text(one.ids[0]) for one in wanted)
    assert any(one.ids[0] == EOS for one in wanted)
    for found, expected in zip(llm.candidates_many(asked, 8, scored), wanted, strict=True):
        check(found, expected)
    found, expected = llm.candidates(asked[9], 10 * V), local.candidates(asked[9], V)
    order, expected_order = found.ids.argsort(), expected.ids.argsort()
    assert found.ids[order].tolist() == list(range(V))
    torch.testing.assert_close(found.logprob[order], expected.logprob[expected_order], **TOLERANCE)


def test_completions_are_greedy_decoding_token_by_token(live, local):
    llm, asked = connect(live), prompts(40)
    wanted = local.complete_many(asked, 60)
    assert {int(new[-1]) == EOS for new in wanted} == {True, False}
    for found, expected in zip(llm.complete_many(asked, 60), wanted, strict=True):
        assert found.tolist() == expected.tolist()
    assert llm.complete(asked[0], 1).tolist() == wanted[0][:1].tolist()
    ids, tokens = asked[-1], []
    while len(tokens) < 60 and tokens[-1:] != [EOS]:
        tokens.append(int(llm.candidates(torch.cat([ids, torch.tensor(tokens, dtype=torch.long)]), 1).ids))
    assert tokens == wanted[-1].tolist()


def test_samples_repeat_with_their_seed_and_differ_by_number(live, local):
    llm, asked, settings = connect(live), prompts(6), {"temperature": 1.5, "top_p": 0.95, "top_k": 0}

    def drawn(seed, n=4, **options):
        return [
            [new.tolist() for new in group]
            for group in llm.sample_many(asked, n, 12, seed=seed, **(settings | options))
        ]

    first = drawn(3)
    assert first == drawn(3) != drawn(4)
    assert [len({tuple(sample) for sample in samples}) for samples in first] == [4] * len(asked)
    greedy = [[new.tolist()] * 2 for new in local.complete_many(asked, 12)]
    assert drawn(0, 2, top_k=1) == drawn(0, 2, top_p=1e-6) == drawn(0, 2, temperature=1e-3) == greedy


def test_samples_follow_the_truncated_distribution(live, local):
    (ids,), temperature, top_p, top_k, n = prompts(1), 3.0, 0.8, 8, 400
    ranked = local.candidates(ids, top_k)
    chances = (ranked.logprob.double() / temperature).softmax(0)
    kept = int((chances.cumsum(0) - chances < top_p).sum())
    wanted = (chances[:kept] / chances[:kept].sum()).tolist()
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": 7}
    (drawn,) = connect(live).sample_many([ids], n, 1, **settings)
    counts = [sum(int(sample) == token for sample in drawn) for token in ranked.ids[:kept].tolist()]
    assert (kept, sum(counts)) == (6, n)  # kept would be 5 if the temperature came last
    for count, chance in zip(counts, wanted, strict=True):
        assert count / n == pytest.approx(chance, abs=4 * (chance * (1 - chance) / n) ** 0.5)


def test_a_prompt_without_room_is_refused_and_named(live, local):
    llm, ids = connect(live), torch.full((CONTEXT,), 7)
    with pytest.raises(ServerError, match=r"got status 400: .*exceeds the available context size"):
        llm.candidates(ids, 3, [9])
    check(llm.candidates(ids[1:], 3, [9]), local.candidates(ids[1:], 3, [9]))


@pytest.mark.parametrize("in_flight", [1, 3, 16])
def test_many_requests_come_in_order_and_as_many_at_once_as_allowed(live, local, in_flight):
    llm, asked = connect(live, Watched, in_flight=in_flight), prompts(120)
    assert lists(llm.complete_many(asked, 30)) == lists(local.complete_many(asked, 30))
    assert min(in_flight, 2) <= llm.most <= in_flight  # a machine under load may not reach the bound


def lists(written):
    return [new.tolist() for new in written]


class Watched(ServerLLM):
    """Counts the requests under way, answers and failures; calls `then` after the 20th answer."""

    under_way = most = answers = failures = 0
    then = staticmethod(lambda: None)

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.lock = threading.Lock()
        self._plain, self._connections.post = self._connections.post, self._counted

    def _counted(self, *arguments):
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            answer = self._plain(*arguments)
        except Exception:
            self.failures += 1
            raise
        finally:
            with self.lock:
                self.under_way -= 1
        with self.lock:
            self.answers += 1
            if self.answers == 20:
                self.then()
        return answer


def test_a_server_killed_and_started_again_costs_no_answer(live, local):
    llm, asked = connect(live, Watched, retries=12), prompts(80)

    def start_again():
        while not llm.failures:
            time.sleep(0.01)
        live.start()

    again = threading.Thread(target=start_again, daemon=True)
    llm.then = lambda: live.kill() or again.start()
    assert lists(llm.complete_many(asked, 40)) == lists(local.complete_many(asked, 40))
    again.join(HANG)


def test_a_server_killed_for_good_is_an_error_and_the_next_one_is_taken(live, local):
    llm, asked = connect(live, Watched, retries=2), prompts(80)
    llm.then = live.kill
    with pytest.raises(ServerError, match=r"ConnectionRefusedError.*, 3 times"):
        llm.candidates_many(asked, 4)
    live.start()
    assert lists(llm.complete_many(asked[:5], 9)) == lists(local.complete_many(asked[:5], 9))


def test_a_server_that_hangs_ends_at_the_timeout(live, local):
    llm, (ids,) = connect(live, timeout=0.2, retries=1), prompts(1)
    os.kill(live.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerError, match=r"TimeoutError: .*, 2 times"):
            llm.candidates(ids, 3, [9])
    finally:
        os.kill(live.process.pid, signal.SIGCONT)
    check(connect(live).candidates(ids, 3, [9]), local.candidates(ids, 3, [9]))


def test_a_key_opens_the_server_and_is_not_shown(live):
    guarded = LlamaCpp(live.file, KEY)
    try:
        connect(guarded, api_key=KEY).check_tokenizer(byte_tokenizer(merges=MERGES))
        for key in (None, "sk-other"):
            with pytest.raises(ServerError, match=r"status 401: .*api_key") as raised:
                connect(guarded, api_key=key).candidates([5], 3)
            assert "sk-" not in str(raised.value)
    finally:
        guarded.kill()


# --- decoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["joint", "slm", "llm"])
@decoders
def test_decoding_is_that_with_the_model_in_process(live, local, slm, kind, pool):
    selector = SLMPreference() if pool == "llm" else LLMPreference()

    def decode(llm):
        return kind(slm, llm, selector, RequestPolicy(1.5), pool=pool).generate_many(prompts(6, seed=3), 24)

    events = 0
    for found, wanted in zip(decode(connect(live)), decode(local), strict=True):
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        events += len(wanted.events)
        for event, expected in zip(found.events, wanted.events, strict=True):
            assert (event.step, event.pool, event.choice) == (expected.step, expected.pool, expected.choice)
            assert event.llm_logprob == pytest.approx(expected.llm_logprob, abs=1e-4)
            assert event.error is None
    assert events > 10


class Killing(LLMPreference):
    """Kills the server when it has chosen so often."""

    def __init__(self, live, after):
        self.live, self.left = live, after

    def choose_many(self, states, pools):
        self.left -= 1
        if not self.left:
            self.live.kill()
        return super().choose_many(states, pools)


@decoders
def test_a_server_killed_in_mid_generation_leaves_the_small_model_marked(live, local, slm, kind):
    asked, llm = prompts(3, seed=3), connect(live, retries=1)
    alone = kind(slm, local, LLMPreference(), RequestPolicy(1.5), max_events=0)
    whole = kind(slm, local, LLMPreference(), RequestPolicy(1.5)).generate_many(asked, 24)
    decoder = kind(slm, llm, Killing(live, 3), RequestPolicy(1.5), on_llm_error="slm")
    try:
        found = decoder.generate_many(asked, 24)
    finally:
        live.start()
    events = [event for one in found for event in one.events]
    assert {event.error is None for event in events} == {True, False}
    for ids, one, expected in zip(asked, found, whole, strict=True):
        assert len(one.events) <= 8
        marked = [event for event in one.events if event.error is not None]
        served = one.events[: len(one.events) - len(marked)]
        assert all(event.error is None for event in served)
        for event, like in zip(served, expected.events, strict=False):
            assert (event.step, event.pool, event.choice) == (like.step, like.pool, like.choice)
        if not marked:
            assert one.token_ids.tolist() == expected.token_ids.tolist()
            continue
        since = marked[0].step
        known = torch.cat([ids, one.token_ids[:since]])
        assert one.token_ids[since:].tolist() == alone.generate(known, 24 - since).token_ids.tolist()
        for event in marked:
            logits = slm(torch.cat([ids, one.token_ids[: event.step]])[None]).logits[0, -1].detach()
            assert event.entropy > 1.5
            assert re.search("ConnectionRefusedError.*, 2 times; check that the server runs", event.error)
            assert (event.pool, event.token) == ([int(logits.argmax())], int(one.token_ids[event.step]))
            assert event.slm_logprob == pytest.approx([float(logits.log_softmax(-1).max())], abs=1e-4)
            assert (event.sources, event.scores) == ([SLM], None)
            assert event.llm_logprob == pytest.approx([math.nan], nan_ok=True)
    assert [one.token_ids.tolist() for one in decoder.generate_many(asked, 24)] == [
        one.token_ids.tolist() for one in whole
    ]


@decoders
def test_a_server_killed_in_mid_generation_is_an_error_and_the_decoder_stays_usable(live, local, slm, kind):
    asked = prompts(3, seed=3)
    decoder = kind(slm, connect(live, retries=1), Killing(live, 3), RequestPolicy(1.5))
    try:
        with pytest.raises(ServerError, match=r"ConnectionRefusedError.*, 2 times"):
            decoder.generate_many(asked, 24)
    finally:
        live.start()
    whole = kind(slm, local, LLMPreference(), RequestPolicy(1.5)).generate_many(asked, 24)
    assert [each.token_ids.tolist() for each in decoder.generate_many(asked, 24)] == [
        each.token_ids.tolist() for each in whole
    ]


def test_another_word_for_an_llm_that_fails_is_refused(slm, local):
    with pytest.raises(ValueError, match="on_llm_error:"):
        CollaborativeDecoder(slm, local, LLMPreference(), RequestPolicy(1.5), on_llm_error="ignore")
