"""The demo end to end at a small size: what it writes, and that it answers to what it is given."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import numpy as np
import pytest
import torch

from fb_core import FutureBridgeSelector, RandomChoice, RequestPolicy, TokenReranker, statistics
from fb_core.config import DemoSettings, WorldSettings
from fb_core.demo import pairs, report
from fb_core.demo.experiment import WorldRun, _agreement, cross_state, run_world
from fb_core.demo.run import run_demo
from fb_core.pool import Pool
from fb_core.stages.examples import Future, State, Trajectory
from fb_core.stages.problems import Problem
from fb_core.verify import Verifier


def small(**changes):
    values = {
        "name": "plans",
        "quantile": 0.94,
        "train_problems": 40,
        "validation_problems": 20,
        "test_problems": 24,
        "sweep": (0.9,),
    }
    return WorldSettings(**{**values, **changes})


@pytest.fixture(scope="module")
def plans():
    return pairs.load_pair("plans")


@pytest.fixture(scope="module")
def two_seeds(plans):
    runs = []
    for seed in (0, 1):
        settings = DemoSettings(seed=seed, worlds=(small(),))
        runs.append(run_world(plans, settings, settings.worlds[0], lambda *_: None))
    return runs


@pytest.mark.slow
def test_two_seeds_give_different_rows_and_the_same_methods(two_seeds):
    first, second = two_seeds
    assert [row["method"] for row in first["accuracy"]] == [row["method"] for row in second["accuracy"]]
    assert [row["accuracy"] for row in first["accuracy"]] != [row["accuracy"] for row in second["accuracy"]]
    assert first["threshold_nats"] != second["threshold_nats"]


@pytest.mark.slow
def test_every_promised_row_is_there(two_seeds):
    result = two_seeds[0]
    methods = {row["method"] for row in result["accuracy"]}
    assert methods == {
        "SLM greedy",
        "Maj@8",
        "random pick",
        "S2T",
        "direct LLM score",
        "FutureBridge",
        "FutureBridge, SLM pool",
        "FutureBridge, LLM pool",
        "FutureBridge, cross-state future",
        "FutureBridge, H = 4",
        "FutureBridge + certain LLM",
        "Takeover",
    }
    for row in result["accuracy"]:
        mean, low, high = row["accuracy"]
        assert 0 <= low <= mean <= high <= 100
    assert {row["score"] for row in result["agreement"]} == {"SLM", "LLM", "Direct-B_4", "Direct-B_16", "FutureBridge"}
    assert [row["pool"] for row in result["coverage"]] == ["SLM", "LLM", "joint"]
    assert [row["quantile"] for row in result["sweep"]] == [0.9, 0.94]
    assert sum(part["events"] for part in result["agreement_by_kind"].values()) == result["agreement"][0]["states"]
    joint = result["coverage"][2]
    assert all(joint["coverage_percent"] >= row["coverage_percent"] for row in result["coverage"])
    takeover = next(row for row in result["accuracy"] if row["method"] == "Takeover")
    assert takeover["accuracy"][0] >= 90


@pytest.mark.slow
def test_report_and_plots_are_written(tmp_path, capsys):
    settings = DemoSettings(seed=3, worlds=(small(test_problems=8), small(name="control", horizon=16, sweep=())))
    results = run_demo(settings, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["worlds"] == json.loads(json.dumps(results["worlds"]))
    text = (tmp_path / "report.md").read_text()
    assert text == report.markdown(written)
    for words in (
        "World: plans",
        "World: control",
        "Pool coverage",
        "By kind of event",
        "Wall time",
        "One event in full",
    ):
        assert words in text
    for name in ("accuracy.png", "agreement.png", "sweep.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "plans world" in capsys.readouterr().out


@pytest.mark.slow
def test_random_reranker_falls_to_the_random_pick(plans):
    """Nothing but what was learned lifts FutureBridge: random weights choose as well as a random pick does."""
    torch.manual_seed(0)
    settings = DemoSettings(worlds=(small(test_problems=300),))
    with Verifier() as verifier:
        run = WorldRun(plans, settings, settings.worlds[0], verifier, lambda *_: None)
        test = run.problems("test", 300)
        policy = RequestPolicy(1.7)
        random = [run.evaluate("", run.decoder(RandomChoice(s), policy).generate_many, test).correct for s in range(3)]
        blank = []
        for _ in range(3):
            reranker = TokenReranker.from_base(plans.slm)
            with torch.no_grad():
                for parameter in reranker.parameters():
                    if parameter.requires_grad:
                        parameter.normal_(std=0.5)
            blank.append(
                run.evaluate("", run.decoder(FutureBridgeSelector(reranker), policy).generate_many, test).correct
            )
    difference = statistics.paired_interval(np.mean(blank, 0), np.mean(random, 0))
    assert abs(difference.mean) < 0.1
    assert np.mean(blank) < 0.85


def test_only_base_weights_ship():
    with resources.as_file(resources.files("fb_core.demo") / "weights") as folder:
        files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert {path.name for path in files} <= {"model.safetensors", "config.json", "generation_config.json"}
    assert not [path for path in files if "adapter" in path.name or "reranker" in path.name]
    assert sum(path.stat().st_size for path in files) < 6 << 20


def state(problem):
    """A state of the problem of that number."""
    trajectory = Trajectory(Problem(str(problem), "", ""), torch.arange(3), 1, torch.zeros(2))
    none = torch.zeros(0)
    return State(trajectory, 1, 0.0, Pool(none.long(), none.int(), none, none))


def test_cross_state_futures_come_from_other_problems():
    futures = [Future(state(i // 3), 0, torch.tensor([i]), "correct") for i in range(30)]
    moved = cross_state(futures, 0)
    assert sorted(int(one.tokens) for one in moved) == list(range(30))
    for one, before in zip(moved, futures, strict=True):
        assert one.state is before.state
        assert str(int(one.tokens) // 3) != one.state.trajectory.problem.id


def test_settings_are_checked():
    with pytest.raises(ValueError, match="short_horizon"):
        small(short_horizon=20)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        small(quantile=1.5)
    with pytest.raises(ValueError, match="Extra inputs"):
        small(nonsense=1)


SWEPT = ["direct LLM score", "FutureBridge", "FutureBridge + certain LLM"]


def made_up(*names):
    """Results of worlds that share some methods, and come in other orders of accuracy."""

    def world(place, name):
        methods = ["SLM greedy", *SWEPT, *(["FutureBridge, own future"] if place else [])]
        means = {method: 90.0 - 20 * ((row + place) % 3) for row, method in enumerate(methods)}
        spans = {method: [mean, mean - 4, mean + 5] for method, mean in means.items()}
        return {
            "world": name,
            "accuracy": [{"method": method, "n": 400, "accuracy": span} for method, span in spans.items()],
            "agreement": [
                {"score": "SLM", "pairwise_percent": [52.0, 40.0, 65.0]},
                {"score": "Direct-B_4", "pairwise_percent": None},  # known nowhere
                {"score": "FutureBridge", "pairwise_percent": [82.0, 70.0, 90.0]},
            ],
            "sweep": [
                {"quantile": quantile, "accuracy": {method: spans[method] for method in SWEPT}}
                for quantile in ((0.9, 0.92), (0.9, 0.92, 0.94, 0.96))[place]
            ],
        }

    return {"worlds": [world(place, name) for place, name in enumerate(names)]}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The demo's figures by the names of their files, laid out."""
    found = {}

    def kept(figure, path):
        figure.canvas.draw()
        found[path.name] = figure
        return path

    monkeypatch.setattr(report, "_save", kept)
    assert [path.name for path in report.plots(made_up("plans", "control"), tmp_path)] == list(found)
    return found


