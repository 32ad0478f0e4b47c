"""Many sequences at once: tokens of each are those that it has alone, whatever enters, waits, leaves or fails."""

import asyncio
import copy
import gc
import math
import os
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import CancelledError, Future
from fractions import Fraction
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import NEVER, Mixed
from tiny import EOS, V, prompts, tiny
from warm import python

from fb_core import (
    CollaborativeDecoder,
    FutureBridgeSelector,
    LLMPreference,
    LocalLLM,
    LowLatencyDecoder,
    RequestPolicy,
    Sampling,
    SLMPreference,
    TokenReranker,
)
from fb_core.decode import loop
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.llm.local import LLM
from fb_core.llm.paged_llm import PagedLLM
from fb_core.runtime import loop as runtime_loop
from fb_core.runtime.cuda_graphs import Graphs
from fb_core.runtime.kv_pages import SIZE, Pages, pages_of
from fb_core.runtime.paged_model import BUCKETS, PagedModel, Part
from fb_core.runtime.plain import Running, Stop, steps
from fb_core.runtime.step import RANKED, DecodeStep
from fb_kernels import rms_norm
from fb_kernels._runtime import cpu

OPTIONS = {"slm_k": 3, "llm_k": 3}


def models(family="qwen3", seed=1, **options):
    return tiny(family, seed, max_position_embeddings=400, **options), tiny(
        family, seed + 1, max_position_embeddings=400
    )


def facts(generation):
    return generation.token_ids.tolist(), [(event.step, event.pool, event.choice) for event in generation.events]


def alone(slm, llm, asked, new, selector=None, threshold=1.2, **options):
    """What each prompt becomes in the plain loop."""
    decoder = CollaborativeDecoder(slm, llm, selector or Mixed(), RequestPolicy(threshold), **OPTIONS, **options)
    return [facts(decoder.generate(ids, new)) for ids in asked]


def engine(slm, llm, selector=None, threshold=1.2, **options):
    return Engine(Pair(slm, llm), selector or Mixed(), RequestPolicy(threshold), **{**OPTIONS, **options})


# --- pages ------------------------------------------------------------------------------------------------------------


def test_pages_are_shared_by_what_they_hold_and_found_again():
    pages, tokens = Pages(10), list(range(200))
    first, held = pages.take(tokens, 250)
    assert (len(first), held, pages.free) == (4, 0, 6)
    pages.filled(tokens, first)
    second, held = pages.take([*tokens[:150], 7, *tokens[151:]], 250)
    assert held == 2 * SIZE
    assert second[:2] == first[:2]
    assert set(second[2:]).isdisjoint(first)
    whole, held = pages.take(tokens[: 2 * SIZE], 2 * SIZE)  # its last token is computed in any case
    assert (held, whole[0]) == (SIZE, first[0])
    assert whole[1] not in (*first, *second)
    for each in (first, second, whole):
        pages.release(each)
    assert pages.free == 10
    again, held = pages.take(tokens, 200)
    assert held == 3 * SIZE
    assert again[:3] == first[:3]
    pages.forget()
    assert pages.take(tokens, 200)[1] == 0


def test_pages_that_were_given_back_first_go_first():
    pages = Pages(5)
    known = [list(range(begin, begin + 129)) for begin in (0, 1000)]
    for tokens in known:
        own, _ = pages.take(tokens, 128)
        pages.filled(tokens, own)
        pages.release(own)
    pages.take([5, 6, 7], 128)  # the fifth page, and the end of the older beginning
    for tokens, held in zip(known, (SIZE, 2 * SIZE), strict=True):
        own, found = pages.take(tokens, held)
        assert found == held
        pages.release(own)
    assert pages.take([8], 4 * SIZE) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300), st.integers(0, 200)), max_size=30),
    st.integers(1, 12),
)
def test_pages_are_never_given_twice_nor_lost(asked, count):
    """Whatever is taken, grown and given back: only what was filled is shared, and by equal beginnings alone."""
    pages, running = Pages(count), []
    for kind, length, more in asked:
        tokens = [kind] * length
        taken = pages.take(tokens, length + more)
        if taken is None:
            if running:
                pages.release(running.pop(0)[1])
            continue
        own, held = taken
        assert len(own) == pages_of(length + more)
        assert held < length
        for other, theirs in running:
            shared = set(own) & set(theirs)
            assert not shared or (other[0] == kind and len(shared) * SIZE <= min(held, len(other)))
        if length % 3:
            pages.filled(tokens, own)
        running.append((tokens, own))
        if pages.grow(own, length + more + SIZE):
            assert len(own) == pages_of(length + more + SIZE)
    for _, own in running:
        pages.release(own)
    assert pages.free == count


