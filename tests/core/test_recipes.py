"""Every option of a recipe reaches what it names: targets, adapters, selection, states under a deployed reranker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import linked, settings

from fb_core import CertainLLM, CollaborativeDecoder, FutureBridgeSelector, TokenReranker, deployment_of
from fb_core.demo.pairs import load_pair
from fb_core.reranker import FEATURES, candidate_features
from fb_core.stages.artefacts import Artefact
from fb_core.stages.calibration import CalibrationStage
from fb_core.stages.commands import run_command
from fb_core.stages.decode import read_rows
from fb_core.stages.deploy import chosen_reranker, frozen_policy
from fb_core.stages.examples import Examples
from fb_core.stages.futures import FutureStage
from fb_core.stages.inputs import splits_of
from fb_core.stages.pools import part_of
from fb_core.stages.problems import prompt_ids
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.run import run_stage
from fb_core.stages.scores import ScoreStage
from fb_core.stages.states import PolicyStage, StateStage
from fb_core.stages.training import TrainStage
from fb_core.stages.trajectories import TrajectoryStage
from fb_core.targets import KL_WEIGHT, MARGIN, without_hindsight

LOGGED = ("trajectories", "policy", "states", "futures", "scores")
SHORT = {"seeds": [0], "epochs": 1}


@pytest.fixture(scope="module")
def pair():
    return load_pair("plans")


@pytest.fixture(scope="module")
def run(undisturbed) -> Path:
    return undisturbed[0]["train"]


def groups_of(run, **train):
    """The training groups under other settings, one after the other."""
    stage = TrainStage(settings(train=train), run)
    return [group for trajectory in stage.groups("train") for group in trajectory.groups]


def scored(run, shards="train"):
    """The usable groups of the scores."""
    found = [g for s in Artefact(run, "scores").shards(shards) for g in Examples(run, s).groups.values()]
    return [group for group in found if group.logprob is not None]


def standardised(values):
    values = values.double()
    return (values - values.mean()) / (values.std(correction=0) + 1e-6)


def assert_targets(run, wanted, **train):
    found, known = groups_of(run, **train), scored(run)
    assert len(found) == len(known) == 93
    for group, source in zip(found, known, strict=True):
        assert torch.equal(group.candidates, source.state.pool.ids)
        columns = [wanted(source, horizon) for horizon in train.get("horizons", [8])]
        torch.testing.assert_close(group.target.double(), torch.stack(columns, 1), rtol=1e-4, atol=1e-5)


def test_the_targets_of_all_horizons_are_columns_in_order(run):
    def wanted(group, horizon):
        return (standardised(group.logprob[:, :horizon].double().mean(1)) / 0.5).softmax(0)

    assert_targets(run, wanted, horizons=[8, 3, 5])


def test_temperature_and_alpha_reach_the_target(run):
    def sharp(group, horizon):
        return (standardised(group.logprob[:, :horizon].double().mean(1)) / 0.125).softmax(0)

    def hybrid(group, horizon):
        future, local = group.logprob[:, :horizon].double().mean(1), group.state.pool.llm_logprob
        return ((0.25 * standardised(future) + 0.75 * standardised(local)) / 0.5).softmax(0)

    def local(group, horizon):
        return (standardised(group.state.pool.llm_logprob) / 0.5).softmax(0)

    assert_targets(run, sharp, temperature=0.125)
    assert_targets(run, hybrid, alpha=0.25)
    assert_targets(run, local, alpha=0.0)


def test_hindsight_is_given_back_to_all_but_the_llms_own(run):
    changed = 0

    def wanted(group, horizon):
        nonlocal changed
        (own,) = (group.state.pool.ids == group.first).nonzero()[:, 0].tolist()
        assert own == int(group.state.pool.llm_logprob.argmax())
        matrix = without_hindsight(group.logprob, own, 3)
        assert torch.equal(matrix[own], group.logprob[own])
        assert torch.equal(matrix[:, 3:], group.logprob[:, 3:])
        changed += not torch.equal(matrix, group.logprob)
        return (standardised(matrix[:, :horizon].double().mean(1)) / 0.5).softmax(0)

    assert_targets(run, wanted, hindsight=3)
    assert changed > 20


def test_the_selectors_target_and_margin_are_those_of_its_loss(run):
    def wanted(group, horizon):
        target = KL_WEIGHT * group.state.pool.llm_logprob.double().softmax(0)
        target[group.state.pool.llm_logprob.argmax()] += 1
        return target

    assert_targets(run, wanted, target="select", horizons=[8, 4])
    for target, margin in (("select", MARGIN), ("future", 0.0)):
        assert TrainStage(settings(train={"target": target}), run)._fresh().recipe.margin == margin


def trained(run, folder, *stages, **changes) -> tuple:
    """(settings, folder) of a run trained under other settings."""
    place = linked(run, folder, *(stages or LOGGED))
    chosen = settings(**changes | {"train": SHORT | changes.get("train", {})})
    for command in ("score", "train"):
        run_command(command, chosen, place, show=lambda text: None)
    return chosen, place


def assert_selected(chosen, run, pair, selector, policy=None, **options):
    """The trial of the first epoch and seed is what a decoder of these options does on the validation problems."""
    problems = splits_of(chosen.problems)["validation"]
    prompts = [torch.tensor(prompt_ids(pair.world.tokenizer, problem, "{problem}")) for problem in problems]
    options = {"slm_k": 3, "llm_k": 3, "max_events": 8, "tokenizer": pair.world.tokenizer} | options
    decoder = CollaborativeDecoder(pair.slm, pair.llm, selector, policy or frozen_policy(run), **options)
    rows = read_rows(Artefact(run, "selection"), "epoch-1-h8-s0")
    folder = str(run / "reranker" / "seed-0")  # deployed, it decodes likewise
    selector, policy, options = deployment_of(folder, pair.slm)
    deployed = CollaborativeDecoder(pair.slm, pair.llm, selector, policy, **options).generate_many(prompts, 45)
    wanted = decoder.generate_many(prompts, 45)
    assert [one.token_ids.tolist() for one in deployed] == [one.token_ids.tolist() for one in wanted]
    for row, problem, one in zip(rows, problems, wanted, strict=True):
        assert (row.problem, row.tokens, row.text) == (problem.id, one.token_ids.tolist(), one.text)
        assert [event.step for event in row.events] == [event.step for event in one.events]
        assert row.correct == (f"\\boxed{{{problem.answer}}}" in one.text)


def test_features_are_trained_kept_and_deployed(run, pair, tmp_path):
    chosen, place = trained(run, tmp_path / "run", train={"features": list(FEATURES)})
    for group, source in zip(groups_of(place, features=list(FEATURES)), scored(place), strict=True):
        pool = source.state.pool
        wanted = candidate_features(pool.slm_logprob, pool.llm_logprob, pool.sources)
        torch.testing.assert_close(group.features, wanted)
        assert group.features.shape == (len(group.candidates), 6)
    directory = place / "reranker" / "seed-0"
    weights = json.loads((directory / "futurebridge.json").read_text())["features"]
    assert list(weights) == list(FEATURES)
    assert all(weights.values())  # they were zero before training
    tensors = Artefact(place, "training").tensors("epoch-1")
    assert tensors["h8-s0/feature_weight"].tolist() == pytest.approx(list(weights.values()))
    assert "candidate features: slm, llm, in_slm" in (directory / "README.md").read_text()
    reranker = chosen_reranker(chosen, place, 0)
    assert reranker.feature_names == FEATURES
    assert_selected(chosen, place, pair, FutureBridgeSelector(reranker))


def test_a_reranker_without_features_has_none(run):
    tensors = Artefact(run, "training").tensors("epoch-1")
    assert not [name for name in tensors if "feature" in name]
    assert json.loads((run / "reranker" / "seed-0" / "futurebridge.json").read_text())["features"] == {}


def test_scope_sequence_is_trained_saved_and_deployed(run, pair, tmp_path):
    chosen, place = trained(run, tmp_path / "run", train={"scope": "sequence"})
    directory = place / "reranker" / "seed-0"
    assert json.loads((directory / "futurebridge.json").read_text())["scope"] == "sequence"
    assert "scope='sequence'" in (directory / "README.md").read_text()
    with pytest.raises(ValueError, match="expected an adapter trained under scope 'candidate', got 'sequence'"):
        chosen_reranker(settings(train=SHORT), place, 0)
    reranker = chosen_reranker(chosen, place, 0)
    assert reranker.scope == "sequence"
    assert_selected(chosen, place, pair, FutureBridgeSelector(reranker))


def test_selection_uses_the_override(run, pair, tmp_path):
    chosen, place = trained(run, tmp_path / "run", evaluate={"certainty": 0.4})
    reranker = chosen_reranker(chosen, place, 0)
    assert_selected(chosen, place, pair, CertainLLM(FutureBridgeSelector(reranker), 0.4))
    plain, overridden = (
        [row.tokens for row in read_rows(Artefact(folder, "selection"), "epoch-1-h8-s0")] for folder in (run, place)
    )
    assert plain != overridden
    assert "CertainLLM(FutureBridgeSelector(reranker), 0.4)" in (place / "reranker/seed-0/README.md").read_text()


@pytest.mark.parametrize(("pool", "options"), [("slm-wide", {"pool": "slm", "slm_k": 6}), ("llm", {"pool": "llm"})])
def test_pools_are_scored_trained_on_and_deployed(run, pair, tmp_path, pool, options):
    chosen, place = trained(run, tmp_path / "run", "trajectories", "policy", "states", "futures", score={"pool": pool})
    states = Examples(run, "train-00001").states
    usable = {name: g for name, g in Examples(run, "train-00001").groups.items() if g.logprob is not None}
    found = Examples(place, "train-00001").groups
    assert {state for state, group in found.items() if group.logprob is not None} == set(usable)
    for state, group in found.items():
        wanted, ids = part_of(states[state].pool, 3, pool), group.state.pool.ids
        assert ids.tolist() == wanted.ids.tolist()
        assert group.state.pool.sources.tolist() == wanted.sources.tolist()
        assert torch.equal(group.state.pool.slm_logprob, wanted.slm_logprob)
        if pool == "slm-wide":
            assert ids.tolist() == states[state].pool.ids[:6].tolist()
        shared = {int(token): k for k, token in enumerate(ids)}
        if group.logprob is not None:
            for k, token in enumerate(usable[state].state.pool.ids.tolist()):
                if token in shared:
                    torch.testing.assert_close(
                        group.logprob[shared[token]], usable[state].logprob[k], rtol=1e-4, atol=1e-4
                    )
    reranker = TokenReranker.from_pretrained(place / "reranker" / "seed-0", pair.slm)
    assert_selected(chosen, place, pair, FutureBridgeSelector(reranker), **options)


def test_the_calibrated_target_is_one_command(run, tmp_path):
    shown: list[str] = []
    place = linked(run, tmp_path / "run", *LOGGED)
    chosen = settings(train=SHORT | {"target": "calibrated"})
    run_command("train", chosen, place, show=shown.append)
    assert [text.split(":")[0].strip("*") for text in shown if text.startswith("**")] == [
        "rollouts",
        "training",
        "reranker",
    ]
    assert "| b | llm | slm | b_certain | llm_certain | slm_certain |" in shown[1]
    assert Artefact(place, "training").finished()["identity"]["inputs"].keys() >= {"calibration", "scores"}


@pytest.fixture(scope="module")
def on_policy(run, tmp_path_factory) -> tuple:
    """(settings, folder) of a run whose states are those of the deployed run's first reranker."""
    place = tmp_path_factory.mktemp("on-policy") / "run"
    chosen = settings(collect={"deployed": str(run), "quantile": 0.5}, train={"epochs": 1})
    for stage in (TrajectoryStage, PolicyStage, StateStage, FutureStage, ScoreStage):
        run_stage(stage(chosen, place))
    return chosen, place


