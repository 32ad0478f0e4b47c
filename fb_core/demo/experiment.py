"""The whole method in one world: collect, futures, score, train, deploy, and the rivals beside it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fb_core import statistics
from fb_core.config import DemoSettings, WorldSettings
from fb_core.decoding import CollaborativeDecoder
from fb_core.demo.pairs import DemoPair
from fb_core.llm import LocalLLM
from fb_core.methods.majority import majority
from fb_core.methods.takeover import takeover
from fb_core.policy import RequestPolicy
from fb_core.reranker import TokenReranker
from fb_core.scorer import CompatibilityScorer
from fb_core.selectors import CertainLLM, FutureBridgeSelector, LLMPreference, RandomChoice, Selector, SLMPreference
from fb_core.stages.accuracy import Evaluation, evaluate
from fb_core.stages.examples import Future, Rollout, State, Trajectory
from fb_core.stages.futures import Filters, own_futures, usable, verified
from fb_core.stages.problems import Problem
from fb_core.stages.rollouts import roll_out
from fb_core.stages.scores import score_states
from fb_core.stages.states import log_states
from fb_core.stages.trajectories import collect
from fb_core.targets import future_compatibility, group_targets
from fb_core.training import Recipe, TrainingGroup, TrainingTrajectory, train_reranker
from fb_core.verify import Verifier

Report = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, how much there is)."""


@dataclass
class Problems:
    """A role's problems, ready for the models."""

    known: list[Problem]
    prompts: list[Tensor]

    @property
    def golds(self) -> list[str]:
        """Their answers."""
        return [problem.answer for problem in self.known]


@dataclass
class Distilled:
    """What the offline stages leave behind at one request policy."""

    policy: RequestPolicy
    states: list[State]
    used: list[Future]  # of the states that can be scored
    matrices: list[Tensor]  # [K, H] of the used ones
    filters: Filters


