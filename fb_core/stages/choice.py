"""Stage 4, its end: the recipe that is deployed, chosen on held-out problems by the deployed loop.

Learn-then-Test (Angelopoulos et al., arXiv 2110.01052): the recipes that do best on validation problems are tested on
problems that nothing else was chosen on. A recipe may be deployed where the lower bounds of its paired differences to
greedy decoding *and* to the direct LLM score are above -delta; both must hold, so that no error is added by there being
two. The error is divided (Bonferroni) among the recipes tested, the direct score, which is held against greedy
decoding, and greedy decoding, which is held against the direct score: that a recipe worse than either by more than
delta passes its test has at most the probability 1 - level, for the adapter of a seed. Of those that may, the most
accurate is taken, the fewer LLM calls deciding a tie; if none may, greedy decoding.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fb_core import statistics
from fb_core.methods import Generate
from fb_core.recipe import DIRECT, GREEDY, PUBLISHED, Deployed, Difference, Evidence, Recipe
from fb_core.stages.decode import DecodeStage, Row, Trial, read_rows
from fb_core.stages.deploy import DEPLOYED_STAGE, Context
from fb_core.stages.inputs import DEPLOYED, splits_of
from fb_core.stages.problems import Problem
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.states import PolicyStage
from fb_core.stages.trajectories import TrajectoryStage
from fb_core.stages.values import Candidate, ValueStage

ASKED_HERE = ("problems", "collect.max_new_tokens", "verify", "train.seeds", *DEPLOYED)
ALWAYS = {GREEDY: "greedy", DIRECT: "direct"}  # decoded once, whatever the seed


class _RecipeTrials(DecodeStage):
    """Recipes on a run's held-out problems, a shard each; greedy decoding and the direct score first."""

    command = "train"
    unit = "decodes"
    split: str

    @abstractmethod
    def recipes(self, seed: int) -> list[Recipe]:
        """Which of them, of a seed."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Of these at most, by the settings."""

    def most(self) -> int:
        return len(self.problems) * (len(ALWAYS) + self.count * len(self.settings.train.seeds))

    def cost(self) -> Cost:
        """The LLM reads a decode's tokens once at most."""
        longest = self.models.longest_prompt(self.problems, self.template) + self.max_new_tokens
        words = f"decoded in batches, {len(self.problems)} problems by each of {self.count} recipes a seed at most"
        return Cost(words, longest, llm_tokens=longest)

    @cached_property
    def problems(self) -> list[Problem]:
        """What they are asked."""
        return splits_of(self.settings.problems)[self.split]

    @cached_property
    def trials(self) -> dict[str, Trial]:
        found = {name: Trial(self.split, recipe.label, None, "batch", self.problems) for recipe, name in ALWAYS.items()}
        for seed in self.settings.train.seeds:
            for recipe in self.recipes(seed):
                found[shard_of(recipe, seed)] = Trial(self.split, recipe.label, seed, "batch", self.problems)
        return found

    @property
    def max_new_tokens(self) -> int:
        return self.settings.collect.max_new_tokens

    @cached_property
    def candidates(self) -> dict[tuple[str, int], Candidate]:
        """By label and seed."""
        values = self.input(ValueStage)
        return {
            (one.deployed.recipe.label, seed): one
            for seed in self.settings.train.seeds
            for one in values.candidates(seed)
        }

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        seed = self.settings.train.seeds[0] if trial.seed is None else trial.seed
        deployed = self.candidates[trial.method, seed].deployed
        context = Context(self.settings, self.run, max_length=max_length, max_batch=max_batch)
        reranker = self.input(ValueStage).reranker(deployed.recipe, seed)
        return context.by_recipe(deployed, reranker).generate_many

    def tried(self, recipe: Recipe, seed: int) -> Tried:
        """What a finished recipe made of the problems."""
        return Tried.of(recipe, list(read_rows(self.folder, ALWAYS.get(recipe) or shard_of(recipe, seed))))


def shard_of(recipe: Recipe, seed: int) -> str:
    """Of a recipe's trial."""
    certainty = "" if recipe.certainty is None else f"{recipe.certainty!r}"
    parts = [recipe.scores, recipe.value or "", certainty, "ask" * recipe.ask]
    return f"seed-{seed}.{'+'.join(filter(None, parts))}"


