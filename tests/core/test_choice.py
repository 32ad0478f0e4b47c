"""The choice of a recipe: its rule on outcomes made by hand, its error over many draws, and all of it on a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from runs import contents, finish, receipts, settings, start
from typer.testing import CliRunner

from benchmarks import power
from fb_core import (
    CollaborativeDecoder,
    FutureBridgeSelector,
    LLMPreference,
    LowLatencyDecoder,
    TokenReranker,
    deployment_of,
)
from fb_core.apps.cli.main import app
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.choose import CertificationStage, ChoiceStage, Results, ValueStage, decide, rerank_states
from fb_core.apps.pipeline.commands import run_command
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import LABELS, Context, frozen_policy, splits_of
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.settings.loading import load
from fb_core.apps.settings.pair import PairSettings
from fb_core.apps.settings.run import RunSettings
from fb_core.decode.deployment import Deployed, RecipeName
from fb_core.decode.selectors import ValueSelector
from fb_core.hub import deployed_files
from fb_core.rerank.reranker import DESCRIPTION
from fb_core.rerank.value_head import fit_value, value_terms

LABELLED = ("greedy", "direct", "published", "value")


def tried(recipe: RecipeName, correct: np.ndarray | list[int], calls: float = 1.0) -> Results:
    return Results(recipe, np.asarray(correct, dtype=np.float64), calls, calls)


def first(right: int, of: int = 400) -> np.ndarray:
    """The first so many problems right."""
    return (np.arange(of) < right).astype(np.float64)


def test_the_best_of_those_that_are_safe_is_taken():
    rights = {"greedy": 200, "direct": 300, "published": 340, "value": 350}
    tested = [tried(recipe, first(right)) for recipe, right in rights.items()]
    chosen, evidence = decide(tested, 0.02, 0.95)
    assert chosen == "value"
    found = dict(evidence)["value"]
    assert (found.problems, found.tests, found.accuracy) == (400, 4, 0.875)
    assert found.words.startswith("value: the best of 3 recipes (of 4 tested) that are shown")
    wanted = statistics.paired_lower_bound(first(350), first(300), level=1 - 0.05 / 4)
    assert (found.minus_direct.mean, found.minus_direct.low) == (wanted.mean, wanted.low)


def test_a_tie_goes_to_the_fewer_calls():
    tested = [tried("greedy", first(200), 0), tried("direct", first(300), 5), tried("published", first(340), 4)]
    assert decide([*tested, tried("value", first(340), 3)], 0.02, 0.95)[0] == "value"
    chosen, evidence = decide([tested[0], tried("direct", first(340), 3), tested[2]], 0.02, 0.95)
    assert chosen == "direct"
    assert evidence[0][1].words.startswith("direct LLM score: the best of 2 recipes (of 3 tested)")
    alone = decide([tested[0], tried("direct", first(340), 3)], 0.02, 0.95)[1][0][1].words
    assert alone.startswith("direct LLM score: the only one of 2 tested recipes that is shown with 95% confidence")
    for ours in (398, 400):  # greedy decoding is better than a recipe that may be deployed, or as good and asks nobody
        tested = [tried("greedy", first(400), 0), tried("direct", first(300)), tried("published", first(ours), 5)]
        assert decide(tested, 0.02, 0.95)[0] == "greedy"


def test_a_recipe_must_hold_against_both():
    """Above greedy decoding, yet not shown to be within two points of the direct score; or the other way round."""
    greedy, direct = tried("greedy", first(200), 0), tried("direct", first(300))
    assert decide([greedy, direct, tried("published", first(290))], 0.02, 0.95)[0] == "direct"
    swapped = [tried("greedy", first(300), 0), tried("direct", first(200)), tried("published", first(290))]
    assert decide(swapped, 0.02, 0.95)[0] == "greedy"


@pytest.mark.parametrize(("problems", "lead"), [(2, None), (5, 5), (40, 5), (246, 1), (247, 0)])
def test_what_too_few_problems_cannot_show_is_said_once_before_the_run(problems, lead, tmp_path, caplog, monkeypatch):
    chosen = settings(problems={"limit": 500, "certification": problems})
    lost = tried("greedy", first(0, problems)), tried("direct", first(0, problems))
    for won in {0, max(0, (lead or 0) - 1), lead or 0, problems}:
        best = tried("published", first(won, problems))
        evidence = dict(decide([*lost, best, best], chosen.choice.delta, chosen.choice.level)[1])["published"]
        assert (evidence.minus_greedy.low > -chosen.choice.delta) == (lead is not None and won >= lead)
    with pytest.raises(ValueError, match="expected finished"):
        run_command("train", chosen, tmp_path)
    run_command("collect", chosen, tmp_path, dry_run=True, show=lambda text: None)
    assert caplog.text == ""
    monkeypatch.setattr("fb_core.apps.pipeline.commands.run_stage", lambda stage, engine: stage.folder.finished())
    with pytest.raises(ValueError, match="expected finished"):
        run_command("collect", chosen, tmp_path)
    assert ("no recipe can pass its test" in caplog.text) == (lead is None)
    assert (f"only if it gains {lead} or more of them" in caplog.text) == bool(lead)
    caplog.clear()
    begun = Artefact(tmp_path, "trajectories")
    with begun.locked():
        begun.begin({}, {})
    with pytest.raises(ValueError, match="expected finished"):
        run_command("collect", chosen, tmp_path)
    assert caplog.text == ""


def test_too_few_problems_show_nothing():
    """Twenty problems on which the recipes differ: none is shown to be safe, the direct score neither."""
    rng = np.random.default_rng(0)
    noisy = [rng.permutation(first(10, 20)) for _ in range(3)]
    chosen, evidence = decide(
        [tried(r, c) for r, c in zip(("greedy", "direct", "published"), noisy, strict=True)], 0.02, 0.95
    )
    assert chosen == "greedy"  # equally accurate, without a call
    assert evidence[0][1].words.endswith(
        "the more accurate of these two on the same problems, which guarantees nothing."
    )
    better = [tried("greedy", noisy[0], 0), tried("direct", first(11, 20)), tried("published", first(12, 20))]
    assert decide(better, 0.02, 0.95)[0] == "direct"


@pytest.mark.parametrize("gained", [0.0, 0.005, 0.04])
@pytest.mark.parametrize("problems", [300, 750])
def test_the_level_holds_at_the_border_itself(problems, gained):
    """Two recipes that lose two points more than they gain: few pass."""
    rng, wrong, draws = np.random.default_rng(2), 0, 800
    for _ in range(draws):
        direct = rng.random(problems) < 0.5
        others = []
        for recipe in ("published", "value"):  # apart from each other where the direct score is what it is
            lost = direct & (rng.random(problems) < (gained + 0.02) / 0.5)
            won = ~direct & (rng.random(problems) < gained / 0.5)
            others.append(tried(recipe, (direct & ~lost) | won))
        chosen, _ = decide([tried("greedy", np.zeros(problems), 0), tried("direct", direct), *others], 0.02, 0.95)
        wrong += chosen not in ("greedy", "direct")
    assert wrong / draws <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)


def told(name: str) -> dict[str, list[float]]:
    """The rows of a table of the page, as shares."""
    page = (Path(__file__).parents[2] / "docs" / "choice.md").read_text()
    block = page.split(f"<!-- {name}:")[1].split(f"<!-- end of {name} -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if "%" in line]
    return {first: [int(cell.removesuffix("%")) / 100 for cell in cells] for first, *cells in rows}


@pytest.mark.parametrize("better", [3, 4, 5])
def test_only_what_passed_is_promised(better):
    """The fallback is sometimes worse than the other by more than the margin, as often as the page says."""
    draws, shown = 400, told("fallback")[f"{better} points"]
    for problems, (none_passes, greedy) in zip((300, 750), (shown[:2], shown[2:]), strict=True):
        rng, fallen, wrong, promised = np.random.default_rng(3), 0, 0, 0
        for _ in range(draws):
            chosen, evidence = decide(power.drawn(rng, problems, better / 100, -0.05), 0.02, 0.95)
            own = dict(evidence)[chosen]
            passed = min(own.minus_greedy.low, own.minus_direct.low) > -0.02
            assert passed == (": none of" not in own.words)
            assert passed == ("guarantees nothing" not in own.words)
            assert passed or chosen in ("greedy", "direct")
            promised += passed and chosen != "direct"  # worse than the margin allows
            fallen, wrong = fallen + (not passed), wrong + (chosen == "greedy")
        assert promised / draws <= 0.05
        for share, wanted in ((fallen / draws, none_passes), (wrong / draws, greedy)):
            assert abs(share - wanted) <= 4 * np.sqrt(0.25 / draws)


@pytest.mark.parametrize("gain", [-2, 0, 2, 5])
def test_the_power_is_as_the_page_says(gain):
    draws, rng, shown = 300, np.random.default_rng(4), told("power")[f"{gain:+} points" if gain else "0 points"]
    for problems, wanted in zip((300, 750), shown, strict=False):
        deployed = 0
        for _ in range(draws):
            chosen, _ = decide(power.drawn(rng, problems, 0.0, gain / 100), 0.02, 0.95)
            deployed += chosen in ("published", "value")
        assert abs(deployed / draws - wanted) <= 4 * np.sqrt(max(wanted * (1 - wanted), 0.01) / draws)
    assert gain != -2 or max(shown) <= 0.05


@pytest.fixture(scope="module")
def chosen_settings() -> RunSettings:
    return settings(
        problems={"limit": 72, "certification": 24, "train": "demo:plans", "thinking": True},
        train={"seeds": [0], "epochs": 1},
        evaluate={"benchmarks": ["no-such-file.jsonl"]},  # read by nothing of these
    )


@pytest.fixture(scope="module")
def run(chosen_settings, tmp_path_factory) -> Path:
    """Trained, its benchmark not being there: no test problem is read before the choice."""
    run = tmp_path_factory.mktemp("choice") / "run"
    for command in ("collect", "futures", "score", "train"):
        finish(command, chosen_settings, run)
    return run


def test_no_test_problem_is_read_before_the_choice(run, chosen_settings):
    assert Artefact(run, ChoiceStage.name).finished()["complete"]
    with pytest.raises((OSError, ValueError), match="no-such-file"):
        run_command("evaluate", chosen_settings, run)
    folder = run / "deployed" / "seed-0"  # it can go to the hub whole
    assert deployed_files(folder) == sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    with pytest.raises(ValueError, match="recipe:"):
        deployment_of(str(folder_of(run)), load_pair("plans").slm, recipe="publishd")


def test_what_is_set_aside_must_leave_problems_to_train_on(chosen_settings):
    greedy = chosen_settings.problems.model_copy(update={"validation": 50})
    with pytest.raises(ValueError, match=r"more than 74 .*validation \(50\).*certification \(24\).* got 72; lower"):
        splits_of(greedy)


def test_certification_problems_are_used_for_nothing_else(run, chosen_settings):
    splits = splits_of(chosen_settings.problems)
    assert [len(splits[name]) for name in ("train", "validation", "certification")] == [36, 12, 24]
    texts = {name: {problem.text for problem in members} for name, members in splits.items()}
    assert not texts["certification"] & (texts["train"] | texts["validation"])
    seen = {
        problem for shard in Artefact(run, "trajectories").shards() for problem in Examples(run, shard).trajectories
    }
    assert seen == {problem.id for name in ("train", "validation") for problem in splits[name]}


def test_the_head_is_fitted_to_the_rollouts_of_training_states(run, chosen_settings):
    """Their candidates' terms from the reranker's own scores, and whether each rollout was right."""
    slm = load_pair("plans").slm
    reranker = {0: TokenReranker.from_pretrained(run / "reranker" / "seed-0", slm).eval()}
    shards = Artefact(run, "rollouts").shards()
    assert all(shard.startswith("train") for shard in shards)
    rolled = {one.state.id: one for shard in shards for one in Examples(run, shard).rollouts().values()}
    terms, outcomes = [], []
    for state, _, scores in rerank_states(slm, reranker, [one.state for one in rolled.values()]):
        wanted = reranker[0].scores(state.prefix, state.pool.ids)
        torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-4)
        terms.append(value_terms(state.pool, scores, state.entropy))
        outcomes.append(rolled[state.id].correct)
    values = ValueStage(chosen_settings, run)
    assert values.head(0) == fit_value(terms, outcomes)
    counts = values.folder.finished()["counts"]
    assert counts["rolled-out states"] == len(rolled)
    assert counts["mixed states"] == sum(len(set(one.tolist())) == 2 for one in outcomes) > 3


@pytest.mark.parametrize("recipe", LABELLED)
@pytest.mark.sweep(3)
def test_recipes_are_certified_as_they_are_deployed(run, chosen_settings, recipe):
    """A recipe's rows are what its decoder makes of the certification problems one at a time, in the plain loop."""
    stage, pair = CertificationStage(chosen_settings, run), load_pair("plans")
    deployed = stage.deployed(recipe, 0)
    selector = deployed.selector(TokenReranker.from_pretrained(run / "reranker" / "seed-0", pair.slm).eval())
    options = deployed.pools.model_dump() if selector else {"max_events": 0}
    decoder = CollaborativeDecoder(pair.slm, pair.llm, selector, deployed.policy, **options)
    mine = [row for row in stage.rows() if row.method == recipe]
    assert len(mine) == 24
    assert {row.seed for row in mine} == ({None} if recipe in ("greedy", "direct") else {0})
    prompts = stage.models.prompts(stage.problems, stage.prompt_settings)
    for row, prompt in zip(mine, prompts, strict=True):
        assert row.tokens == decoder.generate(prompt, 45).token_ids.tolist()


