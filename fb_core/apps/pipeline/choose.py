"""Stage 4, second part: the sweep's best reranker, the value head over it, and the recipe that is deployed.

Learn-then-Test (Angelopoulos et al., arXiv 2110.01052): greedy decoding, the direct LLM score, the published reranker
and the value of its scores are tested on problems that nothing was chosen on. A recipe may be deployed if the lower
bounds of its paired differences to greedy decoding *and* to the direct LLM score are above -delta. Both bounds must
hold, so having two of them adds no error. The error is divided (Bonferroni) among all that are tested. So for one
adapter, the probability that any recipe that is worse than either by more than delta passes its test is at most
1 - level. Of the recipes that may be deployed the most accurate is taken, with fewer LLM calls in a tie; if there is
none, the more accurate of greedy decoding and the direct score. That has then passed no test: it may be worse than the
other by more than delta.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import resources
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fb_core.apps.demo import DEMO
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.collect import PolicyStage, TrajectoryStage
from fb_core.apps.pipeline.decode import DecodeStage, Row, Trial, read_rows
from fb_core.apps.pipeline.models import (
    DEPLOYED,
    DEPLOYED_STAGE,
    Context,
    Generate,
    chosen_reranker,
    frozen_policy,
    pool_options,
    splits_of,
)
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.pipeline.problems import Problem, drawn
from fb_core.apps.pipeline.records import Examples, LoggedState, Rollout
from fb_core.apps.pipeline.rollouts import RolloutStage
from fb_core.apps.pipeline.run import Output, Stage
from fb_core.apps.pipeline.scores import ScoreStage, filter_table
from fb_core.apps.pipeline.statistics import outcomes_differ
from fb_core.apps.pipeline.train import TrainStage, run_name
from fb_core.apps.settings.config import ProblemSettings
from fb_core.decode.deployment import LABELS, Deployed, Difference, Evidence, Pools, RecipeName
from fb_core.models.checkpoints import is_hub_id
from fb_core.models.facts import CausalLM
from fb_core.models.packed import ROWS, Prefix, packs, prefill_packed
from fb_core.rerank.reranker import TokenReranker
from fb_core.rerank.value_head import ValueHead, fit_value, value_terms

SEEDED: tuple[RecipeName, ...] = ("published", "value")  # recipes of one seed's reranker
UNSEEDED: tuple[RecipeName, ...] = ("greedy", "direct")  # decoded once, whatever the seed
Key = TypeVar("Key", bound=Hashable)


class SelectionStage(DecodeStage):
    """Decodes the validation problems with every reranker of every epoch, and chooses the best horizon and epoch."""

    name = "selection"
    command = "futurebridge train"
    slice = (*DEPLOYED, "selection", "collect.max_new_tokens", "train.epochs", "verify")
    reads = (TrajectoryStage, PolicyStage, TrainStage)
    unit = "decodes"

    @cached_property
    def _problems(self) -> list[Problem]:
        held, few = self.input(TrajectoryStage), self.settings.selection.problems
        validation = held.splits["validation"]
        return validation if few is None else drawn(validation, few, held.settings.problems.seed)

    @cached_property
    def _rerankers(self) -> dict[str, tuple[int, int, int]]:
        """(epoch, horizon, seed) by shard, which is the method's name in the rows."""
        return {
            f"epoch-{epoch}-{run_name(horizon, seed)}": (epoch, horizon, seed)
            for epoch in range(1, self.settings.train.epochs + 1)
            for horizon, seed in self.input(TrainStage).runs()
        }

    @cached_property
    def trials(self) -> dict[str, Trial]:
        return {
            name: Trial("validation", name, seed, "batch", self._problems)
            for name, (_, _, seed) in self._rerankers.items()
        }

    @property
    def asked(self) -> ProblemSettings:
        return self.input(TrajectoryStage).settings.problems

    @property
    def max_new_tokens(self) -> int:
        return self.settings.collect.max_new_tokens

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        reranker = self.input(TrainStage).trained(*self._rerankers[trial.method])
        context = Context(self.settings, self.run, max_length=max_length, max_batch=max_batch)
        return context.reranking_decoder(reranker).generate_many

    def summary(self) -> dict[str, Any]:
        """The table and the choice: highest accuracy averaged over seeds; ties go to the first epoch and horizon."""
        names = ("accuracy", "cross_entropy", "pairwise_accuracy")
        logged = {(row["epoch"], row["horizon"], row["seed"]): row for row in self.input(TrainStage).metrics()}
        right: dict[tuple[int, int], int] = {}  # whole numbers, so that ties are exact
        table: dict[tuple[int, int], dict[str, Any]] = {}
        for shard, (epoch, horizon, seed) in self._rerankers.items():
            correct = [row.correct for row in read_rows(self.folder, shard)]
            metrics = {name: logged[epoch, horizon, seed][f"validation_{name}"] for name in names[1:]}
            key = epoch, horizon
            row = table.setdefault(key, {"epoch": epoch, "horizon": horizon, "seeds": []})
            row["seeds"].append({"seed": seed, "accuracy": float(np.mean(correct)), **metrics})
            right[key] = right.get(key, 0) + sum(correct)
        for row in table.values():
            row |= {name: _mean([seed[name] for seed in row["seeds"]]) for name in names}
        chosen = max(table, key=right.__getitem__)
        return {
            "epoch": chosen[0],
            "horizon": chosen[1],
            "problems": len(self._problems),
            "table": list(table.values()),
        }

    def report(self, manifest: dict[str, Any]) -> str:
        return selection_table(manifest["summary"])


