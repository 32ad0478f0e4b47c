"""Scores in an engine: continuations of shared prefixes, and a prompt's own tokens, beside sequences that run."""

import copy
import math
import os
import sys
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from test_engine import alone, engine, facts, models, waited
from tiny import V, prompts, tiny

from fb_core import CompatibilityScorer
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.models import native, packed
from fb_core.runtime import loop
from fb_core.runtime.paged_model import PagedModel, page_bytes
from fb_core.runtime.step import RANKED


def exact(slm, ids):
    """float64 log-probs [n, V] of a plain forward; row i is what follows ids[: i + 1]."""
    with torch.no_grad():
        return copy.deepcopy(slm).double()(ids[None]).logits[0].log_softmax(-1)


def check_scores(slm, prefix, continuations, scores):
    """They are those of plain forwards in float64."""
    assert len(scores) == len(continuations)
    for tokens, (logprob, greedy) in zip(continuations, scores, strict=True):
        assert (logprob.dtype, greedy.dtype) == (torch.float32, torch.bool)
        rows = exact(slm, torch.cat([prefix, tokens]))[len(prefix) - 1 : -1]
        wanted = rows.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprob.double(), wanted, rtol=0, atol=1e-4)
        assert greedy.tolist() == (rows.argmax(-1) == tokens).tolist()


class Counts:
    """Tokens of prompts and rows of continuations that the small model computes."""

    def __init__(self, slm, monkeypatch):
        self.prefix = self.rows = 0
        extend, forward = PagedModel.extend, packed.packed_forward

        def extending(model, parts, *more, **options):
            self.prefix += sum(len(part.tokens) for part in parts) * (model.model is slm)
            return extend(model, parts, *more, **options)

        def running(model, ids, *more, **options):
            self.rows += len(ids)
            return forward(model, ids, *more, **options)

        monkeypatch.setattr(PagedModel, "extend", extending)
        monkeypatch.setattr(packed, "packed_forward", running)
        monkeypatch.setattr("fb_core.score.shared_prefix.packed_forward", running)


# --- continuations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama", "qwen2"])
@pytest.mark.sweep(2)
def test_continuations_beside_running_sequences_get_the_scorers_numbers(family):
    slm, llm = models(family, **({"sliding_window": 70} if family == "mistral" else {}))
    asked, scorer = prompts(5, 150, 9, seed=3), CompatibilityScorer(slm)
    want = alone(slm, llm, asked, 60)
    prefixes = [*prompts(1, 2, 64, 65, 130, seed=4), asked[1][:140]]
    continuations = [
        prompts(*lengths, seed=5) for lengths in ((1,), (7, 1, 30), (4, 4), (64, 65, 9, 1, 2), (90,), (3,) * 13)
    ]
    with engine(slm, llm, max_batch=4, max_length=300, prefill_tokens=16) as running:
        free = running.decoder.loop.model.pages.free
        for _ in range(2):  # the second time over known pages
            handles = [running.submit(ids, 60) for ids in asked]
            scoring = [running.score(*each) for each in zip(prefixes, continuations, strict=True)]
            for prefix, tokens, handle in zip(prefixes, continuations, scoring, strict=True):
                scores = handle.result(60)
                check_scores(slm, prefix, tokens, scores)
                for own, theirs in zip(scores, scorer.logprobs(prefix, tokens, return_greedy=True), strict=True):
                    torch.testing.assert_close(own[0], theirs[0], rtol=1e-5, atol=1e-5)
                    assert torch.equal(own[1], theirs[1])
                assert handle.done
                assert list(handle) == []
            assert [facts(handle.result(60)) for handle in handles] == want
        assert running.score([5, 6], []).result(60) == []
        assert [len(each) for each, _ in running.score([5, 6], [[], [7], []]).result(60)] == [0, 1, 0]
        assert [len(each) for each, _ in running.score([5, 6], [[]]).result(60)] == [0]
        assert running.decoder.loop.model.pages.free == free


def test_a_beginning_that_anyone_computed_is_computed_once(monkeypatch):
    """By an answer, by scores before, and by scores that come at the same time."""
    slm, llm = models()
    (stem, other), tokens = prompts(200, 150), prompts(5, 9)
    counts = Counts(slm, monkeypatch)
    with engine(slm, llm, max_batch=4, max_length=300) as running:
        with running._state.changed:  # both come at once: the second waits for the first one's pages
            handles = [running.score(stem, tokens), running.score(torch.cat([stem[:190], other[:5]]), tokens)]
        for handle in handles:
            handle.result(60)
        assert counts.prefix == 199 + (194 - 128)
        running.submit(torch.cat([stem, other[:5]]), 3, max_events=0).result(60)
        assert counts.prefix == 199 + 66 + (205 - 192)
        running.submit(other, 3, max_events=0).result(60)
        before = counts.prefix
        check_scores(slm, other, tokens, running.score(other, tokens).result(60))
        assert counts.prefix == before + (149 - 128)
        assert counts.rows == 4 * 0 + 3 * (5 + 9)  # each continuation's rows, and none of a prefix


