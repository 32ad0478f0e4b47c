"""The choice of a recipe: its rule on outcomes made by hand, its error over many draws, and all of it on a run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from runs import contents, finish, receipts, settings, start
from safetensors.torch import save_file
from typer.testing import CliRunner

from fb_core import (
    CollaborativeDecoder,
    FutureBridgeSelector,
    LLMPreference,
    State,
    TokenReranker,
    deployment_of,
    statistics,
)
from fb_core.cli import app
from fb_core.config import PairSettings, RunSettings
from fb_core.demo.pairs import load_pair
from fb_core.hub import deployed_files
from fb_core.loading import load
from fb_core.recipe import ASK, DIRECT, GREEDY, PUBLISHED, Deployed, Recipe
from fb_core.reranker import DESCRIPTION
from fb_core.stages.artefacts import Artefact
from fb_core.stages.choice import ChoiceStage, TrialStage, Tried, decide, promising
from fb_core.stages.commands import run_command, train_others
from fb_core.stages.deploy import LABELS, Context, frozen_policy
from fb_core.stages.examples import Examples
from fb_core.stages.inputs import splits_of
from fb_core.stages.values import Candidate, ValueStage, competing, possible

PLAIN, FEATURES, GATED = Recipe(), Recipe(scores="features"), Recipe(scores="features", value="gate", certainty=0.6)


def tried(recipe: Recipe, correct: np.ndarray | list[int], calls: float = 1.0) -> Tried:
    return Tried(recipe, np.asarray(correct, dtype=np.float64), calls, calls)


def first(right: int, of: int = 400) -> np.ndarray:
    """The first so many problems right."""
    return (np.arange(of) < right).astype(np.float64)


def test_the_best_of_those_that_are_safe_is_taken():
    rights = {GREEDY: 200, DIRECT: 300, PLAIN: 340, GATED: 350}
    tested = [tried(recipe, first(right)) for recipe, right in rights.items()]
    chosen, evidence = decide(tested, 0.02, 0.95)
    assert chosen == GATED
    found = dict(evidence)[GATED]
    assert (found.problems, found.tests, found.accuracy) == (400, 4, 0.875)
    assert found.words.startswith("features + gate + override 0.6: the best of 3 recipes (of 4 tested) that are shown")
    wanted = statistics.paired_lower_bound(first(350), first(300), level=1 - 0.05 / 4)
    assert (found.minus_direct.mean, found.minus_direct.low) == (wanted.mean, wanted.low)


def test_a_tie_goes_to_the_fewer_calls():
    tested = [tried(GREEDY, first(200), 0), tried(DIRECT, first(300), 5), tried(PLAIN, first(340), 4)]
    assert decide([*tested, tried(GATED, first(340), 3)], 0.02, 0.95)[0] == GATED
    chosen, evidence = decide([tested[0], tried(DIRECT, first(340), 3), tested[2]], 0.02, 0.95)
    assert chosen == DIRECT
    assert evidence[0][1].words.startswith("direct LLM score: the best of 2 recipes (of 3 tested)")


def test_greedy_decoding_competes():
    """It is better than a recipe that may be deployed, or as good and asks nobody."""
    for ours in (398, 400):
        tested = [tried(GREEDY, first(400), 0), tried(DIRECT, first(300)), tried(PLAIN, first(ours), 5)]
        assert decide(tested, 0.02, 0.95)[0] == GREEDY


def test_a_recipe_must_hold_against_both():
    """Above greedy decoding, yet not shown to be within two points of the direct score; or the other way round."""
    greedy, direct = tried(GREEDY, first(200), 0), tried(DIRECT, first(300))
    assert decide([greedy, direct, tried(PLAIN, first(290))], 0.02, 0.95)[0] == DIRECT
    swapped = [tried(GREEDY, first(300), 0), tried(DIRECT, first(200)), tried(PLAIN, first(290))]
    assert decide(swapped, 0.02, 0.95)[0] == GREEDY


def test_too_few_problems_show_nothing():
    """Twenty problems on which the recipes differ: none is shown to be safe, the direct score neither."""
    rng = np.random.default_rng(0)
    noisy = [rng.permutation(first(10, 20)) for _ in range(3)]
    chosen, evidence = decide([tried(r, c) for r, c in zip((GREEDY, DIRECT, PLAIN), noisy, strict=True)], 0.02, 0.95)
    assert chosen == GREEDY
    assert evidence[0][1].words.endswith("so the LLM is not asked. The direct LLM score may be far better.")


@pytest.mark.parametrize("gained", [0.0, 0.005, 0.04])
@pytest.mark.parametrize("problems", [300, 750])
def test_the_level_holds_at_the_border_itself(problems, gained):
    """Three recipes that lose two points more than they gain, as gates do where they differ rarely: few pass."""
    rng, wrong, draws = np.random.default_rng(2), 0, 800
    for _ in range(draws):
        direct = rng.random(problems) < 0.5
        others = []
        for recipe in (PLAIN, FEATURES, GATED):  # apart from each other where the direct score is what it is
            lost = direct & (rng.random(problems) < (gained + 0.02) / 0.5)
            won = ~direct & (rng.random(problems) < gained / 0.5)
            others.append(tried(recipe, (direct & ~lost) | won))
        chosen, _ = decide([tried(GREEDY, np.zeros(problems), 0), tried(DIRECT, direct), *others], 0.02, 0.95)
        wrong += chosen not in (GREEDY, DIRECT)
    assert wrong / draws <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)


@pytest.mark.parametrize("better", [3, 4, 5])
def test_only_what_passed_is_promised(better):
    """Greedy decoding as a fallback is often worse than the direct score by more than the margin, as the page says."""
    page = (Path(__file__).parents[2] / "docs" / "choice.md").read_text()
    told = re.search(rf"^\| {better} points \| (\d+)% \| (\d+)% \|$", page, re.MULTILINE)
    rng, draws = np.random.default_rng(3), 400
    for problems, percent in zip((300, 750), map(int, told.groups()), strict=True):
        fallen = promised = 0
        for _ in range(draws):
            kind = rng.random(problems)  # below 0.3: greedy decoding and the direct score differ
            lost, won = kind < (0.3 - better / 100) / 2, (kind >= (0.3 - better / 100) / 2) & (kind < 0.3)
            greedy, direct = lost | (kind > 0.65), won | (kind > 0.65)
            others = [tried(recipe, greedy) for recipe in (PLAIN, FEATURES, GATED)]
            chosen, evidence = decide([tried(GREEDY, greedy, 0), tried(DIRECT, direct), *others], 0.02, 0.95)
            found = dict(evidence)[chosen]
            passed = min(found.minus_greedy.low, found.minus_direct.low) > -0.02
            assert passed == ("are shown with 95% confidence" in found.words)
            assert passed == ("may be far better" not in found.words)
            assert passed or chosen == GREEDY
            promised += passed and chosen != DIRECT  # of a recipe that is worse than the margin allows
            fallen += not passed
        assert promised / draws <= 0.05
        assert abs(fallen / draws - percent / 100) <= 4 * np.sqrt(0.25 / draws)


def test_promising_recipes_are_the_best_of_each_kind():
    def candidate(recipe: Recipe, success: float, asked: float = 1.0) -> Candidate:
        return Candidate(Deployed(recipe, None, None, {}, None), success, asked)  # type: ignore[arg-type]

    sharper = GATED.model_copy(update={"certainty": 0.9})
    found = promising(
        [
            candidate(GREEDY, 0.99),
            candidate(DIRECT, 0.99),
            candidate(PLAIN, 0.5),
            candidate(GATED, 0.7),
            candidate(sharper, 0.8),
            candidate(FEATURES, 0.8, 0.5),
        ],
        2,
    )
    assert found == [FEATURES, sharper]


def test_possible_recipes_differ_and_ask_for_something():
    found = possible(settings().choice, ["own", "features", "calibrated"])
    assert found[:2] == [GREEDY, DIRECT]
    assert len({one.label for one in found}) == len(set(found)) == len(found)
    assert sum(one.greedy for one in found) == 1
    assert not any(one.scores == "slm" and one.value for one in found)


@pytest.fixture(scope="module")
def chosen_settings() -> RunSettings:
    return settings(
        problems={"limit": 72, "certification": 24, "train": "demo:plans", "thinking": True},
        train={"seeds": [0], "epochs": 1},
        choice={"trained": ["features", "calibrated"], "tried": 4, "tested": 2},
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


def test_the_deployed_folder_can_go_to_the_hub_whole(run):
    folder = run / "deployed" / "seed-0"
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert deployed_files(folder) == sorted(there)


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


def test_what_rollouts_say_is_what_each_recipe_takes(run, chosen_settings):
    """Success of every candidate at the validation states, chosen once more by its selector."""
    values = ValueStage(chosen_settings, run)
    rolled = [
        one
        for shard in Artefact(run, "rollouts").shards("validation")
        for one in Examples(run, shard).rollouts.values()
    ]
    states = [State(one.state.prefix, 0, one.state.entropy) for one in rolled]
    pools = [one.state.pool for one in rolled]
    checked = 0
    for found in values.candidates(0):
        recipe = found.deployed.recipe
        if recipe.ask or recipe.greedy:
            continue
        selector = recipe.selector(values.reranker(recipe, 0), found.deployed.value)
        taken = [place for place, _ in selector.choose_many(states, pools)]
        success = np.mean([bool(one.correct[place]) for one, place in zip(rolled, taken, strict=True)])
        assert found.success == pytest.approx(success), recipe.label
        assert found.asked == 1.0
        checked += 1
    assert checked > 20


def test_trials_are_decoded_as_deployed(run, chosen_settings):
    """A recipe's rows are what its decoder makes of the validation problems one at a time, in the plain loop."""
    trials, values, pair = TrialStage(chosen_settings, run), ValueStage(chosen_settings, run), load_pair("plans")
    shard, trial = list(trials.trials.items())[2]
    deployed = trials.candidates[trial.method, 0].deployed
    selector = deployed.recipe.selector(values.reranker(deployed.recipe, 0), deployed.value)
    decoder = CollaborativeDecoder(pair.slm, pair.llm, selector, deployed.policy, **deployed.options)
    rows = list(trials.rows())
    mine = [row for row in rows if row.method == trial.method]
    assert len(mine) == 12
    assert {row.method for row in rows} >= {"SLM greedy", "direct LLM score"}
    prompts = trials.models.prompts(trial.problems, "{problem}")
    for row, prompt in zip(mine, prompts, strict=True):
        assert row.tokens == decoder.generate(prompt, 45).token_ids.tolist()
    assert shard.startswith("seed-0.")


