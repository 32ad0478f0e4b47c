"""Rollouts against naive decoding, and the share of the states that is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import linked, settings

from fb_core import Verifier
from fb_core.demo.pairs import load_pair
from fb_core.stages.files import Artefact
from fb_core.stages.models import splits_of
from fb_core.stages.records import Examples
from fb_core.stages.rollouts import RolloutStage, token_kind
from fb_core.stages.run import run_stage
from fb_core.stages.scores import part_of


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
    counts = manifest["counts"]
    assert counts["train states"] + counts["validation states"] == len(fifth)
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