def folder_of(run: Path) -> Path:
    return run / ChoiceStage.name / "seed-0"


def deployed_as(run: Path, folder: Path, recipe: RecipeName, chosen_settings: RunSettings) -> Path:
    """An adapter folder with another recipe of the run."""
    shutil.copytree(run / "reranker" / "seed-0", folder)
    CertificationStage(chosen_settings, run).deployed(recipe, 0).save(folder)
    return folder


def test_the_folder_of_an_adapter_holds_recipe_and_evidence(run, chosen_settings):
    recipe, evidence = ChoiceStage(chosen_settings, run).verdict(0)
    found = Deployed.load(folder_of(run))
    assert found is not None
    assert found.name == recipe
    assert found.evidence == dict(evidence)[recipe]
    assert found.evidence.problems == 24
    assert found.policy.threshold == frozen_policy(run).threshold
    assert found.pools.model_dump() == {"pool": "joint", "slm_k": 3, "llm_k": 3, "max_events": 8}
    assert found.thinking
    assert "## Deployed recipe" in (folder_of(run) / "README.md").read_text()
    TokenReranker.from_pretrained(folder_of(run), load_pair("plans").slm)


def test_an_adapter_of_a_run_says_what_it_was_trained_for(run):
    slm, folder = load_pair("plans").slm, run / "reranker" / "seed-0"
    assert Deployed.load(folder).thinking
    selector, policy, options = deployment_of(str(folder), slm)
    assert (type(selector), policy) == (FutureBridgeSelector, frozen_policy(run))
    assert options == {"pool": "joint", "slm_k": 3, "llm_k": 3, "max_events": 8}
    loaded = load(PairSettings(slm="demo:plans", llm="demo:plans", adapter=str(folder)))
    assert (loaded.policy, loaded.options, loaded.thinking) == (policy, options, True)


