"""The demo at a small size: what it writes, that it goes on where it was, and that its rows are those of the tables."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from limits import HANG
from runs import children_of, ended, receipts, settings
from typer.testing import CliRunner
from warm import context

from fb_core import CollaborativeDecoder, FutureBridgeSelector, RandomChoice, RequestPolicy, TokenReranker, statistics
from fb_core.cli import app
from fb_core.config import RunSettings
from fb_core.demo import pairs, run
from fb_core.demo.run import demo_settings, run_demo
from fb_core.experiment.tables import TABLES, Plan
from fb_core.report.findings import read_findings
from fb_core.stages.artefacts import Artefact
from fb_core.verify import Verifier

ROWS = {"greedy", "majority", "random", "s2t", "direct", "takeover", "futurebridge"}
ROWS |= {"features", "override", "features-override"}
SWEPT = ["direct", "futurebridge", "override"]
PNGS = {"accuracy.png", "agreement.png", "sweep.png"}
REPORT = {"results.json", "report.md", "report.html"}


def small(seed, world="plans", **changes):
    """Some 40 problems of a world."""
    pair, longest = f"demo:{world}", pairs.WORLDS[world].max_new_tokens
    values = {
        "models": {"slm": pair, "llm": pair},
        "problems": {"train": pair, "seed": seed, "per_shard": 20},
        "collect": {"max_new_tokens": longest},
        "futures": {"max_new_tokens": longest},
        "train": {"seeds": [seed], "epochs": 1},
        "evaluate": {"benchmarks": [pair], "limit": 24, "max_new_tokens": longest, "per_shard": 24},
    }
    return settings(**(values | {name: values.get(name, {}) | section for name, section in changes.items()}))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(folder, findings) of two worlds, one at several quantiles."""
    out = tmp_path_factory.mktemp("demo")
    worlds = {"tiny": small(0), "tiny-control": small(0, "control", experiment={"quantiles": []})}
    return out, run_demo(worlds, out), worlds


def keys_of(found, table):
    return [row.key for row in found.of(table)]


@pytest.mark.slow
def test_every_promised_row_is_there(demo):
    _, (plans, control), _ = demo
    assert set(keys_of(plans, "methods")) == ROWS
    assert set(keys_of(control, "methods")) == ROWS
    assert (keys_of(plans, "quantiles"), keys_of(control, "quantiles")) == ([*SWEPT, *SWEPT], [])
    assert [row.quantile for row in plans.of("quantiles")] == 3 * [0.9] + 3 * [0.92]
    for one in (plans, control):
        for row in one.rows:
            mean, low, high = row.accuracy
            assert 0 <= low <= mean <= high <= 1
            assert row.problems == 24
            assert row.minus.keys() == {"greedy", "direct", "futurebridge"} - {row.key}
        assert {"SLM", "LLM", "Direct-B_8", "FutureBridge"} <= {row.score for row in one.agreement}
        by_kind = {kind: sum(row.states for row in one.agreement if row.kind == kind) for kind in ("all", "digit")}
        where = [row.benchmark for row in one.coverage]
        assert where == [None] * 3 + list(one.test_sets) * 3
        assert {row.benchmark for row in one.agreement if row.score == "FutureBridge"} == set(where)
        assert 0 < by_kind["digit"] < by_kind["all"]
        assert [row.pool for row in one.coverage] == ["SLM", "LLM", "joint"] * 2
        assert one.coverage[2].coverage.mean == max(row.coverage.mean for row in one.coverage[:3])
    takeover = next(row for row in plans.rows if row.key == "takeover")
    assert takeover.accuracy.mean >= 0.9