def folder_of(run: Path) -> Path:
    return run / ChoiceStage.name / "seed-0"


def deployed_as(run: Path, folder: Path, recipe: Recipe, chosen_settings: RunSettings) -> Path:
    """An adapter folder with another recipe of the run."""
    values = ValueStage(chosen_settings, run)
    found = next(one.deployed for one in values.candidates(0) if one.deployed.recipe == recipe)
    shutil.copytree(values.folder_of(recipe, 0), folder)
    shutil.copytree(run / "reranker" / "seed-0", folder / PUBLISHED)
    found.save(folder)
    return folder


def test_the_folder_of_an_adapter_holds_recipe_and_evidence(run, chosen_settings):
    recipe, evidence = ChoiceStage(chosen_settings, run).verdict(0)
    found = Deployed.load(folder_of(run))
    assert found is not None
    assert found.recipe == recipe
    assert found.evidence == dict(evidence)[recipe]
    assert found.evidence.problems == 24
    assert found.policy.threshold == frozen_policy(run).threshold
    assert found.options == {"pool": "joint", "slm_k": 3, "llm_k": 3, "max_events": 8}
    assert found.thinking
    assert "## Deployed recipe" in (folder_of(run) / "README.md").read_text()
    TokenReranker.from_pretrained(folder_of(run), load_pair("plans").slm)


