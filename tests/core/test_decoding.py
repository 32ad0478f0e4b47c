import hashlib
import itertools
import math

import pytest
import torch
import zoo
from tiny import EOS, FAMILIES, V, ending, prompts, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DynamicCache, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from fb_core.decode.asking import candidate_pool
from fb_core.decode.decoder import CollaborativeDecoder, LowLatencyDecoder
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import (
    FutureBridgeSelector,
    LLMPreference,
    RandomChoice,
    ScoringSelector,
    Selector,
    SLMPreference,
    State,
    ValueSelector,
)
from fb_core.events import Pool
from fb_core.llm.local import LLM, Candidates, LocalLLM
from fb_core.llm.remote import ServerLLM
from fb_core.models.packed import Prefix, PrefixKV
from fb_core.rerank.reranker import TokenReranker
from fb_core.rerank.value_head import ValueHead
from fb_core.runtime.plain import left_padded
from fb_core.score.scorer import CompatibilityScorer
from fb_core.score.shared_prefix import shared_prefix_logprobs

MARGIN = 1e-4
NEVER, ALWAYS = math.inf, -math.inf

both_loops = pytest.mark.parametrize("kind", [CollaborativeDecoder, LowLatencyDecoder])


class Mixed(ScoringSelector):
    """A deterministic selector that uses both models and picks all over the pool."""

    def scores_many(self, states, pools):
        return [torch.cos(3.0 * pool.slm_logprob - 2.0 * pool.llm_logprob) for pool in pools]