class SeedStage(Stage):
    """A stage with one shard per seed of the reranker, worked on in this process."""

    command = "futurebridge train"
    unit = "adapters"
    parallel = False

    def shards(self) -> dict[str, int]:
        return {f"seed-{seed}": 1 for seed in self.settings.train.seeds}


class RerankerStage(SeedStage):
    """The chosen adapters, one folder per seed: each is a PEFT checkpoint with a model card."""

    name = "reranker"
    slice = (*DEPLOYED, "train")
    reads = (TrajectoryStage, PolicyStage, ScoreStage, TrainStage, SelectionStage)

    def data(self) -> dict[str, Any]:
        return {"slm": self.settings.models.slm, "llm": self.settings.models.llm}  # named in the model cards

    def work(self, shard: str) -> Output:
        chosen, seed = self.input(SelectionStage).folder.finished()["summary"], _seed(shard)
        reranker = self.input(TrainStage).trained(chosen["epoch"], chosen["horizon"], seed)
        with tempfile.TemporaryDirectory() as folder:
            reranker.save_pretrained(folder)
            deployed_as(self, "published").save(folder)
            files = {f"{shard}/{path.name}": path.read_bytes() for path in sorted(Path(folder).iterdir())}
        files[f"{shard}/README.md"] = self._card(seed, chosen).encode()
        return Output(files, {"adapters": 1})

    def _card(self, seed: int, chosen: dict[str, Any]) -> str:
        models, settings = self.settings.models, self.settings.train
        policy, asked = frozen_policy(self.run), self.input(TrajectoryStage).settings.problems
        template = resources.files("fb_core.apps.pipeline") / "templates" / "card.md"
        return template.read_text(encoding="utf-8").format(
            slm=_public(models.slm),
            llm=_public(models.llm),
            slm_path=_loadable(models.slm),
            llm_path=_loadable(models.llm),
            base=f"base_model: {models.slm}\n" if is_hub_id(models.slm) else "",  # the hub refuses other names
            horizon=chosen["horizon"],
            epoch=chosen["epoch"],
            seed=seed,
            rank=settings.rank,
            alpha=settings.lora_alpha,
            dropout=settings.dropout,
            rate=settings.learning_rate,
            temperature=settings.temperature,
            groups=settings.groups_per_step,
            threshold=policy.threshold,
            top_k=policy.top_k,
            quantile=self.input(PolicyStage).settings.collect.quantile,
            scope="the whole sequence" if settings.scope == "sequence" else "the candidate token alone",
            filters=filter_table(self.input(ScoreStage).folder.finished()["counts"]),
            selection=selection_table(chosen),
            problems=_public(asked.train),
            thinking="on" if asked.thinking else "off",
        )