class Tried(NamedTuple):
    """A recipe and what it made of each problem."""

    recipe: Recipe
    correct: np.ndarray  # [n]
    calls: float  # of the LLM, a problem
    llm_tokens: float  # that it chose or wrote, a problem

    @classmethod
    def of(cls, recipe: Recipe, rows: Sequence[Row]) -> Tried:
        """From its rows."""
        calls = float(np.mean([row.calls for row in rows]))
        tokens = float(np.mean([row.llm_tokens for row in rows]))
        return cls(recipe, np.array([row.correct for row in rows], dtype=np.float64), calls, tokens)

    @property
    def accuracy(self) -> float:
        """On these problems."""
        return float(self.correct.mean())

    @property
    def rank(self) -> tuple[float, float]:
        """The best first: by right answers, then by fewer calls."""
        return -float(self.correct.sum()), self.calls


class TrialStage(_RecipeTrials):
    """The recipes that rollouts speak for, on the validation problems."""

    name = "trials"
    split = "validation"
    slice = (*ASKED_HERE, "choice.tried")
    reads = (TrajectoryStage, PolicyStage, RerankerStage, ValueStage)

    def recipes(self, seed: int) -> list[Recipe]:
        return promising(self.input(ValueStage).candidates(seed), self.count)

    @property
    def count(self) -> int:
        return self.settings.choice.tried

    def report(self, manifest: dict[str, Any]) -> str:
        lines = ["| recipe | seed | accuracy, % | LLM calls | LLM tokens |", "|---|---|---|---|---|"]
        for seed in self.settings.train.seeds:
            tried = [self.tried(recipe, seed) for recipe in (*ALWAYS, *self.recipes(seed))]
            for one in sorted(tried, key=lambda one: one.rank):
                cells = f"{100 * one.accuracy:.1f} | {one.calls:.2f} | {one.llm_tokens:.2f}"
                lines.append(f"| {one.recipe.label} | {seed} | {cells} |")
        return "\n".join(lines)


def promising(candidates: Sequence[Candidate], count: int) -> list[Recipe]:
    """The recipes that rollouts speak for: the best certainty of each kind, then the best of these."""
    kinds: dict[tuple[str, str | None, bool], Candidate] = {}
    for one in candidates:
        recipe = one.deployed.recipe
        if recipe not in ALWAYS:
            kind = (recipe.scores, recipe.value, recipe.ask)
            if kind not in kinds or one.success > kinds[kind].success:
                kinds[kind] = one
    best = sorted(kinds.values(), key=lambda one: (-one.success, one.asked))  # stable: the simplest first
    return [one.deployed.recipe for one in best[:count]]


class CertificationStage(_RecipeTrials):
    """The best of these, on problems that nothing was chosen on."""

    name = "certification"
    split = "certification"
    slice = (*ASKED_HERE, "choice.tested")
    reads = (*TrialStage.reads, TrialStage)

    def recipes(self, seed: int) -> list[Recipe]:
        trials = self.input(TrialStage)
        tried = [trials.tried(recipe, seed) for recipe in trials.recipes(seed)]
        best = sorted(tried, key=lambda one: one.rank)
        return [one.recipe for one in best[: self.count]]

    @property
    def count(self) -> int:
        return self.settings.choice.tested

    def data(self) -> dict[str, Any]:
        return {"problems": [problem.id for problem in self.problems]}

    def tested(self, seed: int) -> list[Tried]:
        """Greedy decoding, the direct score, then the best recipes of a seed."""
        return [self.tried(recipe, seed) for recipe in (GREEDY, DIRECT, *self.recipes(seed))]


def decide(tested: Sequence[Tried], delta: float, level: float) -> tuple[Recipe, list[tuple[Recipe, Evidence]]]:
    """Which recipe may be deployed, by what it made of problems that nothing was chosen on.

    Args:
        tested: greedy decoding, the direct LLM score, then others, on the same problems.
        delta: how far below either of these a recipe may be, as a share of the problems.
        level: one less the chance that any recipe that is worse than that may be deployed.

    Returns:
        the recipe, and the evidence of each, in their order.
    """
    greedy, direct, *_ = tested

    def minus(one: Tried, other: Tried) -> Difference:
        if one is other:
            return Difference(mean=0.0, low=0.0)
        found = statistics.paired_lower_bound(one.correct, other.correct, level=1 - (1 - level) / len(tested))
        return Difference(mean=found.mean, low=found.low)

    differences = [(minus(one, greedy), minus(one, direct)) for one in tested]
    safe = [
        one
        for one, both in zip(tested, differences, strict=True)
        if all(difference.low > -delta for difference in both)
    ]
    chosen = min(safe, key=lambda one: one.rank, default=greedy)
    words = _words(chosen, len(safe), len(tested), delta, level)
    return chosen.recipe, [
        (
            one.recipe,
            Evidence(
                problems=len(greedy.correct),
                delta=delta,
                level=level,
                tests=len(tested),
                accuracy=one.accuracy,
                minus_greedy=to_greedy,
                minus_direct=to_direct,
                calls=one.calls,
                llm_tokens=one.llm_tokens,
                words=words,
            ),
        )
        for one, (to_greedy, to_direct) in zip(tested, differences, strict=True)
    ]