@torch.no_grad()
def logits_of(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()


def ranked(values):
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def gap(values, k):
    """The smallest distance between neighbours among the k + 1 largest."""
    top = sorted(values, reverse=True)[: k + 1]
    return min((a - b for a, b in itertools.pairwise(top)), default=math.inf)


def plain(slm, llm, prompt, *, threshold, pool, k, budget, n, score, ends=(EOS,), top_k=64):
    """The whole method from scratch: a full forward of each model at every step, sorting in Python, float64.

    Returns the tokens, the events, and for every step the margin by which it was decided.
    """
    tokens, events, margins = prompt.tolist(), [], []
    for step in range(n):
        logits = logits_of(slm, tokens)
        values = logits.tolist()
        top = torch.tensor(sorted(values, reverse=True)[: min(top_k, V)]).softmax(0)
        entropy = float(-(top * top.log()).sum())
        margin = math.inf if len(events) == budget else abs(entropy - threshold)
        if entropy > threshold and len(events) < budget:
            theirs = logits_of(llm, tokens)
            small = ranked(values)[:k] if pool != "llm" else []
            large = ranked(theirs.tolist())[:k] if pool != "slm" else []
            ids = list(dict.fromkeys(small + large))
            sources = [(1 if token in small else 0) + (2 if token in large else 0) for token in ids]
            log_s, log_t = (torch.log_softmax(both, 0)[ids].tolist() for both in (logits, theirs))
            scores = [score(s, t) for s, t in zip(log_s, log_t, strict=True)]
            choice = max(range(len(ids)), key=lambda index: (scores[index], -index))
            margin = min(margin, gap(scores, 1), gap(values, k) if small else math.inf)
            margin = min(margin, gap(theirs.tolist(), k) if large else math.inf)
            events.append((step, entropy, ids, sources, log_s, log_t, scores, choice))
            token = ids[choice]
        else:
            token = ranked(values)[0]
            margin = min(margin, gap(values, 1))
        tokens.append(token)
        margins.append(margin)
        if token in ends:
            break
    return tokens[len(prompt) :], events, margins


def check(generation, wanted):
    """Equal in every token and event up to the first step that hangs on less than MARGIN; True if that is all of it."""
    tokens, events, margins = wanted
    safe = next((step for step, margin in enumerate(margins) if margin < MARGIN), len(margins))
    assert generation.token_ids[:safe].tolist() == tokens[:safe]
    found = [event for event in generation.events if event.step < safe]
    expected = [event for event in events if event[0] < safe]
    assert len(found) == len(expected)
    for event, (step, entropy, ids, sources, log_s, log_t, scores, choice) in zip(found, expected, strict=True):
        assert (event.step, event.pool, event.sources, event.choice) == (step, ids, sources, choice)
        assert event.token == ids[choice] == tokens[step]
        assert event.entropy == pytest.approx(entropy, abs=MARGIN)
        assert event.slm_logprob == pytest.approx(log_s, abs=MARGIN)
        assert event.llm_logprob == pytest.approx(log_t, abs=MARGIN)
        assert event.scores == pytest.approx(scores, abs=10 * MARGIN)
    if safe == len(margins):
        assert generation.token_ids.tolist() == tokens
    return safe == len(margins)


SCORES = {
    LLMPreference: lambda s, t: t,
    SLMPreference: lambda s, t: s,
    Mixed: lambda s, t: math.cos(3.0 * s - 2.0 * t),
}


@pytest.mark.parametrize("pool", ["joint", "slm", "llm"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sweep(4)
def test_equals_a_plain_loop_token_by_token_and_event_by_event(family, pool):
    options = {"sliding_window": 5} if family == "mistral" else {}
    slm, llm = tiny(family, 1, **options), tiny("llama" if family == "qwen3" else family, 2)
    ends = (EOS, 7, 11, 19, 23)
    slm.generation_config.eos_token_id = list(ends)
    asked = prompts(5, 9, 2, seed=FAMILIES.index(family))
    number = FAMILIES.index(family) + ["joint", "slm", "llm"].index(pool)
    cases = [(ALWAYS, 8), (1.2, 3), (1.8, 8), (NEVER, 8), (2.2, 2), (ALWAYS, 0), (1.5, 1), (ALWAYS, 4)]
    whole = ended = 0
    for case in range(4):
        threshold, budget = cases[(number + case) % len(cases)]
        kind = list(SCORES)[(number + case) % 3]
        k, n = (1, 3, 8)[(number + case) % 3], 12
        decoder = CollaborativeDecoder(
            slm, LocalLLM(llm), kind(), RequestPolicy(threshold), pool=pool, slm_k=k, llm_k=k, max_events=budget
        )
        wanted = [
            plain(slm, llm, ids, threshold=threshold, pool=pool, k=k, budget=budget, n=n, score=SCORES[kind], ends=ends)
            for ids in asked
        ]
        batched = decoder.generate_many(asked, n)
        for ids, together, want in zip(asked, batched, wanted, strict=True):
            whole += check(together, want)
            check(decoder.generate(ids, n), want)
            ended += int(together.token_ids[-1]) in ends
            assert len(together.token_ids) == n or int(together.token_ids[-1]) in ends
    assert whole >= 10  # of 12: decisions within the margin are rare
    assert ended


@both_loops
def test_eos_inside_and_outside_of_events(kind):
    slm, llm = tiny("qwen3", 1), tiny("qwen3", 2)
    (ids,) = prompts(5)

    def decode():
        options = {"slm_k": 3, "llm_k": 3, "max_events": 3}
        return kind(slm, llm, Mixed(), RequestPolicy(1.2), **options).generate(ids, 16)

    slm.generation_config.eos_token_id = slm.config.eos_token_id = None
    generation = decode()
    tokens, at_events = generation.token_ids.tolist(), {event.step for event in generation.events}
    assert len(at_events) == 3
    for inside in (True, False):
        step = next(s for s, token in enumerate(tokens) if (s in at_events) == inside and token not in tokens[:s])
        slm.generation_config.eos_token_id = tokens[step]
        cut = decode()
        assert cut.token_ids.tolist() == tokens[: step + 1]
        assert cut.events == [event for event in generation.events if event.step <= step]


def test_input_forms_and_repeats_give_the_same_bits():
    slm, llm = tiny("qwen2", 3), tiny("qwen2", 4)
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(1.5))
    (ids,) = prompts(6)
    before = ids.clone()
    first = decoder.generate(ids, 10)
    for form in (ids, ids[None], ids.tolist(), ids.int()):
        again = decoder.generate(form, 10)
        assert torch.equal(again.token_ids, first.token_ids)
        assert again.events == first.events
    assert torch.equal(ids, before)
    assert first.text is None
    assert first.token_ids.dtype == torch.int64
    assert decoder.generate_many([], 10) == []


def test_batches_are_cut_by_their_tokens_and_come_out_in_order():
    slm, llm = tiny("qwen3", 5), tiny("qwen3", 6)
    asked = prompts(3, 8, 1, 5, 9)
    rows = []
    handle = slm.register_forward_pre_hook(lambda _m, _a, kw: rows.append(len(kw["input_ids"])), with_kwargs=True)
    policy = RequestPolicy(1.8)
    whole = CollaborativeDecoder(slm, llm, LLMPreference(), policy).generate_many(asked, 6)
    assert max(rows) == 5
    rows.clear()
    cut = CollaborativeDecoder(slm, llm, LLMPreference(), policy, batch_tokens=30).generate_many(asked, 6)
    assert max(rows) == 2
    handle.remove()
    assert [one.token_ids.tolist() for one in cut] == [one.token_ids.tolist() for one in whole]
    assert [[event.pool for event in one.events] for one in cut] == [
        [event.pool for event in one.events] for one in whole
    ]


def test_a_single_sequence_keeps_the_llm_in_step():
    slm, llm = tiny("qwen3", 7), tiny("qwen3", 8)
    (ids,) = prompts(9)
    shapes = []
    handle = llm.register_forward_pre_hook(lambda _m, _a, kw: shapes.append(kw["input_ids"].shape), with_kwargs=True)
    generation = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(1.5)).generate(ids, 20)
    handle.remove()
    steps = [event.step for event in generation.events]
    assert len(steps) > 2
    caught_up = [9 + steps[0], *(b - a for a, b in itertools.pairwise(steps))]
    assert [tuple(shape) for shape in shapes] == [(1, n) for n in caught_up]


def test_the_llm_is_not_asked_where_no_event_is_admitted():
    class Silent(LLM):
        vocabulary = V

        def candidates(self, ids, k, score_ids=None):
            raise AssertionError

        complete = candidates

    slm = tiny("qwen3", 9)
    for policy, budget in ((RequestPolicy(NEVER), 8), (RequestPolicy(ALWAYS), 0)):
        decoder = CollaborativeDecoder(slm, Silent(), LLMPreference(), policy, max_events=budget)
        (ids,) = prompts(4)
        assert torch.equal(decoder.generate(ids, 8).token_ids, LocalLLM(slm).complete(ids, 8))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_states_carry_the_frozen_prefix_as_views(family):
    slm, llm = tiny(family, 10, **({"sliding_window": 5} if family == "mistral" else {})), tiny(family, 11)
    seen = []

    class Spy(Selector):
        def choose(self, state, pool):
            cache = DynamicCache()
            with torch.no_grad():
                slm(state.tokens[None], past_key_values=cache, use_cache=True)
            part = slice(state.prefix.start, state.prefix.start + state.prefix.length)
            for layer, (keys, values) in zip(cache.layers, state.prefix.kv.layers.values(), strict=True):
                for full, held in ((layer.keys, keys), (layer.values, values)):
                    torch.testing.assert_close(held[state.prefix.pages[0], part], full[0].transpose(0, 1), **TIGHT)
            seen.append((state.prefix.pages[0], state.prefix.start, state.step, state.prefix.length))
            return len(pool) - 1

    asked = prompts(3, 7, 5)
    CollaborativeDecoder(slm, llm, Spy(), RequestPolicy(ALWAYS), slm_k=2, llm_k=2).generate_many(asked, 6)
    assert {row for row, *_ in seen} == {0, 1, 2}
    assert {start for _, start, *_ in seen} == {0, 2, 4}
    assert all(length == step + 7 - start for _, start, step, length in seen)


TIGHT = {"rtol": 1e-4, "atol": 1e-4}


# selectors


def pool_of(ids, slm, llm, sources=None):
    sources = [3] * len(ids) if sources is None else sources
    return Pool(
        torch.tensor(ids),
        torch.tensor(sources, dtype=torch.int32),
        torch.tensor(slm).float(),
        torch.tensor(llm).float(),
    )


STATE = State(torch.tensor([3, 4, 5]), 2, 1.5)


def test_preferences_take_the_first_of_the_best():
    pool = pool_of([7, 8, 9], [-1.0, -0.5, -0.5], [-2.0, -2.0, -3.0])
    assert len(pool) == 3
    assert LLMPreference().choose(STATE, pool) == 0
    assert SLMPreference().choose(STATE, pool) == 1
    ((index, scores),) = LLMPreference().choose_many([STATE], [pool])
    assert index == 0
    assert torch.equal(scores, pool.llm_logprob)
    assert LLMPreference().choose_many([], []) == []


def test_random_choice_depends_on_seed_and_tokens_alone():
    pool = pool_of(list(range(5)), [0.0] * 5, [0.0] * 5)
    states = [State(torch.tensor([3, 4, n]), 1, 0.5) for n in range(200)]
    first = [RandomChoice(1).choose(state, pool) for state in states]
    chooser = RandomChoice(1)
    backwards = chooser.choose_many(states[::-1], [pool] * 200)[::-1]
    assert [(index, None) for index in first] == backwards
    assert [RandomChoice(2).choose(state, pool) for state in states] != first
    assert min(first.count(index) for index in range(5)) > 20


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ValueSelector(None, None), "selector: expected type ScoringSelector, got NoneType"),
        (lambda: ValueSelector(LLMPreference(), None), "head: expected type ValueHead, got NoneType"),
        (lambda: FutureBridgeSelector(None), "reranker: expected type TokenReranker, got NoneType"),
    ],
)
def test_selectors_are_made_of_their_parts_alone(make, sentence):
    with pytest.raises(TypeError, match=sentence):
        make()


