"""Heads fitted to rollouts: their terms by hand, planted weights found, and both loops alike under them."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fb_core import CertainLLM, CollaborativeDecoder, LLMPreference, RequestPolicy, SLMPreference, State
from fb_core.engine.engine import Engine
from fb_core.pair import Pair
from fb_core.policy import AskHead
from fb_core.pool import Pool
from fb_core.selectors import ValueSelector
from fb_core.value import GATE, LISTWISE, TERMS, ValueHead, fit_ask, fit_gate, fit_listwise, gate_terms, listwise_terms
from fb_kernels.testing import count_syncs

OPTIONS = {"slm_k": 3, "llm_k": 3, "max_events": 5}
NEVER = (-1.0, *[0.0] * (len(GATE) - 1))  # the gain of acting is below 0
ALWAYS = (1.0, *[0.0] * (len(GATE) - 1))


def pool_of(slm: list[float], llm: list[float]) -> Pool:
    ids = torch.arange(len(slm))
    sources = torch.full((len(slm),), 3, dtype=torch.int32)
    return Pool(ids, sources, torch.tensor(slm).log(), torch.tensor(llm).log())


def drawn(generator: torch.Generator, candidates: int) -> tuple[Pool, Tensor, float]:
    slm, llm = (torch.randn(candidates, generator=generator).softmax(0).tolist() for _ in range(2))
    return pool_of(slm, llm), torch.randn(candidates, generator=generator), float(torch.rand((), generator=generator))


def test_gate_terms_by_hand():
    """The scores' candidate is the last, the SLM's own the first."""
    terms = gate_terms(pool_of([0.5, 0.25, 0.25], [0.2, 0.1, 0.6]), torch.tensor([1.0, 1.0, 4.0]), 0.75)
    deviation = math.sqrt(2.0)
    expected = [1.0, 0.75, 0.5, 0.6, 0.2, 3.0, math.log(3.0), deviation]
    torch.testing.assert_close(terms, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_listwise_terms_by_hand():
    terms = listwise_terms(pool_of([0.5, 0.25], [0.2, 0.8]), torch.tensor([0.0, 2.0]), 0.5)
    half, quarter = math.log(0.5), math.log(0.25)
    first = [-1, -1, 0, quarter, 1, 0, 0.5, 0, -0.5, -0.8, 0.5, 0, -0.5, 0]
    second = [1, 1, half, 0, 0, 1, 0, 0.8, 0.5, 0.8, 0, 0.5, 0.5, half * 0.5]
    torch.testing.assert_close(terms, torch.tensor([first, second], dtype=torch.float64), atol=5e-6, rtol=0)


def test_a_gate_that_sees_no_gain_keeps_the_slms_token():
    pool, scores = pool_of([0.5, 0.3, 0.2], [0.1, 0.1, 0.8]), torch.tensor([-1.0, 3.0, 0.0])
    assert int(ValueHead("gate", NEVER)(pool, scores, 1.0).argmax()) == 0
    assert int(ValueHead("gate", ALWAYS)(pool, scores, 1.0).argmax()) == 1


class NothingFromTheHost(TorchDispatchMode):
    """Refuses tensors made from Python numbers, whose copy to a device synchronises with it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", TERMS)
def test_a_head_reads_nothing_back_and_copies_nothing(form):
    pool, scores, entropy = drawn(torch.Generator().manual_seed(0), 5)
    head = ValueHead(form, tuple(float(place) for place in range(len(TERMS[form]))))
    first = head(pool, scores, entropy)  # copies the weights
    with NothingFromTheHost(), count_syncs() as syncs:
        again = head(pool, scores, entropy)
    assert syncs.total == 0
    assert torch.equal(again, first)
    with pytest.raises(AssertionError), NothingFromTheHost():
        torch.tensor([entropy])