def test_every_adapter_of_a_run_says_what_it_was_trained_for(run, chosen_settings):
    """The run's own and its competitors', by the plain recipe; only a certainty may be given beside it."""
    slm, folders = load_pair("plans").slm, sorted(run.rglob("reranker/seed-*/"))
    assert [folder.parent.parent.name for folder in folders] == ["run", "calibrated", "features"]
    for folder in folders:
        assert Deployed.load(folder).thinking
        selector, policy, options = deployment_of(str(folder), slm)
        assert (type(selector), policy) == (FutureBridgeSelector, frozen_policy(run))
        assert options == {"pool": "joint", "slm_k": 3, "llm_k": 3, "max_events": 8}
        loaded = load(PairSettings(slm="demo:plans", llm="demo:plans", adapter=str(folder)))
        assert (loaded.policy, loaded.options, loaded.thinking) == (policy, options, True)
        assert deployment_of(str(folder), slm, certainty=0.5).selector.certainty == 0.5


def test_every_recipe_survives_its_folder(run, chosen_settings, tmp_path):
    """Saved and loaded, a recipe decodes as it did."""
    values, pair = ValueStage(chosen_settings, run), load_pair("plans")
    prompts = [torch.tensor(problem.prompt_ids) for problem in pair.world.problems(3, 5, "validation")]
    context = Context(chosen_settings, run)
    for recipe in (
        PLAIN,
        DIRECT,
        Recipe(scores="features", value="gate", certainty=0.6, ask=True),
        Recipe(scores="llm", value="listwise"),
    ):
        folder = deployed_as(run, tmp_path / recipe.label, recipe, chosen_settings)
        assert (folder / ASK).is_file() == recipe.ask
        selector, policy, options = deployment_of(str(folder), pair.slm)
        loaded = CollaborativeDecoder(pair.slm, pair.llm, selector, policy, **options).generate_many(prompts, 30)
        before = next(one.deployed for one in values.candidates(0) if one.deployed.recipe == recipe)
        own = context.decoder_for(before, values.reranker(recipe, 0)).generate_many(prompts, 30)
        assert [one.token_ids.tolist() for one in loaded] == [one.token_ids.tolist() for one in own]
        assert [[event.step for event in one.events] for one in loaded] == [
            [event.step for event in one.events] for one in own
        ]


