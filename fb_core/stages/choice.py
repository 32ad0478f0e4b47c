"""Stage 4, last part: the recipe to deploy, chosen on held-out problems by the deployed decoding loop.

Learn-then-Test (Angelopoulos et al., arXiv 2110.01052): the recipes that do best on validation problems are tested on
problems that nothing else was chosen on. A recipe may be deployed if the lower bounds of its paired differences to
greedy decoding *and* to the direct LLM score are above -delta. Both bounds must hold, so having two of them adds no
error. The error is divided (Bonferroni) among all that are tested: the recipes, the direct score (against greedy
decoding) and greedy decoding (against the direct score). So for one seed's adapter, the probability that any recipe
that is worse than either by more than delta passes its test is at most 1 - level. Of the recipes that may be deployed
the most accurate is taken, with fewer LLM calls in a tie; if there is none, greedy decoding. That has then passed no
test: it may be worse than the direct score by more than delta.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fb_core import statistics
from fb_core.recipe import DIRECT, GREEDY, PUBLISHED, Difference, Evidence, Recipe
from fb_core.stages.decode import DecodeStage, Row, Trial, read_rows
from fb_core.stages.deploy import DEPLOYED_STAGE, Context, Generate
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
    """Recipes on a run's held-out problems, one shard each; greedy decoding and the direct score first."""

    command = "futurebridge train"
    unit = "decodes"
    split: str

    @abstractmethod
    def recipes(self, seed: int) -> list[Recipe]:
        """The recipes to decode with, of one seed."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The largest number of recipes per seed, from the settings."""

    def most(self) -> int:
        return len(self.problems) * (len(ALWAYS) + self.count * len(self.settings.train.seeds))

    def cost(self) -> Cost:
        """The LLM reads every token of a decode at most once."""
        longest = self._longest_prompt(self.problems) + self.max_new_tokens
        words = f"decoded in batches, {len(self.problems)} problems with each of at most {self.count} recipes per seed"
        return Cost(words, longest, llm_tokens=longest)

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems that are decoded."""
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
        """The candidates of `ValueStage` by label and seed."""
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
        return context.decoder_for(deployed, reranker).generate_many

    def tried(self, recipe: Recipe, seed: int) -> Tried:
        """The results of a recipe whose shard is finished."""
        return Tried.of(recipe, list(read_rows(self.folder, ALWAYS.get(recipe) or shard_of(recipe, seed))))


def shard_of(recipe: Recipe, seed: int) -> str:
    """The name of a recipe's shard."""
    certainty = "" if recipe.certainty is None else f"{recipe.certainty!r}"
    parts = [recipe.scores, recipe.value or "", certainty, "ask" * recipe.ask]
    return f"seed-{seed}.{'+'.join(filter(None, parts))}"


class Tried(NamedTuple):
    """A recipe and its results on n problems."""

    recipe: Recipe
    correct: np.ndarray  # [n] float64, 0 or 1
    calls: float  # LLM calls per problem
    llm_tokens: float  # LLM tokens per problem

    @classmethod
    def of(cls, recipe: Recipe, rows: Sequence[Row]) -> Tried:
        """From the recipe's rows."""
        calls = float(np.mean([row.calls for row in rows]))
        tokens = float(np.mean([row.llm_tokens for row in rows]))
        return cls(recipe, np.array([row.correct for row in rows], dtype=np.float64), calls, tokens)

    @property
    def accuracy(self) -> float:
        """The share of problems that are right."""
        return float(self.correct.mean())

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, best first: by right answers, then by fewer calls."""
        return -float(self.correct.sum()), self.calls


class TrialStage(_RecipeTrials):
    """The most promising recipes by the rollouts, on the validation problems."""

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
        head = "| recipe | seed | accuracy, % | LLM calls per problem | LLM tokens per problem |"
        lines = [head, "|---|---|---|---|---|"]
        for seed in self.settings.train.seeds:
            tried = [self.tried(recipe, seed) for recipe in (*ALWAYS, *self.recipes(seed))]
            for one in sorted(tried, key=lambda one: one.rank):
                cells = f"{100 * one.accuracy:.1f} | {one.calls:.2f} | {one.llm_tokens:.2f}"
                lines.append(f"| {one.recipe.label} | {seed} | {cells} |")
        return "\n".join(lines)


def promising(candidates: Sequence[Candidate], count: int) -> list[Recipe]:
    """The `count` recipes with the most success in rollouts; each kind of recipe takes part with its best certainty."""
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
    """The best recipes of `TrialStage`, on problems that nothing was chosen on."""

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
    """Choose the recipe to deploy from results on problems that nothing else was chosen on.

    Args:
        tested: greedy decoding, the direct LLM score, then other recipes, all on the same problems.
        delta: how far below either of the first two a recipe may be, as a share of the problems.
        level: 1 minus the probability that any recipe that is worse than that passes its test.

    Returns:
        the recipe to deploy, and every recipe with its evidence, in order.
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
            f"{chosen.recipe.label}: the best of {safe} recipes (of {tests} tested) that are shown with {sure} "
            f"confidence to be at most {margin} below greedy decoding and the direct LLM score."
        )
    return (
        f"{chosen.recipe.label}: none of {tests} tested recipes is shown with {sure} confidence to be at most {margin} "
        "below greedy decoding and the direct LLM score, so the LLM is not asked. The direct LLM score may be far "
        "better."
    )


def choice_table(chosen: Recipe, evidence: Sequence[tuple[Recipe, Evidence]], seed: int) -> str:
    """The tested recipes of a seed in Markdown: why one was chosen, then a table with the chosen one in bold."""
    first = evidence[0][1]
    lines = [
        f"Seed {seed}, {first.problems} problems. {first.words}",
        "",
        "| recipe | accuracy, % | minus greedy, pp [lower bound] | minus direct, pp [lower bound] | LLM calls per "
        "problem | LLM tokens per problem |",
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
    """One folder per seed: the adapter with its deployed recipe and evidence, and the published adapter inside."""

    name = DEPLOYED_STAGE
    command = "futurebridge train"
    slice = ("choice.delta", "choice.level", "train.seeds")
    reads = (RerankerStage, ValueStage, CertificationStage)
    unit = "adapters"
    parallel = False

    def shards(self) -> dict[str, int]:
        return {f"seed-{seed}": 1 for seed in self.settings.train.seeds}

    def verdict(self, seed: int) -> tuple[Recipe, list[tuple[Recipe, Evidence]]]:
        """The recipe deployed with a seed's adapter, and the evidence of every tested recipe."""
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
            replace(deployed, evidence=shown).save(folder)
            card = (folder / "README.md").read_text(encoding="utf-8")
            table = choice_table(recipe, evidence, seed)
            (folder / "README.md").write_text(f"{card}\n## Deployed recipe\n\n{USE}\n{table}\n", encoding="utf-8")
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
`futurebridge generate`, `chat` and `serve` decode with the recipe of this folder; `--set recipe=published` decodes as
in the paper, even if that is worse. In Python:

```python
from fb_core import CollaborativeDecoder, deployment_of

selector, policy, options = deployment_of("path/to/this/folder", slm)
decoder = CollaborativeDecoder(slm, llm, selector, policy, tokenizer=tokenizer, **options)
```
"""
