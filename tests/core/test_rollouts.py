"""Rollouts against naive decoding, agreement and advice against counting by hand, calibration from a run's files."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from runs import linked, settings
from typer.testing import CliRunner

from fb_core import TokenReranker, Verifier, statistics
from fb_core.calibrated import Calibration, Weights, calibrate, calibrated_target, calibration_terms
from fb_core.cli import app
from fb_core.demo.pairs import load_pair
from fb_core.experiment import recommendation as advising
from fb_core.experiment.recommendation import recommend
from fb_core.pool import Pool
from fb_core.stages.agreement import (
    AgreementStage,
    Judged,
    agreement_rows,
    agreement_table,
    coverage_rows,
    judge,
    judged_states,
)
from fb_core.stages.artefacts import Artefact
from fb_core.stages.calibration import CalibrationStage, read_weights
from fb_core.stages.examples import Examples, Rollout, State, Trajectory
from fb_core.stages.inputs import splits_of
from fb_core.stages.pools import part_of
from fb_core.stages.problems import Problem
from fb_core.stages.rollouts import RolloutStage, token_kind
from fb_core.stages.stage import run_stage
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


def rolled(problem, correct, sources=None, kind="word", **logprob):
    size = len(correct)
    bits = torch.tensor([3] * size if sources is None else sources, dtype=torch.int32)
    known = {"slm_logprob": torch.zeros(size), "llm_logprob": torch.zeros(size)} | logprob
    trajectory = Trajectory(Problem(problem, "", ""), torch.arange(3), 2, torch.zeros(1))
    state = State(trajectory, 2, 1.0, Pool(torch.arange(size), bits, **known))
    return Rollout(state, kind, torch.tensor(correct), [""] * size)


def judged(problem, correct, sources=None, kind="word", **scores):
    """Scores by name, each a list of one [K] a seed."""
    known = {name: [torch.tensor(one) for one in found] for name, found in scores.items()}
    logprob = {f"{name.lower()}_logprob": known[name][0].log_softmax(0) for name in ("SLM", "LLM") if name in known}
    return Judged(rolled(problem, correct, sources, kind, **logprob), known)


STATES = [
    judged(
        "a", [True, False, False], SLM=[[3.0, 2.0, 1.0]], LLM=[[1.0, 2.0, 1.0]], ours=[[3.0, 4.0, 1.0], [3.0, 2.0, 1.0]]
    ),
    judged("a", [True, True], SLM=[[0.0, 1.0]], LLM=[[0.0, 1.0]], ours=[[1.0, 0.0], [1.0, 0.0]]),
    judged("b", [False, True, True, False], kind="digit", SLM=[[2.0, 2.0, 1.0, 0.0]], LLM=[[0.0, 1.0, 2.0, 0.0]]),
    judged("c", [False, False], kind="digit", SLM=[[1.0, 0.0]], LLM=[[1.0, 0.0]], ours=[[1.0, 2.0], [1.0, 2.0]]),
]


def test_agreement_by_hand():
    rows = {(row["kind"], row["score"]): row for row in agreement_rows(STATES)}
    assert list(rows) == [(kind, score) for kind in ("all", "word", "digit") for score in ("SLM", "LLM", "ours")]
    everywhere = rows["all", "SLM"]
    assert {name: everywhere[name] for name in ("states", "mixed_states", "pairs", "problems")} == {
        "states": 4,
        "mixed_states": 2,
        "pairs": 2 + 4,
        "problems": 3,
    }
    # of problem b: (1 over 0) tied, (1 over 3) right, (2 over 0) wrong, (2 over 3) right
    assert everywhere["pairwise"] == statistics.share_interval([2, 2.5, 0], [2, 4, 0])
    assert everywhere["pairwise"].mean == pytest.approx(4.5 / 6)
    assert everywhere["top1"] == statistics.share_interval([2, 0, 0], [2, 1, 1])
    assert everywhere["top1_mixed"] == statistics.share_interval([1, 0, 0], [1, 1, 0])
    ours = rows["all", "ours"]  # the mean of two seeds, known at three states
    assert (ours["states"], ours["mixed_states"], ours["pairs"], ours["problems"]) == (3, 1, 2, 2)
    assert ours["pairwise"] == statistics.share_interval([1.5, 0], [2, 0])
    assert ours["top1"] == statistics.share_interval([1.5, 0], [2, 1])
    assert ours["top1_mixed"].mean == 0.5
    assert ours["top1_minus_slm"] == statistics.paired_share_interval([1.5, 0], [2, 0], [2, 1])
    assert ours["top1_minus_llm"].mean == pytest.approx(0.5 / 3)
    assert (everywhere["top1_minus_slm"], rows["all", "LLM"]["top1_minus_llm"]) == (None, None)
    assert everywhere["top1_minus_llm"] == statistics.paired_share_interval([2, 0, 0], [1, 1, 0], [2, 1, 1])
    assert agreement_rows(STATES, ["ours"]) == [row for row in rows.values() if row["score"] == "ours"]
    alone = rows["digit", "ours"]
    assert (alone["pairwise"], alone["top1_mixed"], alone["top1"].mean) == (None, None, 0.0)
    assert agreement_rows([]) == []


def test_coverage_by_hand():
    states = [
        judged("a", [True, False, False], [1, 1, 2]),
        judged("a", [False, False, True, True], [1, 1, 2, 2]),
        judged("b", [False, False, True], [3, 1, 1]),
        judged("b", [False, False], [3, 3]),
        judged("c", [True, True], [1, 2]),
    ]
    slm, llm, joint = coverage_rows(states)
    assert [row["pool"] for row in (slm, llm, joint)] == ["SLM", "LLM", "joint"]
    sizes = [(2 + 2 + 3 + 2 + 1) / 5, (1 + 2 + 1 + 2 + 1) / 5, (3 + 4 + 3 + 2 + 2) / 5]
    assert [row["mean_size"] for row in (slm, llm, joint)] == sizes
    assert slm["coverage"] == statistics.share_interval([1, 1, 1], [2, 2, 1])
    assert llm["coverage"] == statistics.share_interval([1, 0, 1], [2, 2, 1])
    assert joint["coverage"] == statistics.share_interval([2, 1, 1], [2, 2, 1])
    assert slm["coverage_mixed"] == statistics.share_interval([1, 1, 0], [2, 1, 0])
    assert llm["coverage_mixed"] == statistics.share_interval([1, 0, 0], [2, 1, 0])
    assert joint["coverage_mixed"].mean == 1.0
    assert {(row["states"], row["mixed_states"]) for row in (slm, llm, joint)} == {(5, 3)}
    assert coverage_rows([]) == []


def counted(states, name):
    """(agreeing, comparable, first right, first right of mixed, mixed) of a score, by counting."""
    agreeing = comparable = right = mixed_right = mixed = 0.0
    for state in states:
        outcome, score = state.rolled.correct.tolist(), state.scores[name][0].tolist()
        for a, b in itertools.permutations(range(len(outcome)), 2):
            if outcome[a] and not outcome[b]:
                comparable += 1
                agreeing += 1.0 if score[a] > score[b] else 0.5 if score[a] == score[b] else 0.0
        top = outcome[score.index(max(score))]
        right += top
        if len(set(outcome)) == 2:
            mixed, mixed_right = mixed + 1, mixed_right + top
    return agreeing, comparable, right, mixed_right, mixed


def test_agreement_of_a_run_is_what_counting_gives(run):
    states = judged_states(settings(), run)
    assert len(states) == 45
    rows = {row["score"]: row for row in agreement_rows(states) if row["kind"] == "all"}
    assert list(rows) == ["SLM", "LLM", "Direct-B_8"]  # no reranker was held against the rollouts
    for name, row in rows.items():
        members = [state for state in states if name in state.scores]
        agreeing, comparable, right, mixed_right, mixed = counted(members, name)
        assert (row["states"], row["pairs"], row["mixed_states"]) == (len(members), comparable, mixed)
        assert row["pairwise"].mean == pytest.approx(agreeing / comparable)
        assert row["top1"].mean == pytest.approx(right / len(members))
        assert row["top1_mixed"].mean == pytest.approx(mixed_right / mixed)
    assert rows["Direct-B_8"]["states"] == 37  # with a usable future
    by_kind = [row for row in agreement_rows(states) if row["score"] == "SLM" and row["kind"] != "all"]
    assert sum(row["states"] for row in by_kind) == 45
    first = next(state for state in states if "Direct-B_8" in state.scores)
    matrix = Examples(run, "validation-00000").groups[first.rolled.state.id].logprob
    assert first.scores["Direct-B_8"][0].tolist() == pytest.approx(matrix[:, :8].mean(1).tolist(), abs=1e-5)


@pytest.mark.parametrize("certainty", [None, 0.6])
def test_rerankers_are_held_against_the_rollouts_as_deployed(run, pair, tmp_path, certainty):
    place, shard = linked(run, tmp_path / "run", *TRAINED), "validation-00001"
    output = AgreementStage(settings(evaluate={"certainty": certainty}), place).work(shard)
    table = pq.read_table(io.BytesIO(output.files[f"{shard}.parquet"])).to_pylist()
    certain = 0
    for seed in (0, 1):
        reranker = TokenReranker.from_pretrained(run / "reranker" / f"seed-{seed}", pair.slm)
        for one, row in zip(Examples(run, shard).rollouts.values(), table, strict=True):
            state, llm = one.state, one.state.pool.llm_logprob
            wanted = reranker.scores(state.prefix, state.pool.ids)
            if certainty is not None and float(llm.max().exp()) > certainty:
                wanted, certain = llm, certain + 1
            assert row["state"] == state.id
            assert row[f"seed-{seed}"] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert bool(certain) == (certainty is not None)


def test_a_run_without_rollouts_or_scores_says_so(undisturbed, run, tmp_path):
    with pytest.raises(ValueError, match="expected finished rollouts, got none"):
        judge(settings(), undisturbed[0]["score"])
    place = linked(run, tmp_path / "run", "trajectories", "policy", "states", "futures", "rollouts")
    assert "Direct-B" not in judge(settings(), place)
    assert "| all | LLM |" in judge(settings(), place)
    with pytest.raises(ValueError, match="expected finished scores, got none"):
        recommend(settings(), place)


def advised(monkeypatch, run, states, chosen=None):
    monkeypatch.setattr(advising, "judged_states", lambda *_: states)
    return recommend(settings() if chosen is None else chosen, run)


def states_with(future, large, kind="word", problems=12, known=1.0, certain=0.0, name="p"):
    """States whose scores order their two candidates rightly in these shares of the problems.

    The target is known in the first `known` of them; the LLM is as good as certain in the last `certain` of them.
    """
    found = []
    for place in range(problems):
        sure = 9.0 if place >= (1 - certain) * problems else 0.1
        scores = {
            score: [[size, 0.0] if place < share * problems else [0.0, size]]
            for score, share, size in (("SLM", 0.5, 1.0), ("LLM", large, sure), ("Direct-B_8", future, 1.0))
        }
        if place >= known * problems:
            del scores["Direct-B_8"]
        found.append(judged(f"{name}{place}", [True, False], kind=kind, **scores))
    return found


def line(said, words):
    """The one sentence that begins so."""
    (found,) = [sentence for sentence in said if sentence.startswith(words)]
    return found


def test_advice_on_an_inverted_target(monkeypatch, run):
    said = advised(monkeypatch, run, states_with(future=0.0, large=0.5))
    assert line(said, "Direct-B_8").startswith(
        "Direct-B_8 ranks candidates in the wrong order: pairwise accuracy is 0% [0, 24] at the"
    )
    assert line(said, "Direct-B_8").endswith("Do not train on it alone.")
    assert not [sentence for sentence in said if "future: own" in sentence]  # nothing here is known of that recipe


def test_every_figure_rests_on_states_of_its_own(monkeypatch, run):
    """20 digit states of which two have a future: the target is right at both, which is next to nothing."""
    said = advised(monkeypatch, run, states_with(1.0, 0.3) + states_with(1.0, 0.9, "digit", 20, known=0.1, name="d"))
    digit = line(said, "At digit events (20 held-out states)")
    assert (
        "Direct-B_8 100% [34, 100] at the 2 states that have it, 55% [" in digit
    )  # and 18 pairs of one half in deployment
    assert "the LLM's own score 90% [" in digit
    assert digit.endswith("so the plain recipe decides there without having learned it.")
    word = line(said, "At word events (12 held-out states)")
    assert "Direct-B_8 100% [76, 100] at the 12 states that have it, 100% [76, 100] in deployment" in word
    assert "having learned" not in word
    assert not re.search(r"\b(\d+)% \[\1, \1\]", " ".join(said))  # nowhere an interval of no width


def test_what_is_trained_on_and_what_is_decided_are_told_apart(monkeypatch, run):
    states = states_with(1.0, 0.5, problems=50, known=0.94)
    states += states_with(1.0, 0.5, "digit", 36, known=5 / 36)
    assert advised(monkeypatch, run, states)[0] == (
        "52 of 86 admitted held-out states (60%) have a usable future: word 47 of 50 (94%), digit 5 of 36 (14%). "
        "Shares of the events trained on, and of those decided in deployment: word 90% and 58%, digit 10% and 42%."
    )


@pytest.mark.parametrize(("known", "deployed"), [(1.0, "100% [96, 100]"), (0.5, "75% [66, 82]"), (0.1, "55% [45, 64]")])
def test_pairs_without_a_future_count_half_in_deployment(monkeypatch, run, known, deployed):
    said = line(advised(monkeypatch, run, states_with(1.0, 0.5, problems=100, known=known)), "Direct-B_8")
    assert f" and {deployed} at all 100, where pairs without it count one half" in said
    assert ("is not significantly better than chance in deployment" in said) == (known == 0.1)


FEATURES_AND_OVERRIDE = (
    "Take candidate features with the override (train.features: [slm, llm, in_slm, in_llm, slm_certain, llm_certain], "
    "evaluate.certainty: 0.6). No other recipe is significantly better here: "
)


def test_features_with_the_override_are_advised_where_the_plain_recipe_has_not_learned(monkeypatch, run):
    """As at the low quantile of the plans: digits are rarely trained on, and at many of them the LLM is certain."""
    states = states_with(1.0, 0.6, problems=60, known=0.9)
    states += states_with(1.0, 1.0, "digit", 40, known=0.1, certain=0.9, name="d")
    chosen = settings(rollouts={"minimum_mixed": 1000})  # no calibration
    said = advised(monkeypatch, run, states, chosen)
    advised_here = line(said, "Take")
    assert advised_here.startswith(FEATURES_AND_OVERRIDE)
    gained = re.search(r"([+-]\d+) pp \[([+-]\d+), ([+-]\d+)\] against the plain recipe", advised_here)
    assert int(gained[1]) == 15  # of 36 of the digits, less half of 6 words
    assert int(gained[2]) > 0
    choices = line(
        said, "Choices that lead to success without later interventions, at all 100 admitted held-out states of 100"
    )
    assert "the plain recipe 79% [" in choices  # (54 + 6 / 2 + 4 + 36 / 2) of 100
    assert "candidate features with the override 9" in choices


def test_features_with_the_override_are_not_advised_where_they_do_harm(monkeypatch, run):
    """A certain LLM that is wrong, and a target that is right."""
    chosen = settings(rollouts={"minimum_mixed": 1000})
    said = advised(monkeypatch, run, states_with(1.0, 0.0, problems=60, certain=1.0), chosen)
    assert line(said, "Take").startswith(
        "Take the plain recipe (no options). It is significantly better here: +100 pp ["
    )
    few = advised(monkeypatch, run, states_with(1.0, 0.0, problems=2, certain=1.0), chosen)
    assert line(few, "Take").startswith(FEATURES_AND_OVERRIDE + "-100 pp [")  # two problems decide nothing


def test_a_calibration_is_advised_by_the_same_evidence(monkeypatch, run):
    """The SLM's own score is right where target and LLM are wrong, which the training states' rollouts know."""
    monkeypatch.setattr(
        advising, "calibrate", lambda *_, **__: Calibration(Weights(0, 0, 1, 0, 0, 0), 71, 40, 1.0, 0.5)
    )
    right = {"SLM": [[1.0, 0.0]], "LLM": [[0.0, 0.1]], "Direct-B_8": [[0.0, 1.0]]}
    states = [judged(f"p{place}", [True, False], **right) for place in range(40)]
    said = line(advised(monkeypatch, run, states), "Take")
    assert said.startswith(
        "Take the calibrated target with features and override (train.target: calibrated, here of 71 rolled-out "
        "training states, train.features: ["
    )
    assert "significantly better here: +100 pp [" in said
    assert "against candidate features with the override; " in said


@pytest.mark.parametrize(("share", "percent"), [(0.5, 50), (5 / 12, 42), (7 / 12, 58)])
def test_advice_on_an_undecided_target(monkeypatch, run, share, percent):
    said = line(advised(monkeypatch, run, states_with(share, 0.5)), "Direct-B_8")
    assert f"is not significantly better than chance in deployment: pairwise accuracy is {percent}% [" in said


def test_advice_where_nothing_can_be_compared(monkeypatch, run):
    alike = [judged("a", [True, True], SLM=[[1.0, 0.0]], LLM=[[1.0, 0.0]], **{"Direct-B_8": [[1.0, 0.0]]})]
    said = advised(monkeypatch, run, alike)
    assert line(said, "No held-out state has both").endswith("so nothing is known of Direct-B_8.")
    assert "At word events (1 held-out states), no pair of candidates differs in outcome." in said
    unscored = [judged("a", [True, False], SLM=[[1.0, 0.0]], LLM=[[1.0, 0.0]])]
    said = advised(monkeypatch, run, unscored)
    assert said[0].startswith("No held-out state has both")
    assert said[1].startswith(
        "At word events (1 held-out states), pairwise accuracy: Direct-B_8 unknown, the LLM's own score "
        "100% [21, 100], the SLM's 100%"
    )
    assert len(advised(monkeypatch, run, [])) == 2


def test_advice_counts_what_a_calibration_needs(monkeypatch, run):
    states = states_with(0.5, 0.5)
    needed = math.ceil(3 * 45 / 25)
    assert advised(monkeypatch, run, states)[-1] == (
        "A calibration needs 3 training states whose candidates differ in outcome. 25 of 45 held-out states are of "
        f"that kind, so about {needed} training states have to be rolled out, a share of {needed / 142:.2g} "
        "(rollouts.train is 0.5)."
    )
    many = settings(rollouts={"minimum_mixed": 100})
    assert advised(monkeypatch, run, states, many)[-1].endswith(
        "so about 180 training states have to be rolled out; there are only 142, so collect more."
    )


def test_the_command_shows_agreement_and_advises(run, tmp_path):
    place = linked(run, tmp_path / "run", *TRAINED)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(settings().model_dump(mode="json")))
    called = ["rollouts", "--config", str(config), "--run-dir", str(place), "--advise"]
    done = CliRunner().invoke(app, called, catch_exceptions=False)
    assert done.exit_code == 0
    assert agreement_table(settings(), place) in done.stdout
    assert "| all | FutureBridge |" in done.stdout
    sentences = [line.removeprefix("- ") for line in done.stdout.splitlines() if line.startswith("- ")]
    assert sentences == recommend(settings(), place)
    assert sentences[0].startswith("37 of 45 admitted held-out states (82%) have a usable future: ")
    assert line(sentences, "Direct-B_8 ")
    assert line(sentences, "Take ")
    assert sentences[-1].startswith("A calibration needs 3 training states")
    rows = {row["score"]: row for row in agreement_rows(judged_states(settings(), place)) if row["kind"] == "all"}
    assert rows["FutureBridge"]["states"] == 45
    assert rows["FutureBridge"]["pairs"] == rows["SLM"]["pairs"]


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
