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
from typing import Any, NamedTuple, TypeVar, cast

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
from fb_core.apps.pipeline.problems import Problem, draw_problems
from fb_core.apps.pipeline.records import Examples, LoggedState, Rollout
from fb_core.apps.pipeline.rollouts import RolloutStage
from fb_core.apps.pipeline.run import Output, Stage
from fb_core.apps.pipeline.scores import ScoreStage, filter_table
from fb_core.apps.pipeline.statistics import outcomes_differ
from fb_core.apps.pipeline.train import TrainStage, run_name
from fb_core.apps.settings.run import ProblemSettings
from fb_core.decode.deployment import LABELS, Deployed, Difference, Evidence, Pools, RecipeName
from fb_core.models.checkpoints import is_hub_id
from fb_core.models.facts import CausalLM
from fb_core.models.packed import ROWS, Prefix, packs, prefill_packed
from fb_core.rerank.reranker import TokenReranker
from fb_core.rerank.value_head import ValueHead, fit_value, value_terms

SEEDED: tuple[RecipeName, ...] = ("published", "value")  # recipes of one seed's reranker
UNSEEDED: tuple[RecipeName, ...] = ("greedy", "direct")  # decoded once, whatever the seed
AllEvidence = list[tuple[RecipeName, Evidence]]  # of every tested recipe, in order
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
        stage, count = self.input(TrajectoryStage), self.settings.selection.problems
        validation = stage.splits["validation"]
        return validation if count is None else draw_problems(validation, count, stage.settings.problems.seed)

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
    def prompt_settings(self) -> ProblemSettings:
        return self.input(TrajectoryStage).settings.problems

    @property
    def max_new_tokens(self) -> int:
        return self.settings.collect.max_new_tokens

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        reranker = self.input(TrainStage).reranker_after(*self._rerankers[trial.method])
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

        epoch, horizon = max(table, key=right.__getitem__)
        return {"epoch": epoch, "horizon": horizon, "problems": len(self._problems), "table": list(table.values())}

    def report(self, manifest: dict[str, Any]) -> str:
        return selection_table(manifest["summary"])


class SeedStage(Stage):
    """A stage with one shard per seed of the rerankers, worked on in this process."""

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
        chosen, seed = self.input(SelectionStage).folder.finished()["summary"], _seed_of(shard)
        reranker = self.input(TrainStage).reranker_after(chosen["epoch"], chosen["horizon"], seed)
        with tempfile.TemporaryDirectory() as folder:
            reranker.save_pretrained(folder)
            deployed_as(self, "published").save(folder)
            files = {f"{shard}/{path.name}": path.read_bytes() for path in sorted(Path(folder).iterdir())}
        files[f"{shard}/README.md"] = self._card(seed, chosen).encode()
        return Output(files, {"adapters": 1})

    def _card(self, seed: int, chosen: dict[str, Any]) -> str:
        """The model card; its template says which parts of the settings it shows."""
        models, train, problems = (
            self.settings.models,
            self.settings.train,
            self.input(TrajectoryStage).settings.problems,
        )
        template = resources.files("fb_core.apps.pipeline") / "templates" / "card.md"
        return template.read_text(encoding="utf-8").format(
            slm=_public(models.slm),
            llm=_public(models.llm),
            slm_path=_loadable(models.slm),
            llm_path=_loadable(models.llm),
            base=f"base_model: {models.slm}\n" if is_hub_id(models.slm) else "",  # the hub refuses other names
            chosen=chosen,
            seed=seed,
            train=train,
            policy=frozen_policy(self.run),
            quantile=self.input(PolicyStage).settings.collect.quantile,
            scope="the whole sequence" if train.scope == "sequence" else "the candidate token alone",
            filters=filter_table(self.input(ScoreStage).folder.finished()["counts"]),
            selection=selection_table(chosen),
            problems=_public(problems.train),
            thinking="on" if problems.thinking else "off",
        )