class ValueStage(SeedStage):
    """The value head over every seed's reranker, fitted to the rollouts of a share of the training states."""

    name = "values"
    slice = ("train.scope", "train.seeds")
    reads = (RolloutStage, RerankerStage)
    unit = "rerankers"

    def work(self, shard: str) -> Output:
        seed, rollouts = _seed(shard), self.rollouts()
        outcomes = {rollout.state.id: rollout.correct for rollout in rollouts}
        mixed = sum(outcomes_differ(one.numpy()) for one in outcomes.values())
        weights = None
        if mixed:
            reranker = {seed: chosen_reranker(self.settings, self.run, seed)}
            scored = [
                (value_terms(state.pool, scores, state.entropy), outcomes[state.id])
                for state, _, scores in reranked(self.models.slm, reranker, [rollout.state for rollout in rollouts])
            ]
            weights = fit_value(*zip(*scored, strict=True)).weights
        line = json.dumps({"weights": weights}) + "\n"
        return Output({f"{shard}.jsonl": line.encode()}, {"rolled-out states": len(outcomes), "mixed states": mixed})

    def rollouts(self) -> list[Rollout]:
        """Those of the training states."""
        return [
            rollout
            for shard in self.input(RolloutStage).folder.shards()
            for rollout in Examples(self.run, shard, self.models.slm.device).rollouts().values()
        ]

    def head(self, seed: int) -> ValueHead | None:
        """The head of a finished seed; None if the candidates of no state differed in outcome."""
        weights = json.loads(self.folder.read(f"seed-{seed}", "jsonl"))["weights"]
        return None if weights is None else ValueHead(tuple(weights))


def reranked(
    slm: CausalLM, rerankers: Mapping[Key, TokenReranker], states: Sequence[LoggedState]
) -> Iterator[tuple[LoggedState, Key, Tensor]]:
    """(state, reranker's key, its scores float32 [K] on the CPU) for all; each trajectory's prefix is computed once."""
    members: dict[str, list[LoggedState]] = {}
    for state in states:
        members.setdefault(state.trajectory.problem.id, []).append(state)
    trajectories = list(members.values())
    longest = [max(state.position for state in own) for own in trajectories]
    for pack in starmap(slice, packs(longest, ROWS)):
        packed = trajectories[pack]
        wholes = prefill_packed(
            slm, [own[0].trajectory.tokens[:end] for own, end in zip(packed, longest[pack], strict=True)]
        )
        prefixes = [(whole, state) for whole, own in zip(wholes, packed, strict=True) for state in own]
        for key, reranker in rerankers.items():
            for (_, state), scores in zip(prefixes, _scores(reranker, prefixes), strict=True):
                yield state, key, scores


@torch.no_grad()
def _scores(reranker: TokenReranker, states: Sequence[tuple[Prefix, LoggedState]]) -> list[Tensor]:
    """Scores float32 [K] of every state, given with a prefix that reaches to it or further."""
    pools = [state.pool.ids.to(reranker.base.device) for _, state in states]
    if reranker.scope == "candidate":
        scored = reranker.scores_many([replace(whole, length=state.position) for whole, state in states], pools)
    else:
        scored = [reranker.scores(state.prefix, pool) for (_, state), pool in zip(states, pools, strict=True)]
    return [scores.cpu() for scores in scored]