def test_pages_that_were_computed_twice_are_shared_as_what_they_hold():
    """Sequences that are taken together, filled again and given back in any order, against what pages hold."""
    for seed in range(300):
        draw, pages, held, holds = random.Random(seed), Pages(7), [], {}
        for _ in range(40):
            kind = draw.random()
            if kind < 0.5 or not held:
                taken = []
                for _ in range(draw.randrange(1, 4)):
                    tokens = [one for one in draw.choices(range(2), k=draw.randrange(1, 4)) for _ in range(SIZE)] + [9]
                    if found := pages.take(tokens, len(tokens)):
                        own, known = found
                        for place in range(known // SIZE):
                            assert holds[own[place]] == tokens[: (place + 1) * SIZE]
                        taken.append((tokens, own))
                for tokens, own in taken:
                    holds |= {page: tokens[: (place + 1) * SIZE] for place, page in enumerate(own)}
                    pages.filled(tokens, own)
                held += taken
            elif kind < 0.75:
                pages.filled(*draw.choice(held))
            else:
                pages.release(held.pop(draw.randrange(len(held)))[1])


def test_queries_together_that_share_a_page_stay_right_when_one_makes_room():
    model = tiny("qwen3", 4, max_position_embeddings=400)
    first, a, b = prompts(64, 64, 64)
    paged, plain = PagedLLM(model, 320, 6), LocalLLM(model)
    paged.candidates_many([torch.cat([first, a, a[:1]]), torch.cat([first, b, b[:1]])], 4)
    for ids in (
        prompts(190, seed=1)[0],
        torch.cat([first, b, b[:2]]),
        prompts(320, seed=2)[0],
        torch.cat([first, b, b[:1]]),
    ):
        found, want = paged.candidates(ids, 4), plain.candidates(ids, 4)
        assert found.ids.tolist() == want.ids.tolist()
        torch.testing.assert_close(found.logprob, want.logprob, rtol=1e-4, atol=1e-4)


def test_a_prompt_enters_in_pieces_while_others_run(monkeypatch):
    slm, llm = models()
    slm.generation_config.eos_token_id = None
    short, long = prompts(5, 150)
    (want_short,), (want_long,) = alone(slm, llm, [short], 200), alone(slm, llm, [long], 9)
    pieces, extend = [], PagedModel.extend

    def extending(self, parts, *more):
        if self.model is slm and len(running.decoder.loop.rows):
            pieces.append((running.decoder.loop.step.begun, sum(len(part.tokens) for part in parts)))
        return extend(self, parts, *more)

    monkeypatch.setattr(PagedModel, "extend", extending)
    with engine(slm, llm, max_length=210, max_batch=2, prefill_tokens=16) as running:
        first = running.submit(short, 200)
        next(iter(first))
        assert facts(running.submit(long, 9).result(60)) == want_long
        assert facts(first.result(60)) == want_short
    assert [count for _, count in pieces] == [16] * 9 + [150 % 16]
    assert len({begun for begun, _ in pieces}) == 10  # a step between each two
    with pytest.raises(ValueError, match="prefill_tokens: expected 1 or more, got 0"):
        engine(slm, llm, prefill_tokens=0)


def test_short_prompts_go_ahead_of_long_ones_which_keep_half_of_each_piece(monkeypatch):
    slm, llm = models()
    one, other, *short = prompts(150, 140, *[6] * 4)
    asked, packs, extend = [one, one, other, *short], [], PagedModel.extend  # the second waits for the first's pages
    want = alone(slm, llm, asked, 9)

    def extending(self, parts, *more):
        if self.model is slm:
            packs.append([len(part.tokens) for part in parts])
        return extend(self, parts, *more)

    monkeypatch.setattr(PagedModel, "extend", extending)
    monkeypatch.setattr(runtime_loop, "CHUNK", 16)
    with engine(slm, llm, max_length=210, max_batch=7, prefill_tokens=16) as running:
        with running._state.changed:
            handles = [running.submit(ids, 9) for ids in asked]
        assert [facts(handle.result(60)) for handle in handles] == want
    assert packs[:5] == [[6, 10], [6, 10], [6, 10], [6, 10], [16]]


def test_prompts_that_arrive_together_compute_their_common_pages_once(monkeypatch):
    slm, llm = models()
    (stem,) = prompts(150)
    asked = [
        stem,
        *(torch.cat([stem[:n], ids]) for n, ids in zip((140, 70, 30), prompts(9, 90, 8, seed=2), strict=True)),
    ]
    want, counts, extend = alone(slm, llm, asked, 12), {}, PagedModel.extend

    def extending(self, parts, *more):
        counts[self.model] = counts.get(self.model, 0) + sum(len(part.tokens) for part in parts)
        return extend(self, parts, *more)

    monkeypatch.setattr(PagedModel, "extend", extending)
    decoder = LowLatencyDecoder(
        slm, llm, Mixed(), RequestPolicy(1.2), **OPTIONS, max_length=200, max_batch=4, kv_memory=None
    )
    assert [facts(one) for one in decoder.generate_many(asked, 12)] == want
    assert counts[slm] == 150 + (149 - 128) + (160 - 64) + 38


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama", "qwen2"])
@pytest.mark.sweep(3)
def test_sequences_come_out_as_alone(family, ahead):
    """More of them than rows, of all lengths, some with common beginnings; also where the host looks a step late."""
    slm, llm = models(family, **({"sliding_window": 70} if family == "mistral" else {}))
    asked = prompts(3, 150, 70, 1, 64, 65, 128, seed=3)
    asked += [torch.cat([asked[1][:140], ids]) for ids in prompts(20, 5, seed=4)] + [asked[1], asked[0]]
    lengths = [30, 7, 19, 30, 2, 11, 1, 23, 30, 5, 16]
    want = [alone(slm, llm, [ids], new)[0] for ids, new in zip(asked, lengths, strict=True)]
    with engine(slm, llm, max_batch=4, max_length=300) as running:
        running.decoder.loop.step.ahead = ahead
        for order in (range(11), range(10, -1, -1)):  # the second time over known pages
            handles = {place: running.submit(asked[place], lengths[place]) for place in order}
            assert [facts(handles[place].result(60)) for place in range(11)] == want
    assert sum(len(events) for _, events in want) > 20


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.sweep(2)
def test_no_end_comes_early(ahead, drawn):
    """Every second token is an end. Tokens and pools are the plain loop's, and log-probs those that the model has."""
    slm, llm = models()
    ends = frozenset(range(0, V, 2)) | {V + 5}  # one that neither model has
    for model in (slm, llm):
        model.generation_config.eos_token_id = sorted(ends)
    sampling = Sampling(temperature=2.0, top_p=1.0, top_k=0, seed=3) if drawn else None
    plain, exact = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(1.2), **OPTIONS), copy.deepcopy(slm).double()
    with engine(slm, llm, max_batch=3, max_length=200) as running:
        running.decoder.loop.step.ahead = ahead
        asked = [*zip(prompts(5, 40, 70, 9, 6, 5, seed=6), (0, 1, 7, 12, 20, 20), strict=True)]
        options = {"ranking": True, "sampling": sampling}
        handles = [running.submit(ids, 20, min_new_tokens=least, **options) for ids, least in asked]
        for (ids, least), handle in zip(asked, handles, strict=True):
            tokens, (new, events) = [*handle], facts(handle.result(60))
            draws = [] if sampling is None else [sampling.draw(ids.tolist())]
            row = Running(0, ids.tolist(), len(ids), least=least)
            for _ in steps(slm, [row], Stop(ends, 20, None), partial(plain.choose, draws)):
                pass
            assert (new, events) == (row.new, [(event.step, event.pool, event.choice) for event in row.events])
            assert ends.isdisjoint(new[:-1])
            assert len(new) == 20 or (new[-1] in ends and len(new) > least)
            assert all(ends.isdisjoint(event.pool) for event in row.events if event.step < least)
            logprobs = exact(torch.cat([ids, torch.tensor(new)])[None]).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            for token, own in zip(tokens, logprobs.detach(), strict=True):
                assert token.ranked.taken == pytest.approx(float(own[token.id]), abs=1e-4)
        for wrong in (-1, 21):
            with pytest.raises(ValueError, match="min_new_tokens: expected"):
                running.submit(ids, 20, min_new_tokens=wrong)
    with (
        engine(slm, llm, pool="llm", max_length=200) as running,
        pytest.raises(ValueError, match=r'min_new_tokens: .* pool "llm"'),
    ):
        running.submit(ids, 20, min_new_tokens=1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_log_probs_are_the_small_models_at_every_place(ahead):
    """Some ask for them and some do not, at events and between; float64 forwards say what they are."""
    slm, llm = models()
    exact, asked = copy.deepcopy(slm).double(), prompts(5, 40, 130, 9, 64, seed=6)
    want = alone(slm, llm, asked, 20)
    with engine(slm, llm, max_batch=3, max_length=300) as running:
        running.decoder.loop.step.ahead = ahead
        handles = [running.submit(ids, 20, ranking=place % 2 == 0) for place, ids in enumerate(asked)]
        tokens = [list(handle) for handle in handles]
    assert [[token.id for token in each] for each in tokens] == [ids for ids, _ in want]
    events = 0
    for place, (ids, each) in enumerate(zip(asked, tokens, strict=True)):
        if place % 2:
            assert {token.ranked for token in each} == {None}
            continue
        whole = torch.cat([ids, torch.tensor([token.id for token in each])])
        logprobs = exact(whole[None]).logits[0, len(ids) - 1 : -1].detach().log_softmax(-1)
        for token, row in zip(each, logprobs, strict=True):
            assert token.ranked.taken == pytest.approx(float(row[token.id]), abs=1e-4)
            best = row.topk(RANKED)
            torch.testing.assert_close(torch.tensor(token.ranked.logprobs).double(), best.values, rtol=0, atol=1e-4)
            torch.testing.assert_close(row[token.ranked.ids], best.values, rtol=0, atol=1e-4)
            assert (token.seconds is None) == (token.event is None)
            assert token.seconds is None or 0 < token.seconds < 60
            events += token.event is not None and token.id != token.ranked.ids[0]
    assert events > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_given_ids(dtype):
    """Beside a sequence that asks for the likeliest; in bfloat16, of the model's own hidden states."""
    slm, llm = (model.to(dtype) for model in models())
    (ids,), given, exact = prompts(40, seed=6), [7, 3, EOS], copy.deepcopy(slm).double()
    with engine(slm, llm, threshold=-1.0, max_batch=3, max_length=200, max_events=4) as running:
        handles = [running.submit(ids, 12, ranking=asked) for asked in (given, False, True)]
        own, _, likely = ([token.ranked for token in handle] for handle in handles)
        new = handles[0].result(60).token_ids
        assert torch.equal(new, handles[2].result(60).token_ids)
        with pytest.raises(ValueError, match="ranking_ids: expected ids from 0 below"):
            running.submit(ids, 12, ranking=[V])
    logprobs = exact(torch.cat([ids, new])[None]).logits[0, len(ids) - 1 : -1].detach().log_softmax(-1)
    atol = 1e-4 if dtype == torch.float32 else 0.1
    for found, top, row, token in zip(own, likely, logprobs, new.tolist(), strict=True):
        assert (found.ids, len(top.ids)) == (given, RANKED)
        assert found.taken == pytest.approx(top.taken, abs=atol)
        torch.testing.assert_close(
            torch.tensor([found.taken, *found.logprobs]).double(), row[[token, *given]], rtol=0, atol=atol
        )


@pytest.mark.parametrize("kind", [CollaborativeDecoder, LowLatencyDecoder])
def test_an_end_that_the_large_model_alone_has_ends_the_generation(kind):
    slm, llm = models()
    (ids,) = prompts(6, seed=5)

    def decoder():
        return kind(slm, llm, LLMPreference(), RequestPolicy(-math.inf), max_events=6)

    whole = decoder().generate(ids, 30).token_ids.tolist()
    assert len(whole) > 5
    llm.generation_config.eos_token_id = [EOS, whole[4]]
    wanted = whole[: whole.index(whole[4]) + 1]
    assert decoder().generate(ids, 30).token_ids.tolist() == wanted
    if kind is LowLatencyDecoder:
        with engine(slm, llm, LLMPreference(), -math.inf, max_events=6) as served:
            assert served.submit(ids, 30).result(60).token_ids.tolist() == wanted


def test_where_pages_are_scarce_sequences_wait():
    slm, llm = models()
    asked = prompts(100, 20, 30, 90, 10, seed=5)
    want = alone(slm, llm, asked, 20)
    page = 2 * 2 * 2 * SIZE * 2 * 8 * 4  # of both models: keys and values, layers, heads, width, bytes
    with engine(slm, llm, max_batch=8, max_length=200, kv_memory=3 * page) as running:
        assert [facts(each) for each in running.generate_many(asked, 20)] == want
        with pytest.raises(ValueError, match=f"expected prompt and new tokens to fit {3 * SIZE} tokens of keys"):
            running.submit(prompts(180)[0], 20)
        with pytest.raises(ValueError, match="expected prompt and new tokens to fit buffers of 200 tokens"):
            running.submit(prompts(190)[0], 20)
    with pytest.raises(ValueError, match=f"kv_memory: expected {page} bytes or more"):
        engine(slm, llm, kv_memory=page - 1)


def test_a_sequence_may_begin_and_end_in_one_tick():
    """Its first token is sure, its second and last an event."""
    slm, llm = models()
    asked, threshold = prompts(*[9] * 30, seed=8), 2.2
    want = alone(slm, llm, asked, 2, threshold=threshold)
    assert any([step for step, *_ in events] == [1] for _, events in want)
    with engine(slm, llm, threshold=threshold, max_batch=2) as running:
        handles = [running.submit(ids, 2) for ids in asked]
        assert [facts(handle.result(60)) for handle in handles] == want


def test_a_threshold_and_a_budget_of_ones_own():
    slm, llm = models()
    (ids,) = prompts(9, seed=6)
    odd = ((np.float32(1.5), np.int64(4)), (Fraction(3, 2), 4), (10**300, 4))  # numbers that no tensor takes
    with engine(slm, llm, max_events=np.int64(4), max_batch=np.int64(2)) as running:
        for threshold, events in ((-math.inf, 2), (1.5, 4), (math.inf, 4), (1.2, 0), *odd):
            want = alone(slm, llm, [ids], 16, threshold=float(threshold), max_events=int(events))
            handle = running.submit(ids, np.int64(16), threshold=threshold, max_events=events)
            assert [facts(handle.result(60))] == want
        with pytest.raises(ValueError, match="expected at most the engine's 4, got 5"):
            running.submit(ids, 16, max_events=5)
        with pytest.raises(ValueError, match="threshold"):
            running.submit(ids, 16, threshold=math.nan)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_selector_of_ones_own_among_others(family):
    slm, llm = models(family)
    asked, own = prompts(5, 9, 12, 7, seed=6), [None, SLMPreference(), LLMPreference(), None]
    want = [alone(slm, llm, [ids], 20, each, -1.0)[0] for ids, each in zip(asked, own, strict=True)]
    assert want != alone(slm, llm, asked, 20, threshold=-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gemma2 runs in the plain loop
        running = engine(slm, llm, threshold=-1.0)
    with running:
        handles = [running.submit(ids, 20, selector=selector) for ids, selector in zip(asked, own, strict=True)]
        assert [facts(handle.result(60)) for handle in handles] == want
        with pytest.raises(TypeError, match="selector: expected type Selector, got str"):
            running.submit(asked[0], 20, selector="direct")


def test_other_families_run_one_after_another():
    slm, llm = tiny("gemma2", 1), tiny("gemma2", 2)
    asked = prompts(5, 9, seed=7)
    with pytest.warns(UserWarning, match="slm: Gemma2ForCausalLM has no native decoder"):
        running = engine(slm, llm)
    with running:
        assert [facts(each) for each in running.generate_many(asked, 9)] == alone(slm, llm, asked, 9)
        tokens = list(running.stream(asked[0], 9))
        assert [token.id for token in tokens] == running.submit(asked[0], 9).result(60).token_ids.tolist()


# --- who waits, leaves and fails --------------------------------------------------------------------------------------


def test_tokens_come_as_they_are_appended_with_their_events():
    slm, llm = models()
    (ids,) = prompts(7, seed=8)
    with engine(slm, llm) as running:
        tokens = list(running.stream(ids, 20))
        whole = running.submit(ids, 20).result(60)
    assert [token.id for token in tokens] == whole.token_ids.tolist()
    heard = [(token.event.step, token.event.pool, token.event.choice) for token in tokens if token.event]
    assert heard == facts(whole)[1]
    assert [step for step, token in enumerate(tokens) if token.event] == [event.step for event in whole.events]


class Slow(LLM):
    """A large model elsewhere, which answers when it is told to."""

    def __init__(self, llm):
        self.llm, self.go, self.asked, self.problem = LocalLLM(llm), threading.Event(), [], None

    def candidates(self, ids, k, score_ids=None):
        self.asked.append(len(ids))
        assert self.go.wait(60)
        if self.problem is not None and len(ids) in self.problem:
            raise ConnectionError("it is down")
        return self.llm.candidates(ids, k, score_ids)

    def complete(self, ids, max_new_tokens):
        raise NotImplementedError


def waited(condition):
    stop = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.005)


def test_a_slow_large_model_holds_up_only_who_asks():
    slm, llm = models()
    asked, quiet = prompts(5, 6, 7, seed=9), prompts(8, 80, seed=10)
    slow = Slow(llm)
    with engine(slm, slow, threshold=-math.inf, max_batch=4) as running:
        stuck = [running.submit(ids, 12) for ids in asked]
        waited(lambda: len(slow.asked) == 3)
        free = [facts(running.submit(ids, 12, max_events=0).result(60)) for ids in quiet]
        assert free == alone(slm, llm, quiet, 12, max_events=0)
        assert not any(handle.done for handle in stuck)
        slow.go.set()
        assert [facts(handle.result(60)) for handle in stuck] == alone(slm, llm, asked, 12, threshold=-math.inf)


@pytest.mark.parametrize("rule", ["raise", "slm"])
def test_a_large_model_that_fails_one_query_ends_or_marks_one_sequence(rule):
    slm, llm = models()
    slow, asked = Slow(llm), prompts(5, 16, 27, seed=11)
    slow.problem = range(15, 20)
    slow.go.set()
    with engine(slm, slow, threshold=-math.inf, max_events=3, on_llm_error=rule) as running:
        handles = [running.submit(ids, 6) for ids in asked]
        want = alone(slm, llm, asked, 6, threshold=-math.inf, max_events=3)
        for place in (0, 2):
            assert facts(handles[place].result(60)) == want[place]
        if rule == "raise":
            with pytest.raises(ConnectionError, match="it is down"):
                handles[1].result(60)
            with pytest.raises(ConnectionError, match="it is down"):
                list(handles[1])
        else:
            assert [event.error for event in handles[1].result(60).events] == ["ConnectionError: it is down"] * 3
        assert facts(running.submit(asked[0], 6).result(60)) == want[0]


def test_who_is_cancelled_leaves_room_and_the_others_alone():
    slm, llm = models()
    slm.generation_config.eos_token_id = slm.config.eos_token_id = None
    asked = prompts(5, 70, 9, 130, seed=12)
    want = alone(slm, llm, asked, 40)
    with engine(slm, llm, max_batch=2, max_length=300) as running:
        free = running.decoder.loop.model.pages.free
        for _ in range(3):
            handles = [running.submit(ids, 40) for ids in asked]
            next(iter(handles[0]))
            handles[0].cancel()
            handles[2].cancel()  # it has not begun, or just so
            for place in (0, 2):
                with pytest.raises(CancelledError):
                    handles[place].result(60)
            for place in (1, 3):
                assert facts(handles[place].result(60)) == want[place]
            handles[1].cancel()  # what has ended stays so
            assert facts(handles[1].result(60)) == want[1]
        for token in running.stream(asked[0], 200):
            assert token.id < V
            break
        waited(lambda: running.decoder.loop.model.pages.free == free)


def test_a_selector_that_fails_ends_whom_it_served_and_the_engine_goes_on():
    slm, llm = models()

    class Failing(Mixed):
        armed = True

        def scores_many(self, states, pools):
            if self.armed:
                raise ValueError("no score")
            return super().scores_many(states, pools)

    selector, (ids,) = Failing(), prompts(6)
    with engine(slm, llm, selector) as running:
        handle = running.submit(ids, 20)
        with pytest.raises(ValueError, match="no score"):
            handle.result(60)
        selector.armed = False
        assert [facts(running.submit(ids, 20).result(60))] == alone(slm, llm, [ids], 20)


def test_nan_logits_end_a_sequence_with_their_step():
    slm, llm = models()
    (ids,) = prompts(6)
    with engine(slm, llm, SLMPreference()) as running:
        before = facts(running.submit(ids, 9).result(60))
        kept = slm.model.norm.weight.detach().clone()
        with torch.no_grad():
            slm.model.norm.weight.fill_(math.nan)
        with pytest.raises(ValueError, match="at step 0 of prompt 0"):
            running.submit(ids, 9).result(60)
        with torch.no_grad():
            slm.model.norm.weight.copy_(kept)
        assert facts(running.submit(ids, 9).result(60)) == before


@pytest.mark.parametrize("write", ["in place", "by data", "one row"])
def test_changed_weights_are_not_behind_known_pages(write):
    slm, llm = models()
    (ids,) = prompts(200, seed=13)
    with engine(slm, llm, max_length=300) as running:
        running.submit(ids, 9).result(60)
        for weight in (model.model.layers[0].self_attn.v_proj.weight for model in (slm, llm)):
            {"in place": weight.detach(), "by data": weight.data, "one row": weight.data[0]}[write].mul_(-9)
        if write == "one row":
            running.weights_changed()
        assert [facts(running.submit(ids, 9).result(60))] == alone(slm, llm, [ids], 9)


def test_threads_share_an_engine():
    slm, llm = models()
    asked = prompts(*range(3, 27), seed=14)
    want = alone(slm, llm, asked, 12)
    found = [None] * len(asked)
    with engine(slm, llm, max_batch=5) as running:

        def work(first):
            for place in range(first, len(asked), 4):
                found[place] = facts(running.submit(asked[place], 12).result(60))

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == want


def test_an_error_of_all_reaches_all_who_were_submitted(monkeypatch):
    slm, llm = models()
    with engine(slm, llm) as running:
        state = running._state
        with state.changed:  # the engine's thread sees all three at once
            handles = [running.submit(ids, 9) for ids in prompts(5, 6, 7)]
            monkeypatch.setattr(running.decoder.loop, "refresh", lambda: 1 / 0)
        for handle in handles:
            with pytest.raises(ZeroDivisionError):
                handle.result(60)
        monkeypatch.undo()
        assert [facts(running.submit(prompts(5)[0], 9).result(60))] == alone(slm, llm, prompts(5), 9)


@pytest.mark.parametrize("where", ["loop.step.put", "loop.step.resume", "loop._threads.submit", "pair.text"])
def test_an_error_in_what_one_sequence_needs_ends_it_alone(monkeypatch, where):
    slm, llm = models()
    slow, asked, second = Slow(llm), prompts(5, 90, 7, seed=15), iter([False, True])
    slow.go.set()
    (of, _, name), threshold = where.rpartition("."), -1.0 if "submit" in where else NEVER
    with engine(slm, slow, threshold=threshold, max_batch=3, max_length=200) as running:
        place, pages = attrgetter(of)(running.decoder), running.decoder.loop.model.pages
        act = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given: 1 / 0 if next(second, False) else act(*given))
        with running._state.changed:
            handles = [running.submit(ids, 3 * new) for new, ids in enumerate(asked, 1)]
        with pytest.raises(ZeroDivisionError):
            handles[1].result(60)
        for place, new in ((0, 3), (2, 9)):
            assert [facts(handles[place].result(60))] == alone(slm, llm, asked[place : place + 1], new, None, threshold)
        waited(lambda: pages.free == pages.count)


