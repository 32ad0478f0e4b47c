"""Spans: the LLM's candidate with what it writes after it is one choice, in both loops and in training."""

import io
import math
import random
import re

import pytest
import torch
from rich.console import Console
from starlette.testclient import TestClient
from test_decoding import ALWAYS, MARGIN, Mixed, gap, logits_of, prompts, ranked
from test_engine import engine, facts
from test_runtime import random_reranker
from tiny import EOS, tiny
from transformers import DynamicCache

from benchmarks.paper.methods.takeover import takeover
from fb_core import (
    CollaborativeDecoder,
    FutureBridgeSelector,
    LLMPreference,
    LocalLLM,
    RequestPolicy,
    SLMPreference,
    hf,
    spans,
)
from fb_core.chat import Chat, Printer
from fb_core.config import PairSettings
from fb_core.demo.pairs import load_pair
from fb_core.engine.engine import Engine
from fb_core.engine.large import PagedLLM
from fb_core.engine.model import PagedModel
from fb_core.explain import print_rows
from fb_core.llm import LLM
from fb_core.pair import Pair
from fb_core.pool import Event
from fb_core.serve.app import application
from fb_core.serve.service import Service
from fb_core.spans import Span, ending_ids, write_tails
from fb_core.stages.decode import Row
from fb_core.terminal import IN_TOKEN, escaped

SPANS = [Span(2), Span(4), Span(None, frozenset({5, 9, 13, 17, 21, 25, 29})), Span(6, agree=True), Span(None)]
SCORES = {LLMPreference: lambda s, t: t, Mixed: lambda s, t: math.cos(3.0 * s - 2.0 * t), SLMPreference: lambda s, t: s}


def pair(family="qwen3", seed=1, ends=(EOS, 7)):
    slm, llm = (tiny(family, number, max_position_embeddings=400) for number in (seed, seed + 1))
    for model in (slm, llm):
        model.generation_config.eos_token_id = list(ends)
    return slm, llm


def plain(slm, llm, prompt, span, score, *, threshold=1.2, k=3, budget=3, n=20, ends=(EOS, 7)):
    """The method from scratch, a full forward for every token: (tokens, [(step, pool, choice, tails)], margins)."""
    tokens, start, events, margins = prompt.tolist(), len(prompt), [], []
    while len(tokens) < start + n and (len(tokens) == start or tokens[-1] not in ends):
        values = logits_of(slm, tokens).tolist()
        chances = torch.tensor(sorted(values, reverse=True)).softmax(0)
        entropy, margin = float(-(chances * chances.log()).sum()), gap(values, 1)
        if entropy <= threshold or len(events) == budget:
            margins.append(min(margin, math.inf if len(events) == budget else threshold - entropy))
            tokens.append(ranked(values)[0])
            continue
        theirs = logits_of(llm, tokens).tolist()
        ids = list(dict.fromkeys(ranked(values)[:k] + ranked(theirs)[:k]))
        margin = min(entropy - threshold, gap(values, k), gap(theirs, k))
        tail = []
        while (
            (span.tokens is None or len(tail) < span.tokens - 1)
            and len(tokens) + 1 + len(tail) < start + n
            and [ranked(theirs)[0], *tail][-1] not in (*span.ends, *ends)
        ):
            so_far = [*tokens, ranked(theirs)[0], *tail]
            next_values, own = logits_of(llm, so_far).tolist(), logits_of(slm, so_far).tolist()
            margin = min(margin, gap(next_values, 1), gap(own, 1) if span.agree else math.inf)
            if span.agree and ranked(own)[0] == ranked(next_values)[0]:
                break
            tail.append(ranked(next_values)[0])
        log_s, log_t = (torch.log_softmax(torch.tensor(both), 0)[ids].tolist() for both in (values, theirs))
        scores = [score(s, t) for s, t in zip(log_s, log_t, strict=True)]
        choice = max(range(len(ids)), key=lambda index: (scores[index], -index))
        margin = min(margin, gap(scores, 1))
        tails = [tail if token == ranked(theirs)[0] else [] for token in ids]
        events.append((len(tokens) - start, ids, choice, tails if tail else None))
        appended = [ids[choice], *tails[choice]]
        margins += [margin] * len(appended)
        tokens += appended
    return tokens[start:], events, margins