@pytest.mark.parametrize("recipe", LABELLED)
def test_a_recipe_survives_its_folder(run, chosen_settings, tmp_path, recipe):
    """Saved and loaded, it decodes as it did."""
    stage, pair = CertificationStage(chosen_settings, run), load_pair("plans")
    prompts = [torch.tensor(problem.prompt_ids) for problem in pair.world.problems(3, 5, "validation")]
    folder = deployed_as(run, tmp_path / recipe, recipe, chosen_settings)
    selector, policy, options = deployment_of(str(folder), pair.slm)
    loaded = CollaborativeDecoder(pair.slm, pair.llm, selector, policy, **options).generate_many(prompts, 30)
    reranker = TokenReranker.from_pretrained(run / "reranker" / "seed-0", pair.slm).eval()
    own = Context(chosen_settings, run).decoder_for(stage.deployed(recipe, 0), reranker).generate_many(prompts, 30)
    assert [one.token_ids.tolist() for one in loaded] == [one.token_ids.tolist() for one in own]
    assert [[event.step for event in one.events] for one in loaded] == [
        [event.step for event in one.events] for one in own
    ]


def test_published_is_the_papers_whatever_was_chosen(run, chosen_settings, tmp_path):
    slm = load_pair("plans").slm
    folder = deployed_as(run, tmp_path / "value", "value", chosen_settings)
    assert type(deployment_of(str(folder), slm).selector) is ValueSelector
    selector, policy, options = deployment_of(str(folder), slm, recipe="published")
    assert type(selector) is FutureBridgeSelector
    assert policy == frozen_policy(run)
    own = TokenReranker.from_pretrained(run / "reranker" / "seed-0", slm)
    for name, tensor in own.tensors().items():
        assert torch.equal(tensor, selector.reranker.tensors()[name])
    assert options["max_events"] == 8


