"""The value head: its terms by hand, planted weights found, and both loops alike under it."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fb_core import CollaborativeDecoder, LLMPreference, LowLatencyDecoder, RequestPolicy, State
from fb_core.decode.selectors import ValueSelector
from fb_core.events import Pool
from fb_core.rerank.value_head import PENALTY, TERMS, ValueHead, fit_value, value_terms
from fb_kernels.testing import count_syncs

OPTIONS = {"slm_k": 3, "llm_k": 3, "max_events": 5}
SOME = ValueHead((0.3,) * len(TERMS))


def pool_of(slm: list[float], llm: list[float]) -> Pool:
    ids = torch.arange(len(slm))
    sources = torch.full((len(slm),), 3, dtype=torch.int32)
    return Pool(ids, sources, torch.tensor(slm).log(), torch.tensor(llm).log())


def drawn(generator: torch.Generator, candidates: int) -> tuple[Pool, Tensor, float]:
    slm, llm = (torch.randn(candidates, generator=generator).softmax(0).tolist() for _ in range(2))
    return pool_of(slm, llm), torch.randn(candidates, generator=generator), float(torch.rand((), generator=generator))


def test_terms_by_hand():
    terms = value_terms(pool_of([0.5, 0.25], [0.2, 0.8]), torch.tensor([0.0, 2.0]), 0.5)
    half, quarter = math.log(0.5), math.log(0.25)
    first = [-1, -1, 0, quarter, 1, 0, 0.5, 0, -0.5, -0.8, 0.5, 0, -0.5, 0]
    second = [1, 1, half, 0, 0, 1, 0, 0.8, 0.5, 0.8, 0, 0.5, 0.5, half * 0.5]
    torch.testing.assert_close(terms, torch.tensor([first, second], dtype=torch.float64), atol=5e-6, rtol=0)
    pool = pool_of([0.5, 0.3, 0.2], [0.4, 0.6, 0.0])  # the LLM rules one out
    assert bool(value_terms(pool, pool.llm_logprob, 1.0).isfinite().all())


class NothingFromTheHost(TorchDispatchMode):
    """Refuses tensors made from Python numbers, whose copy to a device synchronises with it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def test_a_head_reads_nothing_back_and_copies_nothing():
    pool, scores, entropy = drawn(torch.Generator().manual_seed(0), 5)
    head = ValueHead(tuple(float(place) for place in range(len(TERMS))))
    first = head(pool, scores, entropy)  # copies the weights
    with NothingFromTheHost(), count_syncs() as syncs:
        again = head(pool, scores, entropy)
    assert syncs.total == 0
    assert torch.equal(again, first)
    with pytest.raises(AssertionError), NothingFromTheHost():
        torch.tensor([entropy])


def test_a_value_learns_whom_to_follow():
    """What the LLM takes succeeds in every state, whatever the scores say."""
    generator = torch.Generator().manual_seed(2)
    events = [drawn(generator, 3 + state % 3) for state in range(300)]
    outcomes = [torch.arange(len(pool)) == int(pool.llm_logprob.argmax()) for pool, _, _ in events]
    head = fit_value([value_terms(*event) for event in events], outcomes)
    fresh = [drawn(generator, 4) for _ in range(200)]
    hits = [int(head(*event).argmax()) == int(event[0].llm_logprob.argmax()) for event in fresh]
    assert sum(hits) / len(hits) > 0.97


def test_the_weights_are_the_least_of_their_objective():
    generator = torch.Generator().manual_seed(1)
    terms = [value_terms(*drawn(generator, 3 + state % 2)) for state in range(60)]
    outcomes = [torch.randint(2, (len(rows),), generator=generator).bool() for rows in terms]
    head = fit_value(terms, outcomes)
    mixed = [at for at, outcome in enumerate(outcomes) if 0 < int(outcome.sum()) < len(outcome)]
    assert 20 < len(mixed) < 60
    deviation = torch.cat([terms[at] for at in mixed]).std(0, correction=0) + 1e-9
    theta = (torch.tensor(head.weights, dtype=torch.float64) * deviation).requires_grad_()
    losses = []
    for at in mixed:
        chances = (terms[at] / deviation @ theta).softmax(0)
        losses.append(-chances[outcomes[at]].sum().log())
    objective = torch.stack(losses).mean() + PENALTY * theta.square().sum()
    (slope,) = torch.autograd.grad(objective, theta)
    assert float(slope.abs().max()) < 1e-8
    assert fit_value(terms, outcomes) == head


def test_bad_weights_and_states_are_refused():
    for weights in ((), (0.0,) * 13, (math.nan, *(0.0,) * 13)):
        with pytest.raises(ValueError, match="ValueHead:"):
            ValueHead(weights)
    with pytest.raises(ValueError, match="fit_value:"):
        fit_value([value_terms(*drawn(torch.Generator().manual_seed(0), 3))], [torch.tensor([True, True, True])])


def test_broken_scores_are_not_hidden():
    pool, state = pool_of([0.5, 0.3, 0.2], [0.1, 0.7, 0.2]), State(torch.tensor([1]), 0, 1.0)

    class Broken(LLMPreference):
        def scores_many(self, states, pools):
            return [torch.tensor([0.1, math.nan, 0.2]) for _ in pools]

    with pytest.raises(ValueError, match="expected scores that are numbers"):
        ValueSelector(Broken(), SOME).choose(state, pool)


def test_both_loops_are_alike_under_a_value():
    slm, llm = tiny(), tiny(seed=1)
    selector, policy = ValueSelector(LLMPreference(), SOME), RequestPolicy(0.9)
    asked, found = [torch.tensor([5, 6, 7]), torch.tensor([9, 8, 7, 6])], []
    for kind in (CollaborativeDecoder, LowLatencyDecoder):
        decoder = kind(slm, llm, selector, policy, **OPTIONS)
        found.append(
            [
                (one.token_ids.tolist(), [(each.step, each.pool, each.choice) for each in one.events])
                for one in decoder.generate_many(asked, 30)
            ]
        )
    assert found[0] == found[1]
    assert any(events for _, events in found[0])