def told(generation):
    return generation.token_ids.tolist(), [(e.step, e.pool, e.choice, e.tails) for e in generation.events]


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_equals_a_loop_from_scratch(family, span):
    slm, llm = pair(family)
    asked, spans, decided = prompts(5, 9, 2, seed=3), 0, 0
    for kind, score in SCORES.items():
        options = {"slm_k": 3, "llm_k": 3, "max_events": 3, "span": span}
        decoder = CollaborativeDecoder(slm, llm, kind(), RequestPolicy(1.2), **options)
        for ids, generation in zip(asked, decoder.generate_many(asked, 20), strict=True):
            tokens, events, margins = plain(slm, llm, ids, span, score)
            if min(margins) > MARGIN:
                assert told(generation) == (tokens, events)
                decided += 1
                spans += sum(len(event.tokens) > 1 for event in generation.events)
            assert told(decoder.generate(ids, 20)) == told(generation)
    assert decided >= 6
    assert spans >= 2


@pytest.mark.parametrize("span", [Span(1), *SPANS], ids=str)
def test_the_fast_loop_equals_the_plain_one(span):
    slm, llm = pair("qwen3", 5)
    asked, options = prompts(70, 3, 64, 12, seed=1), {"slm_k": 3, "llm_k": 3, "span": span}
    for selector in (LLMPreference(), Mixed()):
        decoders = [
            CollaborativeDecoder(slm, llm, selector, RequestPolicy(1.0), **options, **more)
            for more in ({}, {"max_length": 160, "max_batch": 3})
        ]
        want, got = ([told(one) for one in decoder.generate_many(asked, 60)] for decoder in decoders)
        assert got == want
        assert sum(len(events) for _, events in want) >= 4
        assert any(tails for _, events in want for *_, tails in events) == (not span.single)


class Elsewhere(LLM):
    """A large model that is asked in other threads."""

    def __init__(self, model):
        self.llm = LocalLLM(model)
        self.written = 0

    @property
    def ends(self):
        return self.llm.ends

    def candidates(self, ids, k, score_ids=None):
        return self.llm.candidates(ids, k, score_ids)

    def complete(self, ids, max_new_tokens):
        found = self.llm.complete(ids, max_new_tokens)
        self.written += len(found)
        return found


@pytest.mark.parametrize("span", [Span(4), Span(None, frozenset({5, 9, 13})), Span(6, agree=True)], ids=str)
def test_an_engine_with_a_large_model_elsewhere_says_the_same(span):
    slm, llm = pair("qwen3", 5)
    asked, options = prompts(5, 30, 12, seed=2), {"slm_k": 3, "llm_k": 3, "span": span}
    decoder = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(1.0), **options)
    with engine(slm, Elsewhere(llm), threshold=1.0, max_length=120, max_batch=3, span=span) as running:
        assert [told(one) for one in running.generate_many(asked, 40)] == [told(decoder.generate(i, 40)) for i in asked]


def test_one_token_asks_for_no_continuation():
    slm, llm = pair()
    large = Elsewhere(llm)
    options = {"slm_k": 3, "llm_k": 3}
    plainly = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(1.0), **options)
    single = CollaborativeDecoder(slm, large, Mixed(), RequestPolicy(1.0), **options, span=Span(1, agree=True))
    for ids in prompts(5, 9, seed=4):
        generation = single.generate(ids, 20)
        assert facts(generation) == facts(plainly.generate(ids, 20))
        assert all(event.tails is None for event in generation.events)
        assert generation.usage.suffix == 0
    assert large.written == 0


