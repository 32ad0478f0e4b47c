"""Variants of a run: links and folders, what cannot be made or was killed, and the findings counted by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from limits import HANG
from paper_runs import TRAINED, settings
from report_runs import rows_of as shown_rows
from report_runs import section
from runs import children_of, contents, ended, linked, receipts
from typer.testing import CliRunner
from warm import futurebridge, start_futurebridge

from benchmarks.paper import tables
from benchmarks.paper.__main__ import app
from benchmarks.paper.gather import gather, parting_event
from benchmarks.paper.published import is_published
from benchmarks.paper.report import render
from benchmarks.paper.rollouts import token_kind
from benchmarks.paper.rows import UNSEEN, tables_bytes
from benchmarks.paper.run import make, run_tables
from benchmarks.paper.settings import PaperSettings, names
from benchmarks.paper.tables import PROBLEM, TABLES, Plan, Table, Variant, settings_of_variant
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.decode import Row
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import frozen_policy, models_of
from fb_core.apps.settings.base import change
from fb_core.apps.settings.run import ModelSettings
from fb_core.events import Event

ROOT = Path(__file__).resolve().parents[2]
METHODS = ["greedy", "majority", "one-token-takeover", "direct", "spans", "published"]
PROGRAM = "benchmarks.paper.__main__"


@pytest.fixture(scope="module")
def chosen() -> PaperSettings:
    return settings(compare={"methods": METHODS, "external": {"lost": "/no/such/checkpoint"}})


def own(table, plan):
    """The rows that a table makes itself."""
    return [variant for variant in TABLES[table].rows(plan) if not variant.borrowed]


def variants_of(settings, run):
    """All rows by their paths inside the run."""
    plan = Plan(settings, run, 8)
    found = [variant for table in TABLES for variant in (*own(table, plan), *plan.references())]
    places = [variant.inside for variant in found if variant.inside is not None]
    places += [place.inside for place in places if place.inside is not None]
    return {"/".join(variant.path.parts[1::2]): variant for variant in (*found, *places)}


def state_of(run):
    """Hashes and times of every file of a run, its variants left out; other tests may end a finished stage anew."""
    stages = [path for path in run.iterdir() if path.is_dir() and path.name != "variants"]
    files = [path for stage in stages for path in stage.rglob("*") if path.name not in ("manifest.json", ".lock")]
    times = {str(path): path.stat().st_mtime_ns for path in files if path.is_file()}
    return {"times": times, **{stage.name: contents(stage.resolve()) for stage in stages}}


MADE = ("greedy", "majority", "direct", "one-token-takeover", "spans", "published")
MADE += ("alpha-0.5", "pool-slm", "q0.92", "q0.92/direct", "q0.92/published")
JUDGED = ("q0.92", "q0.92/published")


def folder_of(run, key):
    """A variant's folder, by its keys with slashes between."""
    return run.joinpath("variants", *"/variants/".join(key.split("/")).split("/"))


@pytest.fixture(scope="module")
def made(trained, chosen, once) -> tuple:
    """(run, state of its stages before, why each variant could not be made)."""

    def make_all(folder):
        run = linked(trained, folder / "run", *TRAINED)
        before, known, values = state_of(run), variants_of(chosen, run), chosen.model_dump_json()
        problems = {key: make(known[key], values, run, key in JUDGED) for key in (*MADE, "external-lost")}
        (folder / "made.json").write_text(json.dumps([before, problems]))

    folder = once("experiment", make_all)
    return folder / "run", *json.loads((folder / "made.json").read_text())


def stages_in(folder):
    """(links, folders of its own) of a variant."""
    stages = [path for path in folder.iterdir() if path.is_dir() and path.name != "variants"]
    return {path.name for path in stages if path.is_symlink()}, {path.name for path in stages if not path.is_symlink()}


COLLECTED = {"trajectories", "policy", "states"}
LEARNED = {"training", "selection", "reranker"}