def test_greedy_asks_nobody_and_options_come_from_the_recipe(run, chosen_settings, tmp_path):
    slm = load_pair("plans").slm
    folder = str(deployed_as(run, tmp_path / "greedy", "greedy", chosen_settings))
    selector, _, options = deployment_of(folder, slm)
    assert selector is None
    assert options["max_events"] == 0
    direct = str(deployed_as(run, tmp_path / "direct", "direct", chosen_settings))
    selector, policy, options = deployment_of(direct, slm, threshold=0.3, max_events=3)
    assert isinstance(selector, LLMPreference)
    assert (policy.threshold, options["max_events"], options["slm_k"]) == (0.3, 3, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({"threshold": "high"}, "threshold: "), ({"more": 1}, "more: "), ({"name": "magic"}, "name: ")),
        *(({"value": {"weights": [1.0]}}, "value: .*ValueHead"), ({"value": None}, "name value without a head")),
        *(({"name": "direct"}, "name direct with a head"), ({"recipe": {"ask": True}}, "recipe: ")),
    ],
)
def test_a_damaged_recipe_or_one_that_there_is_no_more_is_refused(run, chosen_settings, tmp_path, change, words):
    folder = deployed_as(run, tmp_path / "one", "value", chosen_settings)
    description = json.loads((folder / DESCRIPTION).read_text())
    description["recipe"] |= change
    (folder / DESCRIPTION).write_text(json.dumps(description))
    with pytest.raises(ValueError, match=rf"futurebridge\.json: .*{words}.*run `train` again"):
        Deployed.load(folder)


