"""Other futures than the LLM's greedy one: the SLM's own, and those that show what a future must be to teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fb_core.llm import seeded
from fb_core.stages.artefacts import lists, table_bytes
from fb_core.stages.futures import Future, FutureStage, own_continuations, read_futures, usable, verdicts_of
from fb_core.stages.inputs import verifier_of
from fb_core.stages.pools import logged_pool
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.trajectories import StateStage, TrajectoryStage, read_trajectories

SAMPLED, UNVERIFIED, INCORRECT = "sampled", "unverified", "incorrect"  # columns


class OwnFutureStage(Stage):
    """The SLM's own futures, sampled from the bare states; where one of the samples is right, the first right one."""

    name = "own-futures"
    command = "score"
    reads = (TrajectoryStage, StateStage)
    unit = "states"

    def relevant(self) -> dict[str, Any]:
        return {
            **self.settings.samples.model_dump(include={"slm", "slm_temperature", "seed"}),
            "max_new_tokens": self.settings.futures.max_new_tokens,
            "verify": self.settings.verify.model_dump(exclude={"workers"}),
        }

    def shards(self) -> dict[str, int]:
        return FutureStage(self.settings, self.run).shards()

    def most(self) -> int:
        return FutureStage(self.settings, self.run).most()

    def work(self, shard: str) -> Output:
        problems = TrajectoryStage(self.settings, self.run).problems()[shard]
        trajectories, states = read_trajectories(self.source("trajectories"), shard), self.source("states").table(shard)
        slm, settings = self.models.local_slm, self.settings.samples
        owners = [trajectories[state["trajectory"]] for state in states]
        futures = own_continuations(
            slm,
            [owner.tokens[: state["position"]].to(slm.device) for owner, state in zip(owners, states, strict=True)],
            [owner.prompt_length for owner in owners],
            [problems[state["trajectory"]].answer for state in states],
            self.models.tokenizer,
            verifier_of(self.settings.verify),
            self.settings.futures.max_new_tokens,
            samples=settings.slm,
            temperature=settings.slm_temperature,
            seed=settings.seed,
        )
        verdicts = [future.verdict for future in futures]
        columns = {
            "first": pa.array([future.first for future in futures], pa.int32()),
            "tokens": lists((future.tokens for future in futures), pa.int32()),
            "verdict": pa.array(verdicts, pa.string()),
        }
        counts = {"futures": len(futures), "correct": verdicts.count("correct")}
        return Output({f"{shard}.parquet": table_bytes(columns)}, counts)

    def cost(self) -> Cost:
        return Cost("sampled", self.settings.samples.slm * FutureStage(self.settings, self.run).cost().tokens)


class SampleStage(Stage):
    """The LLM's samples behind the states with a usable future: its first one, its first right and first wrong one."""

    name = "samples"
    command = "score"
    reads = (TrajectoryStage, StateStage, FutureStage)
    uses = ("slm", "llm", "tokenizer")
    unit = "states"

    @property
    def on_gpu(self) -> bool:
        return self.settings.models.llm_server is None

    @property
    def device(self) -> str:
        return self.models.device if self.on_gpu else "server"

    def units(self, manifest: dict[str, Any]) -> int:
        return int(manifest["counts"]["sampled"])

    def relevant(self) -> dict[str, Any]:
        return {
            **self.settings.samples.model_dump(include={"llm", "llm_temperature", "seed"}),
            "slm_k": self.settings.collect.slm_k,
            "horizon": self.settings.score.horizon,
            "max_new_tokens": self.settings.futures.max_new_tokens,
            "verify": self.settings.verify.model_dump(exclude={"workers"}),
            "kept": [SAMPLED, UNVERIFIED, INCORRECT],
        }

    def shards(self) -> dict[str, int]:
        return FutureStage(self.settings, self.run).shards()

    def most(self) -> int:
        return FutureStage(self.settings, self.run).most()

    def work(self, shard: str) -> Output:
        problems = TrajectoryStage(self.settings, self.run).problems()[shard]
        trajectories, states = read_trajectories(self.source("trajectories"), shard), self.source("states").table(shard)
        futures, rows = read_futures(self.source("futures"), shard)
        llm, settings = self.models.llm, self.settings.samples
        pools = [logged_pool(row, self.settings.collect.slm_k).ids.tolist() for row in rows]
        left, _ = usable(pools, futures, self.settings.score.horizon)
        found: dict[str, dict[int, torch.Tensor]] = {SAMPLED: {}, UNVERIFIED: {}, INCORRECT: {}}
        for draw in range(settings.llm):
            if not left:
                break
            owners = [trajectories[states[row]["trajectory"]] for row in left]
            prefixes = [owner.tokens[: states[row]["position"]] for owner, row in zip(owners, left, strict=True)]
            drawn = llm.sample_many(
                [prefix.to(llm.device) for prefix in prefixes],
                1,
                self.settings.futures.max_new_tokens,
                temperature=settings.llm_temperature,
                top_p=1.0,
                top_k=0,
                seed=settings.seed + draw,
            )
            written = [new[0].cpu() for new in drawn]
            outputs = [
                torch.cat([prefix[owner.prompt_length :], new])
                for prefix, owner, new in zip(prefixes, owners, written, strict=True)
            ]
            golds = [problems[states[row]["trajectory"]].answer for row in left]
            verdicts = verdicts_of(outputs, golds, self.models.tokenizer, verifier_of(self.settings.verify))
            if draw == 0:
                found[UNVERIFIED] = dict(zip(left, written, strict=True))
            for row, new, verdict in zip(left, written, verdicts, strict=True):
                if verdict in ("correct", "wrong"):
                    found[SAMPLED if verdict == "correct" else INCORRECT].setdefault(row, new)
            left = [row for row in left if row not in found[SAMPLED] or row not in found[INCORRECT]]
            self.on_progress(len(found[UNVERIFIED]) - len(left))
        columns = {
            name: pa.array(
                [by_row[row].tolist() if row in by_row else None for row in range(len(states))], pa.list_(pa.int32())
            )
            for name, by_row in found.items()
        }
        counts = {"states": len(states), "sampled": len(found[UNVERIFIED])}
        counts |= {"with a right one": len(found[SAMPLED]), "with a wrong one": len(found[INCORRECT])}
        return Output({f"{shard}.parquet": table_bytes(columns)}, counts)

    def cost(self) -> Cost:
        return Cost("sampled", self.settings.samples.llm * FutureStage(self.settings, self.run).cost().tokens, "llm")