def test_on_policy_trajectories_are_the_collaborative_decoders(on_policy, run, pair):
    _, place = on_policy
    reranker = TokenReranker.from_pretrained(run / "reranker" / "seed-0", pair.slm)
    options = {"slm_k": 3, "llm_k": 3, "tokenizer": pair.world.tokenizer}
    decoder = CollaborativeDecoder(pair.slm, pair.llm, FutureBridgeSelector(reranker), frozen_policy(run), **options)
    for shard in Artefact(place, "trajectories").shards():
        examples = Examples(place, shard)
        found = list(examples.trajectories.values())
        problems = [one.problem for one in found]
        prompts = [torch.tensor(prompt_ids(pair.world.tokenizer, problem, "{problem}")) for problem in problems]
        wanted = decoder.generate_many(prompts, 45)
        assert [one.output.tolist() for one in found] == [one.token_ids.tolist() for one in wanted]
        steps = [(state.trajectory.problem.id, len(state.output)) for state in examples.states.values()]
        assert steps == [(p.id, event.step) for p, one in zip(problems, wanted, strict=True) for event in one.events]
    with torch.no_grad():
        tokens = found[0].tokens
        logits = pair.slm(input_ids=tokens[None]).logits[0, found[0].prompt_length - 1 : -1]
    torch.testing.assert_close(found[0].entropy, frozen_policy(run).entropy(logits), rtol=1e-4, atol=1e-4)
    assert contents_differ(run, place, "trajectories")


