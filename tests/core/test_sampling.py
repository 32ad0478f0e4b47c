"""Sampling of the SLM's own tokens: the distribution, and that it depends on nothing but seed, prompt and index."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny import prompts, tiny

from fb_core import CollaborativeDecoder, Engine, LLMPreference, LowLatencyDecoder, RequestPolicy, Sampling
from fb_core.apps.serve.protocol import CompletionRequest
from fb_core.apps.settings.pair import PairSettings
from fb_core.decode.pair import Pair
from fb_core.runtime.sampling import GREEDY, Draw, Draws, drawn

NEVER = RequestPolicy(math.inf)
WARM = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=3)
SHARPEST = replace(WARM, temperature=1e-9)


def shares(logits, temperature, top_p, top_k, min_p=0.0):
    """The definition, in float64: softmax over the kept logits, cut to the nucleus."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    total, before, kept = sum(weights), 0.0, {}
    for i, weight in zip(order, weights, strict=True):
        if before < top_p:
            kept[i] = weight
        before += weight / total
    kept = {i: weight for i, weight in kept.items() if weight >= min_p}  # the likeliest one's is 1
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


def counts_agree(counts, expected, of):
    """Whether counts are a sample of the shares; the few that are expected less than five times are one."""
    assert set(counts) <= set(expected)
    common = [i for i, share in expected.items() if share * of >= 5]
    seen = [counts.get(i, 0) for i in common]
    wanted = [expected[i] * of for i in common]
    if len(common) < len(expected):
        seen, wanted = [*seen, of - sum(seen)], [*wanted, of - sum(wanted)]
    return len(seen) < 2 or chisquare(seen, wanted, sum_check=False).pvalue > 1e-3


@pytest.mark.parametrize("position", [0, 7, 4096])
@pytest.mark.parametrize(
    "settings",
    [(1.0, 1.0, 0), (0.7, 0.8, 20), (2.0, 0.5, 0), (0.3, 1.0, 3), (1.0, 1e-9, 0), (1.5, 1.0, 1), (1.5, 0.9, 0, 0.1)],
)
def test_draws_have_the_distribution(settings, position):
    count, size = 20_000, 24
    logits = torch.randn(size, generator=torch.Generator().manual_seed(position)) * 2
    values, ids = logits.sort(descending=True, stable=True)
    how = Draws.of([Draw(*settings[:3], key, *settings[3:]) for key in range(count)], logits.device)
    tokens = drawn(values.expand(count, -1), ids.expand(count, -1), how, torch.full((count,), position))
    counts = dict(zip(*(each.tolist() for each in tokens.unique(return_counts=True)), strict=True))
    assert counts_agree(counts, shares(logits.double().tolist(), *settings), count)


def test_neighbouring_keys_and_positions_are_independent():
    """Pairs of draws fill the square of two tokens as chance does."""
    count = 4000
    values, ids = torch.zeros(count, 2), torch.arange(2).expand(count, 2)

    def flips(keys, positions):
        how = Draws.of([Draw(1.0, 1.0, 0, int(key)) for key in keys], values.device)
        return drawn(values, ids, how, torch.as_tensor(positions))

    by_key, by_position = flips(range(count), [5] * count), flips([9] * count, range(count))
    for first, second in ((by_key[:-1], by_key[1:]), (by_position[:-1], by_position[1:]), (by_key, by_position)):
        table = torch.bincount(2 * first + second, minlength=4).double()
        assert chisquare(table).pvalue > 1e-3


def test_a_draw_does_not_depend_on_its_row_or_on_the_order_of_equal_logits():
    values, ids = torch.tensor([[2.0, 1.0, 1.0, 0.0]]), torch.tensor([[3, 8, 5, 0]])
    swapped = torch.tensor([[3, 5, 8, 0]])
    for key in range(200):
        how = Draws.of([Draw(1.0, 1.0, 0, key)], values.device)
        alone = drawn(values, ids, how, torch.tensor([4]))
        assert torch.equal(alone, drawn(values, swapped, how, torch.tensor([4])))
        both = Draws.of([GREEDY, Draw(1.0, 1.0, 0, key)], values.device)
        assert drawn(values.expand(2, -1), ids.expand(2, -1), both, torch.tensor([0, 4])).tolist() == [3, int(alone)]


