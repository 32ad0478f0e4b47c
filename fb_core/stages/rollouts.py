"""Diagnostics: the SLM's own greedy rollout behind every candidate, with no later intervention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fb_core import hf
from fb_core.llm import LocalLLM, seeded
from fb_core.scorer import BranchGroup
from fb_core.stages.artefacts import Artefact, lists, table_bytes
from fb_core.stages.futures import FutureStage, verdicts_of
from fb_core.stages.inputs import verifier_of
from fb_core.stages.pools import logged_pool
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.trajectories import (
    LoggedState,
    StateStage,
    Trajectory,
    TrajectoryStage,
    read_trajectories,
    texts_of,
)
from fb_core.verify import Verifier


def roll_out(
    slm: LocalLLM,
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
) -> tuple[list[Tensor], list[list[str]]]:
    """(outcomes, texts): for every state a bool [K], which candidates lead to the gold answer, and the solutions.

    Args:
        slm: the small model.
        trajectories: as from `collect`.
        states: as from `log_states`.
        golds: one answer a trajectory.
        tokenizer: of both models.
        verifier: checks the decoded solutions.
        max_new_tokens: rollout length at most.
    """
    return roll_out_candidates(
        slm,
        [trajectories[state.trajectory].tokens[: state.position] for state in states],
        [trajectories[state.trajectory].prompt_length for state in states],
        [state.pool.ids for state in states],
        [golds[state.trajectory] for state in states],
        tokenizer,
        verifier,
        max_new_tokens,
    )


def roll_out_candidates(
    slm: LocalLLM,
    prefixes: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    pools: Sequence[Tensor],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
) -> tuple[list[Tensor], list[list[str]]]:
    """As `roll_out`, of states given by their tokens [P], the prompt's length in them, candidates [K] and answer."""
    written = slm.complete_branches(prefixes, pools, max_new_tokens)
    outputs = [
        torch.cat([prefix[length:], candidate[None], rest])
        for prefix, length, pool, rests in zip(prefixes, prompt_lengths, pools, written, strict=True)
        for candidate, rest in zip(pool, rests, strict=True)
    ]
    counts = [len(pool) for pool in pools]
    asked = [gold for gold, count in zip(golds, counts, strict=True) for _ in range(count)]
    verdicts = verdicts_of(outputs, asked, tokenizer, verifier)
    texts = texts_of(outputs, tokenizer)
    flat = torch.tensor([verdict == "correct" for verdict in verdicts], dtype=torch.bool)
    ends = torch.tensor(counts).cumsum(0).tolist()
    return list(flat.split(counts)), [texts[end - count : end] for end, count in zip(ends, counts, strict=True)]