class CertificationStage(DecodeStage):
    """The recipes on problems that nothing was chosen on, one shard each."""

    name = "certification"
    command = "futurebridge train"
    slice = (*DEPLOYED, "problems", "collect.max_new_tokens", "verify", "train.seeds")
    reads = (TrajectoryStage, PolicyStage, RerankerStage, ValueStage)
    unit = "decodes"

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems that are decoded."""
        return splits_of(self.settings.problems)["certification"]

    def data(self) -> dict[str, Any]:
        return {"problems": [problem.id for problem in self.problems]}

    def recipes(self, seed: int) -> list[RecipeName]:
        """What a seed's reranker competes with and as; no value where no head could be fitted."""
        return [*UNSEEDED, *(name for name in SEEDED if name != "value" or self.input(ValueStage).head(seed))]

    @cached_property
    def trials(self) -> dict[str, Trial]:
        return {
            _shard(recipe, seed): Trial(self.name, recipe, None if recipe in UNSEEDED else seed, "batch", self.problems)
            for seed in self.settings.train.seeds
            for recipe in self.recipes(seed)
        }

    @property
    def max_new_tokens(self) -> int:
        return self.settings.collect.max_new_tokens

    def most(self) -> int:
        return len(self.problems) * (len(UNSEEDED) + len(SEEDED) * len(self.settings.train.seeds))

    def most_tokens(self) -> int:
        return self._longest_prompt(self.problems) + self.max_new_tokens  # of any trial

    def deployed(self, recipe: RecipeName, seed: int) -> Deployed:
        """A recipe with everything that it decodes with."""
        return deployed_as(self, recipe, self.input(ValueStage).head(seed) if recipe == "value" else None)

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        context = Context(self.settings, self.run, max_length=max_length, max_batch=max_batch)
        recipe: Any = trial.method
        if trial.seed is None:
            return context.decoder_for(self.deployed(recipe, self.settings.train.seeds[0]), None).generate_many
        return context.decoder_for(self.deployed(recipe, trial.seed), context.reranker(trial.seed)).generate_many

    def tested(self, seed: int) -> list[Tried]:
        """Greedy decoding, the direct score, then the recipes of a seed's reranker."""
        return [Tried.of(name, list(read_rows(self.folder, _shard(name, seed)))) for name in self.recipes(seed)]


def _shard(recipe: RecipeName, seed: int) -> str:
    return recipe if recipe in UNSEEDED else f"{recipe}-{seed}"


def deployed_as(stage: Stage, recipe: RecipeName, value: ValueHead | None = None) -> Deployed:
    """A recipe as a run decodes with it, from the files and settings of a stage that reads trajectories and policy."""
    thinking = stage.input(TrajectoryStage).settings.problems.thinking
    policy, pools = frozen_policy(stage.run), Pools(**pool_options(stage.settings))
    return Deployed(
        name=recipe, value=value, threshold=policy.threshold, top_k=policy.top_k, pools=pools, thinking=thinking
    )


class Tried(NamedTuple):
    """A recipe and its results on n problems."""

    recipe: RecipeName
    correct: np.ndarray  # [n] float64, 0 or 1
    calls: float  # LLM calls per problem
    llm_tokens: float  # LLM tokens per problem

    @classmethod
    def of(cls, recipe: RecipeName, rows: Sequence[Row]) -> Tried:
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