def decoders(policy=NEVER, llm=None):
    """Every way to decode, by name: prompts, a limit and sampling to generations."""
    slm = tiny("qwen3", 2)
    selector, most = (None, 0) if llm is None else (LLMPreference(), 3)
    plain = CollaborativeDecoder(slm, llm, selector, policy, max_events=most)
    narrow = CollaborativeDecoder(slm, llm, selector, policy, max_events=most, batch_tokens=1)
    made = {"plain": plain.generate_many, "plain, one by one": narrow.generate_many}
    for rows in (1, 3, 8):
        fast = LowLatencyDecoder(slm, llm, selector, policy, max_events=most, max_length=64, max_batch=rows)
        made[f"fast, {rows} rows"] = fast.generate_many
    made["one prompt"] = lambda asked, limit, sampling: [fast.generate(x, limit, sampling=sampling) for x in asked]
    return made


@pytest.mark.parametrize("asks", [False, True])
def test_samples_are_the_same_in_every_loop_and_batch(asks):
    asked = prompts(5, 1, 9, 20, 3)
    ways = decoders(RequestPolicy(2.0), tiny("qwen3", 3)) if asks else decoders()
    found = {name: way(asked, 24, sampling=WARM) for name, way in ways.items()}
    first = found.pop("plain")
    for name, generations in found.items():
        for one, other in zip(first, generations, strict=True):
            assert torch.equal(one.token_ids, other.token_ids), name
            assert [event.step for event in one.events] == [event.step for event in other.events], name
    for name, way in ways.items() if not asks else ():
        cold, greedy = way(asked, 20, sampling=SHARPEST), way(asked, 20, sampling=None)
        assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(cold, greedy, strict=True)), name
    greedy = ways["plain"](asked, 24, sampling=None)
    assert any(not torch.equal(one.token_ids, other.token_ids) for one, other in zip(first, greedy, strict=True))
    assert any(one.events for one in first) == asks


def test_equal_prompts_are_different_samples_and_seeds_differ():
    (ids,) = prompts(6)
    decoder = LowLatencyDecoder(tiny("qwen3", 2), None, None, NEVER, max_events=0, max_length=64, max_batch=4)
    four = [g.token_ids.tolist() for g in decoder.generate_many([ids] * 4, 20, sampling=WARM)]
    assert len({tuple(each) for each in four}) == 4
    assert [g.token_ids.tolist() for g in decoder.generate_many([ids] * 2, 20, sampling=WARM)] == four[:2]
    other = decoder.generate_many([ids] * 4, 20, sampling=replace(WARM, seed=4))
    assert not {tuple(g.token_ids.tolist()) for g in other} & {tuple(each) for each in four}


@pytest.mark.filterwarnings("ignore:slm. Gemma2:UserWarning")
@torch.no_grad()
@pytest.mark.parametrize("native", [True, False], ids=["fast", "plain"])
def test_an_engine_samples_beside_greedy_sequences(native):
    """Each as alone, whatever runs beside it; the log-prob of a token is that of the token drawn."""
    slm = tiny("qwen3", 2) if native else tiny("gemma2", 2)
    asked = prompts(5, 5, 12)
    plain = CollaborativeDecoder(slm, None, None, NEVER, max_events=0)
    with Engine(Pair(slm, None), None, NEVER, max_batch=4, max_length=64, max_events=0) as engine:
        some = [engine.submit(ids, 15, sampling=WARM, sample=1, ranking=native) for ids in asked]
        greedy = [engine.submit(ids, 15, ranking=native) for ids in asked]
        for ids, handle, beside in zip(asked, some, greedy, strict=True):
            tokens = handle.result(60).token_ids
            _, second = plain.generate_many([ids, ids], 15, sampling=WARM)
            assert torch.equal(tokens, second.token_ids)
            assert torch.equal(beside.result(60).token_ids, plain.generate(ids, 15).token_ids)
        both = engine.generate_many([asked[0]] * 2, 15, sampling=WARM)
        again = plain.generate_many([asked[0]] * 2, 15, sampling=WARM)
        assert [each.token_ids.tolist() for each in both] == [each.token_ids.tolist() for each in again]
        for ids, handle in zip(asked, some, strict=True):
            tokens = handle.result(60).token_ids
            for place, token in enumerate(handle):
                if token.ranked is not None:
                    logits = slm(torch.cat([ids, tokens[:place]])[None]).logits[0, -1]
                    assert token.ranked.taken == pytest.approx(float(logits.log_softmax(-1)[token.id]), abs=1e-4)