def test_methods_stand_in_one_order_in_all_panels(drawn):
    axes, panels = drawn["accuracy.png"].axes, []
    labels = [text.get_text() for text in axes[0].get_yticklabels()]
    assert labels == ["SLM greedy", *SWEPT, "FutureBridge, own future"]
    assert axes[0].get_shared_y_axes().joined(*axes)
    for axis in axes:
        panels.append({bar.get_y() + bar.get_height() / 2: round(bar.get_width()) for bar in axis.patches})
    assert panels == [{0: 90, 1: 70, 2: 50, 3: 90}, {0: 70, 1: 50, 2: 90, 3: 70, 4: 50}]
    assert all(axis.yaxis_inverted() for axis in axes)


def test_agreement_has_its_intervals(drawn):
    for axis in drawn["agreement.png"].axes:
        (errors,) = [one for one in axis.containers if one.__class__.__name__ == "ErrorbarContainer"]
        ends = sorted(tuple(segment[:, 0]) for segment in errors.lines[2][0].get_segments())
        assert ends == [(40.0, 65.0), (70.0, 90.0)]
        assert [text.get_text() for text in axis.get_yticklabels()] == ["SLM", "FutureBridge"]


def test_labels_of_the_sweep_do_not_overlap(drawn):
    figure = drawn["sweep.png"]
    for axis, wanted in zip(figure.axes, (["0.9", "0.92"], ["0.9", "0.92", "0.94", "0.96"]), strict=True):
        labels = [text for text in axis.get_xticklabels() if text.get_text()]
        assert [text.get_text() for text in labels] == wanted
        boxes = [text.get_window_extent(figure.canvas.get_renderer()) for text in labels]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_agreement_of_the_demo_is_by_problem():
    """Two problems, one with a state and one with two: 1 of 1 and 3 of 4 pairs."""
    outcomes = [torch.tensor([True, False]), torch.tensor([True, False, False]), torch.tensor([True, False, False])]
    scores = {0: torch.tensor([1.0, 0.0]), 1: torch.tensor([2.0, 1.0, 0.0]), 2: torch.tensor([1.0, 2.0, 0.0])}
    row = _agreement("s", scores, outcomes, [state(0), state(1), state(1)], range(3))
    wanted = statistics.share_interval([1, 3], [1, 4])
    assert row["pairwise_percent"] == [round(100 * part, 1) for part in wanted]
    assert (row["pairs"], row["states"], row["mixed_states"], row["top1_percent"]) == (5, 3, 3, 66.7)
    assert _agreement("s", {}, outcomes, [state(0)] * 3, range(3))["pairwise_percent"] is None