@pytest.mark.parametrize("fast", [{}, {"max_length": 100, "max_batch": 2}])
def test_without_a_bound_the_llms_preference_is_takeover(fast):
    slm, llm = pair("qwen3", 11)
    asked = prompts(4, 8, 15, 6, seed=6)
    want = takeover(slm, llm, RequestPolicy(1.3), asked, 40)
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(1.3), span=Span(None), **fast)
    got = decoder.generate_many(asked, 40)
    assert [one.token_ids.tolist() for one in got] == [one.token_ids.tolist() for one in want]
    for one, other in zip(got, want, strict=True):
        assert (one.usage.calls, *one.usage[2:]) == (other.usage.calls, *other.usage[2:])
    assert sum(one.usage.suffix for one in got) > 20


@pytest.mark.parametrize("fast", [{}, {"max_length": 60}])
def test_limits_hold_inside_a_span(fast):
    slm, llm = pair("qwen3", 5)
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(ALWAYS), span=Span(8), max_events=2, **fast)
    (ids,) = prompts(6, seed=5)
    whole = decoder.generate(ids, 30)
    assert [len(event.tokens) for event in whole.events] == [8, 8]
    assert [event.step for event in whole.events] == [0, 8]
    for most in range(1, 12):
        short = decoder.generate(ids, most)
        assert short.token_ids.tolist() == whole.token_ids[:most].tolist()
        assert sum(len(event.tokens) for event in short.events) == most  # what does not fit is not asked for
        assert short.usage.appended + short.usage.suffix == most
    once = decoder.generate_many([ids], 30, until=1)[0]
    assert once.token_ids.tolist() == whole.token_ids[:8].tolist()


@pytest.mark.parametrize("fast", [{}, {"max_length": 60}])
def test_the_small_models_end_inside_a_span_ends_the_generation(fast):
    slm, llm = pair("qwen3", 5)
    (ids,) = prompts(6, seed=5)
    options = {"span": Span(8), "max_events": 2, **fast}
    whole = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(ALWAYS), **options).generate(ids, 30)
    end = int(whole.token_ids[4])
    slm.generation_config.eos_token_id = [end]
    first = whole.token_ids.tolist().index(end) + 1
    found = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(ALWAYS), **options).generate(ids, 30)
    assert found.token_ids.tolist() == whole.token_ids[:first].tolist()
    assert found.usage.appended + found.usage.suffix == first < 8


@pytest.mark.parametrize("span", [Span(), Span(8)])
@pytest.mark.parametrize("fast", [{}, {"max_length": 60}])
def test_an_end_that_the_large_model_alone_has_ends_the_generation(fast, span):
    slm, llm = pair("qwen3", 5)
    (ids,) = prompts(6, seed=5)

    def decoder():
        return CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(ALWAYS), span=span, max_events=6, **fast)

    whole = decoder().generate(ids, 30).token_ids.tolist()
    assert len(whole) > 5
    llm.generation_config.eos_token_id = [EOS, whole[4]]
    wanted = whole[: whole.index(whole[4]) + 1]
    assert decoder().generate(ids, 30).token_ids.tolist() == wanted
    if fast:
        with engine(slm, llm, LLMPreference(), ALWAYS, span=span, max_events=6) as served:
            assert served.submit(ids, 30).result().token_ids.tolist() == wanted


@pytest.mark.parametrize("fast", [{}, {"max_length": 60}])
def test_whoever_listens_hears_every_token_and_may_stop_inside_a_span(fast):
    slm, llm = pair("qwen3", 5)
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(1.0), span=Span(4), **fast)
    (ids,) = prompts(6, seed=5)
    heard = []
    whole = decoder.generate(ids, 30, on_token=lambda token, event: heard.append((token, event)))
    assert [token for token, _ in heard] == whole.token_ids.tolist()
    assert {step: event for step, (_, event) in enumerate(heard) if event} == {e.step: e for e in whole.events}
    inside = whole.events[0].step + 2
    cut = decoder.decode(ids, 30, lambda row: len(row.new) == inside)
    assert cut.token_ids.tolist() == whole.token_ids[:inside].tolist()
    assert cut.usage.suffix == 1


