import math
import threading
import warnings
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from test_decoding import NEVER, SCORES, Mixed, check, plain, tokenizer_of
from tiny import EOS, prompts, tiny

from fb_core import (
    CollaborativeDecoder,
    CompatibilityScorer,
    FutureBridgeSelector,
    LLMPreference,
    LocalLLM,
    RequestPolicy,
    SLMPreference,
    TokenReranker,
)
from fb_core.decode.decoder import LowLatencyDecoder
from fb_core.llm.paged_llm import PagedLLM
from fb_core.models.experts import Experts
from fb_core.models.native import FAMILIES, NativeDecoder
from fb_core.models.packed import Prefix
from fb_core.models.tokens import token_ids
from fb_core.rerank.merged_reranker import MergedReranker
from fb_core.runtime.kv_pages import SIZE, pages_of
from fb_core.runtime.paged_model import CHUNK, PagedModel, Part
from fb_core.runtime.step import DecodeStep
from fb_kernels import Halt
from fb_kernels.testing import count_launches, count_syncs

NATIVE = sorted(FAMILIES)
ENDS = (EOS, 7, 11, 19, 23)


def pair(family, seed=1, **options):
    """(SLM, LLM), some with a window or with heads of their own."""
    if family == "mistral":
        options = {"sliding_window": 5, **options}
    return tiny(family, seed, **options), tiny("llama" if family == "qwen3" else family, seed + 1)


def random_reranker(model, seed=0, **options):
    """A reranker whose adapter and head are random."""
    reranker = TokenReranker.from_base(model, rank=2, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reranker.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return reranker.eval()


# --- tokens and events ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(10))
@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.sweep(7)
def test_tokens_and_events_are_the_plain_decoders(family, case):
    """Five prompts of every family and case, one to four together: 200, of which few hang on less than the margin."""
    slm, llm = pair(family, case)
    slm.generation_config.eos_token_id = list(ENDS)
    threshold = (-math.inf, 1.2, 1.8, NEVER, 2.2, 0.8, 1.5)[case % 7]
    budget, k, n = (8, 3, 1, 0, 2, 5)[case % 6], (1, 3, 8, 5)[case % 4], 10
    kind = list(SCORES)[case % 3]
    pool = ("joint", "slm", "llm", "joint")[(case + NATIVE.index(family)) % 4]
    options = {"pool": pool, "slm_k": k, "llm_k": k, "max_events": budget}
    fast = LowLatencyDecoder(
        slm, llm, kind(), RequestPolicy(threshold), max_length=64, max_batch=1 + case % 4, **options
    )
    slow = CollaborativeDecoder(slm, LocalLLM(llm), kind(), RequestPolicy(threshold), **options)
    asked = prompts(2, 9, 1, 30, 5, seed=case)
    together = fast.generate_many(asked, n)
    whole = 0
    for ids, generation, other in zip(asked, together, slow.generate_many(asked, n), strict=True):
        want = plain(
            slm, llm, ids, threshold=threshold, pool=pool, k=k, budget=budget, n=n, score=SCORES[kind], ends=ENDS
        )
        if check(generation, want):
            whole += 1
            assert generation.token_ids.tolist() == other.token_ids.tolist()
            assert [event.pool for event in generation.events] == [event.pool for event in other.events]
    assert whole >= 3


@pytest.mark.parametrize("family", NATIVE)
def test_a_sequence_longer_than_a_bucket(family):
    slm, llm = pair(family, 3, max_position_embeddings=400)
    llm.config.max_position_embeddings = 400
    asked = prompts(290, 31, 33, seed=4)
    fast = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.5), slm_k=3, llm_k=3)
    slow = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(1.5), slm_k=3, llm_k=3)
    for model in (slm, llm):
        model.generation_config.eos_token_id = model.config.eos_token_id = None
    for ids in asked:
        got, want = fast.generate(ids, 12), slow.generate(ids, 12)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert len(got.token_ids) == 12
        for mine, theirs in zip(got.events, want.events, strict=True):
            assert mine.pool == theirs.pool
            assert mine.scores == pytest.approx(theirs.scores, abs=1e-3)


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("k", [3, 8, 12])
@pytest.mark.sweep(5)
def test_a_merged_reranker_scores_as_the_adapter(family, k):
    """Pools of up to 2 k candidates: fewer than a forward's rows, as many, and more."""
    slm, llm = pair(family, 7)
    selector = FutureBridgeSelector(random_reranker(slm, 1))
    options = {"slm_k": k, "llm_k": k, "max_events": 4}
    fast = LowLatencyDecoder(slm, llm, selector, RequestPolicy(1.0), **options)
    slow = CollaborativeDecoder(slm, llm, selector, RequestPolicy(1.0), **options)
    for ids in prompts(4, 11, seed=k):
        got, want = fast.generate(ids, 9), slow.generate(ids, 9)
        assert got.events
        for mine, theirs in zip(got.events, want.events, strict=True):
            assert (mine.step, mine.pool, mine.choice) == (theirs.step, theirs.pool, theirs.choice)
            assert mine.scores == pytest.approx(theirs.scores, abs=1e-3)
        assert got.token_ids.tolist() == want.token_ids.tolist()