def test_published_is_the_papers_whatever_was_chosen(run, chosen_settings, tmp_path):
    slm = load_pair("plans").slm
    folder = deployed_as(run, tmp_path / "gated", Recipe(scores="features", value="gate", ask=True), chosen_settings)
    selector, policy, options = deployment_of(str(folder), slm, recipe="published")
    assert type(selector) is FutureBridgeSelector
    assert selector.reranker.feature_names == ()
    assert (policy.ask, policy.threshold) == (None, frozen_policy(run).threshold)
    own = TokenReranker.from_pretrained(run / "reranker" / "seed-0", slm)
    for name, tensor in own.tensors().items():
        assert torch.equal(tensor, selector.reranker.tensors()[name])
    assert options["max_events"] == 8


def test_greedy_asks_nobody_and_options_come_from_the_recipe(run, chosen_settings, tmp_path):
    slm = load_pair("plans").slm
    folder = str(deployed_as(run, tmp_path / "greedy", GREEDY, chosen_settings))
    selector, _, options = deployment_of(folder, slm)
    assert selector is None
    assert options["max_events"] == 0
    direct = str(deployed_as(run, tmp_path / "direct", DIRECT, chosen_settings))
    selector, policy, options = deployment_of(direct, slm, threshold=0.3, max_events=3)
    assert isinstance(selector, LLMPreference)
    assert (policy.threshold, options["max_events"], options["slm_k"]) == (0.3, 3, 3)
    with pytest.raises(ValueError, match=r"certainty: expected none with the recipe in .* \(direct LLM score\)"):
        deployment_of(direct, slm, certainty=0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda recipe: recipe.update(threshold="high"),
        lambda recipe: recipe.update(more=1),
        lambda recipe: recipe["recipe"].update(scores="magic"),
        lambda recipe: recipe.update(value={"form": "gate", "weights": [1.0]}),
        lambda recipe: recipe.update(ask=None),
        lambda recipe: recipe.update(ask={"entropy_weight": 0.0, "bias": float("inf"), "least": 0.0}),
    ],
)
def test_a_damaged_recipe_is_refused_in_a_sentence(run, chosen_settings, tmp_path, change):
    folder = deployed_as(run, tmp_path / "one", Recipe(scores="llm", value="gate", ask=True), chosen_settings)
    description = json.loads((folder / DESCRIPTION).read_text())
    change(description["recipe"])
    (folder / DESCRIPTION).write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"futurebridge\.json: expected a recipe as `train` writes it, got "):
        Deployed.load(folder)


def test_an_adapter_of_the_first_format_is_refused_in_a_sentence(run, chosen_settings, tmp_path):
    """Its recipe may hold spans, which events do not have."""
    folder = deployed_as(run, tmp_path / "one", Recipe(), chosen_settings)
    description = json.loads((folder / DESCRIPTION).read_text()) | {"format": 1}
    description["recipe"]["pools"]["span"] = {"tokens": 4, "ends": [], "agree": False}
    (folder / DESCRIPTION).write_text(json.dumps(description))
    slm = load_pair("plans").slm
    for load_it in (lambda: deployment_of(str(folder), slm), lambda: TokenReranker.from_pretrained(folder, slm)):
        with pytest.raises(ValueError, match=r"futurebridge\.json: expected format 2, got 1; train the adapter again"):
            load_it()