def test_an_engine_ranks_the_tokens_of_a_span():
    slm, llm = pair("qwen3", 5)
    (ids,) = prompts(6, seed=5)
    with engine(slm, llm, LLMPreference(), threshold=1.0, max_length=60, span=Span(4)) as running:
        tokens = list(running.stream(ids, 20, ranking=True))
        with_events = running.submit(ids, 20).result(30)
    assert [token.id for token in tokens] == with_events.token_ids.tolist()
    assert sum(token.event is not None for token in tokens) == len(with_events.events)
    seen = ids.tolist()
    for token in tokens:
        chances = torch.log_softmax(logits_of(slm, seen), 0)
        assert token.logprob == pytest.approx(float(chances[token.id]), abs=1e-3)
        assert token.ranked.ids[0] == int(chances.argmax())
        assert token.ranked.logprobs[0] == pytest.approx(float(chances.max()), abs=1e-3)
        seen.append(token.id)
    assert any(token.id != token.ranked.ids[0] for token in tokens if token.event is None)


def test_a_large_model_of_fewer_positions_offers_what_it_can():
    slm, llm = pair("qwen3", 5)
    short = tiny("qwen3", 6, max_position_embeddings=10)
    short.load_state_dict(llm.state_dict())
    (ids,) = prompts(7, seed=5)
    decoder = CollaborativeDecoder(slm, short, LLMPreference(), RequestPolicy(ALWAYS), span=Span(8), max_events=1)
    assert len(decoder.generate(ids, 20).events[0].tokens) == 3
    assert len(decoder.generate(torch.cat([ids, ids[:3]]), 20).events[0].tokens) == 1  # no position is left for more


def test_what_a_span_is_made_of():
    span = Span(4, frozenset({9}))
    assert span.tail(1, [2, 3, 4, 5]) == (2, 3, 4)
    assert span.tail(1, [2, 9, 4, 5]) == (2, 9)
    assert span.tail(9, [2, 3]) == ()
    assert Span(None).tail(1, [2, 3]) == (2, 3)
    with pytest.raises(ValueError, match="tokens: expected 1 or more of a span, got 0"):
        Span(0)


def test_a_delimiter_is_the_tokens_that_hold_it():
    from fb_core.demo.worlds import WORLDS

    tokenizer = WORLDS["plans"].tokenizer
    assert ending_ids(tokenizer, ".") == {tokenizer.get_vocab()[". "]}
    with pytest.raises(ValueError, match="delimiter: expected a text that some token holds, got 'xyz'"):
        ending_ids(tokenizer, "xyz")


def test_a_terminal_shows_a_span_whole():
    from fb_core.demo.worlds import WORLDS

    tokenizer = WORLDS["plans"].tokenizer
    ids = tokenizer.encode("so 12+3. 45", add_special_tokens=False)
    event = Event(1, 1.0, [ids[1], 0], [2, 1], [0.0, 0.0], [0.0, 0.0], None, 0, tails=[ids[2:4], []])
    screen = io.StringIO()
    show = Printer(tokenizer, Console(file=screen, force_terminal=True, color_system="standard"))
    for place, token in enumerate(ids):
        show(token, event if place == 1 else None)
    show.end()
    marked = re.findall(r"\x1b\[[\d;]+m([^\x1b]*)\x1b\[0m", screen.getvalue())
    assert "".join(marked) == tokenizer.decode(ids[1:4])


# --- the reranker -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_full_forwards(reranker, prefix, candidates, tails):
    """head(h) of each candidate's last token, prefix and span through the adapted modules in one sequence."""
    frozen, scores = reranker.base, []
    for first, tail in zip(candidates.tolist(), tails, strict=True):
        span = torch.tensor([[first, *tail]])
        if reranker.scope == "sequence":
            model, whole = hf.causal_lm(reranker.adapted), torch.cat([prefix[None], span], 1)
            hidden = model.base_model(whole, use_cache=False).last_hidden_state[0, -1]
        else:
            cache = DynamicCache()
            frozen.base_model(prefix[None], past_key_values=cache)
            model = hf.causal_lm(reranker.adapted)
            hidden = model.base_model(span, past_key_values=cache).last_hidden_state[0, -1]
        scores.append(float(hidden @ reranker.head))
    return scores