@pytest.mark.parametrize(
    ("key", "links", "own"),
    [
        ("greedy", COLLECTED, set()),
        ("direct", COLLECTED, set()),
        ("published", COLLECTED | {"futures", "scores"} | LEARNED, set()),
        ("alpha-0.5", COLLECTED | {"futures", "scores"}, LEARNED),
        ("pool-slm", COLLECTED | {"futures"}, LEARNED | {"scores"}),
        ("spans", COLLECTED, set()),
        ("q0.92/direct", COLLECTED, set()),
        ("q0.92/published", COLLECTED | {"futures", "scores", "held-out-rollouts"} | LEARNED, {"agreement"}),
    ],
)
def test_what_is_not_changed_is_a_link(made, key, links, own):
    run, _, problems = made
    assert problems[key] is None
    assert stages_in(folder_of(run, key)) == (links, own | {"comparison"})


def test_a_place_of_others_has_all_but_a_comparison(made):
    run, _, problems = made
    assert problems["q0.92"] is None
    place, inner = folder_of(run, "q0.92"), folder_of(run, "q0.92/direct") / "policy"
    own = {"policy", "states", "futures", "scores", "held-out-rollouts"} | LEARNED
    assert stages_in(place) == ({"trajectories"}, own)
    assert inner.resolve() == (place / "policy").resolve()
    assert not Path(os.readlink(inner)).is_absolute()  # a run's folder can be moved
    assert frozen_policy(place).threshold > frozen_policy(run).threshold


def test_the_run_itself_is_not_written_to(made):
    run, before, _ = made
    assert state_of(run) == before


def test_what_cannot_be_made_is_said_and_made_later(made, trained, pair_checkpoint, tmp_path):
    run, _, problems = made
    assert "no/such/checkpoint: expected a folder or hub id" in problems["external-lost"]
    folder = run / "variants" / "external-lost"
    assert json.loads((folder / PROBLEM).read_text()) == {"problem": problems["external-lost"]}
    assert "Traceback" in (folder / "log.txt").read_text()

    place, lost = linked(trained, tmp_path / "run", *TRAINED), tmp_path / "lost"
    later = settings(compare={"external": {"lost": str(lost)}})
    variant = variants_of(later, place)["external-lost"]
    assert "expected a folder or hub id" in str(make(variant, later.model_dump_json(), place, False))
    assert not (place / variant.path / "comparison").exists()
    Path(pair_checkpoint).rename(lost)
    assert make(variant, later.model_dump_json(), place, False) is None
    assert not (place / variant.path / PROBLEM).exists()


def test_making_a_variant_again_changes_nothing(made, chosen):
    run, _, _ = made
    for key in ("alpha-0.5", "q0.92/direct"):
        variant = variants_of(chosen, run)[key]
        before = receipts(run / variant.path)
        assert make(variant, chosen.model_dump_json(), run, False) is None
        assert receipts(run / variant.path) == before


@pytest.fixture(scope="module")
def found(made, chosen):
    run, _, _ = made
    return gather(chosen, run)


def rows_of(found, table):
    return {(row.key, row.quantile): row for row in found.of(table)}


