"""Stage 4, third part: value heads and gates fitted to rollouts, and the recipes that they make possible."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fb_core import hf
from fb_core.config import ChoiceSettings, RunSettings
from fb_core.policy import AskHead
from fb_core.pool import Pool
from fb_core.recipe import DIRECT, GREEDY, Deployed, Recipe, Trained
from fb_core.reranker import TokenReranker, candidate_features
from fb_core.stages.artefacts import Artefact, tensor_bytes
from fb_core.stages.calibration import rolled_out_terms
from fb_core.stages.deploy import RERANKER, chosen_reranker, frozen_policy, pool_options
from fb_core.stages.examples import Examples, State
from fb_core.stages.inputs import DEPLOYED
from fb_core.stages.nested_runs import FOLDER, TRAINED
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.selection import RerankerStage, SelectionStage
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.states import PolicyStage
from fb_core.stages.trajectories import TrajectoryStage, teacher_forced
from fb_core.statistics import outcomes_differ
from fb_core.value import Form, ValueHead, fit_ask, fit_gate, fit_listwise, gate_terms, listwise_terms

Flags = NDArray[np.bool_]
Places = NDArray[np.int64]
Key = TypeVar("Key", bound=Hashable)


class Candidate(NamedTuple):
    """A recipe that may be deployed, with its results by the rollouts of the validation states.

    Attributes:
        deployed: the recipe with its heads.
        success: share of these states where its choice leads to the right answer without later interventions.
        asked: share of these states at which it asks the LLM.
    """

    deployed: Deployed
    success: float
    asked: float


class ValueStage(Stage):
    """One shard per seed: every recipe with its fitted heads and its results by the rollouts."""

    name = "values"
    command = "futurebridge train"
    slice = (
        "rollouts.minimum_mixed",
        "choice.trained",
        "choice.certainties",
        "choice.values",
        "choice.ask",
        *DEPLOYED,
        "train.seeds",
    )
    reads = (TrajectoryStage, PolicyStage, RolloutStage, RerankerStage)
    unit = "rerankers"
    parallel = False

    def data(self) -> dict[str, Any]:
        return {"trained": {name: Artefact(run, RERANKER).finished()["digest"] for name, run in self._runs.items()}}

    def shards(self) -> dict[str, int]:
        return {f"seed-{seed}": len(self._runs) for seed in self.settings.train.seeds}

    @cached_property
    def _runs(self) -> dict[str, Path]:
        """The folder of the run of every trained reranker, by the name of its scores."""
        return {"own": self.run, **{name: self.run / FOLDER / name for name in competing(self.settings, self.run)}}

    def work(self, shard: str) -> Output:
        seed = int(shard.removeprefix("seed-"))
        rerankers = {name: chosen_reranker(self.settings, run, seed) for name, run in self._runs.items()}
        learned, held_out = (self._states(split, rerankers) for split in ("train", "validation"))
        if not len(learned.entropy) or not len(held_out.entropy):
            raise ValueError(
                f"{self.name}: expected rolled-out states of both splits, got {len(learned.entropy)} for training and "
                f"{len(held_out.entropy)} for validation; raise rollouts.train and rollouts.validation"
            )
        lines, weights = [], {}
        for number, found in enumerate(self._candidates(learned, held_out)):
            line = found.deployed.described() | {"success": found.success, "asked": found.asked}
            lines.append(json.dumps(line) + "\n")
            if found.deployed.policy.ask is not None:
                weights[str(number)] = found.deployed.policy.ask.weight
        files = {f"{shard}.jsonl": "".join(lines).encode(), f"{shard}.safetensors": tensor_bytes(weights)}
        counts = {"rolled-out training states": len(learned.entropy), "validation states": len(held_out.entropy)}
        return Output(files, counts | {"mixed training states": learned.mixed, "recipes": len(lines)})

    def candidates(self, seed: int) -> list[Candidate]:
        """The candidates of a finished seed, in order."""
        shard = f"seed-{seed}"
        weights = self.folder.tensors(shard)
        found = []
        for number, line in enumerate(self.folder.read(shard, "jsonl").splitlines()):
            described = json.loads(line)
            success, asked = described.pop("success"), described.pop("asked")
            deployed = Deployed.read(described, partial(weights.__getitem__, str(number)))
            found.append(Candidate(deployed, success, asked))
        return found

    def reranker(self, recipe: Recipe, seed: int) -> TokenReranker | None:
        """The reranker that gives a recipe's scores; None if it uses none."""
        return chosen_reranker(self.settings, self._runs[recipe.scores], seed) if recipe.trained else None

    def folder_of(self, recipe: Recipe, seed: int) -> Path:
        """The adapter folder of a recipe's reranker; the run's own if the recipe uses none."""
        return self._runs.get(recipe.scores, self.run) / RERANKER / f"seed-{seed}"

    def report(self, manifest: dict[str, Any]) -> str:
        lines = ["| recipe | seed | success, % of validation states | asks the LLM, % of them |", "|---|---|---|---|"]
        for seed in self.settings.train.seeds:
            best = sorted(self.candidates(seed), key=lambda one: -one.success)
            for one in best[:10]:
                lines.append(
                    f"| {one.deployed.recipe.label} | {seed} | {100 * one.success:.1f} | {100 * one.asked:.1f} |"
                )
        return "\n".join(lines)

    def cost(self) -> Cost:
        return Cost("scored at the rolled-out states, heads fitted")

    def _states(self, split: str, rerankers: dict[str, TokenReranker]) -> _States:
        rollouts = [
            one
            for shard in Artefact(self.run, RolloutStage.name).shards(split)
            for one in Examples(self.run, shard, self.models.slm.device).rollouts.values()
        ]
        states = [one.state for one in rollouts]
        place = {state.id: row for row, state in enumerate(states)}
        scores: dict[str, list[Tensor]] = {
            "slm": [state.pool.slm_logprob for state in states],
            "llm": [state.pool.llm_logprob for state in states],
            **{name: [torch.empty(0)] * len(states) for name in rerankers},
        }
        for state, name, found in reranked(self.models.slm, rerankers, states):
            scores[name][place[state.id]] = found
        prefixes = [state.prefix for state in states]
        packs = teacher_forced(self.models.slm, prefixes, [len(prefix) - 1 for prefix in prefixes]) if states else ()
        hidden = [rows[0].float().cpu() for _, pack in packs for rows in pack]
        return _States(
            [state.pool for state in states],
            np.array([state.entropy for state in states]),
            torch.stack(hidden) if hidden else torch.zeros(0, 1),
            [one.correct.numpy() for one in rollouts],
            scores,
        )

    def _candidates(self, learned: _States, held_out: _States) -> Iterator[Candidate]:
        policy, options = frozen_policy(self.run), pool_options(self.settings)
        thinking = self.input(TrajectoryStage).settings.problems.thinking
        heads: dict[tuple[str, Form | None], ValueHead | None] = {}
        for name in learned.scores:
            heads |= {(name, form): learned.head(name, form) for form in self.settings.choice.values}
        recipes = [
            recipe
            for recipe in possible(self.settings.choice, [*self._runs])
            if recipe.value is None or heads[recipe.scores, recipe.value] is not None
        ]
        head = [heads.get((one.scores, one.value)) for one in recipes]
        asking = [at for at, one in enumerate(recipes) if one.ask]
        gates: dict[int, AskHead] = {}
        if asking:
            gains = torch.from_numpy(np.stack([learned.gain(recipes[at], head[at]) for at in asking], 1))
            entropy = torch.from_numpy(learned.entropy)
            gates = dict(zip(asking, fit_ask(learned.hidden, entropy, gains), strict=True))
        for at, (one, value) in enumerate(zip(recipes, head, strict=True)):
            success, asked = held_out.outcome(one, value, gates.get(at))
            asks = replace(policy, ask=gates.get(at))
            yield Candidate(Deployed(one, value, asks, options, None, thinking), success, asked)


