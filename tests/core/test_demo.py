"""The demo at a small size: what it writes, and that it goes on where it was."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from limits import HANG
from runs import children_of, ended, receipts, settings
from warm import context

from fb_core import CollaborativeDecoder, FutureBridgeSelector, RandomChoice, RequestPolicy, TokenReranker
from fb_core.apps.cli import demo as run
from fb_core.apps.cli.demo import demo_settings, run_demo
from fb_core.apps.demo import SETTINGS, pairs
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.evaluate import PAGE
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import LABELS
from fb_core.apps.settings.run import RunSettings
from fb_core.verify.verifier import Verifier

METHODS = [label for name, label in LABELS.items() if name != "deployed"]  # the small runs choose no recipe
FILES = {"results.json", "accuracy.png"}


def small(seed, world="plans"):
    """Some 40 problems of a world."""
    pair, longest = f"demo:{world}", pairs.WORLDS[world].max_new_tokens
    return settings(
        models={"slm": pair, "llm": pair},
        problems={"train": pair, "seed": seed, "per_shard": 20},
        collect={"max_new_tokens": longest},
        futures={"max_new_tokens": longest},
        train={"seeds": [seed], "epochs": 1},
        evaluate={"benchmarks": [pair], "limit": 24, "max_new_tokens": longest, "per_shard": 24},
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(folder, rows by world, settings by world) of two worlds."""
    out = tmp_path_factory.mktemp("demo")
    worlds = {"plans": small(0), "control": small(0, "control")}
    return out, run_demo(worlds, out), worlds


@pytest.mark.slow
def test_every_promised_row_is_there_with_results_a_picture_and_a_solved_problem(demo):
    out, found, worlds = demo
    assert list(found) == list(worlds)
    for rows in found.values():
        assert [row["method"] for row in rows] == METHODS
        for row in rows:
            mean, low, high = row["accuracy"]
            assert 0 <= low <= mean <= high <= 1
            assert row["problems"] == 24
    assert {path.name for path in out.iterdir()} == FILES | {"runs"}
    assert {path.name for path in (out / "runs").iterdir()} == {"plans-seed-0", "control-seed-0"}
    assert json.loads((out / "results.json").read_bytes()) == found
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert all(label in (out / "runs" / "plans-seed-0" / PAGE).read_text() for label in METHODS)


@pytest.mark.slow
def test_a_second_call_makes_nothing_anew(demo, capsys):
    out, found, worlds = demo
    before, files = receipts(out / "runs"), {name: (out / name).read_bytes() for name in FILES}
    assert len(before) == 40
    assert run_demo(worlds, out) == found
    assert receipts(out / "runs") == before
    assert {name: (out / name).read_bytes() for name in files} == files
    shown = capsys.readouterr().out
    assert "Direct LLM score" in shown
    assert "Event 1: step" in shown
    assert str(out / "accuracy.png") in shown.replace("\n", "")


@pytest.mark.slow
def test_two_seeds_give_different_rows_of_the_same_methods(demo):
    out, found, _ = demo
    (second,) = run_demo({"plans": small(1)}, out).values()
    assert [row["method"] for row in second] == METHODS
    assert second != found["plans"]
    assert (out / "runs" / "plans-seed-1").is_dir()


@pytest.mark.slow
@pytest.mark.sweep
def test_a_broken_off_demo_goes_on(tmp_path):
    chosen, out = small(0), tmp_path / "out"
    process = context().Process(target=run_demo, args=({"plans": chosen}, out))
    process.start()
    place = out / "runs" / "plans-seed-0"
    try:
        while not (place / "states" / "manifest.json").exists():
            assert process.is_alive()
            time.sleep(0.05)
        workers = {worker for server in children_of(process.pid) for worker in children_of(server)}
        assert workers
    finally:
        process.kill()
        process.join()
    deadline = time.monotonic() + HANG
    while not all(map(ended, workers)):  # nobody is left that holds a folder
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = receipts(place)
    assert before
    (found,) = run_demo({"plans": chosen}, out).values()
    assert [row["method"] for row in found] == METHODS
    after = receipts(place)
    assert {path: after[path] for path in before} == before
    assert before.keys() < after.keys()


@pytest.mark.slow
def test_random_reranker_falls_to_the_random_pick():
    """Nothing but what was learned lifts the reranker: random weights choose as well as a random pick does."""
    torch.manual_seed(0)
    pair = pairs.load_pair("plans")
    problems = pair.world.problems(300, 0, "test")
    prompts = [torch.tensor(problem.prompt_ids) for problem in problems]

    def correct(selector):
        decoder = CollaborativeDecoder(
            pair.slm, pair.llm, selector, RequestPolicy(1.7), slm_k=4, llm_k=4, tokenizer=pair.world.tokenizer
        )
        texts = [one.text for one in decoder.generate_many(prompts, pair.world.max_new_tokens)]
        verdicts = verifier.verify_many(texts, [problem.answer for problem in problems])
        return np.array([verdict == "correct" for verdict in verdicts])

    def blank():
        reranker = TokenReranker.from_base(pair.slm)
        with torch.no_grad():
            for parameter in reranker.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.5)
        return FutureBridgeSelector(reranker)

    with Verifier() as verifier:
        random = [correct(RandomChoice(seed)) for seed in range(3)]
        blanks = [correct(blank()) for _ in range(3)]
    difference = statistics.average_interval([np.mean(blanks, 0)], [np.mean(random, 0)])
    assert abs(difference.mean) < 0.1
    assert np.mean(blanks) < 0.85


def test_the_demo_is_the_shipped_settings_with_one_reranker():
    for name, chosen in demo_settings(5).items():
        shipped, values = RunSettings.load(SETTINGS[name]), json.loads(chosen.model_dump_json())
        assert (values["problems"].pop("seed"), values["train"].pop("seeds")) == (5, [5])
        assert values["train"].pop("horizons") == [shipped.score.horizon]
        for section, value in values.items():
            assert value.items() <= json.loads(shipped.model_dump_json())[section].items(), section


def test_retrained_pairs_are_checkpoints_like_others(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(pairs, "retrain", lambda folder, worlds, progress: made.append((folder, worlds)))
    found = run._retrain(demo_settings(0), tmp_path)
    assert made == [(tmp_path, {"plans", "helpful", "control"})]
    places = {name: (one.models.slm, one.models.llm) for name, one in found.items()}
    assert places["control"] == (str(tmp_path / "style-slm"), str(tmp_path / "control-llm"))
    assert {(one.models.device, one.models.dtype) for one in found.values()} == {("cpu", "float32")}
    assert found["plans"].problems.train == "demo:plans"


def test_a_folder_of_other_settings_is_named(tmp_path):
    folder = Artefact(tmp_path / "runs" / "plans-seed-0", "trajectories")
    with folder.locked():
        folder.begin({"settings": {"problems": {"limit": 7}}}, {})
        folder.put("train-00000", {"train-00000.jsonl": b""}, {}, 1.0, "cpu")
    with pytest.raises(ValueError, match=r"settings.problems.limit 7, got 48"):
        run_demo({"plans": small(0)}, tmp_path)