def decide(tested: Sequence[Tried], delta: float, level: float) -> tuple[RecipeName, list[tuple[RecipeName, Evidence]]]:
    """Choose the recipe to deploy from results on problems that nothing else was chosen on.

    Args:
        tested: greedy decoding, the direct LLM score, then other recipes, all on the same problems.
        delta: how far below either of the first two a recipe may be, as a share of the problems.
        level: 1 minus the probability that any recipe that is worse than that passes its test.

    Returns:
        the recipe to deploy, and every recipe with its evidence, in order.
    """
    greedy, direct, *_ = tested

    def minus(recipe: Tried, other: Tried) -> Difference:
        if recipe is other:
            return Difference(mean=0.0, low=0.0)
        bound = statistics.paired_lower_bound(recipe.correct, other.correct, level=1 - (1 - level) / len(tested))
        return Difference(mean=bound.mean, low=bound.low)

    differences = [(minus(recipe, greedy), minus(recipe, direct)) for recipe in tested]
    safe = [
        recipe
        for recipe, both in zip(tested, differences, strict=True)
        if all(difference.low > -delta for difference in both)
    ]
    chosen = min(safe or (greedy, direct), key=lambda recipe: recipe.rank)
    words = _words(chosen, len(safe), len(tested), delta, level)
    return chosen.recipe, [
        (
            tried.recipe,
            Evidence(
                problems=len(greedy.correct),
                delta=delta,
                level=level,
                tests=len(tested),
                accuracy=tried.accuracy,
                minus_greedy=to_greedy,
                minus_direct=to_direct,
                calls=tried.calls,
                llm_tokens=tried.llm_tokens,
                words=words,
            ),
        )
        for tried, (to_greedy, to_direct) in zip(tested, differences, strict=True)
    ]


def _words(chosen: Tried, safe: int, tests: int, delta: float, level: float) -> str:
    margin, sure = f"{100 * delta:g} points", f"{100 * level:g}%"
    if safe:
        one = f"the only one of {tests} tested recipes that is"
        best = one if safe == 1 else f"the best of {safe} recipes (of {tests} tested) that are"
        return (
            f"{LABELS[chosen.recipe]}: {best} shown with {sure} confidence to be at most {margin} below greedy "
            "decoding and the direct LLM score."
        )
    return (
        f"{LABELS[chosen.recipe]}: none of {tests} tested recipes is shown with {sure} confidence to be at most "
        f"{margin} below greedy decoding and the direct LLM score. It is the more accurate of these two on the same "
        "problems, which guarantees nothing."
    )


def least_lead(problems: int, delta: float, level: float, tests: int = len(LABELS)) -> int | None:
    """On how many of so many problems a recipe must beat another one to pass beside it, if it loses on none.

    None if too few problems are too little evidence even then.
    """
    other = np.zeros(problems)
    for won in range(problems + 1):
        bound = statistics.paired_lower_bound(np.arange(problems) < won, other, level=1 - (1 - level) / tests)
        if bound.low > -delta:
            return won
    return None


def weakness(problems: int, delta: float, level: float) -> str:
    """What so few certification problems cannot show; "" if they are enough for recipes that never lose to pass."""
    lead = least_lead(problems, delta, level)
    if lead == 0:
        return ""
    passing = "no recipe can pass its test"
    if lead is not None:
        passing = (
            f"a recipe passes its test only if it gains {lead} or more of them over greedy decoding and loses none, "
        )
        passing += "and the same over the direct LLM score"
    return (
        f"problems.certification: with {problems} problems {passing}; if none passes, the more accurate of these "
        "two is deployed. Set aside some hundreds of problems, or 0 for no test"
    )


def choice_table(chosen: RecipeName, evidence: Sequence[tuple[RecipeName, Evidence]], seed: int) -> str:
    """The tested recipes of a seed in Markdown: why one was chosen, then a table with the chosen one in bold."""
    head = ["recipe", "accuracy, %", "minus greedy, pp [lower bound]", "minus direct, pp [lower bound]"]
    head += ["LLM calls per problem", "LLM tokens per problem"]
    first, rows = evidence[0][1], []
    for recipe, row in evidence:
        bounds = [f"{100 * each.mean:+.1f} [{100 * each.low:+.1f}]" for each in (row.minus_greedy, row.minus_direct)]
        cells = [LABELS[recipe], f"{100 * row.accuracy:.1f}", *bounds, f"{row.calls:.2f}", f"{row.llm_tokens:.2f}"]
        if recipe == chosen:
            cells = [f"**{cell}**" for cell in cells]
        rows.append(cells)
    return "\n".join([f"Seed {seed}, {first.problems} problems. {first.words}", "", *markdown_table(head, rows)])


