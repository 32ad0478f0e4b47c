"""Rollouts against naive decoding, and calibration from a run's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import linked, settings

from fb_core import Verifier
from fb_core.calibrated import Weights, calibrate, calibrated_target, calibration_terms
from fb_core.demo.pairs import load_pair
from fb_core.stages.artefacts import Artefact
from fb_core.stages.calibration import CalibrationStage, read_weights
from fb_core.stages.examples import Examples
from fb_core.stages.inputs import splits_of
from fb_core.stages.pools import part_of
from fb_core.stages.rollouts import RolloutStage, token_kind
from fb_core.stages.run import run_stage
from fb_core.stages.training import TrainStage
from fb_core.stages.trajectories import TrajectoryStage

LOGGED = ("trajectories", "policy", "states", "futures", "scores")
TRAINED = (*LOGGED, "rollouts", "training", "selection", "reranker")


@pytest.fixture(scope="module")
def pair():
    return load_pair("plans")


@pytest.fixture(scope="module")
def run(undisturbed) -> Path:
    return undisturbed[0]["train"]


def logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0, -1]


def naive(model, tokens, room, end):
    """Greedy, a whole forward a token."""
    new = []
    while len(new) < room and (not new or new[-1] != end):
        new.append(int(logits(model, torch.cat([tokens, torch.tensor(new, dtype=torch.int64)])).argmax()))
    return new


def test_outcomes_are_those_of_naive_greedy_decoding(run, pair):
    shard, end = "validation-00000", pair.slm.config.eos_token_id
    examples = Examples(run, shard)
    assert list(examples.rollouts) == list(examples.states)  # a share of 1
    problems = splits_of(settings().problems)["validation"]
    assert [one.problem for one in examples.trajectories.values()] == problems[:6]
    rolled = list(examples.rollouts.values())
    decode = pair.world.tokenizer.decode
    outcomes = []
    with Verifier(workers=1) as verifier:
        for one in rolled[::5]:
            owner, pool = one.state.trajectory, part_of(examples.states[one.state.id].pool, 3)
            assert one.state.pool.ids.tolist() == pool.ids.tolist()
            assert one.state.pool.sources.tolist() == pool.sources.tolist()
            assert torch.equal(one.state.pool.llm_logprob, pool.llm_logprob)
            prefix = owner.tokens[: one.state.position]
            logprob = logits(pair.slm, prefix).log_softmax(-1)
            torch.testing.assert_close(one.state.pool.slm_logprob, logprob[pool.ids], rtol=1e-4, atol=1e-4)
            assert one.kind == token_kind(decode([int(logprob.argmax())]))
            for candidate, correct, text in zip(pool.ids.tolist(), one.correct.tolist(), one.texts, strict=True):
                tokens = torch.cat([prefix, torch.tensor([candidate])])
                new = [] if candidate == end else naive(pair.slm, tokens, 45, end)
                written = [*tokens[owner.prompt_length :].tolist(), *new]
                assert text == decode(written, skip_special_tokens=True)
                verdict = verifier.verify_many([text], [owner.problem.answer], bad_golds="unparsable")[0]
                assert correct == (verdict == "correct")
                outcomes.append(correct)
    assert set(outcomes) == {True, False}


def rolled_states(run, changes, folder):
    place = linked(run, folder, "trajectories", "policy", "states", "futures")
    manifest = run_stage(RolloutStage(settings(rollouts=changes), place))
    shards = RolloutStage(settings(), place).shards()
    return manifest, {(shard, state) for shard in shards for state in Examples(place, shard).rollouts}


def test_the_share_of_states_is_drawn_by_the_seed(run, tmp_path):
    half = {
        (shard, state) for shard in RolloutStage(settings(), run).shards() for state in Examples(run, shard).rollouts
    }
    small = {"validation": 0.2, "train": 0.2}
    manifest, fifth = rolled_states(run, small, tmp_path / "a")
    other = rolled_states(run, small | {"seed": 1}, tmp_path / "b")[1]
    assert fifth < half  # a larger share has the states of a smaller one
    assert len(fifth) == pytest.approx(0.2 * 187, abs=16)
    assert other != fifth
    assert not other <= half
    stage = RolloutStage(settings(rollouts=small), tmp_path / "a")
    assert stage.units(manifest) == len(fifth)
    none = rolled_states(run, {"validation": 0.01, "train": 0}, tmp_path / "c")[1]
    assert not [shard for shard, _ in none if shard.startswith("train")]
    counts = Artefact(run, "rollouts").finished()["counts"]
    assert counts["train states"] == len([shard for shard, _ in half if shard.startswith("train")])
    assert counts["train states"] == pytest.approx(71, abs=20)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("so ", "word"),
        (" Then", "word"),
        ("über", "word"),
        ("7", "digit"),
        (" 12,", "digit"),
        ("x2", "digit"),
        ("²", "digit"),
        ("=", "mark"),
        ("\\boxed{", "mark"),
        ("don't", "mark"),
        ("", "mark"),
        ("\n\n", "mark"),
        ("�", "mark"),
    ],
)
def test_kinds_of_tokens(text, kind):
    assert token_kind(text) == kind


@pytest.fixture(scope="module")
def calibrated(run, tmp_path_factory) -> Path:
    place = linked(run, tmp_path_factory.mktemp("calibrated") / "run", *LOGGED, "rollouts")
    run_stage(CalibrationStage(settings(), place))
    return place


def test_theta_is_fitted_to_the_rolled_out_training_states(run, calibrated):
    terms, outcomes, none = [], [], 0
    for shard in RolloutStage(settings(), run).shards():
        if shard.startswith("validation"):
            continue
        examples = Examples(run, shard)
        for state, one in examples.rollouts.items():
            group, pool = examples.groups[state], one.state.pool
            none += group.logprob is None
            future = None if group.logprob is None else group.logprob[:, :8].mean(1)
            assert group.state.pool.ids.tolist() == pool.ids.tolist()
            terms.append(calibration_terms(future, pool.llm_logprob, pool.slm_logprob))
            outcomes.append(one.correct)
    assert none  # states without a future count too
    wanted = calibrate(terms, outcomes, minimum_mixed=3)
    found = Artefact(calibrated, "calibration").finished()["summary"]["h8"]
    assert (found["states"], found["mixed"]) == (71, 40) == (wanted.states, wanted.mixed)
    assert found["theta"] == pytest.approx(wanted.theta._asdict(), abs=1e-3)
    assert found["loss_after"] < found["loss_before"]
    assert read_weights(calibrated, [8]) == [Weights(**found["theta"])]


def test_theta_and_its_states_are_printed(calibrated):
    stage = CalibrationStage(settings(), calibrated)
    manifest = stage.folder.finished()
    head, line, row = stage.report(manifest).splitlines()
    assert "mixed states (at least 3)" in head
    assert head.count("|") == line.count("|") == row.count("|") == 11
    cells = dict(
        zip((cell.strip() for cell in head.split("|")), (cell.strip() for cell in row.split("|")), strict=True)
    )
    for name, value in manifest["summary"]["h8"]["theta"].items():
        assert cells[name] == f"{value:+.2f}"
    assert row.startswith("| 8 | 40 | 71 | ")
    assert json.loads((calibrated / "calibration" / "h8.jsonl").read_text()) == manifest["summary"]["h8"]


def test_too_few_mixed_states_are_one_sentence(run, tmp_path):
    place = linked(run, tmp_path / "run", *LOGGED, "rollouts")
    chosen = settings(rollouts={"minimum_mixed": 41}, train={"target": "calibrated"})
    with pytest.raises(ValueError, match=r"at least 41 states .* got 40 of 71 rolled out; roll out a larger share"):
        run_stage(CalibrationStage(chosen, place))
    with pytest.raises(ValueError, match=r"expected finished calibration .* run `futurebridge train` first"):
        run_stage(TrainStage(chosen, place))


def test_the_calibrated_target_is_of_all_states_with_a_pool(run, calibrated):
    chosen = settings(train={"target": "calibrated"})
    (theta,) = read_weights(calibrated, [8])
    stage = TrainStage(chosen, calibrated)
    found = [group for trajectory in stage.groups("train") for group in trajectory.groups]
    assert len(found) == 142  # with and without a future
    wanted = []
    for shard in TrajectoryStage(chosen, calibrated).shards():
        if shard.startswith("train"):
            for group in Examples(run, shard).groups.values():
                future, pool = None if group.logprob is None else group.logprob[:, :8].mean(1), group.state.pool
                terms = calibration_terms(future, pool.llm_logprob, pool.slm_logprob)
                wanted.append((pool.ids, calibrated_target(terms, theta)))
    for group, (candidates, target) in zip(found, wanted, strict=True):
        assert torch.equal(group.candidates, candidates)
        torch.testing.assert_close(group.target[:, 0], target, rtol=1e-4, atol=1e-5)
