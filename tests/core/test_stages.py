"""The stages on disk against the functions in memory and plain forwards, and what they refuse."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from runs import SMALL, contents, settings
from warm import futurebridge

from fb_core import LocalLLM, RequestPolicy, TokenReranker
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.choose import SelectionStage
from fb_core.apps.pipeline.collect import PolicyStage, StateStage, TrajectoryStage, log_states
from fb_core.apps.pipeline.commands import COMMANDS, run_command, stages_of
from fb_core.apps.pipeline.decode import Row, read_rows
from fb_core.apps.pipeline.evaluate import EvaluateStage
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.futures import FutureStage
from fb_core.apps.pipeline.models import frozen_policy, models_of, splits_of
from fb_core.apps.pipeline.problems import Problem, prompt_ids
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.pipeline.rollouts import RolloutStage
from fb_core.apps.pipeline.run import plan, run_stage
from fb_core.apps.pipeline.scores import ScoreStage, reduce_pool
from fb_core.apps.pipeline.train import TrainStage
from fb_core.apps.settings.run import RunSettings, TrainSettings, settings_of
from fb_core.models import facts as models
from fb_core.rerank.training import RerankerRun, Sweep
from fb_core.verify.verifier import Verdict, tally_words

STAGES = tuple(kind.name for command in COMMANDS for kind in stages_of(command, settings()))


@pytest.fixture(scope="module")
def run(undisturbed) -> Path:
    return undisturbed[0]["evaluate"]


def copied(undisturbed, tmp_path, command) -> Path:
    return Path(shutil.copytree(undisturbed[0][command], tmp_path / "run"))


def full(model, ids):
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0]


def test_states_and_pools_are_those_of_the_functions_in_memory(run, pair):
    policy, seen = frozen_policy(run), 0
    for shard in TrajectoryStage(settings(), run).shards():
        examples = Examples(run, shard)
        trajectories = list(examples.trajectories.values())
        expected = log_states(LocalLLM(pair.slm), LocalLLM(pair.llm), trajectories, policy, slm_k=3, llm_k=3)
        futures = examples.futures()
        assert list(examples.states) == list(futures) == [state.id for state in expected]
        for state in expected:
            found = examples.states[state.id]
            assert found.entropy == pytest.approx(state.entropy, abs=1e-5)
            logged = reduce_pool(found.pool, 3)
            assert logged.ids.tolist() == state.pool.ids.tolist()
            assert logged.sources.tolist() == state.pool.sources.tolist()
            assert logged.llm_logprob.tolist() == pytest.approx(state.pool.llm_logprob.tolist(), abs=1e-4)
            assert logged.slm_logprob.tolist() == pytest.approx(state.pool.slm_logprob.tolist(), abs=1e-4)
            assert int((found.pool.sources & 1).sum()) == 6
            assert futures[state.id].first == int(full(pair.llm, state.prefix)[-1].argmax())
            seen += 1
    assert seen > 20


def test_the_threshold_is_the_quantile_of_the_validation_split_alone(run):
    entropies = [
        trajectory.entropy
        for shard in TrajectoryStage(settings(), run).shards()
        if shard.startswith("validation")
        for trajectory in Examples(run, shard).trajectories.values()
    ]
    assert sum(map(len, entropies)) == Artefact(run, "policy").finished()["counts"]["validation tokens"]
    assert frozen_policy(run) == RequestPolicy.calibrate(torch.cat(entropies), 0.9)


def test_matrices_and_log_p_of_candidates_are_those_of_full_forwards(run, pair):
    examples = Examples(run, "train-00001")
    futures, groups = examples.futures(), examples.groups
    verified = {name for name, future in futures.items() if future.verdict == "correct" and len(future.tokens) >= 8}
    assert set(groups) == verified
    assert verified < set(examples.states)
    for name, group in groups.items():
        prefix, pool = group.state.prefix, reduce_pool(examples.states[name].pool, 3)
        for model, found in ((pair.slm, group.state.pool.slm_logprob), (pair.llm, group.state.pool.llm_logprob)):
            own = full(model, prefix)[-1].log_softmax(-1)
            torch.testing.assert_close(found, own[pool.ids], rtol=1e-4, atol=1e-4)
        assert group.state.pool.ids.tolist() == pool.ids.tolist()
        assert group.state.pool.sources.tolist() == pool.sources.tolist()
        future = futures[name]
        for candidate, found in zip(pool.ids.tolist(), group.logprob, strict=True):
            ids = torch.cat([prefix, torch.tensor([candidate]), future.tokens[:8]])
            wanted = full(pair.slm, ids)[len(prefix) : -1].log_softmax(-1).gather(1, ids[len(prefix) + 1 :, None])[:, 0]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_filters_count_as_the_paper_has_it(run):
    counts, futures, states = (Artefact(run, stage).finished()["counts"] for stage in ("scores", "futures", "states"))
    assert counts["admitted"] == states["states"] == futures["futures"]
    assert counts["verified"] == futures["correct"]
    assert counts["admitted"] >= counts["verified"] >= counts["long_enough"] >= counts["valid_group"] > 0
    assert counts["train groups"] + counts["validation groups"] == counts["valid_group"]


def test_the_sweep_logs_losses_and_validation_of_every_run(run):
    rows = TrainStage(settings(), run).metrics()
    assert [(row["epoch"], row["horizon"], row["seed"]) for row in rows] == [(e, 8, s) for e in (1, 2) for s in (0, 1)]
    assert all(math.isfinite(value) for row in rows for value in [*row["loss"], row["validation_cross_entropy"]])
    assert rows[0]["loss"] != rows[1]["loss"]


def test_a_seed_trains_as_it_does_alone_in_an_order_of_its_own(run):
    stage = TrainStage(settings(), run)
    logged = {row["seed"]: row["loss"] for row in stage.metrics() if row["epoch"] == 1}
    recipe, orders = stage._fresh()[0].optimisation, []
    for seed in (0, 1):
        sweep = Sweep([RerankerRun(stage.reranker(seed), seed)], stage.groups("train"), replace(recipe, seed=seed))
        assert [loss for _ in logged[seed] for loss in sweep.advance()] == logged[seed]
        orders.append([[step[0].tokens.tolist() for step in sweep._steps]])
    assert orders[0] != orders[1]


def test_the_choice_is_the_best_mean_over_seeds(run):
    summary = Artefact(run, "selection").finished()["summary"]
    means = {(row["epoch"], row["horizon"]): sum(s["accuracy"] for s in row["seeds"]) / 2 for row in summary["table"]}
    assert means[summary["epoch"], summary["horizon"]] == max(means.values())


def test_the_reranker_folder_loads_and_its_card_runs(run, pair):
    for seed in (0, 1):
        folder = run / "reranker" / f"seed-{seed}"
        reranker = TokenReranker.from_pretrained(folder, pair.slm)
        assert reranker.head.abs().sum() > 0
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["task_type"]) == ("LORA", 4, "SEQ_CLS")
        card = (folder / "README.md").read_text()
        assert "admitted states" in card
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        names: dict = {}
        exec(code.replace("path/to/this/folder", str(folder)), names)
        prompt = pair.world.problems(1, 0, "test")[0].prompt_ids
        assert names["decoder"].generate(list(prompt), 45).text


def test_every_problem_has_its_row(run):
    problems = {problem.prompt for problem in load_pair("plans").world.problems(9, 0, "test")}
    files = sorted((run / "evaluation").glob("*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    for seed in (None, 0, 1):
        mine = [row for row in rows if row["seed"] == seed]
        assert {row["method"] for row in mine} == ({"greedy", "s2t", "direct"} if seed is None else {"published"})
        assert {row["problem"].removeprefix("plans/") for row in mine} == problems
        for row in mine:
            assert (row["verdict"] == "correct") == (f"\\boxed{{{row['gold']}}}" in row["text"])
            assert len(row["prompt_sha256"]) == 64
            assert (row["loop"], row["seconds"]) == ("batch", None)  # many at once: none has a time of its own
            assert not row["events"] or row["method"] != "greedy"
    table = Artefact(run, "evaluation").finished()["summary"]["table"]
    runs = {"Greedy": 1, "S2T": 1, "Direct LLM score": 1, "Published recipe": 2}
    assert [(row["method"], row["problems"], row["runs"]) for row in table] == [(m, 9, n) for m, n in runs.items()]


def test_manifests_say_what_made_them(run):
    assert RunSettings.model_validate_json((run / "settings.json").read_text()) == settings()
    for stage in STAGES:
        manifest = Artefact(run, stage).finished()
        assert manifest["identity"]["settings"]
        assert manifest["identity"]["models"]["tokenizer"]
        assert manifest["made_by"][0]["torch"] == metadata.version("torch")
        assert manifest["cost"]["seconds"] > 0
        assert manifest["cost"]["gpu_hours"] == 0 or torch.cuda.is_available()


CHANGED = {  # command: (section, setting, the run's value, another)
    "collect": [("collect", "quantile", 0.9, 0.8), ("problems", "per_shard", 6, 7), ("collect", "max_states", 8, 3)],
    "futures": [("futures", "llm_k", 3, 4), ("problems", "seed", 0, 5), ("problems", "per_shard", 6, 7)],
    "score": [("score", "horizon", 8, 9), ("collect", "quantile", 0.9, 0.8)],
    "train": [("train", "rank", 4, 5), ("futures", "max_new_tokens", 45, 40)],
    "evaluate": [("evaluate", "limit", 9, 8), ("train", "seeds", [0, 1], [0]), ("score", "horizon", 8, 9)],
}


def test_a_changed_setting_is_named_and_nothing_is_lost(undisturbed, tmp_path):
    run, before = copied(undisturbed, tmp_path, "evaluate"), contents(undisturbed[0]["evaluate"])
    tried = [
        (command, {section: {name: new}}, f"settings.{section}.{name} {old}, got {new}")
        for command, changes in CHANGED.items()
        for section, name, old, new in changes
    ]
    tried += [("score", {"models": {"slm": "demo:control"}}, "models.slm")]
    tried += [("evaluate", {"models": {"dtype": "bfloat16"}}, "models.dtype auto, got bfloat16")]
    for command, changes, words in tried:
        with pytest.raises(ValueError, match=re.escape(words)):
            run_command(command, settings(**changes), run, show=lambda text: None)
    assert contents(run) == before


def test_what_changes_no_byte_may_change(undisturbed, tmp_path):
    run = copied(undisturbed, tmp_path, "train")
    for changes in ({"train": {"checkpoint_steps": 9}}, {"verify": {"workers": 2}}):
        run_command("train", settings(**changes), run, show=lambda text: None)


@pytest.fixture
def saved(tmp_path, pair):
    """Values of settings on the pair as ordinary checkpoints with so many rows of the vocabulary."""
    problems = tmp_path / "problems.jsonl"
    drawn = pair.world.problems(8, 3, "train")
    problems.write_text("".join(json.dumps({"problem": p.prompt, "answer": p.answer}) + "\n" for p in drawn))

    def save(rows=None):
        places = {}
        for role, given in (("slm", pair.slm), ("llm", pair.llm)):
            model, places[role] = copy.deepcopy(given), str(tmp_path / f"{role}-{rows}")
            if rows is not None:
                size = models.vocabulary(model)
                model.resize_token_embeddings(rows, mean_resizing=False)
                with torch.no_grad():
                    for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
                        table[size:] = 1.5 * table[: rows - size]
            model.save_pretrained(places[role])
            pair.world.tokenizer.save_pretrained(places[role])
        return {**SMALL, "models": places, "problems": {**SMALL["problems"], "train": str(problems), "validation": 3}}

    return save


SCORED = (TrajectoryStage, PolicyStage, StateStage, FutureStage, ScoreStage)


def test_checkpoints_on_disk_do_as_the_demo_and_changes_of_theirs_are_named(saved, pair, tmp_path):
    values, run, config = saved(), tmp_path / "run", tmp_path / "run.yaml"
    chosen = RunSettings.model_validate(values)
    for stage in SCORED:
        run_stage(stage(chosen, run))
    (trajectory, *_) = Examples(run, "train-00000").trajectories.values()
    logits = full(pair.slm, trajectory.tokens)[trajectory.prompt_length - 1 : -1]
    assert torch.equal(logits.argmax(-1), trajectory.output)
    config.write_text(yaml.safe_dump(values))
    slm = Path(values["models"]["slm"])

    def swapped(data):
        changed = json.loads(data)
        vocabulary = changed["model"]["vocab"]
        vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
        return json.dumps(changed).encode()

    for path, change, named in (
        (slm / "tokenizer.json", swapped, "models.tokenizer"),
        (slm / "model.safetensors", lambda data: data[:-1000] + bytes(1000), "models.slm"),
        (tmp_path / "problems.jsonl", lambda data: data.replace(b'"answer": "', b'"answer": "1', 1), "data.validation"),
    ):
        before = path.read_bytes()
        path.write_bytes(change(before))
        done = futurebridge("collect", "--config", config, "--run-dir", run)
        assert done.returncode == 2, done.stderr[-2000:]
        assert named in done.stderr
        assert "Traceback" not in done.stderr
        path.write_bytes(before)


def test_a_damaged_shard_is_named_stops_what_reads_it_and_is_made_again(undisturbed, tmp_path, caplog):
    run = copied(undisturbed, tmp_path, "collect")
    path = run / "states" / "train-00002.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    for read in (
        lambda: Artefact(run, "states").table("train-00002"),
        lambda: run_command("futures", settings(), run, show=lambda text: None),
    ):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read()
    path.with_suffix(".json").rename(run / "kept.json")
    with pytest.raises(ValueError, match=r"train-00002.*futurebridge collect"):
        run_command("futures", settings(), run, show=lambda text: None)
    (run / "kept.json").rename(path.with_suffix(".json"))
    run_command("collect", settings(), run, show=lambda text: None)
    assert str(path) in caplog.text
    assert contents(run) == contents(undisturbed[0]["collect"])


def test_an_edited_adapter_is_not_evaluated(undisturbed, tmp_path):
    run = copied(undisturbed, tmp_path, "train")
    path = run / "reranker" / "seed-1" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        run_command("evaluate", settings(), run, show=lambda text: None)


def test_an_earlier_epoch_is_made_anew_from_where_it_was(undisturbed, tmp_path, monkeypatch):
    run = copied(undisturbed, tmp_path, "score")
    stage, checkpoint = TrainStage(settings(), run), TrainStage._checkpoint

    class Enough(Exception):
        pass

    def stop_in_the_second_epoch(self, sweeps, seconds):
        checkpoint(self, sweeps, seconds)
        if sweeps[0].step > sweeps[0].epoch_ends[0]:
            raise Enough

    monkeypatch.setattr(TrainStage, "_checkpoint", stop_in_the_second_epoch)
    with pytest.raises(Enough):
        run_stage(stage)
    monkeypatch.undo()
    (run / "training" / "epoch-1.safetensors").write_bytes(b"damaged")
    assert [path.name for path in (run / "training").glob("step-*.json")]
    run_command("train", settings(), run, show=lambda text: None)
    assert contents(run) == contents(undisturbed[0]["train"])


def test_the_advice_on_a_horizon_leads_through_and_keeps_the_futures(undisturbed, tmp_path):
    def run_at(command, horizon):
        run_command(command, settings(score={"horizon": horizon}, train={"horizons": [horizon]}), run, show=print)

    run = copied(undisturbed, tmp_path, "futures")
    futures = contents(run / "futures")
    run_at("score", 60)
    with pytest.raises(ValueError, match=f"lower it and train.horizons with it, delete {run / 'scores'} and run "):
        run_at("train", 60)
    with pytest.raises(ValueError, match=f"{run / 'scores'}: .*horizon 60, got 8; .*delete this folder"):
        run_at("score", 8)
    shutil.rmtree(run / "scores")
    run_at("score", 8)
    run_at("train", 8)  # whose folder was begun with other scores, but nothing was made there
    assert contents(run / "futures") == futures


def test_nothing_to_validate_on_is_said_before_training(undisturbed, tmp_path):
    run = copied(undisturbed, tmp_path, "futures")
    futures = Artefact(run, "futures")
    for path in (run / "futures").glob("validation-*.parquet"):
        rows = [row | {"verdict": "wrong"} for row in futures.table(path.stem)]
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), buffer)
        counts = {"futures": len(rows), "wrong": 1, "unparsable": len(rows) - 1, "unboxed": len(rows) - 1}
        futures.put(path.stem, {path.name: buffer.getvalue()}, counts, 1.0, "cpu")
    run_command("score", settings(), run, show=lambda text: None)
    with pytest.raises(ValueError, match=r"validation problems, got none of \d+ .*prompt.*boxed{") as raised:
        run_command("train", settings(), run, show=lambda text: None)
    assert "horizon" not in str(raised.value)


def test_an_earlier_stage_is_asked_for_by_its_command(tmp_path):
    words = "run `futurebridge collect`"
    for stage in (StateStage, ScoreStage):
        with pytest.raises(ValueError, match=words):
            run_stage(stage(settings(), tmp_path))
        assert words in plan(stage(settings(), tmp_path))


def test_a_plan_tells_what_is_left_and_what_it_costs(undisturbed, tmp_path):
    run = copied(undisturbed, tmp_path, "collect")
    (run / "trajectories" / "train-00001.json").unlink()
    before = contents(run)
    text = plan(TrajectoryStage(settings(), run))
    assert "1 of 8 shards, " in text
    longest = max(
        len(prompt_ids(load_pair("plans").world.tokenizer, p, "{problem}"))
        for ps in splits_of(settings().problems).values()
        for p in ps
    )
    assert longest > 0
    weights, keys = (f"{size / 1e9:.3g} GB" for size in models_of(settings().models).memory("slm"))
    memory = f"slm with {weights} of weights and at most {keys} of keys and values"
    assert f"6 of 48 problems to do, at most {6 * 2 * (longest + 45):,} tokens, {memory}, 0:00:" in text
    assert "\n" not in text
    shown: list[str] = []
    run_command("futures", settings(), run, dry_run=True, show=shown.append)
    assert "8 of 8 shards" in shown[0]
    run_command("collect", settings(collect={"top_k": 3}), run, dry_run=True, show=shown.append)
    assert "settings.collect.top_k 64, got 3" in shown[1]
    assert contents(run) == before


def test_a_plan_says_what_does_not_fit_and_what_a_server_has(undisturbed):
    run = undisturbed[0]["evaluate"]
    shown = {kind: plan(kind(settings(models={"batch_tokens": 10**10}), run)) for kind in (StateStage, ScoreStage)}
    model = load_pair("plans").llm
    layers = model(torch.tensor([[3]])).past_key_values.layers
    held = 10 * sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert f"llm with {sum(x.nbytes for x in model.parameters()) / 1e9:.3g} GB of weights" in shown[StateStage]
    assert f"at most {held:.3g} GB of keys and values; **does not fit**: expected " in shown[StateStage]
    assert "fit" not in shown[ScoreStage]
    server = {"url": "http://127.0.0.1:9", "flavour": "vllm"}
    assert ", slm with " in (text := plan(StateStage(settings(models={"llm_server": server}), run)))
    assert ", llm on its server, " in text
    elsewhere = settings(models={"batch_tokens": 10**10, "device": "cuda:99"})  # as on a node without a GPU
    assert "fit" not in plan(StateStage(elsewhere, run))


def test_before_anything_is_collected_plans_have_a_bound_from_the_settings(undisturbed, tmp_path):
    bounds: dict[str, int] = {}
    for command in COMMANDS:
        shown: list[str] = []
        run_command(command, settings(), tmp_path, dry_run=True, show=shown.append)
        for text in shown:
            if "cannot run yet" in text:
                (bound,) = re.findall(r"according to the settings, at most ([\d,]+) \w+", text)
                bounds[text.partition(":")[0]] = int(bound.replace(",", ""))
    assert bounds["futures"] == bounds["scores"] == 48 * 8
    assert bounds["training"] == 2 * 36 * 8
    assert not any(tmp_path.iterdir())
    run = undisturbed[0]["evaluate"]
    for kind in (FutureStage, ScoreStage, TrainStage):
        assert sum(kind(settings(), run).shards().values()) <= bounds[kind.name]
    absent = settings(models={"slm": "nobody/small", "llm": "nobody/large"})  # not on this machine
    text = plan(TrajectoryStage(absent, tmp_path))
    assert text.startswith(
        f"trajectories: 8 of 8 shards, 48 of 48 problems to do, at most {48 * 2 * 45:,} tokens without"
    )


def test_the_choice_is_bounded_ahead_of_time(undisturbed, tmp_path):
    few, models = settings(selection={"problems": 5}), models_of(settings().models)
    validation = splits_of(few.problems)["validation"]
    longest = 45 + models.longest_prompt(validation, few.problems)
    for chosen, problems in ((settings(), 12), (few, 5), (settings(selection={"problems": 12}), 12)):
        shown: list[str] = []
        run_command("train", chosen, tmp_path, dry_run=True, show=shown.append)
        (text,) = (text for text in shown if text.startswith("selection"))
        decodes = problems * 2 * 2  # seeds, epochs
        assert f"at most {decodes} decodes, at most {decodes * longest:,} tokens" in text
    run = copied(undisturbed, tmp_path / "run", "score")
    run_command("train", few, run, show=lambda text: None)
    found, stage = Artefact(run, "selection").finished()["summary"], SelectionStage(few, run)
    drawn = {trial: [row.problem for row in read_rows(stage.folder, trial)] for trial in stage.trials}
    (asked,) = {tuple(problems) for problems in drawn.values()}
    assert found["problems"] == len(asked) == 5
    everything = [problem.id for problem in validation]
    assert set(asked) < set(everything)
    assert list(asked) != everything[:5]  # a set in its own order may begin with one subject
    whole = SelectionStage(settings(), undisturbed[0]["train"])
    for shard in stage.trials:  # the rerankers are the same, so are their answers
        answers = {row.problem: row.tokens for row in read_rows(whole.folder, shard)}
        assert all(row.tokens == answers[row.problem] for row in read_rows(stage.folder, shard))
    assert "% of 5 problems" in (run / "reranker" / "seed-0" / "README.md").read_text()


def test_tokens_of_a_plan_are_not_exceeded(undisturbed):
    run = undisturbed[0]["evaluate"]
    stage, examples = TrajectoryStage(settings(), run), partial(Examples, run)
    passed = sum(2 * len(t.tokens) for shard in stage.shards() for t in examples(shard).trajectories.values())
    assert passed <= stage.most_tokens() * 48
    stage = FutureStage(settings(), run)
    futures = [future for shard in stage.shards() for future in examples(shard).futures().values()]
    passed = sum(future.state.position + 1 + len(future.tokens) for future in futures)
    assert passed <= stage.most_tokens() * len(futures)


def test_verdicts_are_told_while_futures_and_trajectories_are_made(tmp_path, capsys):
    chosen = settings(problems={"limit": 12, "validation": 6})
    for command, stage in (("collect", "trajectories"), ("futures", "futures")):
        run_command(command, chosen, tmp_path, show=lambda text: None)
        counts = Artefact(tmp_path, stage).finished()["counts"]
        assert sum(counts[verdict] for verdict in get_args(Verdict)) == counts[stage] > 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{stage}: ")]
        done = [line for line in shown if "done" in line]
        assert len(done) == 2
        assert done[-1].endswith(f"; {tally_words(counts)}")
        assert "correct" in done[-1]
    counts = {"trajectories": 12, "wrong": 2, "unparsable": 7, "timeout": 0, "unboxed": 6, "worded": 1}
    text = TrajectoryStage(settings(), tmp_path).report({"counts": counts, "cost": {"seconds": 1.0}})
    verdicts = "2 wrong (1 with words in the box), 7 unparsable (6 without a closed box)"
    assert text == f"**trajectories**: 12 trajectories, {verdicts}; 0:00:01 of work"


def test_a_pair_that_never_boxes_shows_at_once(tmp_path, capsys, monkeypatch, caplog):
    monkeypatch.setattr("fb_core.apps.pipeline.collect.texts_of", lambda outputs, tokenizer: ["34"] * len(outputs))
    small = {"limit": 12, "validation": 6}
    refused = {"boxed": "none of 6 .*ends in '34'", "choice": "none of 6 that can be judged, .*no gold answer"}
    for judge, words in refused.items():
        stopping = settings(problems=small, collect={"unread": "stop"}, verify={"judge": judge})
        with pytest.raises(ValueError, match=f"trajectories: .*{words}"):
            run_command("collect", stopping, tmp_path / judge)
    chosen = settings(problems=small)
    for command in ("collect", "futures", "score"):
        run_command(command, chosen, tmp_path, show=lambda text: None)
        out = capsys.readouterr().out
        assert command == "score" or re.search(r"; (\d+) unparsable \(\1 without a closed box\)", out)
    assert caplog.text.count("got none of 6 that can be judged") == 1  # of the first shard
    with pytest.raises(ValueError, match=r"futures: (\d+) unparsable \(\1 without a closed box\); .*prompt"):
        run_command("train", chosen, tmp_path, show=lambda text: None)


def test_a_padded_embedding_changes_no_result(tmp_path, pair, saved):
    """The same pair with rows of the vocabulary that no token has: the same files, and a manifest that tells."""
    size, found, identities = models.vocabulary(pair.slm), [], []
    for rows in (size, size + 13):
        values = {**saved(rows), "rollouts": {**SMALL["rollouts"], "train": 1.0}}
        run, chosen = tmp_path / f"run-{rows}", RunSettings.model_validate(values)
        for stage in (*SCORED, RolloutStage):
            identities.append(run_stage(stage(chosen, run))["identity"]["models"].get("valid_vocab"))
        found.append((Artefact(run, "scores").tensors("train-00000")["logprob"], Examples(run, "train-00000")))
    (plain, theirs), (padded, ours) = found
    assert len(plain) > 10
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)
    assert theirs.states
    for one, other in zip(ours.states.values(), theirs.states.values(), strict=True):
        assert one.pool.ids.tolist() == other.pool.ids.tolist()
        for name in ("slm_logprob", "llm_logprob"):
            torch.testing.assert_close(getattr(one.pool, name), getattr(other.pool, name), rtol=1e-5, atol=1e-5)
    assert list(theirs.groups) == list(ours.groups)
    texts = [[rollout.texts for rollout in each.rollouts().values()] for each in (theirs, ours)]
    assert texts[0] == texts[1]
    assert identities == [None] * 10 + [size] * 2


@pytest.mark.parametrize(
    ("section", "value", "words"),
    [
        *(("train", {"horizons": [64]}, "at most score.horizon"), ("train", {"seeds": [0, 0]}, "different numbers")),
        *(("problems", {"prompt": "solve it"}, "problem"), ("collect", {"quantle": 0.9}, "quantle")),
    ],
)
def test_settings_that_do_not_fit_are_refused(section, value, words):
    with pytest.raises(ValueError, match=words):
        settings(**{section: value})


@pytest.mark.parametrize("text", ["a: [", "3", "models: {slm: a}", "\x00"])
def test_a_damaged_settings_file_is_one_sentence(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError):
        RunSettings.load(str(path))
    with pytest.raises(OSError, match="tiny"):
        RunSettings.load("no-such-settings")


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-0.6b"])
def test_the_recipe_for_new_pairs_is_shipped_and_the_published_one_beside_it(name):
    shipped, published = RunSettings.load(name), RunSettings.load(f"{name}-published")
    assert shipped.problems.certification == 750
    without = shipped.problems.model_copy(update={"certification": 0})
    assert published == shipped.model_copy(update={"problems": without})
    assert published.train == TrainSettings()  # all of its values are the paper's


def test_a_file_may_change_another(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: tiny\ntrain: {rank: 4}\nevaluate: {limit: 7}\n")
    mine, tiny = RunSettings.load(str(tmp_path / "mine.yaml")), RunSettings.load("tiny")
    assert (mine.train.rank, mine.evaluate.limit) == (4, 7)
    assert mine.train.model_copy(update={"rank": tiny.train.rank}) == tiny.train
    other = tmp_path / "other.yaml"
    for base, kind, words in ((tmp_path / "mine.yaml", ValueError, r"mine\.yaml:"), ("nothing", OSError, "nothing:")):
        other.write_text(f"base: {base}\n")
        with pytest.raises(kind, match=words):
            RunSettings.load(str(other))


def test_what_is_set_is_a_setting_of_the_run(undisturbed, tmp_path):
    """It is recorded like any setting, and refused if it differs from the one that the run began with."""
    folder, config = copied(undisturbed, tmp_path, "collect"), tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(SMALL | {"collect": SMALL["collect"] | {"slm_k": 2}}))

    def collect(*changes):
        return futurebridge("collect", "--config", config, "--run-dir", folder, *changes)

    done = collect("--set", "collect.slm_k=3", "--set", "evaluate.limit=4")
    assert done.returncode == 0, done.stderr
    assert settings_of(folder).evaluate.limit == 4
    for changes, got in (([], 2), (["--set", "collect.slm_k=4"], 4)):
        done = collect(*changes)
        assert done.returncode == 2
        assert f"begun with settings.collect.slm_k 3, got {got}; put that back" in done.stderr


def test_several_benchmarks_are_averaged_in_pairs(monkeypatch, tmp_path):
    """Two problems of one set and one of another, two rerankers, the others once."""
    stage = EvaluateStage(settings(evaluate={"benchmarks": ["a", "b"]}), tmp_path)
    right = {("a", None): "10", ("a", 0): "11", ("a", 1): "10", ("b", None): "0", ("b", 0): "1", ("b", 1): "1"}
    rest = {"loop": "fast", "text": "", "prompt_sha256": "", "gold": "", "seconds": 1.0, "events": [], "calls": 0}
    rest |= {"pool": None, "appended": 0, "suffix": 0, "read": 0, "peak_bytes": None}
    rows = [
        Row(
            benchmark=benchmark,
            method=method,
            seed=seed,
            problem=str(problem),
            verdict="correct" if verdict == "1" else "wrong",
            tokens=[0] * (3 if benchmark == "a" else 9),
            **rest,
        )
        for (benchmark, seed), verdicts in right.items()
        for method in (("greedy", "s2t", "direct") if seed is None else ("published",))
        for problem, verdict in enumerate(verdicts)
    ]
    monkeypatch.setattr("fb_core.apps.pipeline.evaluate.benchmark_problems", lambda _: {"a": [], "b": []})
    monkeypatch.setattr(stage, "rows", lambda: rows)
    summary = stage.summary()
    once = ("Greedy", "S2T", "Direct LLM score")
    assert [(row["benchmark"], row["method"], row["problems"], row["runs"]) for row in summary["table"]] == [
        (benchmark, method, problems, 1 if method in once else 2)
        for benchmark, problems in (("a", 2), ("b", 1), ("average", 3))
        for method in (*once, "Published recipe")
    ]
    average = summary["table"][-1]
    assert average["accuracy"] == list(statistics.average_interval(known := [[[1, 1], [1, 0]], [[1, 1]]]))
    assert average["minus greedy"] == list(statistics.average_interval(known, [[1, 0], [0]]))
    assert average["minus direct"] == average["minus greedy"]  # which are right on the same problems here
    assert average["accuracy"][0] == (0.75 + 1) / 2
    assert average["tokens"] == 6  # a benchmark counts alike, however many problems it has
    assert "**average**, 3 problems; 2 runs of Published recipe\n" in (shown := stage.report({"summary": summary}))
    assert "\n| Published recipe | 87.5 [" in shown


def test_a_set_that_is_repeated_has_as_many_runs_of_greedy_decoding(monkeypatch, tmp_path, caplog):
    repeated = "aime-2024=a.jsonl"
    chosen = settings(evaluate={"benchmarks": [repeated, "gsm8k"]}, train={"seeds": [4, 5, 6]})
    problems = {repeated: [Problem("1", "1+1", "2")], "gsm8k": [Problem("2", "2+2", "4")]}
    monkeypatch.setattr("fb_core.apps.pipeline.evaluate.benchmark_problems", lambda _: problems)
    runs: dict[tuple[str, str], list[int | None]] = {}
    for trial in EvaluateStage(chosen, tmp_path).trials.values():
        runs.setdefault((trial.benchmark, trial.method), []).append(trial.seed)
    assert runs == {
        (benchmark, method): [4, 5, 6]
        if method == "published" or (benchmark, method) == (repeated, "greedy")
        else [None]
        for benchmark in (repeated, "gsm8k")
        for method in ("greedy", "s2t", "direct", "published")
    }
    assert not caplog.records
    EvaluateStage(settings(evaluate={"benchmarks": [repeated]}), tmp_path).trials  # noqa: B018
    assert "2 runs instead of 3, one per seed" in caplog.text