class ValueStage(SeedStage):
    """The value head over every seed's reranker, fitted to the rollouts of a share of the training states."""

    name = "values"
    slice = ("train.scope", "train.seeds")
    reads = (RolloutStage, RerankerStage)
    unit = "rerankers"

    def work(self, shard: str) -> Output:
        seed, rollouts = _seed_of(shard), self.rollouts()
        outcomes = {rollout.state.id: rollout.correct for rollout in rollouts}
        mixed = sum(outcomes_differ(outcome) for outcome in outcomes.values())
        weights = None
        if mixed:
            reranker = {seed: chosen_reranker(self.settings, self.run, seed)}
            states = [rollout.state for rollout in rollouts]
            scored = [
                (value_terms(state.pool, scores, state.entropy), outcomes[state.id])
                for state, _, scores in rerank_states(self.models.slm, reranker, states)
            ]
            weights = fit_value(*zip(*scored, strict=True)).weights
        line = json.dumps({"weights": weights}) + "\n"
        return Output({f"{shard}.jsonl": line.encode()}, {"rolled-out states": len(outcomes), "mixed states": mixed})

    def rollouts(self) -> list[Rollout]:
        """The rollouts of the training states."""
        return [
            rollout
            for shard in self.input(RolloutStage).folder.shards()
            for rollout in Examples(self.run, shard, self.models.slm.device).rollouts().values()
        ]

    def head(self, seed: int) -> ValueHead | None:
        """The head of a finished seed; None if the candidates of no state differed in outcome."""
        weights = json.loads(self.folder.read(f"seed-{seed}", "jsonl"))["weights"]
        return None if weights is None else ValueHead(tuple(weights))


def rerank_states(
    slm: CausalLM, rerankers: Mapping[Key, TokenReranker], states: Sequence[LoggedState]
) -> Iterator[tuple[LoggedState, Key, Tensor]]:
    """(state, a reranker's key, its scores float32 [K] on the CPU); each trajectory's prefix is computed once."""
    members: dict[str, list[LoggedState]] = {}
    for state in states:
        members.setdefault(state.trajectory.problem.id, []).append(state)
    trajectories = list(members.values())
    longest = [max(state.position for state in own) for own in trajectories]
    for pack in starmap(slice, packs(longest, ROWS)):
        packed = trajectories[pack]
        wholes = prefill_packed(
            slm,
            [own[0].trajectory.tokens[:end] for own, end in zip(packed, longest[pack], strict=True)],
            [[state.position for state in own] for own in packed],
        )
        prefixes = [(whole, state) for whole, own in zip(wholes, packed, strict=True) for state in own]
        for key, reranker in rerankers.items():
            for (_, state), scores in zip(prefixes, _score(reranker, prefixes), strict=True):
                yield state, key, scores


@torch.no_grad()
def _score(reranker: TokenReranker, states: Sequence[tuple[Prefix, LoggedState]]) -> list[Tensor]:
    """Scores float32 [K] of every state; the prefix beside a state may be longer than the state's own."""
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
        """The certification problems."""
        return splits_of(self.settings.problems)["certification"]

    def data(self) -> dict[str, Any]:
        return {"problems": [problem.id for problem in self.problems]}

    def recipes(self, seed: int) -> list[RecipeName]:
        """The recipes that are tested for a seed; without "value" if no value head could be fitted."""
        return [*UNSEEDED, *(name for name in SEEDED if name != "value" or self.input(ValueStage).head(seed))]

    @cached_property
    def trials(self) -> dict[str, Trial]:
        trials = {}
        for seed in self.settings.train.seeds:
            for recipe in self.recipes(seed):
                own = None if recipe in UNSEEDED else seed
                trials[_shard_of(recipe, seed)] = Trial(self.name, recipe, own, "batch", self.problems)
        return trials

    @property
    def max_new_tokens(self) -> int:
        return self.settings.collect.max_new_tokens

    def most(self) -> int:
        return len(self.problems) * (len(UNSEEDED) + len(SEEDED) * len(self.settings.train.seeds))

    def most_tokens(self) -> int:
        return self.models.longest_prompt(self.problems, self.prompt_settings) + self.max_new_tokens  # of any trial

    def deployed(self, recipe: RecipeName, seed: int) -> Deployed:
        """A recipe with its thresholds, pools and value head."""
        return deployed_as(self, recipe, self.input(ValueStage).head(seed) if recipe == "value" else None)

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        context = Context(self.settings, self.run, max_length=max_length, max_batch=max_batch)
        seed, reranker = self.settings.train.seeds[0], None
        if trial.seed is not None:
            seed, reranker = trial.seed, context.reranker(trial.seed)
        return context.decoder_for(self.deployed(cast(RecipeName, trial.method), seed), reranker).generate_many

    def results(self, seed: int) -> list[Results]:
        """Greedy decoding, the direct score, then the recipes of a seed's reranker."""
        return [Results.of(name, list(read_rows(self.folder, _shard_of(name, seed)))) for name in self.recipes(seed)]