def contents_differ(run, place, stage):
    return Artefact(run, stage).finished()["digest"] != Artefact(place, stage).finished()["digest"]


def test_the_policy_is_the_deployed_runs(on_policy, run):
    chosen, place = on_policy
    assert frozen_policy(place) == frozen_policy(run)
    report = PolicyStage(chosen, place).report(Artefact(place, "policy").finished())
    assert report.endswith(f"nats, as in {run}")


def test_training_groups_are_of_both_runs(on_policy, run):
    chosen, place = on_policy
    for split in ("train", "validation"):
        theirs = TrainStage(settings(), run).groups(split)
        collect = chosen.collect.model_copy(update={"deployed": None})
        ours = TrainStage(chosen.model_copy(update={"collect": collect}), place).groups(split)
        both = TrainStage(chosen, place).groups(split)
        assert len(both) == len(theirs) + len(ours)
        for found, wanted in zip(both, [*theirs, *ours], strict=True):
            assert torch.equal(found.tokens, wanted.tokens)
            for group, other in zip(found.groups, wanted.groups, strict=True):
                assert group.position == other.position
                assert torch.equal(group.candidates, other.candidates)
                assert torch.equal(group.target, other.target)
    run_command("train", chosen, place, show=lambda text: None)
    assert Artefact(place, "reranker").finished()["counts"] == {"adapters": 2}