@pytest.mark.slow
def test_report_and_pictures_are_written(demo):
    out, found, _ = demo
    assert {path.name for path in out.iterdir()} == REPORT | PNGS | {"figures", "problems", "runs"}
    assert {path.name for path in (out / "runs").iterdir()} == {"tiny-seed-0", "tiny-control-seed-0"}
    assert read_findings(out / "results.json") == found
    text = (out / "report.md").read_text()
    for words in ("All runs", "Methods on demo:plans", "Request quantiles", "Pool coverage", "One trajectory", "Costs"):
        assert words in text
    assert "tiny-control-seed-0" in (out / "report.html").read_text()
    for name in PNGS:
        assert (out / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_second_call_makes_nothing_anew(demo, capsys):
    out, found, worlds = demo
    before, files = receipts(out / "runs"), {name: (out / name).read_bytes() for name in REPORT | PNGS}
    assert len(before) > 50
    assert run_demo(worlds, out) == found
    assert receipts(out / "runs") == before
    assert {name: (out / name).read_bytes() for name in files} == files
    shown = capsys.readouterr().out
    assert "All runs" in shown
    assert str(out / "report.html") in shown.replace("\n", "")


@pytest.mark.slow
def test_its_runs_are_runs(demo, tmp_path):
    out, (plans, _), _ = demo
    done = CliRunner().invoke(app, ["report", str(out / "runs" / "tiny-seed-0"), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (found,) = read_findings(tmp_path / "findings.json")
    shown = {(row.table, row.key, row.quantile): row.accuracy for row in found.rows}
    assert all(shown[row.table, row.key, row.quantile] == row.accuracy for row in plans.of("quantiles"))


@pytest.mark.slow
def test_two_seeds_give_different_rows_of_the_same_methods(demo):
    out, (first, _), _ = demo
    (second,) = run_demo({"tiny": small(1)}, out)
    assert keys_of(first, "methods") == keys_of(second, "methods")
    assert [row.accuracy for row in first.rows] != [row.accuracy for row in second.rows]
    assert first.policy.threshold != second.policy.threshold
    assert (out / "runs" / "tiny-seed-1").is_dir()


@pytest.mark.slow
def test_a_broken_off_demo_goes_on(tmp_path):
    chosen, out = small(0, experiment={"quantiles": []}), tmp_path / "out"
    process = context().Process(target=run_demo, args=({"tiny": chosen}, out))
    process.start()
    variants = out / "runs" / "tiny-seed-0" / "variants"

    def finished():
        paths = [path.parent for path in variants.glob("*/comparison/manifest.json")]
        return [path for path in paths if Artefact(path.parent, "comparison").manifest()["complete"]]

    try:
        while not finished():
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
    before = {path: receipts(path) for path in finished()}
    assert 0 < len(before) < len(ROWS)
    (found,) = run_demo({"tiny": chosen}, out)
    assert set(keys_of(found, "methods")) == ROWS
    assert {path: receipts(path) for path in before} == before


@pytest.mark.slow
def test_random_reranker_falls_to_the_random_pick():
    """Nothing but what was learned lifts FutureBridge: random weights choose as well as a random pick does."""
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


def test_the_demo_is_the_shipped_settings_with_one_reranker_and_fewer_quantiles():
    for name, chosen in demo_settings(5).items():
        shipped, values = RunSettings.load(name), json.loads(chosen.model_dump_json())
        assert set(chosen.experiment.quantiles) <= set(shipped.experiment.quantiles)
        assert (values["problems"].pop("seed"), values["train"].pop("seeds")) == (5, [5])
        assert values["train"].pop("horizons") == [shipped.score.horizon]
        assert set(values["choice"].pop("trained")) <= set(shipped.choice.trained)
        assert values["choice"].pop("tried") < shipped.choice.tried
        values["experiment"].pop("quantiles")
        for section, value in values.items():
            assert value.items() <= json.loads(shipped.model_dump_json())[section].items(), section


def test_its_rows_are_those_of_the_tables(tmp_path):
    """Folders, settings and labels, so that the numbers are one."""
    plan = Plan(demo_settings(0)["tiny"], tmp_path, 8)
    known = [row for table in TABLES.values() for row in table.rows(plan)]
    rows = {name: table.rows(plan) for name, table in run.TABLES_SHOWN.items()}
    assert all(row in known for found in rows.values() for row in found)
    assert {row.key for row in rows["methods"]} == ROWS | {"deployed"}  # which the small runs here do not choose
    assert [(row.x, row.key) for row in rows["quantiles"]] == [(q, key) for q in (0.9, 0.94) for key in SWEPT]


def test_retrained_pairs_are_checkpoints_like_others(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(pairs, "retrain", lambda folder, worlds, progress: made.append((folder, worlds)))
    found = run._retrained(demo_settings(0), tmp_path)
    assert made == [(tmp_path, {"plans", "helpful", "control"})]
    places = {name: (one.models.slm, one.models.llm) for name, one in found.items()}
    assert places["tiny-control"] == (str(tmp_path / "style-slm"), str(tmp_path / "control-llm"))
    assert {(one.models.device, one.models.dtype) for one in found.values()} == {("cpu", "float32")}
    assert found["tiny"].problems.train == "demo:plans"


def test_a_folder_of_other_settings_is_named(tmp_path):
    folder = Artefact(tmp_path / "runs" / "tiny-seed-0", "trajectories")
    with folder.held():
        folder.begin({"settings": {"problems": {"limit": 7}}}, {})
    with pytest.raises(ValueError, match=r"settings.problems.limit 7, got 48"):
        run_demo({"tiny": small(0)}, tmp_path)


def test_only_base_weights_ship():
    with resources.as_file(resources.files("fb_core.demo") / "weights") as folder:
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    assert {path.name for path in files} <= {"model.safetensors", "config.json", "generation_config.json"}
    assert not [path for path in files if "adapter" in path.name or "reranker" in path.name]
    assert sum(path.stat().st_size for path in files) < 6 << 20
