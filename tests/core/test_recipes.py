"""Every option of the training reaches what it names: targets, adapters, selection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import linked, settings

from fb_core import CollaborativeDecoder, FutureBridgeSelector, TokenReranker, deployment_of
from fb_core.apps.pipeline.commands import run_command
from fb_core.apps.pipeline.decode import read_rows
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import chosen_reranker, frozen_policy, splits_of
from fb_core.apps.pipeline.problems import prompt_ids
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.pipeline.scores import reduce_pool
from fb_core.apps.pipeline.train import TrainStage

LOGGED = ("trajectories", "policy", "states", "futures", "scores")
SHORT = {"seeds": [0], "epochs": 1}


@pytest.fixture(scope="module")
def run(undisturbed) -> Path:
    return undisturbed[0]["train"]


def groups_of(run, **train):
    """The training groups under other settings, one after the other."""
    stage = TrainStage(settings(train=train), run)
    return [group for trajectory in stage.groups("train") for group in trajectory.groups]


def scored(run, shards="train"):
    """The usable groups of the scores."""
    return [group for shard in Artefact(run, "scores").shards(shards) for group in Examples(run, shard).groups.values()]


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


def test_horizons_temperature_and_alpha_reach_the_target(run):
    def targets(temperature, alpha=1.0):
        def wanted(group, horizon):
            future, local = group.logprob[:, :horizon].double().mean(1), group.state.pool.llm_logprob
            mixed = alpha * standardised(future) + (1 - alpha) * standardised(local)
            return (mixed / temperature).softmax(0)

        return wanted

    assert_targets(run, targets(0.5), horizons=[8, 3, 5])
    assert_targets(run, targets(0.125), temperature=0.125)
    for alpha in (0.25, 0.0):
        assert_targets(run, targets(0.5, alpha), alpha=alpha)


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


def test_scope_sequence_is_trained_saved_and_deployed(run, pair, tmp_path):
    chosen, place = trained(run, tmp_path / "run", train={"scope": "sequence"})
    directory = place / "reranker" / "seed-0"
    assert json.loads((directory / "futurebridge.json").read_text())["scope"] == "sequence"
    assert "on the whole sequence" in (directory / "README.md").read_text()
    with pytest.raises(ValueError, match="scope 'candidate'"):
        chosen_reranker(settings(train=SHORT), place, 0)
    reranker = chosen_reranker(chosen, place, 0)
    assert reranker.scope == "sequence"
    assert_selected(chosen, place, pair, FutureBridgeSelector(reranker))


@pytest.mark.parametrize(("pool", "options"), [("slm-wide", {"pool": "slm", "slm_k": 6}), ("llm", {"pool": "llm"})])
def test_pools_are_scored_trained_on_and_deployed(run, pair, tmp_path, pool, options):
    chosen, place = trained(run, tmp_path / "run", "trajectories", "policy", "states", "futures", score={"pool": pool})
    states = Examples(run, "train-00001").states
    usable, found = Examples(run, "train-00001").groups, Examples(place, "train-00001").groups
    assert set(found) == set(usable)
    for state, group in found.items():
        wanted, ids = reduce_pool(states[state].pool, 3, pool), group.state.pool.ids
        assert ids.tolist() == wanted.ids.tolist()
        assert group.state.pool.sources.tolist() == wanted.sources.tolist()
        assert torch.equal(group.state.pool.slm_logprob, wanted.slm_logprob)
        if pool == "slm-wide":
            assert ids.tolist() == states[state].pool.ids[:6].tolist()
        shared = {int(token): k for k, token in enumerate(ids)}
        for k, token in enumerate(usable[state].state.pool.ids.tolist()):
            if token in shared:
                own = usable[state].logprob[k]
                torch.testing.assert_close(group.logprob[shared[token]], own, rtol=1e-4, atol=1e-4)
    reranker = TokenReranker.from_pretrained(place / "reranker" / "seed-0", pair.slm)
    assert_selected(chosen, place, pair, FutureBridgeSelector(reranker), **options)