def test_an_on_policy_calibration_serves_the_states_of_both_runs(on_policy, run, tmp_path):
    chosen, place = on_policy
    chosen = chosen.model_copy(update={"train": settings(train={"epochs": 1, "target": "calibrated"}).train})
    folder = linked(place, tmp_path / "run", *LOGGED)
    for stage in (RolloutStage, CalibrationStage):
        run_stage(stage(chosen, folder))
    found = TrainStage(chosen, folder).groups("train")
    states = sum(Artefact(one, "states").finished()["counts"]["train states"] for one in (run, folder))
    assert sum(len(trajectory.groups) for trajectory in found) == states


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluate": {"certainty": 0.9}}, r"settings\.evaluate\.certainty None, got 0\.9"),
        ({"evaluate": {"max_events": 3}}, r"settings\.evaluate\.max_events 8, got 3"),
        ({"score": {"pool": "slm"}}, r"settings\.score\.pool joint, got slm"),
        ({"train": {"seeds": [1]}}, r"settings\.train\.seeds \[0, 1\], got \[1\]"),
        ({"models": {"llm": "demo:helpful"}}, r"data\.llm demo:plans, got demo:helpful"),
        ({"collect": {"deployed": None}}, r"data\.deployed .*, got nothing"),
    ],
)
def test_what_deployed_trajectories_depend_on_is_named(on_policy, run, changes, words):
    _, place = on_policy
    collect = {"deployed": str(run), "quantile": 0.5} | changes.get("collect", {})
    with pytest.raises(ValueError, match=words):
        run_stage(TrajectoryStage(settings(**changes | {"collect": collect}), place))


def test_a_run_that_is_not_trained_cannot_be_deployed(undisturbed, tmp_path):
    chosen = settings(collect={"deployed": str(undisturbed[0]["collect"])})
    with pytest.raises(ValueError, match="expected finished reranker, got none"):
        run_stage(TrajectoryStage(chosen, tmp_path / "run"))
