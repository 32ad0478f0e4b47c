import functools
import math

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st
from plain import models
from tiny import EOS, V, ending, prompts, tiny
from torch.nn import functional as F

from benchmarks.paper.r2r.decoding import r2r
from benchmarks.paper.r2r.network import R2RRouter, RouterFeatures, router_features
from benchmarks.paper.r2r.training import divergence_labels, recall_threshold, train_router
from fb_core.apps.demo.pairs import load_pair
from fb_core.decode.policy import RequestPolicy
from fb_core.events import LARGE, SLM
from fb_core.llm.local import LocalLLM
from fb_core.verify.verifier import Verifier

SMALL = {"logits_size": 10, "width": 16, "blocks": 2}


@functools.cache
def router_of(seed):
    return R2RRouter(models(seed)[0], seed=3, **SMALL).eval()


@torch.no_grad()
def forward(model, ids):
    """(logits [T, V], hidden [T, D]) by the plain model."""
    out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


@torch.no_grad()
def naive_probability(router, slm, ids):
    """The router's formula, written out."""
    logits, hidden = (values[-1] for values in forward(slm, ids))
    weights = router.state_dict()

    def linear(name, x):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, x.shape, weights[f"{name}.weight"], weights[f"{name}.bias"])

    top = logits.sort(descending=True).values[: router.logits_size]
    embedding = slm.get_input_embeddings().weight[logits.argmax()]
    x = linear("projection", torch.cat([hidden, embedding, linear("logits_projection", top)]))
    for block in range(len(router.blocks)):
        x = x + linear(f"blocks.{block}.4", F.gelu(linear(f"blocks.{block}.1", norm(f"blocks.{block}.0", x))))
    return float(linear("head.1", norm("head.0", x)).sigmoid())


def entropy_of(logits, k=V):
    p = logits.topk(k).values.double().softmax(-1)
    return float(-(p * p.log()).sum())


def naive(slm, llm, ids, limit, asks, most=math.inf):
    """asks(ids, logits) -> None for no event, otherwise whether the LLM writes."""
    ids, new, events = ids.tolist(), [], []
    while len(new) < limit and (not new or new[-1] != EOS):
        logits = forward(slm, ids + new)[0][-1]
        mine = int(logits.argmax())
        routed = asks(ids + new, logits) if len(events) < most else None
        theirs = int(forward(llm, ids + new)[0][-1].argmax()) if routed else mine
        if routed is not None:
            events.append((len(new), [mine] if theirs == mine else [mine, theirs], theirs))
        new.append(theirs)
    return new, events


def compare(found, asked, slm, llm, limit, asks, most=math.inf):
    events = 0
    for ids, generation in zip(asked, found, strict=True):
        new, wanted = naive(slm, llm, ids, limit, asks, most)
        assert generation.token_ids.tolist() == new
        assert [(event.step, event.pool, event.token) for event in generation.events] == wanted
        for event in generation.events:
            logits = forward(slm, ids.tolist() + new[: event.step])[0][-1].log_softmax(-1)
            assert event.slm_logprob == pytest.approx(logits[event.pool].tolist(), abs=1e-4)
            assert event.scores is None
        events += len(wanted)
    return events


@pytest.mark.parametrize(("quantile", "most"), [(0.3, None), (0.7, 2)])
def test_token_mode_is_the_naive_loop(quantile, most):
    slm, llm = models(1, 2)
    router, asked = router_of(1), prompts(4, 9, 6, 5)
    responses = LocalLLM(slm).complete_many(asked, 12)
    rows = router_features(slm, list(zip(asked, responses, strict=True)), logits_size=10)
    threshold = float(torch.cat([router.probability(row) for row in rows]).quantile(quantile)) + 1e-4
    found = r2r(slm, llm, router, asked, 20, threshold=threshold, max_events=most)

    def asks(ids, _):
        return True if naive_probability(router, slm, ids) >= threshold else None

    assert compare(found, asked, slm, llm, 20, asks, math.inf if most is None else most)
    for generation in found:
        for event in generation.events:
            assert event.sources in ([SLM, LARGE], [SLM | LARGE])
            assert event.choice == len(event.pool) - 1


