"""The records of a run (Problem -> Trajectory -> State -> Future, Group and Rollout), their reader and their writer.

A state's id names its problem and position; all other stages refer to states by that id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fb_core.apps.pipeline.files import Artefact, table_bytes, tensor_bytes
from fb_core.apps.pipeline.problems import Problem
from fb_core.events import Pool
from fb_core.verify.verifier import Verdict

IDS, NATS, BITS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.int8())
PROBLEM = pa.struct({"id": pa.string(), "text": pa.string(), "answer": pa.string()})
DTYPES = {"ids": torch.int64, "sources": torch.int32, "slm_logprob": torch.float32, "llm_logprob": torch.float32}
POOL = pa.struct({"ids": IDS, "sources": BITS, "slm_logprob": NATS, "llm_logprob": NATS})
PART = pa.struct({"id": pa.string(), "candidates": IDS, "sources": BITS})  # of a state, whose record has the log-probs


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What the SLM wrote for one problem."""

    problem: Problem
    tokens: Tensor  # [T] prompt and output
    prompt_length: int
    entropy: Tensor  # float32 [T - prompt_length], nats, of the SLM's distribution before each output token

    @property
    def output(self) -> Tensor:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, eq=False)
class LoggedState:
    """One admitted state of a trajectory, with its candidates."""

    trajectory: Trajectory  # the state is its prefix tokens[:position]
    position: int  # of the token that is chosen here
    entropy: float  # nats
    pool: Pool  # the candidates; in a group or rollout only those that were scored or rolled out

    @property
    def id(self) -> str:
        """The problem's id and the position, joined by "@"."""
        return f"{self.trajectory.problem.id}@{self.position}"

    @property
    def prefix(self) -> Tensor:
        """[position] prompt and output so far."""
        return self.trajectory.tokens[: self.position]

    @property
    def output(self) -> Tensor:
        """The output so far."""
        return self.trajectory.tokens[self.trajectory.prompt_length : self.position]


@dataclass(frozen=True, eq=False)
class Future:
    """What a model writes from a state."""

    state: LoggedState
    first: int  # the id of the token at the state itself; it is a candidate of the pool
    tokens: Tensor  # [n] the tokens after it, including end-of-sequence: the future that all candidates share
    verdict: Verdict  # on the whole solution against the gold answer


@dataclass(frozen=True, eq=False)
class Group:
    """The K candidates of a state with the log-probs of the future after each."""

    state: LoggedState  # with the candidates that were scored
    logprob: Tensor  # float32 [K, H], nats


@dataclass(frozen=True, eq=False)
class Rollout:
    """The SLM's rollouts after the K candidates of a state."""

    state: LoggedState  # with the candidates that were rolled out
    correct: Tensor  # bool [K], whether each candidate leads to the gold answer
    texts: list[str]  # the K solutions


COLUMNS: dict[type, dict[str, pa.DataType]] = {  # of each record's shards, by attribute
    Trajectory: {"problem": PROBLEM, "tokens": IDS, "prompt_length": pa.int32(), "entropy": NATS},
    LoggedState: {"trajectory": pa.string(), "position": pa.int32(), "entropy": pa.float32(), "pool": POOL},
    Future: {"state": pa.string(), "first": pa.int32(), "tokens": IDS, "verdict": pa.string()},
    Group: {"state": PART},
    Rollout: {"state": PART, "correct": pa.list_(pa.bool_()), "texts": pa.list_(pa.string())},
}


def example_files(shard: str, kind: type, records: Sequence[Any]) -> dict[str, bytes]:
    """The file of a shard of trajectories, states, futures, groups (without matrices) or rollouts, for `Examples`."""
    columns = COLUMNS[kind]
    rows = [{name: _plain(getattr(record, name), column) for name, column in columns.items()} for record in records]
    return {f"{shard}.parquet": table_bytes(rows, columns)}


def group_files(shard: str, groups: Sequence[Group], horizon: int) -> dict[str, bytes]:
    """The files of a shard of groups; their matrices are concatenated along K."""
    tensors = {"logprob": torch.cat([torch.zeros(0, horizon), *(group.logprob.cpu() for group in groups)])}
    return example_files(shard, Group, groups) | {f"{shard}.safetensors": tensor_bytes(tensors)}