def test_positions_and_buffers_bound_a_generation():
    slm, llm = tiny("llama", 1, max_position_embeddings=12), tiny("llama", 2)
    (ids,) = prompts(5)
    slm.generation_config.eos_token_id = slm.config.eos_token_id = None
    decoder = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(-math.inf))
    plainly = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(-math.inf)).generate(ids, 50)
    generation = decoder.generate(ids, 50)
    assert generation.token_ids.tolist() == plainly.token_ids.tolist()
    assert len(generation.token_ids) == 7
    assert decoder.loop.model.length == 12  # no place for what has no position
    short = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.5), max_length=8)
    assert len(short.generate(ids, 3).token_ids) == 3
    with pytest.raises(ValueError, match="expected prompt and new tokens to fit buffers of 8 tokens, got 5 and 4"):
        short.generate(ids, 4)
    assert len(short.generate(ids, 3).token_ids) == 3


# --- the step ---------------------------------------------------------------------------------------------------------


def running(family="qwen3", threshold=math.inf, length=5, slots=256, dtype=None):
    """A step with one sequence under way."""
    slm, _ = pair(family)
    model = PagedModel(slm.to(dtype or slm.dtype), slots, pages_of(slots))
    step, tokens = DecodeStep(model, 50, 64, frozenset(), 1), prompts(length)[0].tolist()
    pages = held(model, tokens)
    step.put(0, tokens, pages, slots, threshold)
    step.resume(0, 8)
    return step


def held(model, tokens):
    """Pages of a new sequence, all of whose tokens but the last have gone through the model."""
    pages, known = model.pages.take(tokens, model.length)
    model.extend([Part(tokens[known:-1], known, pages)])
    return pages


def memory(step):
    model = step.model
    return {
        name: (value.data_ptr(), value.untyped_storage().nbytes())
        for name, value in {
            **step.state._asdict(),
            **{name: value for name, value in vars(step).items() if isinstance(value, torch.Tensor)},
            **{f"key {i}": x for i, x in enumerate(model.keys)},
            **{f"value {i}": x for i, x in enumerate(model.values)},
        }.items()
    }


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.sweep(2)
def test_a_hundred_steps_ask_the_host_for_nothing_and_move_nothing(family, monkeypatch):
    monkeypatch.setattr(Experts, "_each", Experts._grouped)  # as on a GPU
    step = running(family)
    step.run(1)
    before = memory(step)
    with count_syncs() as syncs:
        for _ in range(100):
            step.run(1)
    assert syncs.total == 0
    assert memory(step) == before
    assert int(step.state.length) == 106
    assert step.outcomes(1)[0].halt == Halt.NONE


def test_a_step_launches_little_beside_our_kernels(monkeypatch):
    """On a GPU these are launched without overlap with the kernels before them."""
    step = running()
    results = step.logits[:1], (torch.zeros(1), step.logits[:1, :3], torch.zeros(1, 3, dtype=torch.int64))
    monkeypatch.setattr("fb_core.runtime.paged_model.decoder_layer", lambda hidden, *_, **options: hidden)
    monkeypatch.setattr("fb_core.runtime.paged_model.skinny_linear", lambda *_, **options: results[0].clone())
    monkeypatch.setattr("fb_core.runtime.step.topk_entropy", lambda *_: results[1])
    monkeypatch.setattr("fb_core.runtime.step.commit_", lambda *_, **options: None)
    with count_launches() as launches:
        step.run(1)
    wanted = {"add": 1, "index_select": 2, "embedding": 1, "copy_": 3, "clone": 1}  # a clone of the test's own
    assert launches.by_op == {f"aten::{name}": count for name, count in wanted.items()}


def test_the_host_may_look_a_step_late():
    """As on a GPU, where one more step is enqueued: each has a place of its own for its outcome."""
    steps = [running(), running()]
    plain, late = [], []
    for step, found, ahead in zip(steps, (plain, late), (0, 1), strict=True):
        for _ in range(20):
            while step.enqueued <= ahead:
                step.run(1)
            found += step.outcomes(1)
    assert late == plain
    assert len({one.entropy for one in plain}) == 20