@pytest.mark.parametrize("threshold", [1.5, 2.0])
def test_entropy_mode_is_the_naive_loop(threshold):
    slm, llm = models(3, 4)
    asked = prompts(4, 9, 6, 5)
    found = r2r(slm, llm, None, asked, 20, threshold=threshold)
    assert compare(found, asked, slm, llm, 20, lambda _, logits: True if entropy_of(logits) >= threshold else None)


@pytest.mark.parametrize("most", [None, 3])
def test_events_mode_asks_the_router_where_the_policy_asks(most):
    slm, llm = models(1, 2)
    router, asked, policy = router_of(1), prompts(4, 9, 6, 5), RequestPolicy(1.6, top_k=20)
    threshold = 0.5

    def asks(ids, logits):
        return naive_probability(router, slm, ids) >= threshold if entropy_of(logits, 20) > 1.6 else None

    found = r2r(slm, llm, router, asked, 20, threshold=threshold, policy=policy, max_events=most)
    assert compare(found, asked, slm, llm, 20, asks, math.inf if most is None else most)
    for event in (event for generation in found for event in generation.events):
        assert event.entropy > 1.6
        assert event.choice == len(event.pool) - 1
        assert (event.sources == [SLM]) == math.isnan(event.llm_logprob[0])
    alone = r2r(slm, llm, router, asked, 20, threshold=2.0, policy=policy)
    assert [one.token_ids.tolist() for one in alone] == [ids.tolist() for ids in LocalLLM(slm).complete_many(asked, 20)]
    assert all(event.sources == [SLM] for one in alone for event in one.events)


def test_reaching_the_threshold_routes():
    slm, llm = models(1, 2)
    router, asked = router_of(1), prompts(5)

    def events(**options):
        return r2r(slm, llm, options.pop("router", router), asked, 1, **options)[0].events

    (row,) = router_features(slm, [(asked[0], [4])], logits_size=10)
    with torch.no_grad():  # a router of one value: the same bits on any path
        flat = R2RRouter(slm, **SMALL).eval()
        flat.head[1].weight.zero_()
        flat.head[1].bias.fill_(0.3)
    value = float(flat.probability(row)[0])
    assert len(events(router=flat, threshold=value)) == 1
    assert not events(router=flat, threshold=float(torch.tensor(value).nextafter(torch.tensor(2.0))))
    (first,) = r2r(slm, llm, None, asked, 1, threshold=-math.inf)
    entropy = first.events[0].entropy
    assert len(events(router=None, threshold=entropy)) == 1
    assert not events(router=None, threshold=math.nextafter(entropy, 9) + 1e-6)
    assert not events(threshold=0.0, policy=RequestPolicy(entropy, top_k=V))  # the policy is strict


def test_always_routed_is_the_llm_and_never_routed_the_slm():
    slm, llm = models(1, 2)
    asked = prompts(4, 8, 3)
    for threshold, alone in ((0.0, llm), (math.inf, slm)):
        found = r2r(slm, llm, router_of(1), asked, 12, threshold=threshold)
        assert [one.token_ids.tolist() for one in found] == [
            ids.tolist() for ids in LocalLLM(alone).complete_many(asked, 12)
        ]
    assert not any(one.events for one in found)
    assert r2r(slm, llm, router_of(1), [], threshold=0.5) == []