TAILS = ((), (4, 5, 6), (), (7,))


@pytest.mark.parametrize("scope", ["candidate", "sequence"])
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_a_reranker_reads_the_last_state_of_a_span(family, scope):
    slm, _ = pair(family)
    reranker = random_reranker(slm, scope=scope)
    (prefix,), candidates = prompts(9, seed=2), torch.tensor([3, 8, 20, 31])
    got = reranker.scores(prefix, candidates, tails=TAILS)
    assert got.tolist() == pytest.approx(by_full_forwards(reranker, prefix, candidates, TAILS), abs=1e-4)
    plainly = reranker.scores(prefix, candidates)
    assert torch.equal(reranker.scores(prefix, candidates, tails=[()] * 4), plainly)
    assert got[[0, 2]].tolist() == pytest.approx(plainly[[0, 2]].tolist(), abs=1e-4)
    assert abs((got - plainly)[1].item()) > 1e-3
    with pytest.raises(ValueError, match="tails: expected one for each of 4 candidates, got 2"):
        reranker.scores(prefix, candidates, tails=[(), ()])
    with pytest.raises(ValueError, match=r"tails: expected ids from 0 below 50, got 50"):
        reranker.scores(prefix, candidates, tails=[(), (50,), (), ()])
    with pytest.raises(ValueError, match="expected at most 400 positions"):
        reranker.scores(prefix, candidates, tails=[(), [5] * 391, (), ()])


@pytest.mark.parametrize("span", [Span(3), Span(None, frozenset({5, 9, 13})), Span(6, agree=True), Span(None)], ids=str)
def test_a_merged_reranker_chooses_spans_as_the_plain_one_does(span):
    slm, llm = pair("qwen3", 5)
    selector = FutureBridgeSelector(random_reranker(slm))
    options, asked = {"slm_k": 3, "llm_k": 3, "span": span}, prompts(70, 3, 64, 12, seed=1)
    plainly = CollaborativeDecoder(slm, llm, selector, RequestPolicy(1.0), **options)
    fast = CollaborativeDecoder(slm, llm, selector, RequestPolicy(1.0), **options, max_length=160, max_batch=3)
    want, got = plainly.generate_many(asked, 60), fast.generate_many(asked, 60)
    assert [told(one) for one in got] == [told(one) for one in want]
    events = [event for one in want for event in one.events]
    assert any(len(event.tokens) > 1 for event in events)
    assert any(event.tails and len(event.tokens) == 1 for event in events)
    for one, other in zip((e for g in got for e in g.events), events, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-3)


# --- what shows them --------------------------------------------------------------------------------------------------


def demo():
    world = load_pair("plans")
    problem = world.world.problems(3, 8, "validation")[1]
    return world, problem


def test_a_server_tells_of_spans_and_counts_their_tokens():
    world, problem = demo()
    both, options = Pair(world.slm, world.llm), {"max_length": 256, "span": Span(4)}
    with Engine(both, LLMPreference(), RequestPolicy(0.6), **options) as running:
        want = running.submit(list(problem.prompt_ids), 60).result(60)
        service = Service(running, world.world.tokenizer, "m", 8, 60, 256)
        with TestClient(application(service, key=None, body_limit=1000)) as client:
            body = {"prompt": problem.prompt, "max_tokens": 60, "logprobs": 1}
            answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    events = choice["futurebridge"]["events"]
    assert [event["tails"] for event in events] == [event.tails for event in want.events]
    assert any(event["tails"] for event in events)
    assert len(choice["logprobs"]["tokens"]) == len(want.token_ids)
    large = answer["usage"]["large_model"]
    assert large == {"calls": want.usage.calls, "tokens": want.usage.appended + want.usage.suffix}
    assert large["tokens"] > large["calls"]