def test_a_step_ranks_logits_of_the_models_own_dtype():
    step = running(dtype=torch.bfloat16)
    step.run(1)
    token = step.outcomes(1)[0].token
    assert step.logits.dtype == torch.bfloat16
    assert step.logits.any()
    assert step.logits[0, token] == step.logits.max()


def test_a_step_that_halted_changes_nothing_when_it_runs_again():
    step = running(threshold=-math.inf)
    step.run(1)
    first = step.outcomes(1)
    assert first[0].halt == Halt.EVENT
    kept = [x.clone() for x in (*step.state, *step.model.keys, *step.model.values, step.logits)]
    for _ in range(3):
        step.run(1)
    assert step.outcomes(1) == first
    now = (*step.state, *step.model.keys, *step.model.values, step.logits)
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    step.resume(0, 7, 17, 5)
    step.run(1)
    assert step.state.tokens[0, 5] == 17
    assert int(step.state.budget) == 7


def test_free_slots_are_never_seen():
    clean, dirty = running(), running()
    for buffer in (*dirty.model.keys, *dirty.model.values):
        buffer[int(dirty.table[0, 0]), 4:] = math.nan  # behind the four tokens that have been taken
        buffer[dirty.table[0, 1:].long()] = math.nan
    for step in (clean, dirty):
        for _ in range(4):
            step.run(1)
    assert torch.equal(clean.logits, dirty.logits)
    assert torch.equal(clean.state.tokens, dirty.state.tokens)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, CHUNK, CHUNK + 3])