class FakeReranker:
    training = False

    def __init__(self, scope):
        self.scope, self.calls = scope, []

    def scores_many(self, prefixes, candidates):
        self.calls.append(("many", [prefix.length for prefix in prefixes]))
        return [-ids.float() for ids in candidates]

    def scores(self, prefix, candidates):
        self.calls.append(("one", [len(prefix)]))
        return -candidates.float()


def test_future_bridge_selector_calls_the_reranker_in_its_scope():
    pools = [pool_of([9, 7, 8], [-1.0, -2, -3], [-2.0, -1, -4], [1, 3, 2]), pool_of([5, 6], [-1.0, -2], [-2.0, -1])]
    kv = PrefixKV({})
    states = [State(torch.arange(n), 1, 1.0, Prefix(kv, 0, n, (row,))) for row, n in enumerate((4, 6))]
    for scope, calls in (("candidate", [("many", [4, 6])]), ("sequence", [("one", [4]), ("one", [6])])):
        reranker = FakeReranker(scope)
        assert [index for index, _ in FutureBridgeSelector(reranker).choose_many(states, pools)] == [1, 0]
        assert reranker.calls == calls
    bare = FakeReranker("candidate")
    assert FutureBridgeSelector(bare).choose(State(torch.arange(5), 1, 1.0), pools[1]) == 0
    assert bare.calls == [("one", [5])]
    assert FutureBridgeSelector(bare).choose_many([], []) == []