def test_the_llms_end_of_sequence_ends_the_generation():
    slm, large = models(1)[0], tiny("qwen3", 2)
    (ids,) = prompts(5)
    (one,) = r2r(slm, large, router_of(1), [ids], 6, threshold=0.0)
    large.generation_config.eos_token_id = int(one.token_ids[2])
    (ended,) = r2r(slm, large, router_of(1), [ids], 6, threshold=0.0)
    assert ended.token_ids.tolist() == one.token_ids[: one.token_ids.tolist().index(int(one.token_ids[2])) + 1].tolist()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_features_are_those_of_plain_forwards(family):
    slm = tiny(family, 5)
    pairs = list(zip(prompts(4, 2, 7), prompts(6, 9, 0, seed=1), strict=True))
    for batch_tokens in (65536, 1):
        for (prompt, response), found in zip(
            pairs, router_features(slm, pairs, logits_size=7, batch_tokens=batch_tokens), strict=True
        ):
            logits, hidden = forward(slm, [*prompt.tolist(), *response.tolist()])
            rows = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            torch.testing.assert_close(found.hidden, hidden[rows], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.logits, logits[rows].topk(7).values, atol=1e-4, rtol=1e-4)
            assert torch.equal(found.token, logits[rows].argmax(-1))
            assert torch.equal(found.embedding, slm.get_input_embeddings().weight[found.token])
            assert found.hidden.dtype == found.logits.dtype == torch.float32
    (cut,) = router_features(slm, pairs[:1], vocabulary=20, logits_size=99)
    assert cut.logits.shape == (6, 20)
    assert bool((cut.token < 20).all())
    assert router_features(slm, []) == []