def competing(settings: RunSettings, run: Path) -> list[Trained]:
    """The rerankers that compete with the run's own; calibrated ones only if enough mixed states were rolled out.

    Raises:
        ValueError: no reranker is chosen, or there are no rollouts.
    """
    horizon = int(Artefact(run, SelectionStage.name).finished()["summary"]["horizon"])
    _, outcomes = rolled_out_terms(run, horizon)
    mixed = sum(outcomes_differ(one) for one in outcomes)
    enough = mixed >= settings.rollouts.minimum_mixed
    return [name for name in settings.choice.trained if enough or "target" not in TRAINED[name]]


def possible(choice: ChoiceSettings, trained: Sequence[str]) -> list[Recipe]:
    """All recipes that the settings allow with these rerankers, the simplest first."""
    found = [GREEDY, DIRECT]
    for ask in (False, True) if choice.ask else (False,):
        for value in (None, *choice.values):
            for scores in ("slm", "llm", *trained):
                for certainty in (None, *choice.certainties):
                    if scores == "slm" and (value is not None or certainty is None):
                        continue  # the SLM has no scores to weigh, and alone it never takes another token than its own
                    if scores == "llm" and value is None and certainty is not None:
                        continue  # it takes the LLM's token anyway
                    given = {"scores": scores, "value": value, "certainty": certainty, "ask": ask}
                    if (recipe := Recipe.model_validate(given)) != DIRECT:
                        found.append(recipe)
    return found