def _shard_of(recipe: RecipeName, seed: int) -> str:
    return recipe if recipe in UNSEEDED else f"{recipe}-{seed}"


def deployed_as(stage: Stage, recipe: RecipeName, value: ValueHead | None = None) -> Deployed:
    """A recipe as a run decodes with it; the stage reads trajectories and policy."""
    thinking = stage.input(TrajectoryStage).settings.problems.thinking
    policy, pools = frozen_policy(stage.run), Pools(**pool_options(stage.settings))
    return Deployed(
        name=recipe, value=value, threshold=policy.threshold, top_k=policy.top_k, pools=pools, thinking=thinking
    )


class Results(NamedTuple):
    """A recipe and its results on n problems."""

    recipe: RecipeName
    correct: np.ndarray  # [n] float64, 0 or 1
    calls: float  # LLM calls per problem
    llm_tokens: float  # LLM tokens per problem

    @classmethod
    def of(cls, recipe: RecipeName, rows: Sequence[Row]) -> Results:
        """The results in a recipe's rows."""
        calls = float(np.mean([row.calls for row in rows]))
        tokens = float(np.mean([row.llm_tokens for row in rows]))
        return cls(recipe, np.array([row.correct for row in rows], dtype=np.float64), calls, tokens)


def decide(tested: Sequence[Results], delta: float, level: float) -> tuple[RecipeName, AllEvidence]:
    """(the recipe to deploy, every recipe with its evidence), by results on problems that nothing else was chosen on.

    `tested` are greedy decoding, the direct LLM score, then other recipes, all on the same problems. A recipe may be
    below either of the first two by `delta`, a share of the problems; with probability `level` none that is worse
    passes its test.
    """
    greedy, direct, *_ = tested

    def minus(recipe: Results, other: Results) -> Difference:
        if recipe is other:
            return Difference(mean=0.0, low=0.0)
        bound = statistics.paired_lower_bound(recipe.correct, other.correct, level=1 - (1 - level) / len(tested))
        return Difference(mean=bound.mean, low=bound.low)

    differences = [(minus(recipe, greedy), minus(recipe, direct)) for recipe in tested]
    safe = [tried for tried, both in zip(tested, differences, strict=True) if min(d.low for d in both) > -delta]
    chosen = min(safe or (greedy, direct), key=lambda tried: (-float(tried.correct.sum()), tried.calls))
    if not safe:
        subject = f"none of {len(tested)} tested recipes is"
    elif len(safe) == 1:
        subject = f"the only one of {len(tested)} tested recipes that is"
    else:
        subject = f"the best of {len(safe)} recipes (of {len(tested)} tested) that are"
    words = (
        f"{LABELS.get(chosen.recipe, chosen.recipe)}: {subject} shown with {100 * level:g}% confidence to be at most "
        f"{100 * delta:g} points below greedy decoding and the direct LLM score."
    )
    if not safe:
        words += " It is the more accurate of these two on the same problems, which guarantees nothing."
    return chosen.recipe, [
        (
            tried.recipe,
            Evidence(
                problems=len(greedy.correct),
                delta=delta,
                level=level,
                tests=len(tested),
                accuracy=float(tried.correct.mean()),
                minus_greedy=to_greedy,
                minus_direct=to_direct,
                calls=tried.calls,
                llm_tokens=tried.llm_tokens,
                words=words,
            ),
        )
        for tried, (to_greedy, to_direct) in zip(tested, differences, strict=True)
    ]