def test_explain_shows_a_span_whole():
    world, problem = demo()
    decoder = CollaborativeDecoder(
        world.slm, world.llm, LLMPreference(), RequestPolicy(0.6), tokenizer=world.world.tokenizer, span=Span(4)
    )
    found = decoder.generate(list(problem.prompt_ids), 60)
    facts = {"benchmark": "b", "method": "direct", "seed": None, "loop": "batch", "problem": "p", "prompt_sha256": ""}
    facts |= {"gold": "", "verdict": "wrong", "seconds": None, "peak_bytes": None, "text": found.text}
    row = Row(**facts, tokens=found.token_ids.tolist(), events=found.events, **found.usage._asdict())
    console = Console(file=io.StringIO(), width=200)
    print_rows([row], world.world.tokenizer, console)
    text, decode = console.file.getvalue(), world.world.tokenizer.decode
    for number, event in enumerate(found.events, 1):
        whole = escaped(decode(event.tokens), IN_TOKEN)
        assert f"⟦{whole}⟧{'⁰¹²³⁴⁵⁶⁷⁸⁹'[number]}" in text
        table = text.partition(f"Event {number}:")[2].splitlines()
        line = next(line for line in table if line.strip().startswith("→"))
        assert [whole, " ".join(map(str, event.tokens))] == re.split(r" {2,}", line.strip("→g "))[:2]


def test_a_command_s_pair_offers_as_much_as_it_is_told():
    _, problem = demo()
    for given, longest in ((1, 1), (3, 3), (0, 30)):
        chat = Chat(PairSettings(slm="demo:plans", llm="demo:plans", span=given, threshold=0.6, max_length=128))
        found = chat.decoder.generate(list(problem.prompt_ids), 60)
        lengths = [len(event.tokens) for event in found.events]
        assert max(lengths) == longest if given else max(lengths) > longest


# --- at the edges -----------------------------------------------------------------------------------------------------


def test_a_tail_ends_ahead_of_an_id_that_is_not_shared():
    _, llm = pair("qwen3", 5)
    (ids,) = prompts(6, seed=5)
    large = LocalLLM(llm)
    first, *rest = large.complete(ids, 12).tolist()
    bound = sorted(rest)[-1]
    (tail,) = write_tails(large, [ids], [first], [12], Span(None), bound)
    assert tail == tuple(rest[: rest.index(bound)])
    assert write_tails(large, [ids], [first], [12], Span(None), bound + 1) == [tuple(rest)]


def test_the_slms_own_pool_has_no_spans():
    slm, llm = pair("qwen3", 5)
    (ids,) = prompts(6, seed=5)
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(ALWAYS), pool="slm", span=Span(4))
    assert all(event.tails is None for event in decoder.generate(ids, 12).events)


@pytest.mark.parametrize("fast", [{}, {"max_length": 60}])
def test_a_continuation_that_fails_is_an_event_without_the_llm(fast):
    class Broken(Elsewhere):
        def complete(self, ids, max_new_tokens):
            raise ConnectionError("gone")

    slm, llm = pair("qwen3", 5)
    (ids,) = prompts(6, seed=5)
    options = {"span": Span(4), "max_events": 2, **fast}
    with pytest.raises(ConnectionError, match="gone"):
        CollaborativeDecoder(slm, Broken(llm), LLMPreference(), RequestPolicy(ALWAYS), **options).generate(ids, 12)
    options["on_llm_error"] = "slm"
    found = CollaborativeDecoder(slm, Broken(llm), LLMPreference(), RequestPolicy(ALWAYS), **options).generate(ids, 12)
    assert [(event.error, event.tokens) for event in found.events] == [
        ("ConnectionError: gone", [int(token)]) for token in found.token_ids[:2]
    ]
    assert found.usage == (0, 1.0, 0, 0)


