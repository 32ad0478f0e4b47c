"""Agreement of scores with rollouts, and coverage of pools, against counting by hand."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from paper_runs import TRAINED, settings
from runs import linked
from typer.testing import CliRunner

from benchmarks.paper import intervals
from benchmarks.paper.__main__ import app
from benchmarks.paper.agreement import (
    AgreementStage,
    Judged,
    agreement_rows,
    agreement_table,
    coverage_rows,
    judge,
    judged_states,
)
from benchmarks.paper.rollouts import token_kind
from fb_core import TokenReranker
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline.problems import Problem
from fb_core.apps.pipeline.records import Examples, LoggedState, Rollout, Trajectory
from fb_core.events import Pool


@pytest.fixture(scope="module")
def pair():
    return load_pair("plans")


@pytest.fixture(scope="module")
def run(trained) -> Path:
    return trained


def rolled(problem, correct, sources=None, **logprob):
    size = len(correct)
    bits = torch.tensor([3] * size if sources is None else sources, dtype=torch.int32)
    known = {"slm_logprob": torch.zeros(size), "llm_logprob": torch.zeros(size)} | logprob
    trajectory = Trajectory(Problem(problem, "", ""), torch.arange(3), 2, torch.zeros(1))
    state = LoggedState(trajectory, 2, 1.0, Pool(torch.arange(size), bits, **known))
    return Rollout(state, torch.tensor(correct), [""] * size)


def judged(problem, correct, sources=None, kind="word", **scores):
    """Scores by name, each a list of one [K] a seed."""
    known = {name: [torch.tensor(one) for one in found] for name, found in scores.items()}
    logprob = {f"{name.lower()}_logprob": known[name][0].log_softmax(0) for name in ("SLM", "LLM") if name in known}
    return Judged(rolled(problem, correct, sources, **logprob), kind, known)


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
    assert list(rows) == [
        (kind, score) for kind in ("all", "matched", "word", "digit") for score in ("SLM", "LLM", "ours")
    ]
    assert [rows["matched", score]["states"] for score in ("SLM", "LLM", "ours")] == [3, 3, 3]  # all but b's
    assert rows["matched", "ours"] == rows["all", "ours"] | {"kind": "matched"}
    everywhere = rows["all", "SLM"]
    assert {name: everywhere[name] for name in ("states", "mixed_states", "pairs", "problems")} == {
        "states": 4,
        "mixed_states": 2,
        "pairs": 2 + 4,
        "problems": 3,
    }
    # of problem b: (1 over 0) tied, (1 over 3) right, (2 over 0) wrong, (2 over 3) right
    assert everywhere["pairwise"] == intervals.share_interval([2, 2.5, 0], [2, 4, 0])
    assert everywhere["pairwise"].mean == pytest.approx(4.5 / 6)
    assert everywhere["top1"] == intervals.share_interval([2, 0, 0], [2, 1, 1])
    assert everywhere["top1_mixed"] == intervals.share_interval([1, 0, 0], [1, 1, 0])
    ours = rows["all", "ours"]  # the mean of two seeds, known at three states
    assert (ours["states"], ours["mixed_states"], ours["pairs"], ours["problems"]) == (3, 1, 2, 2)
    assert ours["pairwise"] == intervals.share_interval([1.5, 0], [2, 0])
    assert ours["top1"] == intervals.share_interval([1.5, 0], [2, 1])
    assert ours["top1_mixed"].mean == 0.5
    assert ours["top1_minus_slm"] == intervals.paired_share_interval([1.5, 0], [2, 0], [2, 1])
    assert ours["top1_minus_llm"].mean == pytest.approx(0.5 / 3)
    assert (everywhere["top1_minus_slm"], rows["all", "LLM"]["top1_minus_llm"]) == (None, None)
    assert everywhere["top1_minus_llm"] == intervals.paired_share_interval([2, 0, 0], [1, 1, 0], [2, 1, 1])
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
    assert slm["coverage"] == intervals.share_interval([1, 1, 1], [2, 2, 1])
    assert llm["coverage"] == intervals.share_interval([1, 0, 1], [2, 2, 1])
    assert joint["coverage"] == intervals.share_interval([2, 1, 1], [2, 2, 1])
    assert slm["coverage_mixed"] == intervals.share_interval([1, 1, 0], [2, 1, 0])
    assert llm["coverage_mixed"] == intervals.share_interval([1, 0, 0], [2, 1, 0])
    assert joint["coverage_mixed"].mean == 1.0
    assert {(row["states"], row["mixed_states"]) for row in (slm, llm, joint)} == {(5, 3)}
    assert coverage_rows([]) == []


def test_agreement_of_a_run_is_what_counting_gives(run):
    states = judged_states(settings(), run)
    assert len(states) == 45
    rows = {row["score"]: row for row in agreement_rows(states) if row["kind"] == "all"}
    assert list(rows) == ["SLM", "LLM", "Direct-B_8"]  # no reranker was held against the rollouts
    assert rows["Direct-B_8"]["states"] == 37  # with a usable future
    assert {row["states"] for row in agreement_rows(states) if row["kind"] == "matched"} == {37}
    by_kind = [row for row in agreement_rows(states) if row["score"] == "SLM" and row["kind"] not in ("all", "matched")]
    assert sum(row["states"] for row in by_kind) == 45
    first = next(state for state in states if "Direct-B_8" in state.scores)
    matrix = Examples(run, "validation-00000").groups[first.rolled.state.id].logprob
    assert first.scores["Direct-B_8"][0].tolist() == pytest.approx(matrix[:, :8].mean(1).tolist(), abs=1e-5)


def test_rerankers_are_held_against_the_rollouts(run, pair, tmp_path):
    place, shard = linked(run, tmp_path / "run", *TRAINED), "validation-00001"
    output = AgreementStage(settings(), place).work(shard)
    table = pq.read_table(io.BytesIO(output.files[f"{shard}.parquet"])).to_pylist()
    for seed in (0, 1):
        reranker = TokenReranker.from_pretrained(run / "reranker" / f"seed-{seed}", pair.slm)
        for one, row in zip(Examples(run, shard).rollouts("held-out-rollouts").values(), table, strict=True):
            wanted = reranker.scores(one.state.prefix, one.state.pool.ids)
            assert row["state"] == one.state.id
            assert row[f"seed-{seed}"] == pytest.approx(wanted.tolist(), abs=1e-4)


def test_a_run_without_rollouts_or_scores_says_so(undisturbed, run, tmp_path):
    with pytest.raises(ValueError, match="expected finished held-out-rollouts, got none"):
        judge(settings(), undisturbed[0]["score"])
    place = linked(run, tmp_path / "run", "trajectories", "policy", "states", "futures", "held-out-rollouts")
    assert "Direct-B" not in judge(settings(), place)
    assert "| LLM | all |" in judge(settings(), place)


def test_the_command_shows_agreement(run, tmp_path):
    place = linked(run, tmp_path / "run", *TRAINED)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(settings().model_dump(mode="json")))
    called = ["rollouts", "--config", str(config), "--run-dir", str(place)]
    done = CliRunner().invoke(app, called, catch_exceptions=False)
    assert done.exit_code == 0
    assert agreement_table(settings(), place) in done.stdout
    assert "| reranker | all |" in done.stdout
    rows = {row["score"]: row for row in agreement_rows(judged_states(settings(), place)) if row["kind"] == "all"}
    assert rows["reranker"]["states"] == 45
    assert rows["reranker"]["pairs"] == rows["SLM"]["pairs"]


def test_kinds_of_tokens():
    kinds = {
        "word": ("so ", " Then", "über"),
        "digit": ("7", " 12,", "x2", "²"),
        "mark": ("=", "\\boxed{", "don't", "", "\n\n", "�"),
    }
    assert {kind: tuple(text for text in texts if token_kind(text) == kind) for kind, texts in kinds.items()} == kinds