def test_continuations_run_in_pieces_between_steps(monkeypatch):
    """A forward has at most as many rows as a piece of a prompt, or one continuation; steps go on between them."""
    slm, llm = models()
    slm.generation_config.eos_token_id = None
    (ids, prefix), continuations, sizes = prompts(5, 20), prompts(*[10] * 12, 40), []
    forward = loop.shared_prefix.forward

    def forwarding(model, pack, **options):
        state = running.decoder.loop
        rows = sum(group.rows for _, groups in pack for group in groups)
        sizes.append((rows, state.step.begun, len(state.rows)))
        return forward(model, pack, **options)

    with engine(slm, llm, max_length=300, max_batch=2, prefill_tokens=32) as running:
        (want,) = alone(slm, llm, [ids], 100)
        first = running.submit(ids, 100)
        next(iter(first))
        monkeypatch.setattr(loop.shared_prefix, "forward", forwarding)
        scores = running.score(prefix, continuations).result(60)
        assert facts(first.result(60)) == want
    check_scores(slm, prefix, continuations, scores)
    assert [rows for rows, _, beside in sizes if beside] == [30, 30, 30, 30, 40]
    assert len({begun for _, begun, _ in sizes}) == 5


def test_scores_take_turns(monkeypatch):
    slm, llm = models()
    asked = list(zip(prompts(20, 9, 5), (prompts(*n) for n in ([10] * 12, [10] * 12, [3, 3])), strict=True))
    packs, forward = [], loop.shared_prefix.forward

    def forwarding(model, pack, **options):
        packs.append([len(groups[0].continuations) for _, groups in pack])
        return forward(model, pack, **options)

    monkeypatch.setattr(loop, "CHUNK", 40)
    monkeypatch.setattr(loop.shared_prefix, "forward", forwarding)
    with engine(slm, llm, max_length=300, prefill_tokens=40) as running:
        with running._state.changed:
            handles = [running.score(*each) for each in asked]
        for each, handle in zip(asked, handles, strict=True):
            check_scores(slm, *each, handle.result(60))
    assert packs[:2] == [[2, 1, 1], [2, 1, 1]]  # the first begins, then the second; the third is done


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_between_small_results_goes_back_to_the_system(monkeypatch):
    monkeypatch.setattr(loop, "UNTRIMMED", 0, raising=False)
    slm, held = tiny("llama", vocab_size=8000), []
    with Engine(Pair(slm, None), None, RequestPolicy(9.0), max_events=0) as running:
        for _ in range(3):
            for act in (running.score([5], [[9] * 32] * 200).result, native.trim):
                act()
                held.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert max(kept - least for kept, least in zip(held[::2], held[1::2], strict=True)) < 10 << 20


def test_who_stops_waiting_for_scores_frees_its_pages_and_the_others_go_on():
    slm, llm = models()
    (prefix, ids), continuations = prompts(150, 9), prompts(*[8] * 200)
    with engine(slm, llm, max_length=300, max_batch=2, prefill_tokens=8) as running:
        free = running.decoder.loop.model.pages.free
        first, second = running.submit(ids, 100), running.score(prefix, continuations)
        third = running.score(prefix[:40], continuations[:3])
        waited(lambda: running.decoder.loop.scoring)
        second.cancel()
        with pytest.raises(CancelledError):
            second.result(60)
        check_scores(slm, prefix[:40], continuations[:3], third.result(60))
        assert [facts(first.result(60))] == alone(slm, llm, [ids], 100)
        waited(lambda: running.decoder.loop.model.pages.free == free)
        last = running.score(prefix, continuations)
        running.cancel(last)  # before anything of it has run, perhaps
        with pytest.raises(CancelledError):
            last.result(60)
        closing = running.score(prefix, continuations)
    with pytest.raises(CancelledError):
        closing.result(60)


REFUSED = [
    ([], [[5]], "prefix: expected at least 1 token, got 0"),
    ([5], [[V]], "continuations: expected ids from 0 below 50, got 50"),
    ([-1], [[5]], "prefix: expected ids from 0 below 50, got -1"),
    ([5] * 250, [[5] * 60], "prefix: expected at most 300 tokens with a continuation, got 250 and 60"),
    ([5] * 301, [], "prefix: expected at most 300 tokens with a continuation, got 301 and 0"),
    ([5] * 20, [[5] * 382], "prefix: expected at most 400 positions"),
]


@pytest.mark.parametrize(("prefix", "continuations", "words"), REFUSED)
def test_what_can_never_be_scored_is_refused_at_once(prefix, continuations, words):
    slm, _ = models()
    with Engine(Pair(slm, None), None, RequestPolicy(9.0), max_events=0, max_length=300) as running:
        with pytest.raises(ValueError, match=words):
            running.score(prefix, continuations)
        with pytest.raises(TypeError, match="continuations"):
            running.score([5], "text")