def test_extending_in_chunks_is_one_forward(count):
    """Several sequences in a call, one of them of every size."""
    slm, _ = pair("qwen3", max_position_embeddings=600)
    model = PagedModel(slm, 600, 30)
    long, short = (ids.tolist() for ids in prompts(count + 3, 40))
    pages = [model.pages.take(ids, 600)[0] for ids in (long, short, short[::-1])]
    model.extend([Part(long[:3], 0, pages[0])])
    parts = [Part(long[3:], 3, pages[0]), Part(short, 0, pages[1]), Part(short[::-1], 0, pages[2])]
    found = model.logits(model.extend(parts), 50)
    with torch.no_grad():
        for row, ids in zip(found, (long, short, short[::-1]), strict=True):
            torch.testing.assert_close(row, slm(torch.tensor([ids])).logits[0, -1], rtol=1e-4, atol=1e-4)
    last, place = pages[0][len(long) // SIZE], len(long) % SIZE
    assert not any(buffer[last, place:].any() for buffer in (*model.keys, *model.values))


@pytest.mark.parametrize("length", [1, 9, CHUNK + 1])
def test_the_first_token_takes_no_step_of_its_own(monkeypatch, length):
    steps, forward = [], PagedModel.forward
    monkeypatch.setattr(PagedModel, "forward", lambda *given: steps.append(1) or forward(*given))
    slm, llm = pair("qwen3", max_position_embeddings=600)
    decoder = LowLatencyDecoder(slm, llm, LLMPreference(), RequestPolicy(NEVER), max_length=600)
    (ids,) = prompts(length)
    new = decoder.generate(ids, 3).token_ids
    assert len(steps) == len(new) - 1 == 2


# --- the large model --------------------------------------------------------------------------------------------------


def test_the_llm_computes_only_what_is_new(monkeypatch):
    llm = tiny("qwen3", 2, max_position_embeddings=400)
    steady, fresh = PagedLLM(llm, 300, 10), LocalLLM(llm)
    seen = []
    extend = PagedModel.extend
    monkeypatch.setattr(
        PagedModel,
        "extend",
        lambda self, parts: seen.append([(part.held, len(part.tokens)) for part in parts]) or extend(self, parts),
    )
    (ids,) = prompts(150)
    for queries in (
        [ids[:10]],
        [ids[:13]],
        [ids[:13]],
        [ids[:100], torch.cat([ids[:12], ids[:2]])],
        [ids, torch.cat([ids[:90], ids[:2]])],  # the second shares a page with the first
        [ids[:8], ids[:9]],
    ):
        got = steady.candidates_many(queries, 4, [ids[:3]] * len(queries))
        for mine, want in zip(got, fresh.candidates_many(queries, 4, [ids[:3]] * len(queries)), strict=True):
            assert mine.ids.tolist() == want.ids.tolist()
            torch.testing.assert_close(mine.logprob, want.logprob, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.score_logprob, want.score_logprob, rtol=1e-4, atol=1e-4)
    assert seen[:5] == [[(0, 10)], [(10, 3)], [(12, 1)], [(13, 87), (0, 14)], [(100, 50), (64, 28)]]
    with pytest.raises(ValueError, match="expected at most 300 tokens, as buffers and positions have, got 301"):
        steady.candidates(prompts(301)[0], 4)
    assert steady.candidates(ids, 4).ids.tolist() == fresh.candidates(ids, 4).ids.tolist()


def test_the_llm_answers_more_queries_than_its_pages_hold():
    llm = tiny("qwen3", 2, max_position_embeddings=400)
    steady, fresh = PagedLLM(llm, 192, 3), LocalLLM(llm)
    asked = prompts(100, 150, 20, 192, 64, 65)
    for _ in range(3):
        got = steady.candidates_many(asked, 4)
        assert [mine.ids.tolist() for mine in got] == [each.ids.tolist() for each in fresh.candidates_many(asked, 4)]
    with pytest.raises(ValueError, match="expected at most 128 tokens, as buffers and positions have, got 129"):
        PagedLLM(llm, 192, 2).candidates(prompts(129)[0], 4)
    with pytest.raises(ValueError, match="expected at most 400 tokens, as buffers and positions have, got 401"):
        PagedLLM(llm, 512, 8).candidates(prompts(401)[0], 4)


def test_a_prompt_is_checked_once_and_not_again_at_its_events(monkeypatch):
    decoder = LowLatencyDecoder(*pair("qwen3"), LLMPreference(), RequestPolicy(-1.0))
    check = mock.Mock(side_effect=token_ids)
    monkeypatch.setattr("fb_core.models.tokens.token_ids", check)
    assert len(decoder.generate(prompts(9)[0], 12).events) == 8
    assert check.call_count == 1


def test_an_id_that_only_the_small_model_has_is_refused_before_anything_runs():
    slm, llm = tiny("qwen3", 1, vocab_size=64), tiny("qwen3", 2)
    decoder = LowLatencyDecoder(slm, llm, LLMPreference(), RequestPolicy(NEVER), tokenizer=tokenizer_of(48))
    with pytest.raises(ValueError, match="input_ids: expected ids below 50, as the large model has, got 55; use"):
        decoder.generate(torch.tensor([3, 55]), 3)
    assert len(decoder.generate(torch.tensor([3, 49]), 3).token_ids) > 0


# --- what goes wrong, and who goes another way ------------------------------------------------------------------------


def test_changed_weights_count_and_a_changed_dtype_is_refused():
    slm, llm = pair("llama")
    decoder = LowLatencyDecoder(slm, llm, SLMPreference(), RequestPolicy(NEVER))
    (ids,) = prompts(5)
    before = decoder.generate(ids, 6).token_ids.tolist()
    with torch.no_grad():
        slm.model.layers[0].mlp.down_proj.weight.mul_(-2.0)
    after = decoder.generate(ids, 6).token_ids.tolist()
    assert (
        after
        == CollaborativeDecoder(slm, llm, SLMPreference(), RequestPolicy(NEVER)).generate(ids, 6).token_ids.tolist()
    )
    assert after != before
    slm.double()
    with pytest.raises(ValueError, match="make the decoder after moving its models"):
        decoder.generate(ids, 6)


def test_rotary_tables_are_made_where_their_frequencies_have_changed(monkeypatch):
    slm, _ = pair("llama")
    model, made = PagedModel(slm, 16, 1), []
    rope = NativeDecoder.rope
    monkeypatch.setattr(NativeDecoder, "rope", lambda *given: made.append(1) or rope(*given))
    model.refresh()
    assert not made
    rotary = slm.model.rotary_emb
    rotary.inv_freq.mul_(2)
    model.refresh()
    rotary.inv_freq = rotary.inv_freq.clone().mul_(2)
    model.refresh()
    rotary.attention_scaling *= 2
    model.refresh()
    assert len(made) == 3
    torch.testing.assert_close((model.cos, model.sin), rope(model.decoder, torch.arange(16)))


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
def test_other_families_run_as_in_the_plain_decoder_and_say_so_once(family):
    slm, llm = tiny(family, 1), tiny(family, 2)
    with pytest.warns(UserWarning, match="slm: .* has no native decoder") as warned:
        decoder = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.5), slm_k=3, llm_k=3)
    assert warned[0].filename == __file__
    (ids,) = prompts(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = decoder.generate(ids, 8)
    want = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(1.5), slm_k=3, llm_k=3).generate(ids, 8)
    assert got.token_ids.tolist() == want.token_ids.tolist()


