"""The demo end to end at a small size: what it writes, and that it answers to what it is given."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest
import torch

from fb_core import FutureBridgeSelector, RandomChoice, RequestPolicy, TokenReranker, statistics
from fb_core.config import DemoSettings, WorldSettings
from fb_core.demo import pairs, report
from fb_core.demo.experiment import WorldRun, cross_state, run_world
from fb_core.demo.run import run_demo
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


def test_cross_state_futures_come_from_other_problems():
    class State:
        def __init__(self, trajectory):
            self.trajectory = trajectory

    states = [State(i // 3) for i in range(30)]
    futures = [torch.tensor([i]) for i in range(30)]
    moved = cross_state(states, futures, 0)
    assert sorted(int(f) for f in moved) == list(range(30))
    assert all(int(f) // 3 != state.trajectory for f, state in zip(moved, states, strict=True))


def test_settings_are_checked():
    with pytest.raises(ValueError, match="short_horizon"):
        small(short_horizon=20)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        small(quantile=1.5)
    with pytest.raises(ValueError, match="Extra inputs"):
        small(nonsense=1)