def _plain(value: Any, column: pa.DataType) -> Any:
    """A value as its column stores it; trajectories and states as their ids."""
    match value:
        case Tensor():
            return value.tolist()
        case Trajectory():
            return value.problem.id
        case LoggedState():
            part = {"id": value.id, "candidates": value.pool.ids.tolist(), "sources": value.pool.sources.tolist()}
            return part if column == PART else value.id
        case Problem() | Pool():
            return {field.name: _plain(getattr(value, field.name), field.type) for field in column}
    return value


class Examples:
    """The records of one shard from a run's finished stages; each kind is read when first used.

    The trajectories' tokens and entropies are on the device, all else is on the CPU. Reading is a ValueError if a file
    is missing, damaged, of another format, or of another run's states.
    """

    def __init__(self, run: Path, shard: str, device: torch.device | str = "cpu") -> None:
        self.run, self.shard, self.device = run, shard, device

    @cached_property
    def trajectories(self) -> dict[str, Trajectory]:
        """Trajectories by the problem's id."""
        trajectories = {}
        for row in self._rows("trajectories"):
            tokens = torch.tensor(row["tokens"], device=self.device)
            entropy = torch.tensor(row["entropy"], dtype=torch.float32, device=self.device)
            problem = Problem(**row["problem"])
            trajectories[problem.id] = Trajectory(problem, tokens, row["prompt_length"], entropy)
        return trajectories

    @cached_property
    def states(self) -> dict[str, LoggedState]:
        """States by id, like all records below."""
        states = {}
        for row in self._rows("states"):
            trajectory = self._lookup("states", self.trajectories, row["trajectory"])
            pool = Pool(**{name: torch.tensor(row["pool"][name], dtype=dtype) for name, dtype in DTYPES.items()})
            state = LoggedState(trajectory, row["position"], row["entropy"], pool)
            states[state.id] = state
        return states

    def futures(self, stage: str = "futures") -> dict[str, Future]:
        """The LLM's futures, or those of another stage."""
        futures = {}
        for row in self._rows(stage):
            state, tokens = (
                self._lookup(stage, self.states, row["state"]),
                torch.tensor(row["tokens"], dtype=torch.int64),
            )
            futures[state.id] = Future(state, row["first"], tokens, row["verdict"])
        return futures

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups of the states with a usable future."""
        states = [self._reduced("scores", row["state"]) for row in self._rows("scores")]
        sizes = [len(state.pool) for state in states]
        matrices = Artefact(self.run, "scores").tensors(self.shard)["logprob"].split(sizes)
        return {state.id: Group(state, matrix) for state, matrix in zip(states, matrices, strict=True)}

    def rollouts(self, stage: str = "rollouts") -> dict[str, Rollout]:
        """Rollouts of the states that were drawn for them, or those of another stage."""
        rollouts = {}
        for row in self._rows(stage):
            state, correct = self._reduced(stage, row["state"]), torch.tensor(row["correct"], dtype=torch.bool)
            rollouts[state.id] = Rollout(state, correct, row["texts"])
        return rollouts

    def _rows(self, stage: str) -> list[dict[str, Any]]:
        return Artefact(self.run, stage).table(self.shard)

    def _reduced(self, stage: str, part: Mapping[str, Any]) -> LoggedState:
        """A state with only the candidates in `part`."""
        state = self._lookup(stage, self.states, part["id"])
        index_of = {token: index for index, token in enumerate(state.pool.ids.tolist())}
        at = torch.tensor([self._lookup(stage, index_of, token) for token in part["candidates"]], dtype=torch.int64)
        sources = torch.tensor(part["sources"], dtype=torch.int32)
        pool = Pool(state.pool.ids[at], sources, state.pool.slm_logprob[at], state.pool.llm_logprob[at])
        return replace(state, pool=pool)

    def _lookup(self, stage: str, by_id: Mapping[Any, Any], name: Any) -> Any:
        if name not in by_id:
            words = (
                f"expected rows of the states in {self.run}, got {name!r}; run the stage again into a new run folder"
            )
            raise ValueError(f"{self.run / stage / self.shard}.parquet: {words}")
        return by_id[name]