def rows_in(run, key):
    """What a variant's files hold."""
    files = sorted((folder_of(run, key) / "comparison").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def outcomes(run, key):
    """Whether each run was right, by problem, from a variant's files alone; also its mean steps and tokens."""
    right: dict = {}
    steps, tokens = [], []
    for row in rows_in(run, key):
        right.setdefault(row["problem"], []).append(row["verdict"] == "correct")
        steps.append(len(row["events"]))
        tokens.append(len(row["tokens"]))
    means = [sum(steps) / len(steps), sum(tokens) / len(tokens)]
    return right, *means


def test_a_row_is_what_its_files_say(made, found):
    run, _, _ = made
    row, ours = rows_of(found, "alpha")["alpha-0.5", None], rows_of(found, "alpha")["published", None]
    own, events, tokens = outcomes(run, "alpha-0.5")
    assert row.accuracy == statistics.average_interval([list(own.values())])
    assert (row.problems, row.events, row.tokens) == (9, pytest.approx(events), pytest.approx(tokens))
    assert (row.seeds, row.x, row.label, row.benchmark) == ((0, 1), 0.5, "alpha = 0.5", "demo:plans")
    assert (ours.x, ours.label) == (1.0, "alpha = 1")
    assert (list(row.minus), list(ours.minus)) == (["greedy", "direct", "published"], ["greedy", "direct"])


def test_methods_have_their_rows_and_those_unseen_their_reason(made, found):
    _, _, problems = made
    rows = {row.key: row for row in found.of("methods")}
    assert {"greedy", "majority", "one-token-takeover", "direct", "published", "external-lost"} <= rows.keys()
    assert rows.keys() >= UNSEEN.keys() | {"distilled", "s2t-local", "s2t-local-original"}
    assert rows["external-lost"].note == problems["external-lost"]
    assert rows["distilled"].note == "not run"
    assert rows["TaH"].note.startswith("changes the SLM itself")
    assert rows["greedy"].seeds == ()
    assert rows["majority"].seeds == (0, 1)
    assert (rows["majority"].label, rows["majority"].tokens) == ("Maj@2", None)
    assert rows["direct"].accuracy == rows["one-token-takeover"].accuracy
    assert rows["one-token-takeover"].minus["direct"] == (0.0, 0.0, 0.0)
    for key in ("greedy", "direct", "published"):
        assert key not in rows[key].minus


def test_rows_of_a_quantile_are_beside_the_methods_at_that_quantile(made, found, chosen):
    run, _, _ = made
    rows = rows_of(found, "quantiles")
    there, here = rows["published", 0.92], rows["published", 0.9]
    own, direct = outcomes(run, "q0.92/published")[0], outcomes(run, "q0.92/direct")[0]
    assert there.accuracy == statistics.average_interval([list(own.values())])
    assert there.minus["direct"] == statistics.average_interval([list(own.values())], [[direct[p] for p in own]])
    greedy = outcomes(run, "greedy")[0]
    assert there.minus["greedy"] == statistics.average_interval([list(own.values())], [[greedy[p] for p in own]])
    assert "published" not in there.minus
    assert rows["direct", 0.92].minus["published"].mean == pytest.approx(-there.minus["direct"].mean)
    assert there.threshold == frozen_policy(run / "variants" / "q0.92").threshold
    assert here.threshold == frozen_policy(run).threshold
    assert here.accuracy == statistics.average_interval([list(outcomes(run, "published")[0].values())])
    quantiles = [row.quantile for row in found.of("quantiles")]
    assert quantiles == sorted(quantiles)
    keys = {q: [key for key, quantile in rows if quantile == q] for q in (0.9, 0.92)}
    assert keys[0.9] == [key for key in keys[0.92] if key not in ("takeover", "s2t")]  # not among the methods here
    assert keys[0.92] == ["s2t", "direct", "published", "takeover"]


def test_tables_that_were_not_asked_for_are_left_out(found):
    assert {row.table for row in found.results} == {"methods", "pools", "alpha", "quantiles"}
    pools = rows_of(found, "pools")
    assert list(pools) == [("published", None), ("pool-slm", None), ("pool-llm", None), ("pool-slm-wide", None)]
    assert pools["published", None].label == "joint pool"
    assert pools["pool-llm", None].note == "not run"


def test_what_a_run_shows_is_finite_and_complete(made, found, chosen):
    run, _, _ = made
    assert len(tables_bytes([found])) > 1000
    assert (found.name, found.policy["threshold"]) == (run.name, frozen_policy(run).threshold)
    assert {row["stage"] for row in found.parts["offline"]} == set(TRAINED)
    assert all(row["published"] is None for row in found.parts["offline"])
    assert found.timed == ()
    quantile = {"validation, quantile 0.92": {"SLM", "LLM", "reranker"}, "validation": {"SLM", "LLM", "Direct-B_8"}}
    scores = {where: set() for where in quantile}
    for row in found.parts["agreement"]:
        scores[row["where"]].add(row["score"])
    assert scores == quantile
    assert len(found.parts["coverage"]) == 3
    assert not {"future_quality", "certification"} & found.parts.keys()


def test_the_long_table_has_every_row_of_every_variant(made, found):
    run, _, problems = made
    variants = [key for key, problem in problems.items() if problem is None and key != "q0.92"]
    assert {row.variant for row in found.rows} == set(variants)
    for key in variants:
        wanted = {(row["problem"], row["seed"]): row for row in rows_in(run, key)}
        own = {(row.problem, row.seed): row for row in found.rows if row.variant == key}
        assert own.keys() == wanted.keys()
        for place, row in own.items():
            known = wanted[place]
            assert (row.verdict, row.calls, row.events) == (known["verdict"], known["calls"], len(known["events"]))
            assert row.tokens == (None if key == "majority" else len(known["tokens"]))
            assert row.llm_tokens == min(known["calls"], known["appended"]) + known["suffix"]
            assert (row.run, row.method, row.loop, row.seconds) == (run.name, known["method"], "batch", None)


@pytest.mark.parametrize(
    ("tokens", "step"),
    [
        ([1, 9, 3, 4], 1),  # the first event's own token
        ([1, 2, 9, 4], None),  # after it, where there is no event
        ([1, 2, 3], None),  # it ends sooner
    ],
)
def test_a_text_parts_at_the_event_whose_token_differs(tokens, step):
    known = {"benchmark": "b", "method": "m", "seed": None, "loop": "batch", "problem": "p", "prompt_sha256": ""}
    known |= {"gold": "", "verdict": "wrong", "calls": 1, "seconds": None, "peak_bytes": None, "text": ""}
    event = Event(1, 2.0, [tokens[1], 7], [1, 2], [-1.0, -1.0], [-1.0, -1.0], [1.0, 0.0], 0)
    counts = {"pool": None, "appended": 1, "suffix": 0, "read": 1}
    greedy = Row(**known, **counts, tokens=[1, 2, 3, 4], events=[])
    assert parting_event(greedy, Row(**known, **counts, tokens=tokens, events=[event])) == step


def test_changed_answers_are_counted_by_the_event_at_which_the_texts_part(made, found, chosen):
    run, _, _ = made
    plain, wanted = {row["problem"]: row for row in rows_in(run, "greedy")}, Counter()
    for row in rows_in(run, "published"):
        greedy = plain[row["problem"]]
        if (row["verdict"] == "correct") != (greedy["verdict"] == "correct"):
            both = zip(greedy["tokens"], row["tokens"], strict=False)
            step = next(step for step, (one, other) in enumerate(both) if one != other)
            event = next(event for event in row["events"] if event["step"] == step)
            assert event["pool"][0] == greedy["tokens"][step] != event["pool"][event["choice"]]
            kind = token_kind(models_of(chosen.models).tokenizer.decode([greedy["tokens"][step]]))
            wanted["wrong → right" if row["verdict"] == "correct" else "right → wrong", kind] += 1
        else:
            wanted["none", ""] += 1
    assert len(wanted) > 1
    changes = found.parts["changes"]
    assert {row["method"] for row in changes} == {"Published recipe"}
    assert {(row["change"], row["kind of event"]): row["answers"] for row in changes} == wanted


def test_a_new_ablation_is_one_entry(made, chosen, monkeypatch):
    """Its row is made, compared and shown, and no other line knows of it."""
    run, _, _ = made

    def rows(plan):
        greedier = plan.recipe("events-1", "one event", evaluate={"max_events": 1})
        return [plan.own("all events"), greedier]

    entry = Table("events", "Number of events", "How often the LLM may be asked.", rows)
    monkeypatch.setitem(TABLES, "events", entry)
    (variant,) = own("events", Plan(chosen, run, 8))
    assert make(variant, chosen.model_dump_json(), run, False) is None
    found = gather(chosen, run)
    ours, new = found.of("events")
    assert (ours.label, new.label) == ("all events", "one event")
    assert new.accuracy == statistics.average_interval([list(outcomes(run, "events-1")[0].values())])
    assert set(new.minus) == {"greedy", "direct", "published"}
    shown = shown_rows(section(render([found], {}), "Number of events"))
    assert [row["label"] for row in shown] == ["all events", "one event"]


def test_no_row_of_the_demos_worlds_wants_a_judge():
    for name in ("tiny", "tiny-helpful", "tiny-control"):
        methods = PaperSettings.of_config(name).compare.methods
        assert set(names()) - set(methods) == {"spec-reason"}


def test_every_row_has_a_folder_of_its_own(chosen, tmp_path):
    plan = Plan(chosen, tmp_path, 8)
    assert own("alpha", plan)[0].path == Path("variants/distilled")  # the same under another name
    found = [variant for table in TABLES for variant in own(table, plan) if variant.label != "alpha = 0"]
    assert len({variant.path for variant in found}) == len(found)
    for variant in found:
        their = settings_of_variant(chosen, variant)
        methods = [*their.compare.methods, *their.compare.external]
        assert methods == [variant.method.removeprefix("external:")]
        if variant.inside is not None:
            assert variant.path.is_relative_to(variant.inside.path)
    by_key = {variant.key: settings_of_variant(chosen, variant) for variant in found if variant.inside is None}
    assert by_key["alpha-0.5"].train.alpha == 0.5
    original = by_key["s2t-local-original"]
    assert (original.experiment.target, original.score.pool) == ("select", "slm")
    distilled = by_key["distilled"]
    assert (distilled.experiment.target, distilled.train.alpha, distilled.score.pool) == ("future", 0.0, "joint")
    assert by_key["future-shuffled"].samples.future == "shuffled"
    assert by_key["scope-sequence"].train.scope == "sequence"
    assert by_key["temperature-1"].train.temperature == 1.0
    same = {"train": {"alpha": 0.5}, "experiment": {"alphas": [0.5, 0.25], "quantiles": [0.9]}}
    plan = Plan(settings(**same), tmp_path, 8)
    assert [variant.x for variant in own("alpha", plan)] == [0.0, 0.25]
    assert [variant.x for variant in TABLES["alpha"].rows(plan)] == [0.0, 0.25, 0.5]  # the run's own among them
    assert own("quantiles", plan) == []


def test_a_horizon_is_kept_by_all_but_the_horizons(tmp_path):
    chosen = settings(train={"horizons": [4, 8, 2]})
    plan = Plan(chosen, tmp_path, 4)
    assert [(variant.key, variant.x) for variant in own("horizons", plan)] == [("horizon-2", 2.0), ("horizon-8", 8.0)]
    assert settings_of_variant(chosen, own("horizons", plan)[0]).train.horizons == (2,)
    for table in ("pools", "futures", "alpha", "scope", "temperature", "quantiles"):
        for variant in own(table, plan):
            assert settings_of_variant(chosen, variant).train.horizons == (4,)


def test_changes_go_on_top_of_those_around_them():
    base = settings()
    outer = Variant("a", "a", {"collect": {"quantile": 0.5}, "train": {"alpha": 0.5}}, None)
    inner = Variant("b", "b", {"train": {"rank": 2}, "evaluate": {"max_events": 7}}, inside=outer)
    found = settings_of_variant(base, inner)
    assert (found.collect.quantile, found.train.alpha, found.train.rank) == (0.5, 0.5, 2)
    assert (found.evaluate.max_events, found.compare.methods) == (7, ("published",))
    assert settings_of_variant(base, outer).compare.methods == ()
    assert inner.path == Path("variants/a/variants/b")
    assert found.collect.model_dump() == base.collect.model_dump() | {"quantile": 0.5}
    with pytest.raises(ValueError, match=r"at most score\.horizon, 8, got 16"):
        change(base, {"train": {"horizons": (16,)}})


PAPER = {"models": ModelSettings(slm="Qwen/Qwen3-1.7B", llm="Qwen/Qwen3-32B")}


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        ({}, True),
        ({"train": {"microbatches": 4, "checkpoint_steps": 9}, "models": {"dtype": "bfloat16"}}, True),
        ({"compare": {"methods": ["greedy"]}, "experiment": {"quantiles": [0.5]}}, True),
        ({"models": {"slm": "Qwen/Qwen3-4B"}}, False),
        ({"models": {"dtype": "float32"}}, False),
        ({"models": {"llm": "Qwen/Qwen3-14B"}}, False),
        ({"collect": {"quantile": 0.98}}, False),
        ({"score": {"pool": "slm"}}, False),
        ({"evaluate": {"benchmarks": ["gsm8k"]}}, False),
    ],
)
def test_the_papers_figures_stand_beside_its_own_settings_alone(changes, published):
    assert is_published(change(PaperSettings(**PAPER), changes)) == published