@pytest.mark.parametrize("scope", ["candidate", "sequence"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_future_bridge_end_to_end_scores_as_the_reranker_alone(family, scope):
    slm, llm = tiny(family, 12, **({"sliding_window": 5} if family == "mistral" else {})), tiny(family, 13)
    reranker = TokenReranker.from_base(slm, rank=2, scope=scope)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reranker.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    decoder = CollaborativeDecoder(slm, llm, FutureBridgeSelector(reranker), RequestPolicy(1.5), slm_k=3, llm_k=3)
    asked = prompts(4, 8)
    for ids, generation in zip(asked, decoder.generate_many(asked, 8), strict=True):
        assert generation.events
        for event in generation.events:
            tokens = torch.cat([ids, generation.token_ids[: event.step]])
            with torch.no_grad():
                alone = reranker.scores(tokens, event.pool)
            assert event.scores == pytest.approx(alone.tolist(), abs=1e-3)
            assert event.choice == event.scores.index(max(event.scores))


# pools and vocabularies


def test_candidate_pool_clamps_and_copes_with_foreign_ids():
    class Fixed(LLM):
        def __init__(self, *answers):
            self.answers = list(answers)

        def candidates(self, ids, k, score_ids=None):
            asked.append((k, None if score_ids is None else score_ids.tolist()))
            found, scored = self.answers.pop(0)
            return Candidates(torch.tensor(found, dtype=torch.long), -torch.arange(1.0, 1 + len(found)), scored)

        def complete(self, ids, max_new_tokens):
            raise NotImplementedError

    asked: list = []
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    two = [torch.tensor([1]), torch.tensor([1, 2])]
    scored = torch.tensor([-7.0, -8.0])
    joint = candidate_pool(logits, Fixed(([3, 9, 1], scored), ([0], scored)), two, "joint", 2, 3)
    assert asked == [(3, [1, 2]), (3, [0, 1])]
    assert [pool.ids.tolist() for pool in joint] == [[1, 2, 3], [0, 1]]
    assert [pool.sources.tolist() for pool in joint] == [[3, 1, 2], [3, 1]]
    assert [pool.llm_logprob.tolist() for pool in joint] == [[-7.0, -8.0, -1.0], [-7.0, -8.0]]
    torch.testing.assert_close(joint[0].slm_logprob, logits[0].log_softmax(0)[[1, 2, 3]])
    asked.clear()
    (everything,) = candidate_pool(logits[:1], Fixed(([3], torch.zeros(4))), two[:1], "slm", 99, 99)
    assert asked == [(1, [1, 2, 3, 0])]
    assert everything.ids.tolist() == [1, 2, 3, 0]
    assert everything.sources.tolist() == [1] * 4
    asked.clear()
    (large,) = candidate_pool(logits[:1], Fixed(([9, 2], None)), two[:1], "llm", 2, 99)
    assert asked == [(4, None)]
    assert (large.ids.tolist(), large.sources.tolist(), large.llm_logprob.tolist()) == ([2], [2], [-2.0])
    with pytest.raises(ValueError, match="llm: expected a candidate among the 4 shared ids, got none"):
        candidate_pool(logits[:1], Fixed(([9], None)), two[:1], "llm", 2, 1)
    with pytest.raises(ValueError, match="llm: expected log-probabilities of the 2 score_ids, got None"):
        candidate_pool(logits[:1], Fixed(([2], None)), two[:1], "joint", 2, 1)


def tokenizer_of(size, offset=0):
    words = {f"w{(token + offset) % size}": token for token in range(size)}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token="w1")


def test_vocabularies_are_compared():
    slm, same, padded = tiny("qwen3", 1), tiny("llama", 2), tiny("qwen3", 2, vocab_size=64)
    selector, policy = LLMPreference(), RequestPolicy(1.0)
    tokenizer = tokenizer_of(48)
    CollaborativeDecoder(slm, same, selector, policy)
    CollaborativeDecoder(slm, LocalLLM(padded, valid_vocab=50), selector, policy)
    with pytest.raises(ValueError, match=r"llm: expected the SLM's vocabulary of 50 ids, got 64; .* tokenizer"):
        CollaborativeDecoder(slm, LocalLLM(padded), selector, policy)
    assert CollaborativeDecoder(slm, padded, selector, policy, tokenizer=tokenizer).vocabulary == 48
    pair = (tokenizer, tokenizer_of(48))
    assert CollaborativeDecoder(slm, LocalLLM(padded), selector, policy, tokenizer=pair).vocabulary == 48
    with pytest.raises(
        ValueError, match=r"tokenizer: expected .* one vocabulary, got 48 and 48 entries of which 48 differ"
    ):
        CollaborativeDecoder(slm, same, selector, policy, tokenizer=(tokenizer, tokenizer_of(48, 1)))
    with pytest.raises(ValueError, match="slm: expected at least the tokenizer's 60 ids, got 50"):
        CollaborativeDecoder(slm, padded, selector, policy, tokenizer=tokenizer_of(60))
    with pytest.raises(ValueError, match="llm: expected at least the tokenizer's 60 ids, got 50"):
        CollaborativeDecoder(padded, same, selector, policy, tokenizer=tokenizer_of(60))


def test_the_tokenizers_end_token_ends_a_generation_too():
    model, prompt, tokenizer, plain, whole = ending()
    never = RequestPolicy(NEVER)
    pair = Pair(model, model, (tokenizer, plain))
    ways = [
        CollaborativeDecoder(model, model, SLMPreference(), never, tokenizer=(plain, tokenizer)).generate(prompt, 20),
        LowLatencyDecoder(model, model, SLMPreference(), never, max_length=64, tokenizer=tokenizer).generate(
            prompt, 20
        ),
        CollaborativeDecoder(model, model, LLMPreference(), RequestPolicy(ALWAYS), tokenizer=tokenizer).generate(
            prompt
        ),
    ]
    with Engine(pair, SLMPreference(), never, max_batch=2, max_length=64) as engine:
        ways += engine.generate_many([prompt], 20)
    assert [way.token_ids.tolist() for way in ways] == [whole] * 4
    large = Pair(model, model, tokenizer).large()
    assert large.ends == {whole[-1]}
    assert large.complete(prompt, 20).tolist() == whole
    assert LocalLLM(model, tokenizer=tokenizer).complete(prompt, 20).tolist() == whole


def test_padding_of_the_embedding_never_counts():
    slm = tiny("qwen3", 3, tie_word_embeddings=False)
    llm = tiny("qwen3", 4, tie_word_embeddings=False, vocab_size=64)
    with torch.no_grad():
        for model in (slm, llm):
            model.lm_head.weight[48:] *= 20
    tokenizer = tokenizer_of(48)
    decoder = CollaborativeDecoder(slm, llm, Mixed(), RequestPolicy(0.5), tokenizer=tokenizer, slm_k=4, llm_k=4)
    with torch.no_grad():
        for model in (slm, llm):
            model.lm_head.weight[48:] *= -1
    for flipped in range(2):
        with torch.no_grad():
            for model in (slm, llm):
                model.lm_head.weight[48:] *= -1
        for generation in decoder.generate_many(prompts(4, 6, seed=flipped), 10):
            assert generation.events
            assert int(generation.token_ids.max()) < 48
            assert generation.text == tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            for event in generation.events:
                assert max(event.pool) < 48
                assert [bits & 1 for bits in event.sources].count(1) == 4
                assert [bits & 2 for bits in event.sources].count(2) == 4
                assert max(event.llm_logprob) > -4.0  # normalised over the ids that count


# bad arguments


def decoder_of(kind=CollaborativeDecoder, **options):
    slm = tiny("qwen3", 1)
    settings = {
        "slm": slm,
        "llm": tiny("qwen3", 2),
        "selector": LLMPreference(),
        "policy": RequestPolicy(1.0),
    } | options
    return kind(**settings)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"pool": "both"}, ValueError, "pool: expected 'joint', 'slm' or 'llm', got 'both'"),
        ({"slm_k": 0}, ValueError, "slm_k: expected 1 or more, got 0"),
        ({"llm_k": 0}, ValueError, "llm_k: expected 1 or more, got 0"),
        ({"max_events": -1}, ValueError, "max_events: expected 0 or more, got -1"),
        ({"batch_tokens": 0}, ValueError, "batch_tokens: expected 1 or more, got 0"),
        ({"slm": tiny().train()}, ValueError, r"slm: expected a model in eval mode.*call .eval\(\)"),
        ({"slm": "qwen"}, TypeError, "slm: expected a transformers causal LM, got str"),
        ({"llm": None}, TypeError, "llm: expected type LLM, got NoneType"),
        ({"selector": None}, TypeError, "selector: expected type Selector, got NoneType"),
        ({"policy": 1.0}, TypeError, "policy: expected type RequestPolicy, got float"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer: expected a tokenizer or a pair of them, got str"),
        ({"tokenizer": ()}, TypeError, "tokenizer: expected a tokenizer or a pair of them, got an empty tuple"),
        ({"tokenizer": (None, None)}, TypeError, "tokenizer: expected a tokenizer or a pair of them, got NoneType"),
        ({"slm_k": 2.5}, ValueError, "slm_k: expected 1 or more, got 2.5"),
    ],
)
def test_bad_settings(options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        decoder_of(**options)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda d: d.generate([]), ValueError, "input_ids: expected at least one token"),
        (lambda d: d.generate([3, V]), ValueError, "input_ids: expected ids from 0 below 50, got 50"),
        (lambda d: d.generate(torch.ones(3)), TypeError, "input_ids: expected int64"),
        (lambda d: d.generate(torch.ones(2, 3, dtype=torch.long)), ValueError, "input_ids: expected one dimension"),
        (lambda d: d.generate([3] * 128), ValueError, "input_ids: expected at most 127 tokens"),
        (lambda d: d.generate([3], 0), ValueError, "max_new_tokens: expected 1 or more, got 0"),
        (lambda d: d.generate([3], 2.5), TypeError, "max_new_tokens: expected an int, got float"),
        (lambda d: d.generate([None]), TypeError, "input_ids: expected a sequence of token ids"),
        (lambda d: d.generate_many([[3], []], 4), ValueError, "input_ids: expected at least one token"),
    ],
)
def test_bad_prompts_leave_the_decoder_usable(call, kind, sentence):
    decoder = decoder_of()
    (ids,) = prompts(4)
    before = decoder.generate(ids, 6)
    forwards = []
    handle = decoder.slm.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(kind, match=sentence):
        call(decoder)
    handle.remove()
    assert not forwards
    after = decoder.generate(ids, 6)
    assert torch.equal(after.token_ids, before.token_ids)
    assert after.events == before.events