def made_up(count=200, seed=0):
    """Features whose first hidden entry tells the label."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 32, generator=generator)
    rest = torch.randn(count, 10, generator=generator), torch.randn(count, 32, generator=generator)
    return RouterFeatures(hidden, *rest, torch.zeros(count, dtype=torch.int64)), hidden[:, 0] > 1.0


def trained(seed=0, dropout=0.1, **options):
    features, labels = made_up()
    router = R2RRouter(models(1)[0], dropout=dropout, **SMALL)
    halves = [RouterFeatures(*(part[rows] for part in features)) for rows in (slice(80), slice(80, None))]
    options = {"epochs": 20, "batch_size": 64, "learning_rate": 3e-3, "seed": seed} | options
    return router, train_router(router, halves, [labels[:80], labels[80:]], **options)


def test_training_learns_and_repeats_bit_for_bit():
    before = torch.get_rng_state()
    router, losses = trained()
    assert torch.equal(before, torch.get_rng_state())
    assert losses[-1] < 0.3 * losses[0]
    assert not router.training
    features, labels = made_up()
    assert float(((router.probability(features) > 0.5) == labels).float().mean()) > 0.95
    again, repeated = trained()
    assert repeated == losses
    assert all(torch.equal(a, b) for a, b in zip(router.parameters(), again.parameters(), strict=True))
    assert trained(seed=1)[1] != losses


def test_the_loss_is_the_weighted_cross_entropy():
    features, labels = made_up()
    router = R2RRouter(models(1)[0], dropout=0.0, **SMALL).eval()
    p = router.probability(features).double()
    weight = float((~labels).sum() / labels.sum()) * 2.0
    wanted = -torch.where(labels, weight * p.log(), (1 - p).log()).mean()
    (loss,) = train_router(router, [features], [labels], epochs=1, batch_size=200, learning_rate=0.0, recall_factor=2.0)
    assert loss == pytest.approx(float(wanted), rel=1e-4)


def test_labels_of_the_demo_pair_agree_with_one_by_one():
    pair = load_pair("plans")
    world, llm, room = pair.world, LocalLLM(pair.llm), 60
    problems = world.problems(3, 4, "train")
    golds = [problem.answer for problem in problems]
    asked = [problem.prompt_ids for problem in problems]
    trajectories = list(zip(asked, llm.complete_many(asked, room), strict=True))
    with Verifier() as verifier:
        found = divergence_labels(pair.slm, llm, trajectories, golds, world.tokenizer, verifier, room)

    def right(ids, prompt, gold):
        end = world.tokenizer.eos_token_id
        rest = [] if ids[-1] == end else llm.complete(ids, room - len(ids) + prompt).tolist()
        return world.tokenizer.decode([*ids, *rest]).endswith(f"\\boxed{{{gold}}}</s>")

    positives = 0
    for (prompt, response), gold, labels in zip(trajectories, golds, found, strict=True):
        assert labels.differs.shape == labels.divergent.shape == response.shape
        for place in range(len(response)):
            ids = [*prompt, *response[:place].tolist()]
            mine, theirs = (int(forward(model, ids)[0][-1].argmax()) for model in (pair.slm, pair.llm))
            assert bool(labels.differs[place]) == (mine != theirs)
            if mine != theirs:
                lost = not right([*ids, mine], len(prompt), gold) and right([*ids, theirs], len(prompt), gold)
                assert bool(labels.divergent[place]) == lost
                positives += lost
    assert 0 < positives < sum(int(labels.differs.sum()) for labels in found)


def test_labels_of_nothing():
    pair = load_pair("plans")
    llm = LocalLLM(pair.llm)
    with Verifier() as verifier:
        (labels,) = divergence_labels(pair.slm, llm, [([1, 5], [])], ["1"], pair.world.tokenizer, verifier)
        assert labels.differs.tolist() == labels.divergent.tolist() == []
        assert divergence_labels(pair.slm, llm, [], [], pair.world.tokenizer, verifier) == []


def test_the_tokenizers_end_token_ends_a_generation_too():
    model, prompt, tokenizer, _, whole = ending()
    (found,) = r2r(model, model, None, [prompt], 20, threshold=1.0, tokenizer=tokenizer)
    assert found.token_ids.tolist() == whole


def test_a_model_whose_tokens_depend_on_its_neighbours_is_refused():
    model, other = zoo.build("llama4_text"), tiny(vocab_size=zoo.V)
    reason = "Llama4ForCausalLM with layers of type chunked_attention"
    with pytest.raises(ValueError, match=reason):
        r2r(model, other, None, [[5]], 3, threshold=1.0)
    with pytest.raises(ValueError, match=reason):
        R2RRouter(model)


def test_labels_that_are_all_alike_are_refused():
    router, (features, labels) = R2RRouter(models(1)[0], **SMALL), made_up()
    for same in (torch.zeros_like(labels), torch.ones_like(labels)):
        with pytest.raises(ValueError, match="labels: expected divergent positions and others"):
            train_router(router, [features], [same])


def test_the_threshold_by_hand():
    """The largest threshold with recall >= min_recall, p >= threshold routing (r2r/train/optimizer.py)."""
    probability = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    divergent = torch.tensor([True, False, True, True, False, True])
    found = [recall_threshold(probability, divergent, share) for share in (0.25, 0.26, 0.5, 0.75, 0.95, 1.0)]
    assert found == pytest.approx([0.9, 0.7, 0.7, 0.6, 0.4, 0.4])
    assert bool((probability >= found[2])[2])  # the threshold is a probability, and equality routes
    many = torch.arange(100, 0, -1) / 128
    for share in (0.07, 0.29, 0.55, 0.57, 0.95):  # 100 * 0.55 is above 55 in floating point, 55 / 100 is not below 0.55
        assert recall_threshold(many, torch.ones(100, dtype=torch.bool), share) == many[round(100 * share) - 1]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 20).map(lambda share: share / 20),
)
def test_the_threshold_is_the_highest_that_suffices(rows, min_recall):
    probability = torch.tensor([value / 8 for value, _ in rows])
    divergent = torch.tensor([label for _, label in rows])
    if not divergent.any():
        with pytest.raises(ValueError, match="at least one divergent position, got 0 divergent"):
            recall_threshold(probability, divergent, min_recall)
        return

    def recall(threshold):
        routed = [value / 8 >= threshold for value, _ in rows]
        return sum(r and label for r, (_, label) in zip(routed, rows, strict=True)) / int(divergent.sum())

    threshold = recall_threshold(probability, divergent, min_recall)
    assert recall(threshold) >= min_recall
    assert recall(math.nextafter(threshold, 2.0)) < min_recall