def test_pages_and_a_forward_are_limits_too(monkeypatch):
    slm, _ = models()
    settings = {"max_events": 0, "max_length": 300, "kv_memory": 2 * page_bytes(slm)}
    with Engine(Pair(slm, None), None, RequestPolicy(9.0), **settings) as running:
        with pytest.raises(ValueError, match="prefix: expected at most 128 tokens with a continuation, got 120 and 9"):
            running.score([5] * 120, [[5] * 9])
        assert len(running.score([5] * 120, [[5] * 8]).result(60)[0][0]) == 8
        monkeypatch.setattr(loop, "LONGEST", 7)
        with pytest.raises(ValueError, match="continuations: expected at most 7 tokens each, got 8; ask for the"):
            running.score([5], [[5] * 8])
    with pytest.raises(RuntimeError, match="engine: expected an open one"):
        running.score([5], [[5]])


def test_nan_ends_scores_and_the_engine_goes_on():
    slm, llm = models()
    (prefix,), tokens = prompts(70), prompts(5, 9)
    with engine(slm, llm) as running:
        kept = slm.model.norm.weight.detach().clone()
        with torch.no_grad():
            slm.model.norm.weight.fill_(math.nan)
        for asked in (running.score(prefix, tokens), running.submit(prefix, 0, prompt_ranking=True)):
            with pytest.raises(ValueError, match="slm: expected finite logits"):
                asked.result(60)
        with torch.no_grad():
            slm.model.norm.weight.copy_(kept)
        check_scores(slm, prefix, tokens, running.score(prefix, tokens).result(60))


def test_without_a_native_decoder_the_scorer_answers():
    slm = tiny("gemma2")
    (prefix,), tokens = prompts(20), prompts(5, 9)
    with pytest.warns(UserWarning, match="no native decoder"):
        running = Engine(Pair(slm, None), None, RequestPolicy(9.0), max_events=0)
    with running:
        handles = [running.submit(prefix, 20), running.score(prefix, tokens)]
        check_scores(slm, prefix, tokens, handles[1].result(60))
        assert len(handles[0].result(60).token_ids)
        with pytest.raises(ValueError, match="ranking: expected an SLM with a native decoder"):
            running.submit(prefix, 1, prompt_ranking=True)


# --- a prompt's own tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [0, 1, 20])
def test_a_prompts_own_log_probs_are_those_of_plain_forwards(new, monkeypatch):
    slm, llm = models()
    asked = prompts(1, 2, 64, 150, 9, 150, seed=6)
    asked[5][:128] = asked[3][:128]
    want, counts = alone(slm, llm, asked, max(1, new)), Counts(slm, monkeypatch)
    with engine(slm, llm, max_batch=3, max_length=300, prefill_tokens=100) as running:
        handles = [running.submit(ids, new, prompt_ranking=place != 4 or not new) for place, ids in enumerate(asked)]
        found = [facts(handle.result(60)) for handle in handles]
        whole = sum(len(ids) - (not new) for ids in asked)  # no page is shared: all places are computed
        assert counts.prefix == whole
        assert found == (want if new else [([], [])] * 6)
        running.submit(asked[3], 1, max_events=0).result(60)
        assert counts.prefix == whole + 150 - 128  # but others share what they computed
        assert running.decoder.loop.model.pages.free == running.decoder.loop.model.pages.count
    for place, (ids, handle) in enumerate(zip(asked, handles, strict=True)):
        if place == 4 and new:
            assert handle.prompt_ranks == []
            continue
        rows = exact(slm, ids)[:-1]
        assert len(handle.prompt_ranks) == len(ids) - 1
        for rank, token, row in zip(handle.prompt_ranks, ids[1:].tolist(), rows, strict=True):
            assert rank.taken == pytest.approx(float(row[token]), abs=1e-4)
            assert rank.place == int((row > row[token]).sum()) + 1
            best = row.topk(RANKED)
            torch.testing.assert_close(torch.tensor(rank.logprobs).double(), best.values, rtol=0, atol=1e-4)
            assert rank.ids == best.indices.tolist()


def test_a_prompt_whose_tokens_are_ranked_is_refused_where_it_cannot_be():
    slm, llm = models()
    with engine(slm, llm, max_length=100) as running:
        with pytest.raises(ValueError, match="max_new_tokens: expected 1 or more, got 0"):
            running.submit([5], 0)
        with pytest.raises(ValueError, match="input_ids: expected prompt and new tokens to fit buffers of 100"):
            running.submit([5] * 101, 0, prompt_ranking=True)
        running.submit([5] * 100, 0, prompt_ranking=True).result(60)
        running.decoder.vocabulary = 40  # as where a tokenizer knows fewer ids than the embedding has
        with pytest.raises(ValueError, match="input_ids: expected ids from 0 below 40, got 45"):
            running.submit([5, 45], 0, prompt_ranking=True)