def test_an_llm_of_another_family_stays_as_it_is():
    slm, llm = tiny("qwen3", 1), tiny("phi3", 2)
    with pytest.warns(UserWarning, match="llm: Phi3ForCausalLM has no native decoder"):
        decoder = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.5), slm_k=3, llm_k=3)
    (ids,) = prompts(6)
    want = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(1.5), slm_k=3, llm_k=3).generate(ids, 8)
    assert decoder.generate(ids, 8).token_ids.tolist() == want.token_ids.tolist()


def test_a_reranker_of_scope_sequence_runs_its_own_way():
    slm, llm = pair("qwen3")
    selector = FutureBridgeSelector(random_reranker(slm, scope="sequence"))
    fast, slow = (
        kind(slm, llm, selector, RequestPolicy(1.2), slm_k=3, llm_k=3)
        for kind in (LowLatencyDecoder, CollaborativeDecoder)
    )
    (ids,) = prompts(6)
    assert fast.generate(ids, 8).token_ids.tolist() == slow.generate(ids, 8).token_ids.tolist()


def both(slm, llm, reranker):
    """Decoders that ask often, over buffers and not."""
    return (
        kind(slm, llm, FutureBridgeSelector(reranker), RequestPolicy(1.2), slm_k=3, llm_k=3)
        for kind in (LowLatencyDecoder, CollaborativeDecoder)
    )


@pytest.mark.parametrize("write", ["in place", "by data"])
def test_a_reranker_is_merged_where_it_has_changed(write, monkeypatch):
    slm, llm = pair("qwen3")
    reranker = random_reranker(slm)
    fast, slow = both(slm, llm, reranker)
    merges, merged = [], TokenReranker.merged
    monkeypatch.setattr(TokenReranker, "merged", lambda self: merges.append(self) or merged(self))
    (ids,) = prompts(6)
    adapter = next(p for p in reranker.parameters() if p.requires_grad and p.ndim == 2)
    scores = []
    for change, count in ((None, 0), (adapter, 1), (None, 1), (slm.model.layers[0].self_attn.k_proj.weight, 2)):
        if change is not None:
            with torch.no_grad():
                (change if write == "in place" else change.data).mul_(-3)
        got, want = fast.generate(ids, 8), slow.generate(ids, 8)
        assert len(merges) == count
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.events
        scores.append(got.events[0].scores)
        torch.testing.assert_close(scores[-1], want.events[0].scores, rtol=1e-4, atol=1e-4)
    assert scores[0] != scores[1] == scores[2] != scores[3]


def test_a_merge_that_failed_is_made_again(monkeypatch):
    slm, llm = pair("qwen3")
    reranker = random_reranker(slm)
    fast, slow = both(slm, llm, reranker)
    (ids,) = prompts(6)
    fast.generate(ids, 8)
    with torch.no_grad():
        next(p for p in reranker.parameters() if p.requires_grad and p.ndim == 2).mul_(-3)
    with monkeypatch.context() as failing:
        failing.setattr(TokenReranker, "merged", mock.Mock(side_effect=torch.OutOfMemoryError("no memory")))
        with pytest.raises(torch.OutOfMemoryError):
            fast.generate(ids, 8)
    got, want = fast.generate(ids, 8), slow.generate(ids, 8)
    torch.testing.assert_close(got.events[0].scores, want.events[0].scores, rtol=1e-4, atol=1e-4)


def test_another_scale_of_the_adapter_is_merged():
    slm, llm = pair("qwen3")
    reranker = random_reranker(slm)
    fast, slow = both(slm, llm, reranker)
    (ids,) = prompts(6)
    before = fast.generate(ids, 8).events[0].scores
    for module in reranker.adapted.modules():
        if isinstance(module, LoraLayer):
            module.set_scale("default", 5.0)
    got, want = fast.generate(ids, 8), slow.generate(ids, 8)
    assert got.events[0].scores != before
    torch.testing.assert_close(got.events[0].scores, want.events[0].scores, rtol=1e-4, atol=1e-4)


def test_nan_logits_name_the_step_and_leave_the_decoder_usable():
    slm, llm = pair("qwen3")
    decoder = LowLatencyDecoder(slm, llm, LLMPreference(), RequestPolicy(1.5))
    (ids,) = prompts(5)
    before = decoder.generate(ids, 6).token_ids.tolist()
    weight = slm.model.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(ValueError, match="at step 0 of prompt 0"):
        decoder.generate(ids, 6)
    with torch.no_grad():
        weight.copy_(kept)
    assert decoder.generate(ids, 6).token_ids.tolist() == before