def _words(chosen: Tried, safe: int, tests: int, delta: float, level: float) -> str:
    margin, sure = f"{100 * delta:g} points", f"{100 * level:g}%"
    if safe:
        return (
            f"{chosen.recipe.label}: the best of {safe} among {tests} recipes that are shown, with {sure} confidence, "
            f"not to be below greedy decoding or the direct LLM score by more than {margin}."
        )
    return (
        f"{chosen.recipe.label}: none of {tests} recipes is shown, with {sure} confidence, not to be below greedy "
        f"decoding or the direct LLM score by more than {margin}; no LLM is asked."
    )


def choice_table(chosen: Recipe, evidence: Sequence[tuple[Recipe, Evidence]], seed: int) -> str:
    """The certified recipes of a seed in Markdown, the chosen one in bold, and why."""
    first = evidence[0][1]
    lines = [
        f"Seed {seed}, {first.problems} problems. {first.words}",
        "",
        "| recipe | accuracy, % | minus greedy, pp [lower bound] | minus direct, pp [lower bound] | LLM calls | "
        "LLM tokens |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, one in evidence:
        bounds = [f"{100 * each.mean:+.1f} [{100 * each.low:+.1f}]" for each in (one.minus_greedy, one.minus_direct)]
        cells = [recipe.label, f"{100 * one.accuracy:.1f}", *bounds, f"{one.calls:.2f}", f"{one.llm_tokens:.2f}"]
        if recipe == chosen:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class ChoiceStage(Stage):
    """A folder a seed: the adapter with the recipe that is deployed, its evidence, and the published adapter inside."""

    name = DEPLOYED_STAGE
    command = "train"
    slice = ("choice.delta", "choice.level", "train.seeds")
    reads = (RerankerStage, ValueStage, CertificationStage)
    unit = "adapters"
    parallel = False

    def shards(self) -> dict[str, int]:
        return {f"seed-{seed}": 1 for seed in self.settings.train.seeds}

    def verdict(self, seed: int) -> tuple[Recipe, list[tuple[Recipe, Evidence]]]:
        """What is deployed with a seed's adapter, and the evidence of every recipe tested."""
        choice = self.settings.choice
        return decide(self.input(CertificationStage).tested(seed), choice.delta, choice.level)

    def work(self, shard: str) -> Output:
        seed, values = int(shard.removeprefix("seed-")), self.input(ValueStage)
        recipe, evidence = self.verdict(seed)
        deployed = next(one.deployed for one in values.candidates(seed) if one.deployed.recipe == recipe)
        own, source = (values.folder_of(one, seed) for one in (Recipe(), recipe))
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / shard
            shutil.copytree(source, folder)
            if source != own:
                shutil.copytree(own, folder / PUBLISHED)
            shown = dict(evidence)[recipe]
            Deployed(deployed.recipe, deployed.value, deployed.policy, deployed.options, shown).save(folder)
            card = (folder / "README.md").read_text(encoding="utf-8")
            table = choice_table(recipe, evidence, seed)
            (folder / "README.md").write_text(f"{card}\n## The recipe deployed\n\n{USE}\n{table}\n", encoding="utf-8")
            files = {
                str(path.relative_to(made)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
            }
        return Output(files, {"adapters": 1})

    def summary(self) -> dict[str, Any]:
        """The recipe and its evidence, by seed."""
        found = {}
        for seed in self.settings.train.seeds:
            recipe, evidence = self.verdict(seed)
            found[f"seed-{seed}"] = {
                "recipe": recipe.model_dump(),
                "label": recipe.label,
                "tested": [{"label": one.label, **each.model_dump()} for one, each in evidence],
            }
        return json.loads(json.dumps(found))

    def report(self, manifest: dict[str, Any]) -> str:
        tables = [choice_table(*self.verdict(seed), seed) for seed in self.settings.train.seeds]
        return "\n\n".join([*tables, f"Deployed with `--adapter {self.folder.path / next(iter(self.shards()))}`."])

    def cost(self) -> Cost:
        return Cost("a copy of a trained adapter")


STAGES: tuple[type[Stage], ...] = (ValueStage, TrialStage, CertificationStage, ChoiceStage)

USE = """\
`futurebridge generate`, `chat` and `serve` decode as this folder says; `--recipe published` decodes as the paper does,
at any cost. In Python:

```python
from fb_core import CollaborativeDecoder, deployment_of

selector, policy, options = deployment_of("path/to/this/folder", slm)
decoder = CollaborativeDecoder(slm, llm, selector, policy, tokenizer=tokenizer, **options)
```
"""