class RolloutStage(Stage):
    """What becomes of every candidate: of the held-out states' for the diagnostics, of some others' for calibration."""

    name = "rollouts"
    command = "rollouts"
    reads = (TrajectoryStage, StateStage, FutureStage)
    uses = ("slm", "tokenizer", "valid_vocab")
    unit = "states"

    def relevant(self) -> dict[str, Any]:
        return {
            **self.settings.rollouts.model_dump(exclude={"minimum_mixed"}),
            "slm_k": self.settings.collect.slm_k,
            "max_new_tokens": self.settings.collect.max_new_tokens,
            "verify": self.settings.verify.model_dump(exclude={"workers"}),
        }

    def shards(self) -> dict[str, int]:
        return FutureStage(self.settings, self.run).shards()

    def most(self) -> int:
        return FutureStage(self.settings, self.run).most()

    def work(self, shard: str) -> Output:
        problems = TrajectoryStage(self.settings, self.run).problems()[shard]
        slm, settings = self.models.local_slm, self.settings.rollouts
        trajectories = read_trajectories(self.source("trajectories"), shard, slm.device)
        states, rows = self.source("states").table(shard), self.source("futures").table(shard)
        share = settings.validation if shard.startswith("validation") else settings.train
        pools = [logged_pool(row, self.settings.collect.slm_k) for row in rows]
        prefixes = [trajectories[state["trajectory"]].tokens[: state["position"]] for state in states]
        drawn = [
            row
            for row, prefix in enumerate(prefixes)
            if len(pools[row].ids) >= 2 and seeded(settings.seed, prefix.tolist()).random() < share
        ]
        owners = [states[row]["trajectory"] for row in drawn]
        ids = [pools[row].ids.to(slm.device) for row in drawn]
        outcomes, texts = roll_out_candidates(
            slm,
            [prefixes[row] for row in drawn],
            [trajectories[owner].prompt_length for owner in owners],
            ids,
            [problems[owner].answer for owner in owners],
            self.models.tokenizer,
            verifier_of(self.settings.verify),
            self.settings.collect.max_new_tokens,
        )
        groups: dict[int, list[BranchGroup]] = {}
        for row, owner, pool in zip(drawn, owners, ids, strict=True):
            groups.setdefault(owner, []).append(BranchGroup(states[row]["position"], pool, pool[:1]))
        packed = [(trajectories[owner].tokens, members) for owner, members in groups.items()]
        scored = self.models.scorer.score_trajectories(packed, return_local=True)
        known = [local for found in scored for _, local in found]
        decode = self.models.tokenizer.decode
        columns = {
            "state": pa.array(drawn, pa.int32()),
            "problem": pa.array([problems[owner].id for owner in owners], pa.string()),
            "kind": pa.array([token_kind(decode([int(pool[0])])) for pool in ids], pa.string()),
            "ids": lists(ids, pa.int32()),
            "sources": lists((pools[row].sources for row in drawn), pa.int8()),
            "slm_logprob": lists(known, pa.float32()),
            "llm_logprob": lists((pools[row].llm_logprob for row in drawn), pa.float32()),
            "correct": lists(outcomes, pa.bool_()),
            "text": pa.array(texts, pa.list_(pa.string())),
        }
        mixed = sum(bool(outcome.any() and not outcome.all()) for outcome in outcomes)
        side = shard.partition("-")[0]
        counts = {f"{side} states": len(drawn), f"{side} mixed": mixed, "rollouts": sum(map(len, outcomes))}
        return Output({f"{shard}.parquet": table_bytes(columns)}, counts)

    def units(self, manifest: dict[str, Any]) -> int:
        return sum(manifest["counts"].get(f"{split} states", 0) for split in ("train", "validation"))

    def cost(self) -> Cost:
        candidates = self.settings.collect.slm_k + self.settings.futures.llm_k
        tokens = (self.longest_prompt + 2 * self.settings.collect.max_new_tokens + 1) * candidates
        return Cost("rolled out behind every candidate, of the chosen states", tokens)


@dataclass(frozen=True, eq=False)
class RolledOut:
    """One state with what became of its K candidates.

    Attributes:
        state: row of the shard of states.
        problem: id of its problem.
        kind: of the SLM's own token there: "word", "digit" or "mark".
    """

    state: int
    problem: str
    kind: str
    ids: Tensor  # [K] int64
    sources: Tensor  # [K] int32 bits
    slm_logprob: Tensor  # [K] float32, nats
    llm_logprob: Tensor  # [K] float32
    correct: Tensor  # [K] bool
    texts: list[str]


def read_rollouts(folder: Artefact, shard: str) -> list[RolledOut]:
    """The rolled-out states of a finished shard."""
    return [
        RolledOut(
            row["state"],
            row["problem"],
            row["kind"],
            torch.tensor(row["ids"]),
            torch.tensor(row["sources"], dtype=torch.int32),
            torch.tensor(row["slm_logprob"], dtype=torch.float32),
            torch.tensor(row["llm_logprob"], dtype=torch.float32),
            torch.tensor(row["correct"], dtype=torch.bool),
            row["text"],
        )
        for row in folder.table(shard)
    ]


def token_kind(text: str) -> str:
    """The kind of event whose likeliest token reads so: "digit", "word" or "mark" for all else."""
    stripped = text.strip()
    if any(character.isdigit() for character in stripped):
        return "digit"
    return "word" if stripped.isalpha() else "mark"
