"""Rollouts against naive decoding, and the share of the states that is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import linked, settings

from fb_core import Verifier
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import splits_of
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.pipeline.rollouts import RolloutStage
from fb_core.apps.pipeline.run import run_stage
from fb_core.apps.pipeline.scores import reduce_pool


@pytest.fixture(scope="module")
def run(undisturbed, tmp_path_factory) -> Path:
    """All training states are rolled out."""
    return rolled_out(undisturbed[0]["collect"], {"train": 1.0}, tmp_path_factory.mktemp("rollouts"))


def rolled_out(run, changes, folder):
    folder = linked(run, folder, "trajectories", "policy", "states")
    run_stage(RolloutStage(settings(rollouts=changes), folder))
    return folder


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
    shard, end = "train-00000", pair.slm.config.eos_token_id
    examples = Examples(run, shard)
    assert list(examples.rollouts()) == list(examples.states)  # a share of 1
    problems = splits_of(settings().problems)["train"]
    assert [one.problem for one in examples.trajectories.values()] == problems[:6]
    rolled = list(examples.rollouts().values())
    decode = pair.world.tokenizer.decode
    outcomes = []
    with Verifier(workers=1) as verifier:
        for one in rolled[::5]:
            owner, pool = one.state.trajectory, reduce_pool(examples.states[one.state.id].pool, 3)
            assert one.state.pool.ids.tolist() == pool.ids.tolist()
            assert one.state.pool.sources.tolist() == pool.sources.tolist()
            assert torch.equal(one.state.pool.llm_logprob, pool.llm_logprob)
            prefix = owner.tokens[: one.state.position]
            logprob = logits(pair.slm, prefix).log_softmax(-1)
            torch.testing.assert_close(one.state.pool.slm_logprob, logprob[pool.ids], rtol=1e-4, atol=1e-4)
            for candidate, correct, text in zip(pool.ids.tolist(), one.correct.tolist(), one.texts, strict=True):
                tokens = torch.cat([prefix, torch.tensor([candidate])])
                new = [] if candidate == end else naive(pair.slm, tokens, 45, end)
                written = [*tokens[owner.prompt_length :].tolist(), *new]
                assert text == decode(written, skip_special_tokens=True)
                verdict = verifier.verify_many([text], [owner.problem.answer], bad_golds="unparsable")[0]
                assert correct == (verdict == "correct")
                outcomes.append(correct)
    assert set(outcomes) == {True, False}


def states_in(run):
    return {state for shard in Artefact(run, "rollouts").shards() for state in Examples(run, shard).rollouts()}


def test_the_share_of_training_states_is_drawn_by_the_seed(run, tmp_path):
    everything = states_in(run)
    half = states_in(rolled_out(run, {"train": 0.5}, tmp_path / "half"))
    fifth = states_in(rolled_out(run, {"train": 0.2}, tmp_path / "fifth"))
    other = states_in(rolled_out(run, {"train": 0.2, "seed": 1}, tmp_path / "other"))
    assert fifth < half < everything  # a larger share has the states of a smaller one
    assert len(half) == pytest.approx(71, abs=20)
    assert other != fifth
    assert not other <= half
    manifest = Artefact(tmp_path / "fifth", "rollouts").finished()
    assert manifest["counts"]["states"] == len(fifth) == pytest.approx(0.2 * len(everything), abs=16)
    assert all(shard.startswith("train") for shard in manifest["shards"])