def test_a_listener_that_fails_ends_its_own_sequence():
    slm, llm = models()
    asked = prompts(5, 6, seed=15)

    def fail(token):
        raise RuntimeError("nobody is there")

    with engine(slm, llm) as running:
        handles = [
            running.submit(ids, 20, listener=listener) for ids, listener in zip(asked, (fail, None), strict=True)
        ]
        with pytest.raises(RuntimeError, match="nobody is there"):
            handles[0].result(60)
        assert [facts(handles[1].result(60))] == alone(slm, llm, asked[1:], 20)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("where", ["token", "end", "selector"])
@pytest.mark.sweep(5)
def test_what_a_listener_or_a_selector_raises_ends_nobody_else(family, kind, where):
    slm, llm = models(family)
    asked = prompts(5, 6, 7, seed=15)

    def raising(token):
        if (token is None) == (where == "end"):
            raise kind

    class Raising(Mixed):
        def scores_many(self, states, pools):
            raise kind

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gemma2 runs in the plain loop
        running = engine(slm, llm)
    with running:
        own = {"selector": Raising(), "threshold": -1.0} if where == "selector" else {"listener": raising}
        handles = [running.submit(asked[0], 20, **own), running.submit(asked[1], 20)]
        if where == "end":
            assert len(handles[0].result(60).token_ids)
        else:
            with pytest.raises(kind):
                handles[0].result(60)
        handles.append(running.submit(asked[2], 20))
        if kind is not KeyboardInterrupt or where != "selector":  # that may end whom it met
            assert [facts(handle.result(60)) for handle in handles[1:]] == alone(slm, llm, asked[1:], 20)
        assert [facts(running.submit(asked[2], 20).result(60))] == alone(slm, llm, asked[2:], 20)
        assert not running.closed


