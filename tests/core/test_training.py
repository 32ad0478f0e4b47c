"""Distillation: gradients, sharing of the prefix, learning, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny import V, tiny

from fb_core import Recipe, TokenReranker, TrainingGroup, TrainingTrajectory, hf, train_reranker


def trajectories(n=6, seed=0, rule=None):
    """Random states whose target is put on one candidate; `rule` picks which."""
    g = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(n):
        tokens = torch.randint(V, (12,), generator=g)
        groups = []
        for position in (4, 9):
            candidates = torch.randperm(V, generator=g)[:4]
            best = rule(tokens, candidates) if rule else 0
            groups.append(
                TrainingGroup(position, candidates, torch.nn.functional.one_hot(torch.tensor(best), 4).float())
            )
        result.append(TrainingTrajectory(tokens, groups))
    return result


def highest_id(tokens, candidates):
    return int(candidates.argmax())


@pytest.mark.parametrize(("scope", "n", "chance_beaten"), [("candidate", 120, 0.5), ("sequence", 50, 0.35)])
def test_learns_a_rule_on_the_candidate(scope, n, chance_beaten):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # PEFT initialises the adapter from the global generator
        reranker = TokenReranker.from_base(tiny("qwen3"), rank=8, scope=scope)
    data = trajectories(n, rule=highest_id)
    losses = train_reranker(reranker, data, Recipe(learning_rate=1e-2, groups_per_step=16, epochs=8))
    assert losses[0] == pytest.approx(torch.tensor(4.0).log().item(), rel=1e-3)  # zero head: uniform
    assert sum(losses[-4:]) / 4 < 0.7 * losses[0]
    with torch.no_grad():
        fresh = trajectories(40, seed=1, rule=highest_id)
        hits = [
            int(reranker.scores(t.tokens[: s.position], s.candidates).argmax()) == int(s.target.argmax())
            for t in fresh
            for s in t.groups
        ]
    assert sum(hits) / len(hits) > chance_beaten  # chance: 0.25


def test_same_seed_same_bits_and_global_generator_untouched():
    before = torch.random.get_rng_state()
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        reranker = TokenReranker.from_base(tiny("qwen3"), rank=4)
        losses = train_reranker(reranker, trajectories(), Recipe(learning_rate=1e-2, groups_per_step=4))
        runs.append((losses, [p.clone() for p in reranker.parameters() if p.requires_grad]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    torch.random.set_rng_state(before)


def test_prefix_runs_once_a_trajectory(monkeypatch):
    prefilled = []
    plain = hf.prefill_packed
    monkeypatch.setattr(
        hf, "prefill_packed", lambda model, seqs: prefilled.append([len(s) for s in seqs]) or plain(model, seqs)
    )
    reranker = TokenReranker.from_base(tiny("qwen3"), rank=4)
    data = trajectories(5)
    train_reranker(reranker, data, Recipe(groups_per_step=100, epochs=2))
    assert prefilled == [[9] * 5, [9] * 5]  # once an epoch, up to the last state that is trained on


def test_gradient_equals_the_one_of_separate_forwards():
    """The packed loss has the gradient of ordinary forwards with the adapter on the candidate row alone."""
    from fb_core.training import _loss

    torch.manual_seed(0)
    model = tiny("qwen3")
    reranker = TokenReranker.from_base(model, rank=4, dropout=0.0)
    with torch.no_grad():
        for p in reranker.parameters():
            if p.requires_grad:
                p.copy_(torch.randn_like(p) * 0.2)
    data = trajectories(3)
    _loss(reranker, data).backward()
    packed = [p.grad.clone() for p in reranker.parameters() if p.requires_grad and p.numel()]
    reranker.zero_grad()
    losses = []
    for trajectory in data:
        for group in trajectory.groups:
            cache = hf.new_cache()
            with torch.no_grad():
                model(input_ids=trajectory.tokens[None, : group.position], past_key_values=cache, use_cache=True)
            for layer in cache.layers:
                layer.keys = layer.keys.repeat(4, 1, 1, 1)
                layer.values = layer.values.repeat(4, 1, 1, 1)
            lm = hf.causal_lm(reranker.adapted)
            hidden = lm.model(input_ids=group.candidates[:, None], past_key_values=cache, use_cache=True)
            score = hidden.last_hidden_state[:, -1] @ reranker.head
            losses.append(-(group.target * score.log_softmax(0)).sum())
    torch.stack(losses).mean().backward()
    separate = [p.grad for p in reranker.parameters() if p.requires_grad and p.numel()]
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_feature_weights_learn():
    reranker = TokenReranker.from_base(tiny("qwen3"), rank=4, feature_names=("llm",))
    g = torch.Generator().manual_seed(3)
    data = []
    for trajectory in trajectories(20):
        groups = []
        for group in trajectory.groups:
            feature = torch.randn(4, 1, generator=g)
            target = torch.nn.functional.one_hot(feature[:, 0].argmax(), 4).float()
            groups.append(TrainingGroup(group.position, group.candidates, target, feature))
        data.append(TrainingTrajectory(trajectory.tokens, groups))
    train_reranker(reranker, data, Recipe(learning_rate=2e-2, groups_per_step=8, epochs=4))
    assert reranker.feature_weight.item() > 0.5


@pytest.mark.parametrize("setting", [{"epochs": 0}, {"groups_per_step": 0}, {"learning_rate": float("nan")}])
def test_recipe_out_of_range_is_refused(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}: expected"):
        Recipe(**setting)


def test_features_without_use_are_left_out():
    data = trajectories(4)
    runs = []
    for scope in ("candidate", "sequence"):
        for extra in (None, torch.zeros(4, 3)):
            torch.manual_seed(0)
            reranker = TokenReranker.from_base(tiny("qwen3"), rank=2, scope=scope)
            given = [
                TrainingTrajectory(
                    t.tokens, [TrainingGroup(s.position, s.candidates, s.target, extra) for s in t.groups]
                )
                for t in data
            ]
            runs.append(train_reranker(reranker, given, Recipe(epochs=1)))
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]


def test_bad_input():
    reranker = TokenReranker.from_base(tiny("qwen3"))
    group = TrainingGroup(2, torch.tensor([1, 2]), torch.tensor([0.5, 0.5]))
    tokens = torch.tensor([1, 2, 3])
    for data, words in (
        ([], "at least one group"),
        ([TrainingTrajectory(tokens, [])], "at least one group"),
        ([TrainingTrajectory(tokens, [TrainingGroup(4, group.candidates, group.target)])], "position"),
        ([TrainingTrajectory(tokens, [TrainingGroup(2, group.candidates, torch.tensor([1.0]))])], "target"),
        ([TrainingTrajectory(torch.tensor([V]), [group])], "ids from 0"),
    ):
        with pytest.raises(ValueError, match=words):
            train_reranker(reranker, data)
    bad = TrainingGroup(2, group.candidates, torch.tensor([float("nan"), 1.0]))
    with pytest.raises(ValueError, match="target: expected one finite number"):
        train_reranker(reranker, [TrainingTrajectory(tokens, [bad])])
    with pytest.raises(TypeError, match="position: expected an int"):
        train_reranker(reranker, [TrainingTrajectory(tokens, [TrainingGroup(1.5, group.candidates, group.target)])])
    reranker = TokenReranker.from_base(tiny("qwen3"), feature_names=("slm",))
    for features, words in (
        (None, "features: expected"),
        (torch.zeros(2, 2), "features: expected"),
        (torch.full((2, 1), float("nan")), "loss: expected a finite number"),
    ):
        late = TrainingGroup(2, group.candidates, group.target, features)
        with pytest.raises(ValueError, match=words):
            train_reranker(reranker, [TrainingTrajectory(tokens, [late])])
    assert not reranker.training
    assert all(torch.isfinite(p).all() for p in reranker.parameters())