@pytest.mark.parametrize(
    ("form", "weights"), [("gate", NEVER[1:]), ("listwise", NEVER), ("gate", (math.nan, *NEVER[1:])), ("none", ())]
)
def test_weights_that_are_none_of_the_form_are_refused(form, weights):
    with pytest.raises(ValueError, match=r"ValueHead: expected \d+ finite weights"):
        ValueHead(form, weights) if form != "none" else ValueHead("listwise", weights)


def test_a_planted_gain_is_found():
    """Acting pays where the LLM is sure: nothing else matters."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.stack([gate_terms(*drawn(generator, 4)) for _ in range(600)])
    certainty = terms[:, GATE.index("llm_certainty")]
    head = fit_gate(terms, torch.where(certainty > certainty.median(), 1.0, -1.0))
    predicted = terms @ torch.tensor(head.weights, dtype=torch.float64)
    assert float(((predicted > 0) == (certainty > certainty.median())).double().mean()) > 0.9


def test_a_gate_is_the_least_of_its_objective():
    generator = torch.Generator().manual_seed(1)
    terms = torch.stack([gate_terms(*drawn(generator, 3)) for _ in range(40)])
    gain = torch.randint(-1, 2, (40,), generator=generator).double()
    head = fit_gate(terms, gain)
    rows = terms[:, 1:]
    deviation = rows.std(0, correction=0) + 1e-9
    standard = torch.cat([torch.ones(40, 1, dtype=torch.float64), (rows - rows.mean(0)) / deviation], 1)
    slopes = torch.tensor(head.weights[1:], dtype=torch.float64)
    constant = head.weights[0] + float(slopes @ rows.mean(0))
    theta = torch.cat([torch.tensor([constant], dtype=torch.float64), slopes * deviation]).requires_grad_()
    objective = (standard @ theta - gain).square().sum() + 5.0 * theta.square().sum()
    (slope,) = torch.autograd.grad(objective, theta)
    assert float(slope.abs().max()) < 1e-8


def test_the_listwise_value_learns_whom_to_follow():
    """What the LLM takes succeeds in every state, whatever the scores say."""
    generator = torch.Generator().manual_seed(2)
    events = [drawn(generator, 3 + state % 3) for state in range(300)]
    outcomes = [torch.arange(len(pool)) == int(pool.llm_logprob.argmax()) for pool, _, _ in events]
    head = fit_listwise([listwise_terms(*event) for event in events], outcomes)
    fresh = [drawn(generator, 4) for _ in range(200)]
    hits = [int(head(*event).argmax()) == int(event[0].llm_logprob.argmax()) for event in fresh]
    assert sum(hits) / len(hits) > 0.97
    assert len(head.weights) == len(LISTWISE)


def test_a_listwise_value_needs_states_that_differ():
    pool, scores, entropy = drawn(torch.Generator().manual_seed(0), 3)
    with pytest.raises(ValueError, match="fit_listwise: expected a state whose candidates differ"):
        fit_listwise([listwise_terms(pool, scores, entropy)], [torch.tensor([True, True, True])])


def test_an_ask_head_finds_a_direction_in_the_hidden_state_and_no_signal_in_noise():
    generator = torch.Generator().manual_seed(3)
    hidden, entropy = torch.randn(400, 24, generator=generator), torch.rand(400, generator=generator)
    noise = torch.randint(-1, 2, (400,), generator=generator).double()
    signal, nothing = fit_ask(hidden, entropy, torch.stack([torch.sign(hidden[:, 5]).double(), noise], 1))
    fresh = torch.randn(400, 24, generator=generator)
    assert float(((signal.worth(fresh, entropy) > 0) == (fresh[:, 5] > 0)).double().mean()) > 0.9
    assert float(nothing.weight.norm()) < 0.2 * float(signal.weight.norm())


def test_the_penalty_of_an_ask_head_is_the_one_of_the_least_error_on_states_left_out():
    """The closed form against fits that really leave a state out."""
    generator = torch.Generator().manual_seed(4)
    hidden, entropy = torch.randn(30, 5, generator=generator).double(), torch.rand(30, generator=generator).double()
    gain = (hidden[:, 0] + torch.randn(30, generator=generator).double())[:, None]
    (head,) = fit_ask(hidden, entropy, gain)
    rows = torch.cat([hidden, entropy[:, None]], 1)
    standard = (rows - rows.mean(0)) / (rows.std(0, correction=0) + 1e-9)

    def fitted(penalty: float, kept: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([standard, torch.ones(30, 1, dtype=torch.float64)], 1)[kept]
        ridge = penalty * torch.diag(torch.tensor([1.0] * 6 + [0.0], dtype=torch.float64))
        theta = torch.linalg.solve(x.T @ x + ridge, x.T @ gain[kept, 0])
        return theta[:-1], theta[-1]

    def error(penalty: float) -> float:
        total = 0.0
        for out in range(30):
            slope, constant = fitted(penalty, torch.arange(30) != out)
            total += float((gain[out, 0] - standard[out] @ slope - constant) ** 2)
        return total

    best = min((10.0**power for power in range(7)), key=error)
    slope, constant = fitted(best, torch.ones(30, dtype=torch.bool))
    torch.testing.assert_close(head.worth(hidden, entropy), standard @ slope + constant, atol=1e-5, rtol=0)


def facts(generation) -> tuple:
    return generation.token_ids.tolist(), [(one.step, one.pool, one.choice) for one in generation.events]


def heads(slm) -> list[AskHead]:
    """One that asks at about half of the uncertain steps, one never and one always."""
    width = slm.get_input_embeddings().weight.shape[1]
    direction = torch.randn(width, generator=torch.Generator().manual_seed(5))
    return [AskHead(direction, 0.1, 0.0), AskHead(direction * 0, 0.0, -1.0), AskHead(direction * 0, 0.0, 1.0)]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_both_loops_ask_where_it_is_worth_it(family):
    slm, llm = tiny(family), tiny(family, 1)
    asked = [torch.randint(3, 50, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 9, 4)]
    seen = []
    for ask in (None, *heads(slm)):
        policy = RequestPolicy(1.0, ask=ask)
        plain = CollaborativeDecoder(slm, llm, LLMPreference(), policy, **OPTIONS)
        found = [facts(plain.generate(ids, 24)) for ids in asked]
        assert [facts(one) for one in plain.generate_many(asked, 24)] == found
        if family != "gemma2":  # which has no fast loop
            fast = CollaborativeDecoder(slm, llm, LLMPreference(), policy, max_length=64, max_batch=2, **OPTIONS)
            assert [facts(one) for one in fast.generate_many(asked, 24)] == found
        seen.append(found)
    free, some, never, always = seen
    assert free == always != some
    assert any(events for _, events in some)
    assert not any(events for _, events in never)


def test_a_state_that_is_not_worth_asking_about_makes_no_event():
    """The worth at every admitted step, recomputed by the model itself."""
    slm, llm = tiny(), tiny(seed=1)
    ask = heads(slm)[0]
    decoder = CollaborativeDecoder(slm, llm, LLMPreference(), RequestPolicy(1.0, ask=ask), max_events=100)
    prompt = torch.tensor([7, 8, 9])
    found = decoder.generate(prompt, 30)
    steps = {event.step for event in found.events}
    ids = torch.cat([prompt, found.token_ids])
    with torch.no_grad():
        out = slm(input_ids=ids[None], output_hidden_states=True)
    entropy = RequestPolicy(1.0).entropy(out.logits[0].float())
    worth = ask.worth(out.hidden_states[-1][0], entropy)
    wanted = {
        step
        for step in range(len(found.token_ids))
        if entropy[len(prompt) + step - 1] > 1.0 and worth[len(prompt) + step - 1] > 0
    }
    assert steps == wanted
    assert len(steps) > 2


def test_a_worth_that_is_no_number_asks_nobody_in_either_loop():
    slm, llm = tiny(), tiny(seed=1)
    huge = AskHead(torch.full((32,), 3e38) * torch.tensor([1.0, -1.0]).repeat(16), 0.0, 0.0)
    policy = RequestPolicy(-10.0, ask=huge)
    asked = [torch.tensor([5, 6, token]) for token in range(3, 9)]
    plain, fast = (
        CollaborativeDecoder(slm, llm, LLMPreference(), policy, max_length=length, **OPTIONS).generate_many(asked, 20)
        for length in (None, 64)
    )
    assert [facts(one) for one in fast] == [facts(one) for one in plain]
    hidden = slm(input_ids=asked[0][None], output_hidden_states=True).hidden_states[-1][0]
    assert bool(huge.worth(hidden, torch.zeros(3)).isnan().any())


def test_a_gate_does_not_hide_broken_scores():
    pool, state = pool_of([0.5, 0.3, 0.2], [0.1, 0.7, 0.2]), State(torch.tensor([1]), 0, 1.0)

    class Broken(LLMPreference):
        def scores_many(self, states, pools):
            return [torch.tensor([0.1, math.nan, 0.2]) for _ in pools]

    for head in (ValueHead("gate", NEVER), ValueHead("listwise", (0.3,) * 14)):
        with pytest.raises(ValueError, match="expected scores that are numbers"):
            ValueSelector(Broken(), head).choose(state, pool)


def test_a_candidate_that_the_llm_rules_out_spoils_no_terms():
    pool = pool_of([0.5, 0.3, 0.2], [0.4, 0.6, 0.0])
    for terms in (gate_terms(pool, pool.llm_logprob, 1.0), listwise_terms(pool, pool.llm_logprob, 1.0)):
        assert bool(terms.isfinite().all())


def test_a_selector_of_a_sequences_own_is_not_gated():
    slm, llm = tiny(), tiny(seed=1)
    never = RequestPolicy(1.0, ask=heads(slm)[1])
    with Engine(Pair(slm, llm), LLMPreference(), never, max_length=64, max_events=5) as engine:
        gated, free = (engine.submit([5, 6, 7], 20, selector=one) for one in (None, LLMPreference()))
        assert not gated.result(60).events
        assert free.result(60).events


def test_a_head_for_another_width_is_refused():
    with pytest.raises(ValueError, match="expected an AskHead for hidden states of 32, got one for 31"):
        CollaborativeDecoder(
            tiny(), tiny(seed=1), LLMPreference(), RequestPolicy(1.0, ask=AskHead(torch.zeros(31), 0.0, 0.0))
        )
    with pytest.raises(ValueError, match="AskHead: expected finite weights"):
        AskHead(torch.tensor([math.inf]), 0.0, 0.0)


@pytest.mark.parametrize(
    "head", [ValueHead("gate", (0.0, 0.5, 0, 0, 0, 0, -0.2, 0)), ValueHead("listwise", (0.3,) * 14)]
)
def test_both_loops_are_alike_under_a_value(head):
    slm, llm = tiny(), tiny(seed=1)
    selector = CertainLLM(ValueSelector(LLMPreference(), head), 0.9)
    asked = [torch.tensor([5, 6, 7]), torch.tensor([9, 8, 7, 6])]
    plain, fast = (
        CollaborativeDecoder(slm, llm, selector, RequestPolicy(0.9), max_length=length, **OPTIONS)
        for length in (None, 64)
    )
    found = [facts(one) for one in plain.generate_many(asked, 30)]
    assert [facts(one) for one in fast.generate_many(asked, 30)] == found
    assert any(events for _, events in found)


def test_a_gated_selector_takes_the_slms_token_or_the_scores():
    pool = pool_of([0.5, 0.3, 0.2], [0.1, 0.7, 0.2])
    state = State(torch.tensor([1]), 0, 1.0)
    for weights, wanted in ((NEVER, SLMPreference()), (ALWAYS, LLMPreference())):
        gated = ValueSelector(LLMPreference(), ValueHead("gate", weights))
        assert gated.choose(state, pool) == wanted.choose(state, pool)