def test_who_is_cancelled_twice_is_not_kept():
    slm, llm = models("gemma2")
    slow = Slow(llm)
    with pytest.warns(UserWarning, match="no native decoder"):
        running = engine(slm, slow, threshold=-math.inf)
    with running:
        handles = [running.submit(ids, 12) for ids in prompts(5, 6, 7)]
        waited(lambda: slow.asked)
        for _ in range(3):
            for handle in handles:
                handle.cancel()
        slow.go.set()
        for handle in handles:
            with pytest.raises(CancelledError):
                handle.result(60)
            handle.cancel()
        gone = [weakref.ref(handle) for handle in handles]
        del handles, handle
        running.submit(prompts(5)[0], 2).result(60)
        waited(lambda: gc.collect() is not None and not any(each() for each in gone))


def test_a_fork_of_the_engines_process_is_refused():
    code = """
import os, torch
from test_engine import Slow, engine, models, prompts, waited
slm, llm = models()
slow = Slow(llm)
running = engine(slm, slow, threshold=-9.0)
handle = running.submit(prompts(5)[0], 9)
waited(lambda: slow.asked)
if os.fork():
    status = os.waitstatus_to_exitcode(os.wait()[1])
    slow.go.set()
    print(len(handle.result(60).token_ids), status)
else:
    for ask in (lambda: running.submit([5], 3), handle.result, lambda: list(handle), lambda: list(running.stream([5]))):
        try:
            ask()
        except RuntimeError as problem:
            print(problem, flush=True)
    handle.cancel()
    running.close()
"""
    done = python(code)
    said = "engine: expected the process that made it, got a fork of it; make one in each process"
    assert done.stdout.splitlines() == [said] * 4 + ["9 0"], done.stderr