def weakness(problems: int, delta: float, level: float) -> str:
    """What so few certification problems cannot show; "" if a recipe that never loses always passes its test."""

    def passes(won: int) -> bool:
        """Whether a recipe passes that wins this many problems and loses none."""
        won_or_tied = np.arange(problems) < won, np.zeros(problems)
        return statistics.paired_lower_bound(*won_or_tied, level=1 - (1 - level) / len(LABELS)).low > -delta

    lead = next(filter(passes, range(problems + 1)), None)
    if lead == 0:
        return ""
    passing = "no recipe can pass its test"
    if lead is not None:
        passing = (
            f"a recipe passes its test only if it gains {lead} or more of them over greedy decoding and loses none, "
            "and the same over the direct LLM score"
        )
    return (
        f"problems.certification: with {problems} problems {passing}; if none passes, the more accurate of these "
        "two is deployed. Set aside some hundreds of problems, or 0 for no test"
    )


def choice_table(chosen: RecipeName, evidence: AllEvidence, seed: int) -> str:
    """The tested recipes of a seed in Markdown: why one was chosen, then a table with the chosen one in bold."""
    head = ["recipe", "accuracy, %", "minus greedy, pp [lower bound]", "minus direct, pp [lower bound]"]
    head += ["LLM calls per problem", "LLM tokens per problem"]
    rows = []
    for recipe, row in evidence:
        bounds = [f"{100 * gain.mean:+.1f} [{100 * gain.low:+.1f}]" for gain in (row.minus_greedy, row.minus_direct)]
        rows.append([LABELS[recipe], f"{100 * row.accuracy:.1f}", *bounds, f"{row.calls:.2f}", f"{row.llm_tokens:.2f}"])
    table = markdown_table(head, rows, bold=[recipe for recipe, _ in evidence].index(chosen))
    return "\n".join([f"Seed {seed}, {row.problems} problems. {row.words}", "", *table])


class ChoiceStage(SeedStage):
    """One folder per seed: the adapter with its deployed recipe and evidence."""

    name = DEPLOYED_STAGE
    slice = ("choice", "train.seeds")
    reads = (RerankerStage, CertificationStage)

    def verdict(self, seed: int) -> tuple[RecipeName, AllEvidence]:
        """The recipe deployed with a seed's adapter, and the evidence of every tested recipe."""
        choice = self.settings.choice
        return decide(self.input(CertificationStage).results(seed), choice.delta, choice.level)

    def work(self, shard: str) -> Output:
        seed = _seed_of(shard)
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


def _seed_of(shard: str) -> int:
    return int(shard.removeprefix("seed-"))


def _public(name: str) -> str:
    """A hub id or a known name as it is; only the last part of a path, since cards are published."""
    return name if is_hub_id(name) else Path(name).name


def _loadable(name: str) -> str:
    """What loads a model in a card: its name, or a placeholder for a folder of that name."""
    return name if is_hub_id(name) or name.startswith(DEMO) else f"path/to/{_public(name)}"


def selection_table(chosen: dict[str, Any]) -> str:
    """Validation results of every horizon and epoch in Markdown, the chosen one in bold."""
    head = ["H", "epoch", f"accuracy, % of {chosen['problems']} problems", "by seed", "cross-entropy, nats"]
    head += ["pairwise accuracy, %"]
    rows = [
        [
            str(row["horizon"]),
            str(row["epoch"]),
            f"{100 * row['accuracy']:.1f}",
            ", ".join(f"{100 * seed['accuracy']:.1f}" for seed in row["seeds"]),
            f"{row['cross_entropy']:.4f}",
            "" if row["pairwise_accuracy"] is None else f"{100 * row['pairwise_accuracy']:.1f}",
        ]
        for row in chosen["table"]
    ]
    places = [(row["epoch"], row["horizon"]) for row in chosen["table"]]
    return "\n".join(markdown_table(head, rows, bold=places.index((chosen["epoch"], chosen["horizon"]))))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]  # None: there are no pairs to compare
    return float(np.mean(known)) if known else None