def test_pieces_that_end_at_a_delimiter_are_asked_for_as_long_as_needed(monkeypatch):
    monkeypatch.setattr(spans, "PIECE", 3)
    _, llm = pair("qwen3", 5)
    llm.generation_config.eos_token_id = None
    (ids,) = prompts(6, seed=5)
    large, asked = LocalLLM(llm), []
    whole = large.complete(ids, 60).tolist()
    late = max(place for place in range(60) if whole[place] not in whole[:place])
    assert late > 3
    plain_branches = large.complete_branches

    def counted(prefixes, branches, count):
        asked.append(count)
        return plain_branches(prefixes, branches, count)

    large.complete_branches = counted
    (tail,) = write_tails(large, [ids], [whole[0]], [60], Span(None, frozenset({whole[late]})), 50)
    assert tail == tuple(whole[1 : late + 1])
    assert asked == [3] * -(-late // 3)
    assert write_tails(large, [ids], [whole[0]], [60], Span(None, frozenset({whole[0]})), 50) == [()]


# --- a large model over pages -----------------------------------------------------------------------------------------


def test_a_large_model_over_pages_writes_on_from_what_it_holds(monkeypatch):
    _, llm = pair("qwen3", 5)
    paged, plainly = PagedLLM(llm, 320, 12), LocalLLM(llm)
    asked = prompts(150, 64, 9, seed=7)
    paged.candidates_many(asked, 3)
    rows, extend = [], PagedModel.extend

    def counted(self, parts):
        rows.append(sum(len(part.tokens) for part in parts))
        return extend(self, parts)

    firsts = [[4], [20], [EOS]]
    want = plainly.complete_branches(asked, firsts, 7)
    monkeypatch.setattr(PagedModel, "extend", counted)
    got = paged.complete_branches(asked, firsts, 7)
    assert [[rest.tolist() for rest in own] for own in got] == [[rest.tolist() for rest in own] for own in want]
    assert sum(rows) == sum(len(own[0]) for own in got)  # a row a token: no prompt is read again
    rows.clear()
    for ids in asked:  # another candidate is taken: nothing of what was written is held
        found, other = (one.candidates(torch.cat([ids, ids[:1]]), 3) for one in (paged, plainly))
        assert found.ids.tolist() == other.ids.tolist()
        torch.testing.assert_close(found.logprob, other.logprob, rtol=1e-4, atol=1e-4)
    assert rows == [1, 1, 1]


@pytest.mark.parametrize("count", [4, 7, 40])
def test_continuations_over_pages_leave_every_later_query_right(count):
    """Sequences that begin alike, grow, are written on from and asked again, with few pages and with many."""
    _, llm = pair("qwen3", 5)
    paged, plainly, draw = PagedLLM(llm, 256, count), LocalLLM(llm), random.Random(count)
    (stem,) = prompts(130, seed=8)
    known = [stem[:n].tolist() for n in (1, 63, 64, 65, 128, 130)]
    for _ in range(60):
        some = draw.sample(known, draw.randrange(1, 4))
        firsts = [[draw.randrange(3, 50)] for _ in some]
        if draw.random() < 0.5:
            most = draw.choice((1, 3, 20))
            got, want = (one.complete_branches(some, firsts, most) for one in (paged, plainly))
            assert [own[0].tolist() for own in got] == [own[0].tolist() for own in want]
        else:
            for found, other in zip(
                *(one.candidates_many([torch.tensor(ids) for ids in some], 2) for one in (paged, plainly)), strict=True
            ):
                torch.testing.assert_close(found.logprob, other.logprob, rtol=1e-4, atol=1e-4)
        if len(known) < 40 and len(some[0]) < 200:
            known.append([*some[0], *firsts[0], *draw.choices(range(3, 50), k=draw.randrange(30))])


def test_continuations_over_pages_end_with_the_models_positions():
    llm = tiny("qwen3", 6, max_position_embeddings=40)
    llm.generation_config.eos_token_id = None
    paged, plainly = PagedLLM(llm, 100, 9), LocalLLM(llm)
    for ids in prompts(30, 38, 39, seed=9):
        got, want = (one.complete_branches([ids], [[5]], 20)[0][0].tolist() for one in (paged, plainly))
        assert got == want
        assert len(got) == 40 - len(ids) - 1
    with pytest.raises(ValueError, match="prefixes: expected at most 39 tokens"):
        paged.complete_branches(prompts(40), [[5]], 3)
    with pytest.raises(ValueError, match="branches: expected one list for each of 1 prefixes, got 2"):
        paged.complete_branches(prompts(4), [[5], [6]], 3)