def test_shipped_settings_are_published_where_they_say_so():
    names = ("qwen3-1.7b-published", "qwen3-1.7b", "qwen3-0.6b-published", "tiny")
    assert [is_published(PaperSettings.of_config(name)) for name in names] == [True, False, True, False]


PUBLISHED = {  # published values, as literals
    "problems": {"validation": 750},
    "collect": {"max_new_tokens": 4096, "top_k": 64, "quantile": 0.99, "max_states": 8, "slm_k": 8},
    "futures": {"max_new_tokens": 4096, "llm_k": 8},
    "score": {"horizon": 128, "pool": "joint"},
    "train": {"horizons": (16, 32, 64, 128), "temperature": 0.5, "alpha": 1.0, "scope": "candidate", "rank": 16}
    | {"lora_alpha": 32.0, "dropout": 0.05, "learning_rate": 2e-4, "weight_decay": 0.01, "warmup": 0.03, "clip": 1.0}
    | {"groups_per_step": 32, "epochs": 3, "seeds": (0, 1, 2)},
    "evaluate": {"max_new_tokens": 4096, "max_events": 8}
    | {"benchmarks": ("gsm8k", "math-500", "olympiadbench", "aime-2024", "aime-2025")},
}


@pytest.mark.parametrize(("section", "name"), [(each, name) for each, values in PUBLISHED.items() for name in values])
@pytest.mark.parametrize("config", ["default", "qwen3-1.7b-published", "qwen3-0.6b-published"])
def test_a_setting_has_its_published_value(config, section, name):
    found = PaperSettings(**PAPER) if config == "default" else PaperSettings.of_config(config)
    assert getattr(getattr(found, section), name) == PUBLISHED[section][name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experiment": {"target": "best"}}, "experiment.target"),
        ({"experiment": {"validation_states": 0}}, "experiment.validation_states"),
        ({"experiment": {"alphas": [2]}}, "experiment.alphas"),
        ({"compare": {"recall": 0}}, "compare.recall"),
        ({"compare": {"rooter": {}}}, "compare.rooter"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        settings(**changes)


def test_a_table_that_is_not_there_is_one_sentence():
    with pytest.raises(ValueError, match=r"tables: expected all or some of methods, pools, .* got 'poles'; name those"):
        CliRunner().invoke(app, ["tables", "poles", "--config", "tiny"], catch_exceptions=False)


def calls(run: Path, config: Path, table: str, workers: int) -> list[object]:
    return ["tables", table, "--config", config, "--run-dir", run, "--workers", workers]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["tables", "worker"])
@pytest.mark.sweep
def test_a_killed_experiment_goes_on(trained, tmp_path, killed):
    run, config = linked(trained, tmp_path / "run", *TRAINED), tmp_path / "small.yaml"
    chosen = settings(compare={"methods": METHODS})
    config.write_text(yaml.safe_dump(chosen.model_dump(mode="json")))
    called, variants = calls(run, config, "pools", 2), run / "variants"
    process = start_futurebridge(called, tmp_path, program=PROGRAM)
    try:
        while not (finished := [path.parent for path in variants.glob("*/comparison/manifest.json")]):
            assert process.is_alive(), (tmp_path / "stderr").read_text()
            time.sleep(0.05)
        finished = [path for path in finished if Artefact(path.parent, "comparison").manifest()["complete"]]
        workers = {worker for server in children_of(process.pid) for worker in children_of(server)}
        assert workers
        if killed == "worker":
            os.kill(next(iter(workers)), signal.SIGKILL)
            process.join(HANG)
            said = (tmp_path / "stderr").read_text()
            assert process.exitcode == 1
            assert "got one that was killed" in said
            assert "Traceback" not in said
    finally:
        process.kill()
        process.join()
    deadline = time.monotonic() + HANG
    while not all(ended(worker) for worker in workers):  # nobody is left that holds a folder
        assert time.monotonic() < deadline
        time.sleep(0.1)
    done = [path.parent for path in variants.glob("*/comparison/manifest.json")]
    done = [path.parent for path in done if Artefact(path.parent, "comparison").manifest()["complete"]]
    before = {path: receipts(path) for path in done}
    assert len(done) < 6
    again = futurebridge(*called, program=PROGRAM)
    assert again.returncode == 0, again.stderr
    assert {path.name for path in variants.iterdir()} == {
        *("greedy", "direct", "published", "pool-slm", "pool-llm", "pool-slm-wide")
    }
    assert not list(variants.rglob(PROBLEM))
    assert {path: receipts(path) for path in done} == before
    assert {row.table for row in gather(chosen, run).results} == {"methods", "pools"}


@pytest.mark.slow
@pytest.mark.sweep
def test_an_experiment_has_every_row_of_every_table(tmp_path, pair_checkpoint):
    config, run = tmp_path / "small.yaml", tmp_path / "run"
    chosen = settings(
        problems={"limit": 56, "certification": 8},
        train={"horizons": [4, 8], "seeds": [0], "epochs": 1},
        compare={
            "external": {"tuned": pair_checkpoint},
            "router": {"problems": 35, "width": 16, "blocks": 1, "epochs": 2, "learning_rate": 0.001},
        },
        evaluate={"limit": 6},
    )
    config.write_text(yaml.safe_dump(chosen.model_dump(mode="json")))
    done = futurebridge(*calls(run, config, "all", 2), program=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "not made" not in done.stdout
    assert not list(run.rglob(PROBLEM))
    assert (run / "report" / "report.md").stat().st_size > 10_000
    found = gather(chosen, run)
    assert {row.table for row in found.results} == set(TABLES)
    for row in found.results:
        if row.key in UNSEEN:
            assert row.note == UNSEEN[row.key]
            continue
        mean, low, high = row.accuracy
        assert 0 <= low <= mean <= high <= 1
        assert row.problems == 6
        assert row.minus.keys() >= {"greedy", "direct", "published"} - {row.key}
        if row.table == "futures" and row.key != "future-verified":
            assert "verified" in row.minus
        assert ("first correct sample" in row.minus) == (row.key in ("future-unverified", "future-incorrect"))
    keys = {(row.table, row.key) for row in found.results}
    assert len([key for table, key in keys if table == "methods"]) == 19 + 3 + 1 + 3  # distilled, tuned, unseen
    assert len([key for table, key in keys if table == "horizons"]) == 2
    assert len([key for table, key in keys if table == "futures"]) == 6 + 3
    by_quantile = {}
    for row in found.of("quantiles"):
        by_quantile.setdefault(row.quantile, []).append(row.key)
    assert by_quantile[0.92] == ["s2t", "direct", "published", "takeover"]
    assert by_quantile[0.9] == ["s2t", "direct", "deployed", "published", "takeover"]
    scores = {row["score"] for row in found.parts["agreement"] if row["where"] == "validation"}
    assert {"SLM", "LLM", "Direct-B_4", "Direct-B_8", "reranker"} <= scores
    quality = found.parts["future_quality"]
    assert quality[0]["states"] > 3
    assert all(row.keys() == {"future", "states", "4", "8"} for row in quality)
    judged = {(row["where"], row["score"]) for row in found.parts["agreement"] if row["kind"] == "all"}
    assert judged >= {("validation, quantile 0.92", score) for score in ("SLM", "LLM", "reranker")}
    assert len(found.timed) == 9 + 14  # in the fast loop, in the plain one
    swept = found.of("recalls")
    assert [row.x for row in swept] == [0.2, 0.5, 0.8, 0.95, 1.0]
    assert swept[3].accuracy == rows_of(found, "methods")["r2r", None].accuracy
    assert (run / "variants" / "r2r-0.5" / "router").is_symlink()  # trained once
    assert {"samples", "router", "rollouts", "held-out-rollouts"} <= {row["stage"] for row in found.parts["offline"]}
    for kind in ("verified", "sampled", "unverified", "incorrect", "cross-state", "shuffled"):
        assert (run / "variants" / f"future-{kind}" / "samples").is_symlink()  # sampled once
    assert (run / "variants/q0.92/variants/published/held-out-rollouts").is_symlink()


@pytest.fixture
def pair_checkpoint(tmp_path):
    from fb_core.apps.demo.pairs import load_pair

    pair = load_pair("plans")
    pair.slm.save_pretrained(tmp_path / "tuned")
    pair.world.tokenizer.save_pretrained(tmp_path / "tuned")
    return str(tmp_path / "tuned")


def test_an_experiment_goes_on_where_a_router_cannot_be_trained(trained, tmp_path, monkeypatch):
    run, shown = linked(trained, tmp_path / "run", *TRAINED), []
    chosen = settings(compare={"methods": ["greedy", "r2r"], "router": {"problems": 5, "width": 8, "epochs": 1}})
    monkeypatch.setattr(tables, "_distilled", lambda plan: [])
    run_tables(["methods", "costs"], chosen, run, 1, shown.append)
    assert any(text.startswith("**not made**: ") and "label more trajectories" in text for text in shown)
    found = gather(chosen, run)
    rows = {row.key: row for row in found.of("methods")}
    assert "label more trajectories" in rows["r2r"].note
    assert rows["greedy"].accuracy
    assert rows["published"].accuracy
    assert (run / "variants" / "r2r" / "router-labels").is_symlink()
    assert {row["score"] for row in found.parts["agreement"]} >= {"reranker"}
    assert {row.key for row in found.timed} == {"greedy"}  # without a router's rows