def test_an_interrupt_leaves_the_decoder_usable():
    slm, llm = pair("qwen3")

    class Interrupted(Mixed):
        armed = False

        def scores_many(self, states, pools):
            if self.armed:
                raise KeyboardInterrupt
            return super().scores_many(states, pools)

    selector = Interrupted()
    decoder = LowLatencyDecoder(slm, llm, selector, RequestPolicy(1.2), slm_k=3, llm_k=3)
    (ids,) = prompts(5)
    before = decoder.generate(ids, 8)
    selector.armed = True
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(ids, 8)
    selector.armed = False
    again = decoder.generate(ids, 8)
    assert again.token_ids.tolist() == before.token_ids.tolist()
    assert again.events == before.events


def test_inference_mode_and_back():
    slm, llm = pair("mistral")
    (ids,) = prompts(5)
    with torch.inference_mode():
        decoder = LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.2), slm_k=3, llm_k=3)
        inside = decoder.generate(ids, 8)
    outside = decoder.generate(ids, 8)
    assert outside.token_ids.tolist() == inside.token_ids.tolist()


@pytest.mark.parametrize("length", [0, 1])
def test_buffers_for_no_generation_are_refused(length):
    slm, llm = pair("qwen3")
    with pytest.raises(ValueError, match=f"max_length: expected 2 tokens or more, got {length}"):
        LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.2), max_length=length)
    LowLatencyDecoder(slm, llm, Mixed(), RequestPolicy(1.2), max_length=2)


def test_memory_is_reported():
    slm, llm = pair("qwen3")
    decoder = LowLatencyDecoder(
        slm, llm, FutureBridgeSelector(random_reranker(slm)), RequestPolicy(1.0), max_length=32, slm_k=3, llm_k=3
    )
    layer = slm.model.layers[0].self_attn
    attention = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    merged = len(slm.model.layers) * sum(module.weight.nbytes for module in attention)
    cached = [
        2 * 4 * SIZE * len(model.model.layers) * len(model.model.layers[0].self_attn.k_proj.weight)
        for model in (slm, llm)
    ]
    assert decoder.memory == {"buffers": sum(cached), "merged": merged, "graphs": 0}


# --- the reranker on the runtime --------------------------------------------------------------------------------------


def alora_scores(model, directory, prefix, candidates):
    """What PEFT computes of a saved adapter that is active on the last token alone (aLoRA with explicit offsets)."""
    config = LoraConfig.from_pretrained(directory)
    config.task_type, config.modules_to_save, config.alora_invocation_tokens = "CAUSAL_LM", None, [0]
    oracle = get_peft_model(model, config).eval()
    tensors = load_file(directory / "adapter_model.safetensors")
    head = tensors.pop("base_model.model.score.weight").to(model.dtype)
    set_peft_model_state_dict(oracle, tensors)
    rows = torch.cat([prefix.expand(len(candidates), -1), candidates[:, None]], 1)
    with torch.no_grad():
        out = oracle(input_ids=rows, alora_offsets=[1] * len(candidates), output_hidden_states=True)
    return (out.hidden_states[-1][:, -1] @ head.T)[:, 0]


def merged_scores(merged, prefix, candidates):
    """Scores of candidates after a prefix, which first runs through the merged reranker's model."""
    pages = held(merged.model, [*prefix.tolist(), 0])
    return merged.scores_many([Prefix(merged.model.kv, 0, len(prefix), tuple(pages))], [candidates])[0]