def test_the_first_token_of_many_samples_has_the_models_distribution():
    slm, (ids,), count = tiny("qwen3", 2), prompts(6), 2000
    decoder = LowLatencyDecoder(slm, None, None, NEVER, max_events=0, max_length=16, max_batch=250)
    with torch.no_grad():
        logits = slm(ids[None]).logits[0, -1].double().tolist()
    for sampling in (WARM, Sampling(temperature=2.0, top_p=0.9, top_k=12, seed=1)):
        tokens = [int(g.token_ids[0]) for g in decoder.generate_many([ids] * count, 1, sampling=sampling)]
        counts = {token: tokens.count(token) for token in tokens}
        assert counts_agree(counts, shares(logits, sampling.temperature, sampling.top_p, sampling.top_k), count)


@pytest.mark.parametrize("kind", [CollaborativeDecoder, LowLatencyDecoder])
def test_custom_generate_samples_as_the_generation_config_says(kind):
    slm, (ids,) = tiny("qwen3", 2), prompts(6)
    decoder = kind(slm, None, None, NEVER, max_events=0)
    generate = partial(slm.generate, ids[None], custom_generate=decoder.as_custom_generate(), max_new_tokens=20)
    torch.manual_seed(5)
    first, second = (generate(do_sample=True, temperature=1.0, top_p=1.0, top_k=0) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, generate(do_sample=True, temperature=1.0, top_p=1.0, top_k=0))
    assert not torch.equal(first, second)
    state = torch.random.get_rng_state()
    assert torch.equal(generate(), generate(do_sample=True, temperature=1.0, top_p=1.0, top_k=1))
    assert generate(do_sample=False, temperature=0.5).shape == generate().shape
    torch.random.set_rng_state(state)
    assert torch.equal(generate()[0, 6:], decoder.generate(ids, 20).token_ids)


def test_settings_out_of_range_are_refused_and_others_are_plain_numbers():
    for kind, values in (
        (ValueError, {"temperature": (0, -1.0, 10**400), "top_p": (0.0, 1.1), "seed": (-(10**5000),)}),
        (ValueError, {"top_k": (-1, 1 << 63, 10**5000)}),
        (TypeError, {"temperature": ("hot",), "top_p": (None,), "top_k": (1.5,), "seed": (0.5,)}),
    ):
        for name, value in ((name, value) for name, several in values.items() for value in several):
            with pytest.raises(kind, match=f"{name}.*: expected"):
                Sampling(**{name: value})
    odd = Sampling(np.float32(0.5), Fraction(1, 2), np.int64(3), np.int64(4))
    assert odd.draw([5, 6]) == Sampling(0.5, 0.5, 3, 4).draw([5, 6])


def test_sampling_of_another_type_is_refused():
    decoder = CollaborativeDecoder(tiny("qwen3", 2), None, None, NEVER, max_events=0)
    with pytest.raises(TypeError, match="sampling:"):
        decoder.generate([3], 4, sampling={"temperature": 1.0})
    engine = Engine(Pair(decoder.slm, None), None, NEVER, max_length=8, max_events=0)
    with engine, pytest.raises(TypeError, match="sampling:"):
        engine.submit([3], 4, sampling=0.7)


def test_a_request_counts_before_the_settings():
    settings = PairSettings(slm="a", llm="b", temperature=0.5, top_p=0.9, seed=3)
    assert settings.sampling() == Sampling(0.5, 0.9, 0, 3)
    request = CompletionRequest(prompt="x", temperature=1, top_k=-1, seed=5)
    assert settings.sampling(request) == Sampling(1.0, 0.9, 0, 5)
    assert settings.sampling(CompletionRequest(prompt="x", temperature=0)) is None
    assert PairSettings(slm="a", llm="b").sampling() is None
    new = [PairSettings(slm="a", llm="b", temperature=1).sampling().seed for _ in range(2)]
    assert new[0] != new[1]