def test_training_mode_is_refused_later_too():
    decoder = decoder_of()
    decoder.slm.train()
    with pytest.raises(ValueError, match="slm: expected a model in eval mode"):
        decoder.generate([3, 4], 2)
    decoder.slm.eval()
    assert len(decoder.generate([3, 4], 2).token_ids) == 2


def test_nan_logits_name_the_step():
    slm = tiny("qwen3", 3, tie_word_embeddings=False)
    decoder = decoder_of(slm=slm, policy=RequestPolicy(NEVER))
    asked = prompts(4, 5, 6)
    outputs = [decoder.generate(ids, 5).token_ids for ids in asked]
    bad = int(outputs[1][1])
    fine = [row for row in (0, 2) if bad not in torch.cat([asked[row], outputs[row]])]
    with torch.no_grad():
        slm.get_input_embeddings().weight[bad] = torch.nan
    assert fine
    with pytest.raises(ValueError, match=r"slm: expected finite logits, got NaN .* at step 2 of prompt 0"):
        decoder.generate(asked[1], 5)
    with pytest.raises(ValueError, match=r"at step 2 of prompt 1"):
        decoder.generate_many([asked[fine[0]], asked[1]], 5)
    assert torch.equal(decoder.generate(asked[fine[0]], 5).token_ids, outputs[fine[0]])


