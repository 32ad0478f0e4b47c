"""Futures other than the LLM's greedy one: the SLM's own, and those that the ablation of futures compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline.collect import OverStates, StateStage, TrajectoryStage, judge_solutions
from fb_core.apps.pipeline.files import Artefact, table_bytes
from fb_core.apps.pipeline.futures import FutureStage, filter_futures, judge_futures
from fb_core.apps.pipeline.models import verifier_of
from fb_core.apps.pipeline.records import IDS, Examples, Future, example_files
from fb_core.apps.pipeline.run import Output, Stage
from fb_core.apps.pipeline.scores import ScoreStage, reduce_pools
from fb_core.runtime.sampling import seeded

SAMPLED, UNVERIFIED, INCORRECT = "sampled", "unverified", "incorrect"  # columns: first right sample, first, first wrong
SAMPLES = {"state": pa.string(), SAMPLED: IDS, UNVERIFIED: IDS, INCORRECT: IDS}

Samples = Mapping[str, Mapping[str, Tensor]]
"""The kept samples, [n >= 1] ids each, by column and the state's id."""


class OwnFutureStage(OverStates):
    """The SLM's own futures, sampled from the bare states: the first right sample, else the first.

    If the LLM's futures are in a style that the SLM cannot carry out, they rank candidates in the wrong order; the
    SLM's own correct solutions do not.
    """

    name = "own-futures"
    command = "python -m benchmarks.paper"
    settings: PaperSettings
    slice = ("samples.slm", "samples.slm_temperature", "samples.seed", "futures.max_new_tokens", "verify")
    reads = (TrajectoryStage, StateStage)

    def work(self, shard: str) -> Output:
        slm, settings = self.models.local_slm, self.settings.samples
        states, verifier = list(Examples(self.run, shard).states.values()), verifier_of(self.settings.verify)
        drawn = slm.sample_many(
            [state.prefix.to(slm.device) for state in states],
            settings.slm,
            self.settings.futures.max_new_tokens,
            temperature=settings.slm_temperature,
            top_p=1.0,
            top_k=0,
            seed=settings.seed,
        )
        samples = ([written[n] for written in drawn] for n in range(settings.slm))
        tried = [judge_futures(states, written, self.models.tokenizer, verifier)[1] for written in samples]
        own = [
            next((future for future in of_state if future.verdict == "correct"), of_state[0])
            for of_state in zip(*tried, strict=True)
        ]
        counts = {"futures": len(own), "correct": sum(future.verdict == "correct" for future in own)}
        return Output(example_files(shard, Future, own), counts)

    def most_tokens(self) -> int:
        longest = self.input(TrajectoryStage).longest + self.settings.futures.max_new_tokens
        return self.settings.samples.slm * longest


class SampleStage(OverStates):
    """The LLM's samples from the states with a usable future: the first, the first right and the first wrong one."""

    name = "samples"
    command = "python -m benchmarks.paper"
    settings: PaperSettings
    slice = (
        "samples.llm",
        "samples.llm_temperature",
        "samples.seed",
        "collect.slm_k",
        "score.horizon",
        "futures.max_new_tokens",
        "verify",
    )
    reads = (TrajectoryStage, StateStage, FutureStage)
    uses = ("slm", "llm", "tokenizer")
    writer = "llm"

    def work(self, shard: str) -> Output:
        examples, llm, settings = Examples(self.run, shard), self.models.llm, self.settings.samples
        futures = reduce_pools(examples.futures().values(), self.settings.collect.slm_k)
        left = [future.state for future in filter_futures(futures, self.settings.score.horizon)[0]]
        samples: dict[str, dict[str, Tensor]] = {SAMPLED: {}, UNVERIFIED: {}, INCORRECT: {}}
        for draw in range(settings.llm):
            if not left:
                break
            drawn = llm.sample_many(
                [state.prefix.to(llm.device) for state in left],
                1,
                self.settings.futures.max_new_tokens,
                temperature=settings.llm_temperature,
                top_p=1.0,
                top_k=0,
                seed=settings.seed + draw,
            )
            written = [new[0].cpu() for new in drawn]
            _, verdicts = judge_solutions(left, written, self.models.tokenizer, verifier_of(self.settings.verify))
            for state, new, verdict in zip(left, written, verdicts, strict=True):
                if draw == 0:
                    samples[UNVERIFIED][state.id] = new
                if verdict in ("correct", "wrong"):
                    samples[SAMPLED if verdict == "correct" else INCORRECT].setdefault(state.id, new)
            left = [state for state in left if state.id not in samples[SAMPLED] or state.id not in samples[INCORRECT]]
            self.on_progress(len(samples[UNVERIFIED]) - len(left))
        rows = [
            {"state": state} | {name: by_id[state].tolist() for name, by_id in samples.items() if state in by_id}
            for state in examples.states
        ]
        counts = {"states": len(rows), "sampled": len(samples[UNVERIFIED])}
        counts |= {"with a right one": len(samples[SAMPLED]), "with a wrong one": len(samples[INCORRECT])}
        return Output({f"{shard}.parquet": table_bytes(rows, SAMPLES)}, counts)

    def most_tokens(self) -> int:
        return self.settings.samples.llm * self.input(FutureStage).most_tokens()