@dataclass
class WorldRun:
    """One world's run: the models, its problems and the clock."""

    pair: DemoPair
    settings: DemoSettings
    world: WorldSettings
    verifier: Verifier
    report: Report
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.slm, self.llm = LocalLLM(self.pair.slm), LocalLLM(self.pair.llm)
        self.scorer = CompatibilityScorer(self.pair.slm, valid_vocab=len(self.pair.world.vocabulary))
        self.tokenizer = self.pair.world.tokenizer
        self.length = self.pair.world.max_new_tokens

    @contextmanager
    def stage(self, name: str, of: int = 1) -> Iterator[Callable[[int], None]]:
        """Report a stage and add its wall time."""
        began = time.perf_counter()
        self.report(name, 0, of)
        yield lambda done: self.report(name, done, of)
        self.report(name, of, of)
        self.seconds[name.split(":")[0]] += time.perf_counter() - began

    def problems(self, role: str, n: int) -> Problems:
        """Fresh problems of the demo's seed."""
        drawn = self.pair.world.problems(n, self.settings.seed, role)  # type: ignore[arg-type]
        known = [Problem(problem.prompt, problem.prompt, problem.answer) for problem in drawn]
        return Problems(known, [torch.tensor(problem.prompt_ids) for problem in drawn])

    def distil(self, trajectories: Sequence[Trajectory], policy: RequestPolicy) -> Distilled:
        """Admitted states, pools, verified futures and the log-likelihood matrices."""
        k = self.settings.pool_k
        with self.stage("pools"):
            states = log_states(
                self.slm, self.llm, trajectories, policy, slm_k=k, llm_k=k, max_states=self.settings.max_events
            )
        with self.stage("verified futures"):
            written = self.llm.complete_many([state.prefix for state in states], self.length)
            _, futures = verified(states, written, self.tokenizer, self.verifier)
        used, filters = usable(futures, self.world.horizon)
        return Distilled(policy, states, used, self.score(used), filters)

    def score(self, futures: Sequence[Future]) -> list[Tensor]:
        """The [K, H] matrices of futures."""
        with self.stage("compatibility scores", max(1, len(futures))) as done:
            return score_states(self.scorer, futures, self.world.horizon, done)

    def train(self, futures: Sequence[Future], matrices: Sequence[Tensor], horizon: int) -> TokenReranker:
        """A fresh reranker, distilled from the matrices at one horizon."""
        _, targets = group_targets(matrices, [horizon], temperature=self.settings.temperature)
        grouped: dict[str, tuple[Tensor, list[TrainingGroup]]] = {}
        for state, target in zip((future.state for future in futures), targets, strict=True):
            group = TrainingGroup(state.position, state.pool.ids, target[:, 0])
            grouped.setdefault(state.trajectory.problem.id, (state.trajectory.tokens, []))[1].append(group)
        data = [TrainingTrajectory(tokens, groups) for tokens, groups in grouped.values()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            reranker = TokenReranker.from_base(self.pair.slm, rank=self.settings.rank)
        recipe = Recipe(learning_rate=self.settings.learning_rate, epochs=self.settings.epochs, seed=self.settings.seed)
        with self.stage("reranker training"):
            train_reranker(reranker, data, recipe, lambda done, of, _: self.report("reranker training", done, of))
        return reranker

    def decoder(self, selector: Selector, policy: RequestPolicy, pool: str = "joint") -> CollaborativeDecoder:
        """The deployed loop with a selector."""
        k = self.settings.pool_k
        return CollaborativeDecoder(
            self.pair.slm,
            self.llm,
            selector,
            policy,
            pool=pool,  # type: ignore[arg-type]
            slm_k=k,
            llm_k=k,
            max_events=self.settings.max_events,
        )

    def evaluate(self, name: str, generate: Callable, problems: Problems) -> Evaluation:
        """One method on the reported problems."""
        with self.stage(f"evaluation: {name}"):
            return evaluate(generate, problems.prompts, problems.golds, self.tokenizer, self.verifier, self.length)


def cross_state(futures: Sequence[Future], seed: int) -> list[Future]:
    """Futures moved round, so that every state gets one of another problem."""
    order = np.random.default_rng(seed).permutation(len(futures))
    moved = np.roll(order, 1)
    problem = np.array([future.state.trajectory.problem.id for future in futures])
    for _ in range(len(futures)):
        clash = np.flatnonzero(problem[order] == problem[moved])
        if len(clash) == 0:
            break
        moved[clash], moved[(clash + 7) % len(moved)] = moved[(clash + 7) % len(moved)].copy(), moved[clash].copy()
    result = list(futures)
    for target, source in zip(order.tolist(), moved.tolist(), strict=True):
        result[target] = replace(futures[target], tokens=futures[source].tokens)
    return result


def run_world(pair: DemoPair, settings: DemoSettings, world: WorldSettings, report: Report) -> dict[str, Any]:
    """Everything the demo shows of one world, as plain JSON values."""
    began = time.perf_counter()
    with Verifier() as verifier:
        run = WorldRun(pair, settings, world, verifier, report)
        result = _run(run)
    result["seconds"] = {name: round(value, 2) for name, value in run.seconds.items()}
    result["seconds"]["total"] = round(time.perf_counter() - began, 2)
    return result


def _run(run: WorldRun) -> dict[str, Any]:
    world, settings = run.world, run.settings
    train, validation = (
        run.problems("train", world.train_problems),
        run.problems("validation", world.validation_problems),
    )
    test = run.problems("test", world.test_problems)
    with run.stage("trajectories", world.train_problems + world.validation_problems) as done:
        logged = collect(run.slm, train.known, train.prompts, run.length, on_done=done)
        after = len(train.prompts)
        held_out = collect(run.slm, validation.known, validation.prompts, run.length, on_done=lambda n: done(n + after))
    entropies = torch.cat([trajectory.entropy for trajectory in held_out])
    policy = RequestPolicy.calibrate(entropies, world.quantile)
    data = run.distil(logged, policy)
    reranker = run.train(data.used, data.matrices, world.horizon)
    short = run.train(data.used, data.matrices, world.short_horizon)
    moved = cross_state(data.used, settings.seed)
    crossed = run.train(moved, run.score(moved), world.horizon)

    chosen = FutureBridgeSelector(reranker)
    never = RequestPolicy(float("inf"))
    decoders = {
        "SLM greedy": run.decoder(SLMPreference(), never),
        "random pick": run.decoder(RandomChoice(settings.seed), policy),
        "S2T": run.decoder(LLMPreference(), policy, "slm"),
        "direct LLM score": run.decoder(LLMPreference(), policy),
        "FutureBridge": run.decoder(chosen, policy),
        "FutureBridge, SLM pool": run.decoder(chosen, policy, "slm"),
        "FutureBridge, LLM pool": run.decoder(chosen, policy, "llm"),
        "FutureBridge, cross-state future": run.decoder(FutureBridgeSelector(crossed), policy),
        f"FutureBridge, H = {world.short_horizon}": run.decoder(FutureBridgeSelector(short), policy),
        "FutureBridge + certain LLM": run.decoder(CertainLLM(chosen, settings.certainty), policy),
    }
    if world.own_future:
        own = FutureBridgeSelector(train_on_own_futures(run, data.states))
        decoders["FutureBridge, own future"] = run.decoder(own, policy)
        decoders["FutureBridge, own future + certain LLM"] = run.decoder(CertainLLM(own, settings.certainty), policy)
    evaluations = {name: run.evaluate(name, decoder.generate_many, test) for name, decoder in decoders.items()}
    evaluations["Takeover"] = run.evaluate(
        "Takeover", lambda prompts, length: takeover(run.pair.slm, run.llm, policy, prompts, length), test
    )
    greedy, *others = evaluations
    outcomes = {greedy: evaluations[greedy].correct, f"Maj@{settings.votes}": majority_outcomes(run, test)}
    outcomes |= {name: evaluations[name].correct for name in others}

    return {
        "world": world.name,
        "description": run.pair.world.description,
        "settings": world.model_dump(),
        "threshold_nats": policy.threshold,
        "filters": vars(data.filters),
        "accuracy": accuracy_table(outcomes, evaluations),
        **diagnostics(run, held_out, policy, reranker),
        "sweep": sweep(run, logged, entropies, test, evaluations, outcomes),
    }


def majority_outcomes(run: WorldRun, problems: Problems) -> np.ndarray:
    """Bool [n]: whether the answer that most of the SLM's samples agree on is right."""
    with run.stage("evaluation: majority"):
        voted = majority(
            run.slm,
            problems.prompts,
            run.verifier,
            run.tokenizer,
            run.settings.votes,
            run.length,
            seed=run.settings.seed,
        )
        answers = ["" if answer is None else f"\\boxed{{{answer}}}" for answer in voted]
        return np.array([verdict == "correct" for verdict in run.verifier.verify_many(answers, problems.golds)])


def train_on_own_futures(run: WorldRun, states: Sequence[State]) -> TokenReranker:
    """The recipe with the SLM's own verified futures in the place of the LLM's."""
    with run.stage("own futures"):
        futures = own_futures(run.slm, states, run.tokenizer, run.verifier, run.length, seed=run.settings.seed)
    used, _ = usable(futures, run.world.horizon)
    return run.train(used, run.score(used), run.world.horizon)


def accuracy_table(outcomes: dict[str, np.ndarray], evaluations: dict[str, Evaluation]) -> list[dict[str, Any]]:
    """Accuracy in percent with 95% intervals, and paired differences to greedy and to FutureBridge."""
    rows = []
    for name, correct in outcomes.items():
        row: dict[str, Any] = {"method": name, "n": len(correct), "accuracy": _interval(statistics.interval(correct))}
        for other in ("SLM greedy", "FutureBridge"):
            if name != other:
                row[f"minus {other}"] = _interval(statistics.paired_interval(correct, outcomes[other]))
        if name in evaluations:
            row["events"] = round(evaluations[name].events, 2)
            row["tokens"] = round(evaluations[name].new_tokens, 1)
            row["seconds"] = round(evaluations[name].seconds, 2)
        rows.append(row)
    return rows


def diagnostics(
    run: WorldRun, trajectories: Sequence[Trajectory], policy: RequestPolicy, reranker: TokenReranker
) -> dict[str, Any]:
    """On held-out states: how scores agree with the SLM's own rollouts, what the pools cover, and one event in full."""
    data = run.distil(trajectories, policy)
    with run.stage("rollouts"):
        rollouts = roll_out(run.slm, data.states, run.tokenizer, run.verifier, run.length)
    outcomes = [rollout.correct for rollout in rollouts]
    with torch.no_grad():
        learned = [reranker.scores(state.prefix, state.pool.ids) for state in data.states]
    place = {state.id: i for i, state in enumerate(data.states)}
    futures = {place[future.state.id]: future for future in data.used}
    compatibility: dict[int, Tensor] = dict(zip(futures, data.matrices, strict=True))
    scores: dict[str, dict[int, Tensor]] = {
        "SLM": {i: state.pool.slm_logprob for i, state in enumerate(data.states)},
        "LLM": {i: state.pool.llm_logprob for i, state in enumerate(data.states)},
        f"Direct-B_{run.world.short_horizon}": {
            i: future_compatibility(matrix, run.world.short_horizon) for i, matrix in compatibility.items()
        },
        f"Direct-B_{run.world.horizon}": {
            i: future_compatibility(matrix, run.world.horizon) for i, matrix in compatibility.items()
        },
        "FutureBridge": dict(enumerate(learned)),
    }
    kinds = [run.pair.world.event_kind(int(state.pool.ids[0])) for state in data.states]
    everywhere = range(len(data.states))
    return {
        "agreement": [_agreement(name, found, outcomes, data.states, everywhere) for name, found in scores.items()],
        "agreement_by_kind": {
            kind: {
                "events": kinds.count(kind),
                "rows": [
                    _agreement(name, found, outcomes, data.states, [i for i in everywhere if kinds[i] == kind])
                    for name, found in scores.items()
                ],
            }
            for kind in sorted(set(kinds))
        },
        "coverage": _coverage(data.states, outcomes),
        "worked_event": _worked_event(run, futures, rollouts, learned, compatibility),
    }


def _agreement(
    name: str,
    scores: dict[int, Tensor],
    outcomes: Sequence[Tensor],
    states: Sequence[State],
    members: Sequence[int],
) -> dict[str, Any]:
    members = [i for i in members if i in scores]
    succeeded = succeeded_mixed = mixed = 0.0
    tallies: dict[str, list[float]] = {}  # agreeing and comparable pairs by problem
    for i in members:
        score, outcome = scores[i].numpy(), outcomes[i].numpy()
        won, pairs = statistics.pairwise_agreement(score, outcome)
        tally = tallies.setdefault(states[i].trajectory.problem.id, [0.0, 0.0])
        tally[:] = tally[0] + won, tally[1] + pairs
        success = statistics.top1_success(score, outcome)
        succeeded += success
        if outcome.any() and not outcome.all():
            mixed += 1
            succeeded_mixed += success
    agreeing, comparable = np.array(list(tallies.values())).reshape(-1, 2).T
    return {
        "score": name,
        "states": len(members),
        "mixed_states": int(mixed),
        "pairs": int(comparable.sum()),
        "pairwise_percent": _interval(statistics.share_interval(agreeing, comparable)) if comparable.any() else None,
        "top1_percent": _percent(succeeded, len(members)),
        "top1_mixed_percent": _percent(succeeded_mixed, mixed),
    }


def _coverage(states: Sequence[State], outcomes: Sequence[Tensor]) -> list[dict[str, Any]]:
    """How often a pool holds a candidate from which the SLM succeeds."""
    rows = []
    mixed = [bool(outcome.any() and not outcome.all()) for outcome in outcomes]
    for name, bits in (("SLM", 1), ("LLM", 2), ("joint", 3)):
        inside = [(state.pool.sources & bits) > 0 for state in states]
        covered = [bool((outcome & member).any()) for outcome, member in zip(outcomes, inside, strict=True)]
        in_mixed = [hit for hit, count in zip(covered, mixed, strict=True) if count]
        rows.append(
            {
                "pool": name,
                "states": len(states),
                "mixed_states": len(in_mixed),
                "mean_size": round(float(np.mean([int(member.sum()) for member in inside])) if inside else 0.0, 2),
                "coverage_percent": _percent(sum(covered), len(covered)),
                "coverage_mixed_percent": _percent(sum(in_mixed), len(in_mixed)),
            }
        )
    return rows


def _worked_event(
    run: WorldRun,
    futures: dict[int, Future],
    rollouts: Sequence[Rollout],
    learned: Sequence[Tensor],
    compatibility: dict[int, Tensor],
) -> dict[str, Any] | None:
    """The first held-out state with a verified future where the picks of LLM and FutureBridge differ in outcome."""

    def differs(i: int) -> bool:
        picks = int(learned[i].argmax()), int(rollouts[i].state.pool.llm_logprob.argmax())
        return picks[0] != picks[1] and bool(rollouts[i].correct[picks[0]] != rollouts[i].correct[picks[1]])

    found = next((i for i in futures if differs(i)), None)
    if found is None:
        return None
    state, rollout = rollouts[found].state, rollouts[found]
    trajectory = state.trajectory
    decode = run.tokenizer.decode
    b = future_compatibility(compatibility[found], run.world.horizon)
    return {
        "prompt": decode(trajectory.tokens[: trajectory.prompt_length].tolist(), skip_special_tokens=True),
        "prefix": decode(state.output.tolist(), skip_special_tokens=True),
        "gold": trajectory.problem.answer,
        "entropy_nats": round(state.entropy, 3),
        "future": decode(futures[found].tokens[: run.world.horizon].tolist(), skip_special_tokens=True),
        "candidates": [
            {
                "token": decode([int(state.pool.ids[k])]),
                "source": {1: "SLM", 2: "LLM", 3: "both"}[int(state.pool.sources[k])],
                "p_slm": round(float(state.pool.slm_logprob[k].exp()), 4),
                "p_llm": round(float(state.pool.llm_logprob[k].exp()), 4),
                "compatibility": round(float(b[k]), 3),
                "score": round(float(learned[found][k]), 3),
                "rollout": rollout.texts[k],
                "correct": bool(rollout.correct[k]),
            }
            for k in range(len(state.pool.ids))
        ],
    }


def sweep(
    run: WorldRun,
    trajectories: Sequence[Trajectory],
    entropies: Tensor,
    test: Problems,
    evaluations: dict[str, Evaluation],
    outcomes: dict[str, np.ndarray],
) -> list[dict[str, Any]]:
    """The recipe repeated at other request quantiles: plain, with the override, and the direct LLM score."""
    names = ("direct LLM score", "FutureBridge", "FutureBridge + certain LLM")
    rows = [
        _sweep_row(run.world.quantile, entropies, {name: outcomes[name] for name in names}, evaluations["FutureBridge"])
    ]
    for quantile in run.world.sweep:
        policy = RequestPolicy.calibrate(entropies, quantile)
        data = run.distil(trajectories, policy)
        reranker = run.train(data.used, data.matrices, run.world.horizon)
        chosen = FutureBridgeSelector(reranker)
        selectors = (LLMPreference(), chosen, CertainLLM(chosen, run.settings.certainty))
        found = {
            name: run.evaluate(f"{name} at q = {quantile}", run.decoder(selector, policy).generate_many, test)
            for name, selector in zip(names, selectors, strict=True)
        }
        rows.append(
            _sweep_row(quantile, entropies, {name: e.correct for name, e in found.items()}, found["FutureBridge"])
        )
    return sorted(rows, key=lambda row: row["quantile"])


def _sweep_row(
    quantile: float, entropies: Tensor, outcomes: dict[str, np.ndarray], plain: Evaluation
) -> dict[str, Any]:
    return {
        "quantile": quantile,
        "threshold_nats": round(RequestPolicy.calibrate(entropies, quantile).threshold, 3),
        "events": round(plain.events, 2),
        "accuracy": {name: _interval(statistics.interval(correct)) for name, correct in outcomes.items()},
    }


def _interval(interval: statistics.Interval) -> list[float]:
    """Percent: mean, low, high."""
    return [round(100 * value, 1) for value in (interval.mean, interval.low, interval.high)]


def _percent(part: float, whole: float) -> float | None:
    return round(100 * part / whole, 1) if whole else None