def test_a_lost_weight_is_refused(run, chosen_settings, tmp_path):
    folder = deployed_as(run, tmp_path / "one", Recipe(scores="llm", ask=True), chosen_settings)
    (folder / ASK).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"expected a recipe as `train` writes it, got .* in ask\.safetensors"):
        Deployed.load(folder)


def test_commands_decode_by_the_folder(run, chosen_settings, tmp_path):
    """`generate` with another recipe in the folder gives another policy, and the published one on demand."""
    folder = deployed_as(run, tmp_path / "greedy", GREEDY, chosen_settings)
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


def test_a_choice_goes_on_where_it_was_killed(run, chosen_settings, tmp_path):
    """Killed inside several writes of its end, `train` makes the same bytes."""
    left = ("values", "trials", "certification", ChoiceStage.name)
    again = tmp_path / "run"
    shutil.copytree(run, again, symlinks=True)
    for stage in left:
        shutil.rmtree(again / stage)
    for number, seed in ((2, 0), (5, 1), (9, 2)):
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


def test_a_choice_without_rollouts_to_learn_from_is_refused_before_the_training(chosen_settings, tmp_path):
    other = chosen_settings.model_copy(update={"rollouts": chosen_settings.rollouts.model_copy(update={"train": 0.0})})
    with pytest.raises(ValueError, match=r"rollouts.train: expected more than 0 with problems.certification"):
        run_command("train", other, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_calibration_on_too_few_states_does_not_compete(run, chosen_settings, tmp_path):
    """Nor does one that was trained before more states were asked for."""
    few = chosen_settings.model_copy(
        update={"rollouts": chosen_settings.rollouts.model_copy(update={"minimum_mixed": 1000})}
    )
    assert competing(chosen_settings, run) == ["features", "calibrated"]
    assert competing(few, run) == ["features"]
    shown = []
    train_others(few, run, shown.append)
    assert shown == ["**calibrated** does not compete: fewer than 1000 mixed states"]


def test_a_problem_of_a_competitor_ends_the_command(run, chosen_settings, tmp_path):
    """Another process at work there is no reason to choose without it."""
    again = tmp_path / "run"
    shutil.copytree(run, again, symlinks=True)
    folder = Artefact(again / "variants" / "features", "training")
    (folder.path / "manifest.json").unlink()
    with folder.locked(), pytest.raises(ValueError, match="expected to be the only process"):
        train_others(chosen_settings, again, print)


def test_an_unknown_recipe_is_refused(run):
    with pytest.raises(ValueError, match="recipe: expected chosen or published, got 'publishd'"):
        deployment_of(str(folder_of(run)), load_pair("plans").slm, recipe="publishd")


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float8_e4m3fn])
def test_a_weight_of_another_type_is_refused(run, chosen_settings, tmp_path, dtype):
    folder = deployed_as(run, tmp_path / "one", Recipe(scores="llm", ask=True), chosen_settings)
    save_file({"weight": torch.zeros(64).to(dtype)}, folder / ASK)
    with pytest.raises(ValueError, match=r"expected a recipe as `train` writes it, got torch\.\w+ in ask\.safetensors"):
        Deployed.load(folder)


def test_an_adapter_with_heads_is_not_changed_for_another(run, chosen_settings, tmp_path):
    """`load_adapter` takes plain rerankers alone: heads and recipes belong to theirs."""
    pair = load_pair("plans")
    gated = deployed_as(run, tmp_path / "gated", Recipe(scores="features", value="gate"), chosen_settings)
    selector, policy, options = deployment_of(str(gated), pair.slm)
    decoder = CollaborativeDecoder(pair.slm, pair.llm, selector, policy, max_length=64, **options)
    with pytest.raises(ValueError, match="load_adapter: expected a plain reranker"):
        decoder.load_adapter(run / "reranker" / "seed-0")
    plain = FutureBridgeSelector(TokenReranker.from_pretrained(run / "reranker" / "seed-0", pair.slm).eval())
    decoder = CollaborativeDecoder(pair.slm, pair.llm, plain, policy, max_length=64, **options)
    decoder.load_adapter(run / "reranker" / "seed-0")
    with pytest.raises(ValueError, match="load_adapter: expected a plain reranker"):
        decoder.load_adapter(gated)


def test_a_recipe_that_asks_nobody_needs_no_large_model(run, chosen_settings, tmp_path):
    folder = deployed_as(run, tmp_path / "greedy", GREEDY, chosen_settings)
    pair = PairSettings(slm="demo:plans", llm="no/such/model", adapter=str(folder))
    assert load(pair).pair.llm is None
