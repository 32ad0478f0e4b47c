"""The record of a run: what is written is read back by id, and what does not belong together is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.problems import Problem
from fb_core.apps.pipeline.records import (
    Examples,
    Future,
    Group,
    LoggedState,
    Rollout,
    Trajectory,
    example_files,
    group_files,
)
from fb_core.events import Pool

SHARD = "train-00000"


def pool(*ids):
    size = len(ids)
    return Pool(
        torch.tensor(ids), torch.arange(size, dtype=torch.int32) % 3 + 1, torch.rand(size).log(), torch.rand(size).log()
    )


TRAJECTORIES = [
    Trajectory(Problem("a/1", "1+1?", "2"), torch.arange(3, 12), 4, torch.rand(5)),
    Trajectory(Problem("b@2", "ü \\boxed{}", "-1/2"), torch.arange(5), 5, torch.rand(0)),  # wrote nothing
    Trajectory(Problem("c", "", ""), torch.arange(20, 26), 1, torch.rand(5)),
]
STATES = [
    LoggedState(TRAJECTORIES[0], 4, 1.25, pool(7, 3, 9)),
    LoggedState(TRAJECTORIES[2], 1, 0.5, pool(2)),
    LoggedState(TRAJECTORIES[0], 8, 2.5, pool(1, 0, 5, 6)),
]
CUT = replace(
    STATES[2],
    pool=Pool(
        *(torch.tensor([5, 1]), torch.tensor([2, 1], dtype=torch.int32)),
        *(STATES[2].pool.slm_logprob[[2, 0]], STATES[2].pool.llm_logprob[[2, 0]]),
    ),
)
FUTURES = [
    Future(STATES[0], 3, torch.tensor([4, 5]), "correct"),
    Future(STATES[2], 6, torch.tensor([]).long(), "wrong"),
]
GROUPS = [Group(STATES[0], torch.rand(3, 4)), Group(CUT, torch.rand(2, 4))]
ROLLOUTS = [Rollout(CUT, torch.tensor([True, False]), ["x", "\n"])]


def put(run, stage, files):
    folder = Artefact(run, stage)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.put(SHARD, files, {}, 1.0, "cpu")


@pytest.fixture
def run(tmp_path):
    put(tmp_path, "trajectories", example_files(SHARD, Trajectory, TRAJECTORIES))
    put(tmp_path, "states", example_files(SHARD, LoggedState, STATES))
    put(tmp_path, "futures", example_files(SHARD, Future, FUTURES))
    put(tmp_path, "own-futures", example_files(SHARD, Future, FUTURES[:1]))
    put(tmp_path, "scores", group_files(SHARD, GROUPS, 4))
    put(tmp_path, "rollouts", example_files(SHARD, Rollout, ROLLOUTS))
    return tmp_path


def assert_alike(found, wanted):
    assert type(found) is type(wanted)
    for name, value in vars(wanted).items():
        other = getattr(found, name)
        if isinstance(value, torch.Tensor):
            assert other.dtype == value.dtype
            assert torch.equal(other, value), name
        elif isinstance(value, Trajectory | LoggedState | Pool):
            assert_alike(other, value)
        else:
            assert other == value, name


def test_what_is_written_is_read_back_by_id(run):
    examples = Examples(run, SHARD)
    assert list(examples.trajectories) == ["a/1", "b@2", "c"]
    assert list(examples.states) == ["a/1@4", "c@1", "a/1@8"]
    for found, wanted in (
        *((examples.trajectories, TRAJECTORIES), (examples.states, STATES), (examples.futures(), FUTURES)),
        *((examples.futures("own-futures"), FUTURES[:1]), (examples.groups, GROUPS), (examples.rollouts(), ROLLOUTS)),
    ):
        for one, other in zip(found.values(), wanted, strict=True):
            assert_alike(one, other)
    assert examples.states["a/1@8"].trajectory is examples.trajectories["a/1"]
    assert examples.futures()["a/1@8"].state is examples.states["a/1@8"]
    assert (STATES[2].prefix.tolist(), STATES[2].output.tolist()) == (list(range(3, 11)), [7, 8, 9, 10])


def test_a_shard_of_nothing_is_read_back(tmp_path):
    for stage, kind in (
        ("trajectories", Trajectory),
        ("states", LoggedState),
        ("rollouts", Rollout),
        ("futures", Future),
    ):
        put(tmp_path, stage, example_files(SHARD, kind, []))
    put(tmp_path, "scores", group_files(SHARD, [], 4))
    examples = Examples(tmp_path, SHARD)
    assert (
        examples.trajectories == examples.states == examples.futures() == examples.groups == examples.rollouts() == {}
    )


def changed(row, **parts):
    """The row of a state that the run does not know."""
    return replace(row, state=replace(STATES[0], **parts))


STRANGE = replace(TRAJECTORIES[0], problem=Problem("d", "", ""))


@pytest.mark.parametrize(
    ("stage", "files", "unknown"),
    [
        ("states", example_files(SHARD, LoggedState, [replace(STATES[0], trajectory=STRANGE)]), "'d'"),
        ("futures", example_files(SHARD, Future, [changed(FUTURES[0], position=5)]), "'a/1@5'"),
        ("scores", group_files(SHARD, [changed(GROUPS[0], position=7)], 4), "'a/1@7'"),
        ("scores", group_files(SHARD, [changed(GROUPS[0], pool=pool(7, 3, 8))], 4), "8"),
        ("rollouts", example_files(SHARD, Rollout, [changed(ROLLOUTS[0], pool=pool(7, 11))]), "11"),
    ],
)
def test_rows_of_other_states_are_named(run, stage, files, unknown):
    put(run, stage, files)
    examples = Examples(run, SHARD)
    read = {"states": lambda: examples.states, "futures": examples.futures, "rollouts": examples.rollouts}
    with pytest.raises(ValueError, match=rf"^{re.escape(str(run / stage / SHARD))}\.parquet: .*got {unknown};"):
        read.get(stage, lambda: examples.groups)()