def test_bad_selectors_are_named():
    class Wild(Selector):
        def choose(self, state, pool):
            return len(pool)

    class Confused(ScoringSelector):
        def scores_many(self, states, pools):
            return [torch.full((len(pool),), math.nan) for pool in pools]

    class Tensors(Selector):
        def choose(self, state, pool):
            return torch.tensor(1)

    class Absent(Selector):
        def choose(self, state, pool):
            return None

    (event, _) = decoder_of(selector=Tensors(), policy=RequestPolicy(ALWAYS)).generate([3, 4], 2).events
    assert type(event.choice) is int
    with pytest.raises(ValueError, match="Absent: expected an index from 0 below"):
        decoder_of(selector=Absent(), policy=RequestPolicy(ALWAYS)).generate([3, 4], 2)
    with pytest.raises(ValueError, match="Wild: expected an index from 0 below"):
        decoder_of(selector=Wild(), policy=RequestPolicy(ALWAYS)).generate([3, 4], 2)
    with pytest.raises(ValueError, match="Confused: expected scores that are numbers"):
        decoder_of(selector=Confused(), policy=RequestPolicy(ALWAYS)).generate([3, 4], 2)


def test_a_reranker_of_another_model_or_in_training_mode_is_refused():
    """It would read this SLM's cache as if it were its own base's."""
    slm = tiny("qwen3", 1)
    other = FutureBridgeSelector(TokenReranker.from_base(tiny("qwen3", 9)))
    for selector in (other, ValueSelector(other, ValueHead((0.0,) * 14))):
        with pytest.raises(ValueError, match="selector: expected a reranker made on the decoder's own SLM"):
            decoder_of(slm=slm, selector=selector)
    reranker = TokenReranker.from_base(tiny("qwen3", 1))  # a copy of the same weights will do
    decoder = decoder_of(slm=slm, selector=FutureBridgeSelector(reranker), policy=RequestPolicy(ALWAYS))
    assert decoder.generate([3, 4], 2).events
    reranker.train()
    with pytest.raises(ValueError, match="reranker: expected it in eval mode"):
        decoder.generate([3, 4], 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_what_decodes_wrongly_is_refused_and_nothing_else(dtype):
    policy = RequestPolicy(NEVER)
    with pytest.raises(ValueError, match="got MegatronBertForCausalLM with other logits"):
        CollaborativeDecoder(zoo.build("megatron-bert").to(dtype), None, None, policy, max_events=0)
    for kind in ("gpt_oss", "mixtral", "gpt2"):
        CollaborativeDecoder(zoo.build(kind).to(dtype), None, None, policy, max_events=0)


def scaled(kind, **rope):
    own = {"original_max_position_embeddings": 16} if kind == "phi3" else {}
    settings = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    settings |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 9.0, 27.0]} | rope
    return zoo.build(kind, max_position_embeddings=64, rope_parameters=settings, **own)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: scaled("qwen2", rope_type="dynamic", factor=2.0), "Qwen2ForCausalLM with rotary scaling dynamic"),
        (lambda: zoo.build("llama4_text"), "Llama4ForCausalLM with layers of type chunked_attention"),
        (
            lambda: zoo.build("llama4_text", layer_types=["full_attention"] * 4),
            "Llama4ForCausalLM with attention scaled by the place in a batch",
        ),
        (lambda: tiny().base_model, "Qwen3Model with no LM head"),
    ],
)
def test_what_depends_on_length_or_batch_is_refused_by_every_door(model, reason):
    model, other, policy = model(), tiny(vocab_size=zoo.V), RequestPolicy(NEVER)
    for door in (
        lambda: CollaborativeDecoder(model, None, None, policy, max_events=0),
        lambda: CollaborativeDecoder(other, model, SLMPreference(), policy),
        lambda: Engine(Pair(model, None), None, policy),
        lambda: LocalLLM(model),
        lambda: Pair(model, None),
        lambda: Pair(model, ServerLLM("http://127.0.0.1:9", vocabulary=zoo.V)),
        lambda: CompatibilityScorer(model),
        lambda: TokenReranker.from_base(model),
    ):
        with pytest.raises(ValueError, match=reason):
            door()


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_longrope_runs_up_to_the_original_length(kind):
    model, asked = scaled(kind), prompts(3, 11)
    decoder = CollaborativeDecoder(model, None, None, RequestPolicy(NEVER), max_events=0)
    for prompt, one in zip(asked, decoder.generate_many(asked, 20), strict=True):
        whole = model.generate(prompt[None], max_length=16, do_sample=False, pad_token_id=0)[0]
        assert one.token_ids.tolist() == whole[len(prompt) :].tolist()
    prefix, following = asked[1], [asked[0], asked[0][:2]]
    theirs = model(torch.cat([prefix, asked[0]])[None], use_cache=False).logits[0, 10:-1].log_softmax(-1)
    ours = shared_prefix_logprobs(model, prefix, following)
    torch.testing.assert_close(ours[0], theirs.gather(1, asked[0][:, None])[:, 0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"expected at most 16 positions with what follows it, got 11 \+ 8"):
        shared_prefix_logprobs(model, prefix, [asked[0].repeat(3)])


def test_positions_bound_the_generation():
    slm = tiny("llama", 4, max_position_embeddings=12)
    slm.generation_config.eos_token_id = None
    slm.config.eos_token_id = None
    decoder = decoder_of(slm=slm, policy=RequestPolicy(NEVER))
    asked = prompts(11, 5, 8)
    generations = decoder.generate_many(asked, 6)
    assert [len(generation.token_ids) for generation in generations] == [1, 6, 4]
    for ids, generation in zip(asked, generations, strict=True):
        assert torch.equal(decoder.generate(ids, 6).token_ids, generation.token_ids)


def test_models_are_left_as_they_were():
    decoder = decoder_of()
    llm = decoder.llm.model

    def print_of(model):
        digest = hashlib.sha256()
        for tensor in model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest(), model.training, model.config.to_dict(), model.generation_config.to_dict()

    before = print_of(decoder.slm), print_of(llm)
    decoder.generate_many(prompts(3, 5), 8)
    assert (print_of(decoder.slm), print_of(llm)) == before


# through transformers' own generate


class Listener(BaseStreamer):
    def __init__(self):
        self.heard, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.heard.append(value.tolist())

    def end(self):
        self.ended += 1


class StopOn(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def custom(decoder, ids, **settings):
    return decoder.slm.generate(ids, custom_generate=decoder.as_custom_generate(), **settings)


@both_loops
def test_custom_generate_streams_and_honours_limits(kind):
    decoder = decoder_of(kind, policy=RequestPolicy(1.3))
    ids = prompts(5)[0][None]
    plainly = decoder.generate(ids, 9).token_ids.tolist()
    assert len(plainly) == 9
    listener = Listener()
    out = custom(decoder, ids, max_new_tokens=9, streamer=listener)
    assert out.tolist() == [ids[0].tolist() + plainly]
    assert listener.heard == [ids.tolist(), *([token] for token in plainly)]
    assert listener.ended == 1
    assert custom(decoder, ids, max_length=8).tolist() == [ids[0].tolist() + plainly[:3]]
    assert custom(decoder, ids, max_new_tokens=9, do_sample=True, temperature=0.3).tolist() == out.tolist()


@both_loops
def test_custom_generate_honours_stopping_criteria_and_eos(kind):
    decoder = decoder_of(kind, policy=RequestPolicy(1.3))
    ids = prompts(5)[0][None]
    plainly = decoder.generate(ids, 9).token_ids.tolist()
    stop = next(token for token in plainly[2:] if token not in plainly[:2])
    upto = plainly[: plainly.index(stop) + 1]
    criteria = StoppingCriteriaList([StopOn(stop)])
    assert custom(decoder, ids, max_new_tokens=9, stopping_criteria=criteria)[0, 5:].tolist() == upto
    assert custom(decoder, ids, max_new_tokens=9, eos_token_id=stop)[0, 5:].tolist() == upto


@both_loops
def test_custom_generate_of_a_left_padded_batch(kind):
    decoder = decoder_of(kind, policy=RequestPolicy(1.3))
    asked = prompts(3, 6)
    generations = decoder.generate_many(asked, 7)
    stop = int(generations[0].token_ids[2])
    assert stop not in generations[1].token_ids
    ids, mask = left_padded(asked)
    out = custom(decoder, ids, attention_mask=mask, max_new_tokens=7, eos_token_id=stop, pad_token_id=0)
    assert out.shape == (2, 13)
    assert out[:, :6].tolist() == ids.tolist()
    first = generations[0].token_ids[: generations[0].token_ids.tolist().index(stop) + 1].tolist()
    assert out[0, 6:].tolist() == first + [0] * (7 - len(first))
    assert out[1, 6:].tolist() == generations[1].token_ids.tolist()
    decoder.slm.generation_config.pad_token_id = decoder.slm.config.pad_token_id = None
    for ends in (stop, [stop, 0]):
        out = custom(decoder, ids, attention_mask=mask, max_new_tokens=7, eos_token_id=ends)
        assert out[0, 6:].tolist() == first + [stop] * (7 - len(first))


def test_custom_generate_refuses_other_models_and_ends_the_stream_of_a_failure():
    decoder = decoder_of()
    ids = prompts(5)[0][None]
    with pytest.raises(ValueError, match="custom_generate: expected generate to be called on the decoder's own SLM"):
        tiny("qwen3", 9).generate(ids, custom_generate=decoder.as_custom_generate(), max_new_tokens=3)
    slm = decoder.slm
    for given in ({"input_ids": ids, "num_beams": 2}, {"inputs_embeds": slm.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="custom_generate: expected input_ids and one beam"):
            slm.generate(**given, custom_generate=decoder.as_custom_generate(), max_new_tokens=3)
    listener = Listener()
    with pytest.raises(ValueError, match="streamer: expected one prompt, got 2"):
        custom(decoder, ids.repeat(2, 1), max_new_tokens=3, streamer=listener)
    assert listener.ended == 1
