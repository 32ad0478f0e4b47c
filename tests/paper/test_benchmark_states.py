"""The states of benchmark problems: against the functions in memory, never before the choice, and as reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from paper_runs import TRAINED, settings
from report_runs import rows_of, section
from runs import contents, linked, receipts
from typer.testing import CliRunner

from benchmarks.paper.__main__ import app
from benchmarks.paper.agreement import agreement_rows, agreement_table, coverage_rows, judged_states
from benchmarks.paper.benchmark_states import benchmark_runs, judge_benchmarks
from benchmarks.paper.gather import gather
from benchmarks.paper.report import render
from fb_core import RequestPolicy
from fb_core.apps.pipeline import models
from fb_core.apps.pipeline.commands import run_command
from fb_core.apps.pipeline.models import chosen_reranker, frozen_policy, models_of, read_problems
from fb_core.apps.pipeline.problems import draw_problems
from fb_core.apps.pipeline.records import Examples

CHOSEN = settings(experiment={"benchmark_problems": 5})
FOLDER = "benchmark-demo-plans"


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def run(trained, once) -> Path:
    def make(folder):
        judge_benchmarks(CHOSEN, linked(trained, folder / "run", *TRAINED), show=quiet)

    return once("tested", make) / "run"


def test_states_are_those_that_the_slms_greedy_output_admits(run):
    problems, models = draw_problems(read_problems("demo:plans", 9, "test", 0), 5, 0), models_of(CHOSEN.models)
    examples, policy = Examples(run / FOLDER, "validation-00000"), frozen_policy(run)
    assert [one.problem for one in examples.trajectories.values()] == problems
    assert len(problems) == 5
    assert frozen_policy(run / FOLDER) == policy
    prompts = models.prompts(problems, CHOSEN.problems)
    for prompt, output, one in zip(
        prompts, models.local_slm.complete_many(prompts, 45), examples.trajectories.values(), strict=True
    ):
        assert one.tokens.tolist() == [*prompt.tolist(), *output.tolist()]
        asked = [one.prompt_length + step for step in policy.asks(one.entropy).nonzero().flatten().tolist()[:8]]
        assert [state.position for state in examples.states.values() if state.trajectory is one] == asked
    assert len(examples.states) > 5
    assert set(examples.futures()) == set(examples.states) == set(examples.rollouts("held-out-rollouts"))
    assert examples.groups


def test_the_chosen_rerankers_are_held_against_them(run):
    states = judged_states(CHOSEN, run / FOLDER)
    for seed in (0, 1):
        reranker = chosen_reranker(CHOSEN, run, seed)
        for state in states:
            one = state.rolled.state
            scores = reranker.scores(one.prefix, one.pool.ids)
            torch.testing.assert_close(state.scores["reranker"][seed], scores.detach(), rtol=1e-4, atol=1e-4)


def test_no_test_problem_is_read_before_the_choice(tmp_path, monkeypatch):
    roles: list[str] = []
    plain = models.read_problems
    monkeypatch.setattr(models, "read_problems", lambda *given: roles.append(given[2]) or plain(*given))
    models._benchmark_problems.cache_clear()
    models.splits_of.cache_clear()
    place = tmp_path / "run"
    for command in ("collect", "futures", "score", "train"):
        run_command(command, CHOSEN, place, show=quiet)
        if command != "train":
            judge_benchmarks(CHOSEN, place, show=quiet)
    assert set(roles) == {"train"}
    assert not (place / FOLDER).exists()
    judge_benchmarks(CHOSEN, place, show=quiet)
    assert "test" in roles
    before, made = contents(place), receipts(place)
    judge_benchmarks(CHOSEN, place, show=quiet)  # nothing is left to do
    assert (contents(place), receipts(place)) == (before, made)
    few = settings(experiment={"benchmark_problems": 4})
    with pytest.raises(ValueError, match=r"experiment\.benchmark_problems 5, got 4"):
        judge_benchmarks(few, place, show=quiet)
    shutil.rmtree(place / FOLDER)
    judge_benchmarks(settings(experiment={"benchmark_problems": 0}), place, show=quiet)
    assert not (place / FOLDER).exists()


def test_they_stand_beside_the_validation_problems(run, tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(CHOSEN.model_dump(mode="json")))
    called = ["rollouts", "--config", str(config), "--run-dir", str(run)]
    done = CliRunner().invoke(app, called, catch_exceptions=False)
    ((chosen, folder),) = benchmark_runs(CHOSEN, run).values()
    assert agreement_table(CHOSEN, run) in done.stdout
    assert f"**agreement on demo:plans**\n\n{agreement_table(chosen, folder)}" in done.stdout
    found, states = gather(CHOSEN, run), judged_states(chosen, folder)
    rows = [row for row in found.parts["agreement"] if row["where"] == "demo:plans"]
    assert rows == [{"where": "demo:plans", **row} for row in agreement_rows(states)]
    assert {"SLM", "LLM", "Direct-B_8", "reranker"} == {row["score"] for row in rows}
    known = [("validation", judged_states(CHOSEN, run)), ("demo:plans", states)]
    assert found.parts["coverage"] == [{"where": name, **row} for name, of in known for row in coverage_rows(of)]
    shown = section(render([found], {}), "Agreement with rollouts")
    assert {("reranker", "validation"), ("reranker", "demo:plans")} <= {
        (row["score"], row["where"]) for row in rows_of(shown)
    }
    assert "At all events, demo:plans." in shown


def test_a_benchmark_without_an_admitted_state_has_no_rows(trained, tmp_path, monkeypatch):
    place = linked(trained, tmp_path / "run", *TRAINED)
    monkeypatch.setattr("fb_core.apps.pipeline.collect.frozen_policy", lambda run: RequestPolicy(99.0))
    judge_benchmarks(CHOSEN, place, show=quiet)
    ((chosen, folder),) = benchmark_runs(CHOSEN, place).values()
    assert judged_states(chosen, folder) == []
    assert {row["where"] for row in gather(CHOSEN, place).parts["agreement"]} == {"validation"}


def test_two_benchmarks_have_two_folders(run):
    both = settings(evaluate={"benchmarks": ["data/a.jsonl", "data-a.jsonl"]}, experiment={"benchmark_problems": 5})
    with pytest.raises(ValueError, match=r"benchmarks: expected names that differ, got 'data-a\.jsonl' again"):
        benchmark_runs(both, run)