def test_an_adapter_of_the_first_format_is_refused_in_a_sentence(run, chosen_settings, tmp_path):
    """Its recipe may hold spans, which events do not have."""
    folder = deployed_as(run, tmp_path / "one", "published", chosen_settings)
    description = json.loads((folder / DESCRIPTION).read_text()) | {"format": 1}
    description["recipe"]["pools"]["span"] = {"tokens": 4, "ends": [], "agree": False}
    (folder / DESCRIPTION).write_text(json.dumps(description))
    slm = load_pair("plans").slm
    for load_it in (lambda: deployment_of(str(folder), slm), lambda: TokenReranker.from_pretrained(folder, slm)):
        with pytest.raises(ValueError, match=r"futurebridge\.json: .*got 1"):
            load_it()


def test_commands_decode_by_the_folder(run, chosen_settings, tmp_path):
    """`generate` with another recipe in the folder gives another policy, and the published one on demand."""
    folder = deployed_as(run, tmp_path / "greedy", "greedy", chosen_settings)
    pair = {"slm": "demo:plans", "llm": "demo:plans", "adapter": str(folder), "max_new_tokens": 40}
    assert load(PairSettings(**pair)).options["max_events"] == 0
    assert load(PairSettings(**pair, recipe="published")).options["max_events"] == 8
    asked = ["generate", "29*9+7*7+9;", "--slm", "demo:plans", "--llm", "demo:plans", "--adapter", str(folder)]
    greedy, published = (
        CliRunner().invoke(app, [*asked, "--max-new-tokens", "40", "--threshold", "0.5", *more])
        for more in ([], ["--recipe", "published"])
    )
    assert greedy.exit_code == published.exit_code == 0
    assert "no event" in greedy.stderr
    assert "no event" not in published.stderr