class ChoiceStage(SeedStage):
    """One folder per seed: the adapter with its deployed recipe and evidence."""

    name = DEPLOYED_STAGE
    slice = ("choice", "train.seeds")
    reads = (RerankerStage, CertificationStage)

    def verdict(self, seed: int) -> tuple[RecipeName, list[tuple[RecipeName, Evidence]]]:
        """The recipe deployed with a seed's adapter, and the evidence of every tested recipe."""
        choice = self.settings.choice
        return decide(self.input(CertificationStage).tested(seed), choice.delta, choice.level)

    def work(self, shard: str) -> Output:
        seed = _seed(shard)
        recipe, evidence = self.verdict(seed)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / shard
            shutil.copytree(self.input(RerankerStage).folder.path / shard, folder)
            deployed = self.input(CertificationStage).deployed(recipe, seed)
            deployed.model_copy(update={"evidence": dict(evidence)[recipe]}).save(folder)
            card = (folder / "README.md").read_text(encoding="utf-8")
            table = choice_table(recipe, evidence, seed)
            (folder / "README.md").write_text(f"{card}\n## Deployed recipe\n\n{table}\n", encoding="utf-8")
            files = {f"{shard}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
        return Output(files, {"adapters": 1})

    def summary(self) -> dict[str, Any]:
        """The recipe and its evidence, by seed."""
        chosen = {}
        for seed in self.settings.train.seeds:
            recipe, evidence = self.verdict(seed)
            tested = [{"label": LABELS[name], **each.model_dump()} for name, each in evidence]
            chosen[f"seed-{seed}"] = {"recipe": recipe, "label": LABELS[recipe], "tested": tested}
        return chosen

    def report(self, manifest: dict[str, Any]) -> str:
        tables = [choice_table(*self.verdict(seed), seed) for seed in self.settings.train.seeds]
        return "\n\n".join([*tables, f"To decode with it: `--adapter {self.folder.path / next(iter(self.shards()))}`."])


CHOICE: tuple[type[Stage], ...] = (ValueStage, CertificationStage, ChoiceStage)


def _seed(shard: str) -> int:
    return int(shard.removeprefix("seed-"))


def _public(name: str) -> str:
    """A hub id or a known name as it is; only the last part of a path, since cards are published."""
    return name if is_hub_id(name) else Path(name).name


def _loadable(name: str) -> str:
    """What loads a model in a card: its name, or a placeholder for a folder of that name."""
    return name if is_hub_id(name) or name.startswith(DEMO) else f"path/to/{_public(name)}"


def selection_table(chosen: dict[str, Any]) -> str:
    """Validation results of every horizon and epoch in Markdown, the chosen one in bold."""
    rows = []
    for row in chosen["table"]:
        seeds = ", ".join(f"{100 * seed['accuracy']:.1f}" for seed in row["seeds"])
        cells = [
            str(row["horizon"]),
            str(row["epoch"]),
            f"{100 * row['accuracy']:.1f}",
            seeds,
            f"{row['cross_entropy']:.4f}",
            "" if row["pairwise_accuracy"] is None else f"{100 * row['pairwise_accuracy']:.1f}",
        ]
        if (row["epoch"], row["horizon"]) == (chosen["epoch"], chosen["horizon"]):
            cells = [f"**{cell}**" for cell in cells]
        rows.append(cells)
    accuracy = f"accuracy, % of {chosen['problems']} problems"
    head = ["H", "epoch", accuracy, "by seed", "cross-entropy, nats", "pairwise accuracy, %"]
    return "\n".join(markdown_table(head, rows))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]  # None: there are no pairs to compare
    return float(np.mean(known)) if known else None