def futures_of_quality(
    quality: str,
    futures: Sequence[Future],
    used: Sequence[int],
    sampled: Sequence[Mapping[str, Any]],
    owners: Sequence[int],
    horizon: int,
    shard: str,
) -> list[Future]:
    """The futures of one quality on the states that have futures of all of them; the others' are empty.

    Args:
        quality: "verified", "sampled", "unverified", "incorrect", "cross-state" or "shuffled".
        futures: the LLM's greedy ones, a state each.
        used: states whose greedy future is usable.
        sampled: rows of `SampleStage`, a state each.
        owners: the problem of each state.
        horizon: tokens that every one of the futures must have.
        shard: seeds the permutations.

    Returns:
        futures whose first token and verdict are the greedy one's, so that they pass the same filters.
    """
    behind = {
        name: {row: torch.tensor(sampled[row][name][1:]) for row in used if sampled[row][name] is not None}
        for name in (SAMPLED, UNVERIFIED, INCORRECT)
    }
    common = [row for row in used if all(len(tokens.get(row, ())) >= horizon for tokens in behind.values())]
    donors = _donors(common, owners, shard)
    chosen: dict[int, torch.Tensor] = {}
    for row in donors:
        tokens = futures[row].tokens
        if quality in behind:
            tokens = behind[quality][row]
        elif quality == "cross-state":
            tokens = futures[donors[row]].tokens
        elif quality == "shuffled":
            order = list(range(horizon))
            seeded(0, tokens[:horizon].tolist()).shuffle(order)
            tokens = tokens[torch.tensor(order)]
        chosen[row] = tokens
    empty = torch.zeros(0, dtype=torch.int64)
    return [Future(f.first, chosen.get(row, empty), f.verdict) for row, f in enumerate(futures)]


def _donors(rows: Sequence[int], owners: Sequence[int], shard: str) -> dict[int, int]:
    """For every state one of another problem, each at most once where that can be; none where all are of one problem.

    Sorted by problem and rotated by the largest problem's number of states, no state meets its own problem as long as
    no problem has more than half of the states.
    """
    order = np.random.default_rng(list(shard.encode())).permutation(len(rows)).tolist()
    shuffled = [rows[place] for place in order]
    rank = {problem: place for place, problem in enumerate(dict.fromkeys(owners[row] for row in shuffled))}
    grouped = sorted(shuffled, key=lambda row: rank[owners[row]])
    shift = max((sum(owners[row] == problem for row in rows) for problem in rank), default=0)
    donors = {}
    for place, row in enumerate(grouped):
        for step in range(len(grouped)):
            donor = grouped[(place + shift + step) % len(grouped)]
            if owners[donor] != owners[row]:
                donors[row] = donor
                break
    return donors