@dataclass(frozen=True, eq=False)
class _States:
    """Rolled-out states with everything that recipes use."""

    pools: list[Pool]
    entropy: NDArray[np.float64]  # [n] nats
    hidden: Tensor  # [n, D]
    correct: list[Flags]  # [K] each
    scores: dict[str, list[Tensor]]  # by name, [K] each

    @cached_property
    def own(self) -> Places:
        """[n] index of the SLM's token in each pool."""
        return np.array([int(pool.slm_logprob.argmax()) for pool in self.pools], dtype=np.int64)

    @cached_property
    def large(self) -> Places:
        """[n] index of the LLM's token in each pool."""
        return np.array([int(pool.llm_logprob.argmax()) for pool in self.pools], dtype=np.int64)

    @cached_property
    def certainty(self) -> NDArray[np.float64]:
        """[n] the LLM's largest probability."""
        return np.array([float(pool.llm_logprob.max().exp()) for pool in self.pools])

    @property
    def mixed(self) -> int:
        """States whose candidates differ in outcome."""
        return sum(map(outcomes_differ, self.correct))

    def head(self, name: str, form: Form) -> ValueHead | None:
        """A value head fitted to the scores of that name; None if it needs mixed states and there are none."""
        known = list(zip(self.pools, self.scores[name], self.entropy, strict=True))
        if form == "gate":
            terms = torch.stack([gate_terms(*one) for one in known])
            chosen = np.array([int(scores.argmax()) for scores in self.scores[name]], dtype=np.int64)
            return fit_gate(terms, torch.from_numpy(self._success(chosen) - self._success(self.own)))
        if not self.mixed:
            return None
        outcomes = [torch.from_numpy(one) for one in self.correct]
        return fit_listwise([listwise_terms(*one) for one in known], outcomes)

    def chosen(self, recipe: Recipe, head: ValueHead | None) -> Places:
        """[n] index of the candidate that a recipe takes when it asks."""
        found = self.scores[recipe.scores]
        if recipe.value is not None:
            assert head is not None
            known = zip(self.pools, found, self.entropy, strict=True)
            found = [head(pool, scores, entropy) for pool, scores, entropy in known]
        places = np.array([int(scores.argmax()) for scores in found], dtype=np.int64)
        return places if recipe.certainty is None else np.where(self.certainty > recipe.certainty, self.large, places)

    def gain(self, recipe: Recipe, head: ValueHead | None) -> NDArray[np.float64]:
        """[n] success of a recipe's choice minus that of the SLM's token."""
        return self._success(self.chosen(recipe, head)) - self._success(self.own)

    def outcome(self, recipe: Recipe, head: ValueHead | None, ask: AskHead | None) -> tuple[float, float]:
        """(share of states that a recipe leads to success, share of states at which it asks)."""
        chosen, asked = self.chosen(recipe, head), np.full(len(self.pools), not recipe.greedy)
        if ask is not None:
            worth = ask.worth(self.hidden, torch.from_numpy(self.entropy).float())
            asked = (worth > ask.least).numpy()
        return float(self._success(np.where(asked, chosen, self.own)).mean()), float(asked.mean())

    def _success(self, chosen: Places) -> NDArray[np.float64]:
        return np.array([float(one[at]) for one, at in zip(self.correct, chosen, strict=True)])


def reranked(
    slm: hf.CausalLM, rerankers: Mapping[Key, TokenReranker], states: Sequence[State]
) -> Iterator[tuple[State, Key, Tensor]]:
    """(state, reranker's key, its scores float32 [K] on the CPU) for all; prefixes are computed once per trajectory."""
    members: dict[str, list[State]] = {}
    for state in states:
        members.setdefault(state.trajectory.problem.id, []).append(state)
    for of_trajectory in members.values():
        longest = max(of_trajectory, key=lambda state: state.position).prefix
        whole = hf.prefill_packed(slm, [longest])[0]
        for key, reranker in rerankers.items():
            for state, scores in zip(of_trajectory, _scores(reranker, whole, of_trajectory), strict=True):
                yield state, key, scores


@torch.no_grad()
def _scores(reranker: TokenReranker, whole: hf.Prefix, states: Sequence[State]) -> list[Tensor]:
    """Scores float32 [K] of every state of one trajectory; the prefix `whole` reaches to the last of them."""
    device = reranker.base.device
    pools = [state.pool.ids.to(device) for state in states]
    features = [
        candidate_features(pool.slm_logprob, pool.llm_logprob, pool.sources, reranker.feature_names).to(device)
        for pool in (state.pool for state in states)
    ]
    if reranker.scope == "candidate":
        prefixes = [replace(whole, length=state.position) for state in states]
        found = reranker.scores_many(prefixes, pools, features)
    else:
        found = [
            reranker.scores(state.prefix, pool, features=rows)
            for state, pool, rows in zip(states, pools, features, strict=True)
        ]
    return [scores.cpu() for scores in found]