@pytest.mark.sweep
def test_a_choice_goes_on_where_it_was_killed(run, chosen_settings, tmp_path):
    """Killed inside several writes of its end, `train` makes the same bytes."""
    left = ("values", "certification", ChoiceStage.name)
    again = tmp_path / "run"
    shutil.copytree(run, again, symlinks=True)
    for stage in left:
        shutil.rmtree(again / stage)
    for number, seed in ((1, 0), (3, 1), (5, 2)):
        process = start("train", chosen_settings, again, dies=number, seed=seed)
        process.join()
        assert process.exitcode == -9
    kept = receipts(again)
    finish("train", chosen_settings, again)
    assert contents(again) == contents(run)
    after = receipts(again)
    assert all(after[name] == when for name, when in kept.items())


def test_evaluate_shows_the_published_and_the_deployed_recipe(run, chosen_settings, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(run, again, symlinks=True)
    there = chosen_settings.model_copy(
        update={"evaluate": chosen_settings.evaluate.model_copy(update={"benchmarks": ("demo:plans",), "limit": 6})}
    )
    finish("evaluate", there, again)
    table = Artefact(again, "evaluation").finished()["summary"]["table"]
    assert [row["method"] for row in table] == list(LABELS.values())


def test_the_command_says_what_it_chose(chosen_settings, run, tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(chosen_settings.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["train", "--config", str(config), "--run-dir", str(run)])
    assert done.exit_code == 0, done.output
    assert "Seed 0, 24 problems. " in done.output
    assert "| recipe | accuracy, % | minus greedy, pp [lower bound] |" in done.output


def test_another_pool_than_the_joint_one_is_refused_ahead_of_the_training(chosen_settings, tmp_path):
    other = chosen_settings.model_copy(update={"score": chosen_settings.score.model_copy(update={"pool": "slm"})})
    with pytest.raises(ValueError, match=r'score.pool: expected "joint" with problems.certification'):
        run_command("train", other, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_adapter_with_a_head_is_not_changed_for_another(run, chosen_settings, tmp_path):
    """`load_adapter` takes published rerankers alone: a head belongs to its own."""
    pair, published = load_pair("plans"), run / "reranker" / "seed-0"
    value = deployed_as(run, tmp_path / "value", "value", chosen_settings)
    for folder, other in ((value, published), (published, value)):
        selector, policy, options = deployment_of(str(folder), pair.slm)
        decoder = LowLatencyDecoder(pair.slm, pair.llm, selector, policy, max_length=64, **options)
        with pytest.raises(ValueError, match="load_adapter:"):
            decoder.load_adapter(other)
    decoder.load_adapter(published)


def test_a_recipe_that_asks_nobody_needs_no_large_model_and_says_so(run, chosen_settings, tmp_path, caplog):
    folder = deployed_as(run, tmp_path / "greedy", "greedy", chosen_settings)
    pair = PairSettings(slm="demo:plans", llm="no/such/model", adapter=str(folder))
    assert load(pair).pair.llm is None
    assert "training chose greedy decoding" in caplog.text
    assert "no/such/model is neither loaded nor asked" in caplog.text