@pytest.mark.parametrize("family", NATIVE)
def test_scores_through_the_runtime_are_pefts(family, tmp_path):
    model = tiny(family, 5)
    random_reranker(model, 3).save_pretrained(tmp_path)
    prefix, candidates = prompts(21, seed=6)[0], torch.randperm(50)[:20]
    merged = MergedReranker(TokenReranker.from_pretrained(tmp_path, model).eval(), PagedModel(model, 40, 20))
    want = alora_scores(tiny(family, 5), tmp_path, prefix, candidates)
    torch.testing.assert_close(merged_scores(merged, prefix, candidates), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(merged_scores(merged, prefix, candidates[:3]), want[:3], rtol=1e-5, atol=1e-4)


def test_rank_agreement_in_bfloat16(tmp_path, record_property):
    """Merged weights are rounded once more than an adapter beside them: ranks agree, not bits."""
    model = tiny("qwen3", 5).to(torch.bfloat16)
    random_reranker(model, 3).save_pretrained(tmp_path)
    merged = MergedReranker(TokenReranker.from_pretrained(tmp_path, model).eval(), PagedModel(model, 40, 20))
    pairs = agreeing = 0
    for seed in range(10):
        prefix, candidates = (
            prompts(21, seed=seed)[0],
            torch.randperm(50, generator=torch.Generator().manual_seed(seed))[:13],
        )
        ours = merged_scores(merged, prefix, candidates)
        truth = alora_scores(tiny("qwen3", 5), tmp_path, prefix, candidates)
        order = (ours[:, None] - ours).sign() == (truth[:, None] - truth).sign()
        pairs, agreeing = pairs + 13 * 12, agreeing + int(order.sum()) - 13
    record_property("rank agreement in bfloat16", agreeing / pairs)
    assert agreeing / pairs > 0.95


def test_another_adapter_takes_the_place_of_the_first(tmp_path):
    slm, llm = pair("qwen3", 7)
    adapters = []
    for seed in (1, 2):
        random_reranker(slm, seed).save_pretrained(tmp_path / str(seed))
        adapters.append(TokenReranker.from_pretrained(tmp_path / str(seed), slm).eval())
    options = {"slm_k": 4, "llm_k": 4, "max_events": 4}
    fast = LowLatencyDecoder(slm, llm, FutureBridgeSelector(adapters[0]), RequestPolicy(1.0), **options)
    (ids,) = prompts(9, seed=2)
    weights = [weight.data_ptr() for weight in (*fast.loop.merged_reranker._qkv, *fast.loop.merged_reranker._o)]
    seen = []
    for number, adapter in enumerate(adapters, 1):
        fast.load_adapter(tmp_path / str(number))
        plainly = CollaborativeDecoder(slm, llm, FutureBridgeSelector(adapter), RequestPolicy(1.0), **options)
        got, want = fast.generate(ids, 9), plainly.generate(ids, 9)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        seen.append([event.scores for event in got.events])
        for mine, theirs in zip(got.events, want.events, strict=True):
            assert mine.scores == pytest.approx(theirs.scores, abs=1e-3)
    assert seen[0] != seen[1]
    assert [weight.data_ptr() for weight in (*fast.loop.merged_reranker._qkv, *fast.loop.merged_reranker._o)] == weights


def test_an_adapter_that_does_not_fit_changes_nothing(tmp_path):
    slm, llm = pair("qwen3", 7)
    random_reranker(tiny("qwen3", 8)).save_pretrained(tmp_path / "other")
    random_reranker(slm, scope="sequence").save_pretrained(tmp_path / "sequence")
    selector = FutureBridgeSelector(random_reranker(slm))
    decoder = LowLatencyDecoder(slm, llm, selector, RequestPolicy(1.0), slm_k=4, llm_k=4)
    (ids,) = prompts(9, seed=2)
    before = decoder.generate(ids, 9)
    for folder, words in (("other", "with other weights"), ("sequence", "scope"), ("nowhere", "nowhere")):
        with pytest.raises((ValueError, OSError), match=words):
            decoder.load_adapter(tmp_path / folder)
    assert decoder.generate(ids, 9).events == before.events
    with pytest.raises(ValueError, match="expected a decoder whose reranker runs merged"):
        LowLatencyDecoder(slm, llm, SLMPreference(), RequestPolicy(1.0)).load_adapter(tmp_path / "other")


# --- who may share what -----------------------------------------------------------------------------------------------


def in_threads(count, work):
    """What work(number) gives in so many threads that start together; an error of any of them is raised."""
    together, found, wrong = threading.Barrier(count), [None] * count, []

    def run(number):
        try:
            together.wait(600)
            found[number] = work(number)
        except BaseException as problem:
            wrong.append(problem)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads)
    if wrong:
        raise wrong[0]
    return found


def plain_facts(generation):
    return generation.token_ids.tolist(), [(event.step, event.pool, event.choice) for event in generation.events]


def shared_decoder(kind):
    slm, llm = pair("phi3" if kind == "modules" else "qwen3", 7)
    selector = FutureBridgeSelector(random_reranker(slm))
    options = {"slm_k": 4, "llm_k": 4, "max_events": 4}
    if kind in ("plain", "modules"):
        return CollaborativeDecoder(slm, LocalLLM(llm), selector, RequestPolicy(1.0), **options)
    if kind == "sequence":
        selector = FutureBridgeSelector(random_reranker(slm, scope="sequence"))
    return LowLatencyDecoder(slm, llm, selector, RequestPolicy(1.0), **options)