def test_an_interrupt_while_the_llm_takes_pages_loses_none(monkeypatch):
    slm, llm = models()
    decoder = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(-1.0), **OPTIONS, max_length=200)
    large = decoder.llm

    def interrupted(queries):
        large.paged.pages.take(queries[0], 100)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(large, "_extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.generate(prompts(9)[0], 12)
    assert large.paged.pages.free == large.paged.pages.count


def test_what_goes_wrong_at_one_event_ends_that_sequence_alone():
    slm, llm = tiny("qwen3", 4, max_position_embeddings=400), tiny("qwen3", 5, max_position_embeddings=100)
    for model in (slm, llm):
        model.generation_config.eos_token_id = None
    short, long = prompts(5, 120)
    want = alone(slm, llm, [short], 40, LLMPreference(), -1.0, max_events=200)
    with engine(slm, llm, LLMPreference(), -1.0, max_events=200, max_batch=3, max_length=300) as running:
        handles = [running.submit(ids, 40) for ids in (short, long, short)]
        with pytest.raises(ValueError, match="100"):
            handles[1].result(60)
        assert [facts(handles[place].result(60)) for place in (0, 2)] == want * 2


def test_an_interrupt_in_the_midst_of_a_move_loses_no_page(monkeypatch):
    slm, llm = models()
    decoder = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.2), **OPTIONS, max_length=200, max_batch=4)
    asked, loop = prompts(5, 90, 7, 70), decoder.loop
    before = [facts(one) for one in decoder.generate_many(asked, 12)]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for name in ("clear", "move", "put", "resume"):  # of the step, each in the midst of what the loop does
        with monkeypatch.context() as patch:
            patch.setattr(loop.step, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                decoder.generate_many([*asked, prompts(9)[0]], 12 if name != "resume" else 20)
        assert (loop.model.pages.free, loop.busy) == (loop.model.pages.count, False)
        assert [facts(one) for one in decoder.generate_many(asked, 12)] == before


def test_an_engine_whose_loop_cannot_be_mended_closes_and_says_why(monkeypatch):
    slm, llm = models()
    running = engine(slm, llm)
    loop = running.decoder.loop
    monkeypatch.setattr(loop, "tick", lambda: 1 / 0)
    monkeypatch.setattr(loop.step, "clear", lambda row: 1 / 0)
    monkeypatch.setattr(loop, "clear", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        running.submit(prompts(5)[0], 9).result(60)
    running._thread.join(60)
    with pytest.raises(RuntimeError, match="got a closed one"):
        running.submit(prompts(5)[0], 9)


def test_a_process_may_end_while_sequences_run():
    code = """
from test_engine import engine, models, prompts
running = engine(*models(), threshold=-1.0)
next(iter(running.submit(prompts(5)[0], 300)))
"""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | paths)
    assert done.returncode == 0, done.stderr


def test_a_closed_engine_ends_what_is_under_way_and_refuses_more():
    slm, llm = models()
    slow, (ids,) = Slow(llm), prompts(6)
    running = engine(slm, slow, threshold=-math.inf)
    handle = running.submit(ids, 9)
    waited(lambda: slow.asked)
    slow.go.set()
    running.close()
    running.close()
    assert handle.done
    with pytest.raises(RuntimeError, match="expected an open one, got a closed one"):
        running.submit(ids, 9)
    assert not any(thread.name == "fb-engine" and thread.is_alive() for thread in [running._thread])


def test_an_engine_that_nobody_holds_ends():
    slm, llm = models()
    running = engine(slm, llm, LLMPreference(), NEVER)
    thread, gone = running._thread, weakref.ref(running)
    assert running.submit(prompts(5)[0], 4).result(60)
    del running
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()


def test_what_is_warm_captures_no_more(monkeypatch):
    """A capture is only written down here, and its graph is the computation itself."""
    captured = []

    def capture(self, key, compute):
        compute()
        captured.append(key)
        self._graphs[key] = SimpleNamespace(replay=compute)

    monkeypatch.setattr(Graphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    slm, llm = models()
    reranker = FutureBridgeSelector(TokenReranker.from_base(slm, rank=2).eval())
    asked = prompts(30, 5, 12, 7, 9)
    want = alone(slm, llm, asked, 12, reranker)
    fast = engine(slm, llm, reranker, max_batch=4, max_length=100)
    for model in (fast.decoder.loop.model, fast.decoder.loop.paged_llm.paged):
        model.graphs.captures = True
    fast.warm()
    assert len(captured) == len(set(captured)) + len(BUCKETS)  # both models have those
    assert {key[0] for key in captured} == {"step", "rerank", "extend"}
    warm = len(captured)
    assert list(map(facts, fast.generate_many(asked, 12))) == want
    assert len(captured) == warm


class Stream:
    """Writes down what a stream of a GPU is asked, and the events that are recorded on it, which are words."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self):
        self.log.append(f"{self.name} ends")


class Recorded:
    """An event of a GPU: the stream that it was recorded on last."""

    stream = None

    def record(self, stream):
        self.stream = stream.name

    def __str__(self):
        return str(self.stream)


def test_new_tokens_and_steps_wait_for_those_of_another_stream(monkeypatch):
    log = []
    slm, _ = models()
    model = PagedModel(slm, 32, 4)
    model._extended = Recorded()
    monkeypatch.setattr(
        model, "_extend", lambda parts: (log.append("extended"), torch.zeros(len(parts), model.width))[1]
    )
    step = DecodeStep(model, 20, 4, frozenset(), 1)
    for name, act in (("a", model.extend), ("b", model.extend), ("c", lambda _: step.wait_for_stream())):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, name=name: Stream(name, log))
        act([Part([1, 2], 0, [0])])
    assert log == ["a waits for None", "extended", "b waits for a", "extended", "c waits for b"]


def test_an_llm_elsewhere_is_asked_once_the_logits_are_there_and_its_pools_are_complete(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("worker", log))
    task = SimpleNamespace(gone=Future())
    pools = loop._ask_elsewhere(task, lambda *_: log.append("asked") or ["pool"], [], torch.zeros(1, 4), "logits")
    assert pools == ["pool"]
    assert log == ["worker waits for logits", "asked", "worker ends"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")
@pytest.mark.parametrize("then", ["made", "asked"])
def test_workers_of_a_thread_that_computed_end_where_the_engine_begins(then):
    """Beside them those of the engine would sleep between two ops."""
    living, threads = Path("/proc/self/task"), torch.get_num_threads()
    if isinstance(cpu.library(), str) or not hasattr(cpu.library(), "GOMP_parallel"):
        pytest.skip("GNU's OpenMP runtime does not run here")

    def compute():
        rms_norm(torch.ones(4096, 64), None, 1e-6)
        return set(os.listdir(living))

    torch.set_num_threads(2)
    try:
        before = compute()
        with Engine(Pair(models()[0], None), SLMPreference(), RequestPolicy(9.0), pool="slm", max_length=20) as engine:
            if then == "asked":
                before = compute()
                engine.submit([1, 2], 1).result()
            until = time.monotonic() + 10
            while before <= set(os.listdir(living)) and time.monotonic() < until:
                time.sleep(0.01)
            assert not before <= set(os.listdir(living))
    finally:
        torch.set_num_threads(threads)