class OtherScoreStage(ScoreStage):
    """The matrices of other futures than the LLM's greedy ones, under the name of the ordinary scores."""

    slice = (*ScoreStage.slice, "samples.future")
    settings: PaperSettings

    @property
    def reads(self) -> Sequence[type[Stage]]:  # type: ignore[override]
        return (*ScoreStage.reads, *made_for(self.settings.samples.future))

    def futures(self, examples: Examples) -> list[Future]:
        kind, horizon = self.settings.samples.future, self.settings.score.horizon
        if kind == "own":
            return list(examples.futures(OwnFutureStage.name).values())
        futures = super().futures(examples)
        if kind == "greedy":
            return [replace(future, verdict="correct") for future in futures]  # so that they pass the filter
        used, _ = filter_futures(reduce_pools(futures, self.settings.collect.slm_k), horizon)
        sampled = read_samples(self.input(SampleStage).folder, examples.shard)
        return futures_of_quality(kind, futures, [future.state.id for future in used], sampled, horizon, examples.shard)


def made_for(future: str) -> tuple[type[Stage], ...]:
    """The stages that write futures of a kind, besides the LLM's greedy ones."""
    if future in ("llm", "greedy"):
        return ()
    return (OwnFutureStage if future == "own" else SampleStage,)


def read_samples(folder: Artefact, shard: str) -> Samples:
    """The samples of a finished shard."""
    rows = folder.table(shard)
    return {
        name: {row["state"]: torch.tensor(row[name]) for row in rows if row[name] is not None}
        for name in (SAMPLED, UNVERIFIED, INCORRECT)
    }


def futures_of_quality(
    quality: str, futures: Sequence[Future], used: Sequence[str], sampled: Samples, horizon: int, shard: str
) -> list[Future]:
    """The futures of one quality at the states that have futures of every quality; at other states they are empty.

    `futures` are the LLM's greedy ones, one per state, usable at the states `used`; `shard` seeds the permutations. The
    result keeps the first token and verdict of the greedy ones, so that it passes the same filters.
    """
    greedy = {future.state.id: future for future in futures}
    common = [
        state
        for state in used
        if all(state in by_id and len(by_id[state]) > horizon for by_id in sampled.values())  # and a first token
    ]
    owners = {state: greedy[state].state.trajectory.problem.id for state in common}
    chosen: dict[str, Tensor] = {}
    for state, donor in _donors(owners, shard).items():
        tokens = greedy[state].tokens
        if quality in sampled:
            tokens = sampled[quality][state][1:]
        elif quality == "cross-state":
            tokens = greedy[donor].tokens
        elif quality == "shuffled":
            order = list(range(horizon))
            seeded(0, tokens[:horizon].tolist()).shuffle(order)
            tokens = tokens[torch.tensor(order)]
        chosen[state] = tokens
    empty = torch.zeros(0, dtype=torch.int64)
    return [replace(future, tokens=chosen.get(state, empty)) for state, future in greedy.items()]


def _donors(owners: Mapping[str, str], shard: str) -> dict[str, str]:
    """A state of another problem for every state, from the states' problems; empty if all are of one problem.

    If possible each state donates only once: the states are sorted by problem and rotated by the largest number of
    states of one problem, so no state meets its own problem unless one problem has more than half of the states.
    """
    states = list(owners)
    order = np.random.default_rng(list(shard.encode())).permutation(len(states)).tolist()
    shuffled = [states[index] for index in order]
    rank = {problem: index for index, problem in enumerate(dict.fromkeys(owners[state] for state in shuffled))}
    grouped = sorted(shuffled, key=lambda state: rank[owners[state]])
    shift = max(Counter(owners.values()).values(), default=0)
    donors = {}
    for index, state in enumerate(grouped):
        for step in range(len(grouped)):
            donor = grouped[(index + shift + step) % len(grouped)]
            if owners[donor] != owners[state]:
                donors[state] = donor
                break
    return donors