@pytest.mark.parametrize("kind", ["plain", "modules", "fast", "sequence"])
def test_threads_that_share_a_decoder_get_the_serial_answers(kind):
    decoder, asked = shared_decoder(kind), prompts(*range(3, 19), seed=5)
    want = [plain_facts(decoder.generate(ids, 12)) for ids in asked]
    got = in_threads(4, lambda number: [plain_facts(decoder.generate(ids, 12)) for ids in asked[number::4]])
    assert [got[index % 4][index // 4] for index in range(16)] == want
    assert sum(len(events) for _, events in want) > 16


@pytest.mark.parametrize("native", [True, False])
def test_threads_that_share_a_large_model_get_its_serial_answers(native):
    _, model = pair("qwen3")
    llm = PagedLLM(model, 64, 4) if native else LocalLLM(model)
    asked = [prompts(n, seed=n % 3)[0] for n in range(5, 29)]  # some extend others
    fresh = LocalLLM(model)
    want = [fresh.candidates_many([ids], 5)[0] for ids in asked]
    for _ in range(3):
        got = in_threads(4, lambda number: [llm.candidates(ids, 5) for ids in asked[number::4]])
        for index, expected in enumerate(want):
            found = got[index % 4][index // 4]
            assert found.ids.tolist() == expected.ids.tolist()
            torch.testing.assert_close(found.logprob, expected.logprob, rtol=1e-4, atol=1e-4)


def test_threads_that_share_scorer_and_reranker_get_their_serial_answers():
    slm, _ = pair("qwen3")
    scorer, reranker = CompatibilityScorer(slm), random_reranker(slm)
    asked = prompts(*range(3, 19), seed=5)

    def both(ids):
        return scorer.score(ids, [5, 6, 7], [8, 9, 10]), reranker.scores(ids, [5, 6, 7]).detach()

    want = [both(ids) for ids in asked]
    got = in_threads(4, lambda number: [both(ids) for ids in asked[number::4]])
    for index, expected in enumerate(want):
        for mine, theirs in zip(got[index % 4][index // 4], expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_call_from_inside_a_generation_is_refused_and_the_decoder_goes_on(tmp_path):
    decoder, (ids,) = shared_decoder("fast"), prompts(6)
    decoder.selector.reranker.save_pretrained(tmp_path)
    want, refused = plain_facts(decoder.generate(ids, 9)), []

    def on_token(token, event):
        for call in (lambda: decoder.generate(ids, 2), lambda: decoder.load_adapter(tmp_path)):
            with pytest.raises(ValueError, match="expected an idle decoder, got a call from inside") as no:
                call()
            refused.append(no)

    got = in_threads(1, lambda _: decoder.generate(ids, 9, on_token=on_token))[0]  # a deadlock would end in an error
    assert plain_facts(got) == want
    assert len(refused) == 2 * len(want[0])
    assert plain_facts(decoder.generate(ids, 9)) == want


# --- policies of another kind -----------------------------------------------------------------------------------------


class Never(RequestPolicy):
    def asks(self, entropy):
        return torch.zeros_like(entropy, dtype=torch.bool)


class Doubled(RequestPolicy):
    def entropy(self, logits):
        return 2 * super().entropy(logits)


class Named(RequestPolicy):
    """Nothing that the device would have to know."""

    name = "mine"


def test_a_policy_that_the_device_cannot_follow_is_refused():
    slm, llm = pair("qwen3")
    (ids,) = prompts(6)
    plainly = CollaborativeDecoder(slm, llm, LLMPreference(), Never(0.0))
    assert plainly.generate(ids, 8).events == []
    for kind, method in ((Never, "asks"), (Doubled, "entropy")):
        with pytest.raises(ValueError, match=f"policy: expected RequestPolicy's own {method}, .* got {kind.__name__}"):
            LowLatencyDecoder(slm, llm, LLMPreference(), kind(0.0))
    with pytest.warns(UserWarning, match="no native decoder"):
        other = LowLatencyDecoder(tiny("phi3", 1), llm, LLMPreference(), Never(0.0))
    assert other.generate(ids, 8).events == []
    assert LowLatencyDecoder(slm, llm, LLMPreference(), Named(0.0)).generate(ids, 8).events


def test_a_policy_that_is_changed_later_counts_or_is_refused():
    slm, llm = pair("qwen3")
    (ids,) = prompts(6)
    decoder = LowLatencyDecoder(slm, llm, LLMPreference(), RequestPolicy(0.0))
    assert decoder.generate(ids, 8).events
    decoder.policy = RequestPolicy(math.inf)
    assert decoder.generate(ids, 8).events == []
    for policy, words in ((Never(0.0), "got Never"), (RequestPolicy(0.0, top_k=5), "top_k: expected 50 .* got 5")):
        decoder.policy = policy
        with pytest.raises(ValueError, match=words):
            decoder.generate(ids, 8)
