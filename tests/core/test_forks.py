"""Layers that keep a state: forked where branches leave, in every forward that shares a prefix."""

from __future__ import annotations

import math

import pytest
import support
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

from fb_core import (
    BranchGroup,
    CollaborativeDecoder,
    CompatibilityScorer,
    LLMPreference,
    LocalLLM,
    RequestPolicy,
    TokenReranker,
    shared_prefix_logprobs_many,
)
from fb_core.models.facts import empty_cache
from fb_core.models.forks import Plan, State
from fb_core.models.packed import Prefix, prefill_packed
from fb_core.rerank.reranker import CandidateRows

KINDS = ("qwen3_5_text", "lfm2", "granitemoehybrid")  # a gated delta rule, short convolutions, Mamba2
TOKENS = support.ids(20, 5)
GROUPS = [  # states in any order, one of them twice
    BranchGroup(13, torch.tensor([4, 9, 30]), support.ids(5, 6)),
    BranchGroup(4, torch.tensor([8]), support.ids(1, 7)),
    BranchGroup(20, torch.tensor([11, 12]), support.ids(3, 8)),
    BranchGroup(13, torch.tensor([70]), support.ids(2, 9)),
]


@pytest.fixture(scope="module")
def models():
    return {kind: (model := zoo.build(kind), support.wide(model)) for kind in KINDS}


def summed(hidden_states, cache, attention_mask):
    """A layer whose output is the sum of what it has seen: the least that a state can be."""
    before = cache.conv_states[0] if cache.before else torch.zeros(len(hidden_states), 1, hidden_states.shape[-1])
    out = before + hidden_states.cumsum(1)
    cache.conv_states = {0: out[:, -1:]}
    return out


@given(data=st.data())
def test_a_plan_runs_every_sequence_from_its_beginning(data):
    """Against sums along each row's own path, for prefixes among the rows and apart from them."""
    apart, groups, paths, row = data.draw(st.booleans()), [], [], 0
    known = {at: State({0: torch.full((1, 1, 2), 10.0 * at + 1)}, {}) for at in range(3)}
    for _ in range(data.draw(st.integers(1, 5))):
        after = data.draw(st.none() | st.integers(0, 2 if apart else row - 1)) if apart or row else None
        lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        groups.append((lengths, after))
        for count in lengths:
            for at in range(count):
                paths.append([*(paths[-1] if at else [] if after is None or apart else paths[after]), row + at])
            row += count
    keep = data.draw(st.lists(st.integers(0, row - 1), unique=True)) if row and not apart else []
    plan, hidden = Plan(groups, apart, keep, torch.device("cpu")), torch.rand(1, row, 2, dtype=torch.float64)
    starts = [after for lengths, after in groups for count in lengths for _ in range(count)]
    base = [known[after].conv_states[0][0, 0] if apart and after is not None else torch.zeros(2) for after in starts]
    wanted = [hidden[0, path].sum(0) + first for path, first in zip(paths, base, strict=True)]
    states = dict(known) if apart else {}
    if not row:
        return
    torch.testing.assert_close(plan.run(summed, hidden, "cache", states)[0], torch.stack(wanted).to(hidden))
    for at in keep:
        torch.testing.assert_close(states[at].conv_states[0][0, 0], wanted[at].to(hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_many_states_of_a_trajectory_equal_full_forwards(models, kind):
    model, truth = models[kind]
    (found,) = CompatibilityScorer(model).score_trajectories([(TOKENS, GROUPS)])
    for scores, group in zip(found, GROUPS, strict=True):
        wanted = support.full_forwards(truth, TOKENS[: group.position], group.candidates, group.future)
        torch.testing.assert_close(scores.double(), wanted.detach().double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_prefixes_and_gradients_through_the_forks_equal_full_rows(models, kind):
    model, truth = models[kind]
    requests = [
        (TOKENS[:9], [support.ids(4, 1), support.ids(2, 2)]),
        (TOKENS[:15], [torch.cat([TOKENS[15:18], support.ids(2, 3)]), TOKENS[15:20]]),
        (torch.cat([TOKENS[:9], support.ids(3, 4)]), [support.ids(5, 5)]),
        (TOKENS[:18], [TOKENS[3:5], TOKENS[4:6]]),  # rows of their own, one each
    ]
    model.gradient_checkpointing_enable()
    model.train()
    found = [each for group in shared_prefix_logprobs_many(model, requests) for each in group]
    sum(each.sum() for each in found).backward()
    model.eval()
    model.gradient_checkpointing_disable()
    wanted = [
        truth(input_ids=torch.cat([prefix, own])[None], use_cache=False)
        .logits[0, len(prefix) - 1 : -1]
        .log_softmax(-1)
        .gather(1, own[:, None])[:, 0]
        for prefix, branches in requests
        for own in branches
    ]
    sum(each.sum() for each in wanted).backward()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)
    pairs = [(x.grad, y.grad) for x, y in zip(model.parameters(), truth.parameters(), strict=True)]
    mine, theirs = (torch.cat([x.double().flatten() for x in own if x is not None]) for own in zip(*pairs, strict=True))
    assert (mine - theirs).norm() <= 1e-4 * theirs.norm()
    model.zero_grad()
    truth.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_states_inside_a_sequence_and_caches_are_gone_on_from(models, kind):
    model, _ = models[kind]
    reranker, pool, positions = TokenReranker.from_base(model), torch.tensor([5, 9, 17]), [[4, 13], [2, 20]]
    with torch.no_grad():
        for parameter in [x for x in reranker.parameters() if x.requires_grad]:
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(7))
        wholes = prefill_packed(model, [TOKENS[:13], TOKENS], positions)
        prefixes = [Prefix(one.kv, one.start, at) for one, own in zip(wholes, positions, strict=True) for at in own]
        found = reranker.packed_scores(CandidateRows.of(prefixes, [pool] * 4)).view(4, 3)
        for scores, at in zip(found, (4, 13, 2, 20), strict=True):
            torch.testing.assert_close(reranker.scores(TOKENS[:at], pool), scores, rtol=1e-4, atol=1e-4)
            cache = empty_cache(model)
            model(input_ids=TOKENS[None, :at], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(reranker.scores(TOKENS[:at], pool, cache), scores, rtol=1e-4, atol=1e-4)
    rows = CandidateRows.of(prefixes, [pool] * 4)
    reranker.packed_scores(rows).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in reranker.parameters() if x.requires_grad)
    with pytest.raises(ValueError, match="of 4 layers, got those of 0"):
        reranker.scores(TOKENS, pool, type(cache)())


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_shrinks_goes_on_as_each_alone(models, kind):
    """With the model itself as LLM, whose cache goes on from a query to a longer one."""
    model, _ = models[kind]
    decoder = CollaborativeDecoder(model, LocalLLM(model), LLMPreference(), RequestPolicy(-math.inf), max_events=3)
    prompts = [TOKENS[:11], TOKENS[:3], TOKENS[:11], TOKENS[6:13]]
    together = decoder.generate_many(prompts, 6)
    for prompt, one in zip(prompts, together, strict=True):
        assert one.token_ids.tolist() == decoder.generate(prompt, 6).token_ids.tolist()
        assert len(one.events) == 3


def test_a_state_that_several_tokens_do_not_go_on_from_is_refused_in_every_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        model = zoo.build("jamba").to(dtype)
        for door in (CompatibilityScorer, LocalLLM, TokenReranker.from_base):
            with pytest.raises(
                ValueError,
                match="JambaForCausalLM with layers of class JambaMambaMixer, whose state cannot be continued",
            ):
                door(model)
