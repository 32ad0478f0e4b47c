"""One process of a sweep, for the test that starts two."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import V, tiny

from fb_core import Optimisation, TokenReranker, TrainingGroup, TrainingTrajectory
from fb_core.rerank.training import RerankerRun, Sweep


def trajectories(n: int = 7, seed: int = 0) -> list[TrainingTrajectory]:
    """Random states of uneven trajectories, with targets [K, 2]."""
    g = torch.Generator().manual_seed(seed)
    result = []
    for index in range(n):
        groups = []
        for position, size in [(3, 4), (7, 3), (10, 5)][: 1 + index % 3]:
            target = torch.rand(size, 2, generator=g).softmax(0)
            groups.append(TrainingGroup(position, torch.randperm(V, generator=g)[:size], target))
        result.append(TrainingTrajectory(torch.randint(V, (12,), generator=g), groups))
    return result


def sweep(accelerator=None, seed: int = 0) -> Sweep:
    """Three runs of both scopes, three microbatches a step; `seed` of the adapters."""
    model = tiny("qwen3")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        runs = [
            RerankerRun(TokenReranker.from_base(model, rank=2, scope=scope), seed=index, column=index % 2)
            for index, scope in enumerate(("candidate", "candidate", "sequence"))
        ]
    return Sweep(runs, trajectories(), Optimisation(1e-2, groups_per_step=6, microbatches=3), accelerator)


def train(folder: Path, launched: dict[str, str]) -> None:
    """The whole sweep as one of two processes, by the environment of a launcher; what it ends with, in the folder."""
    os.environ.update(launched)
    torch.set_num_threads(1)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    trained = sweep(accelerator, seed=accelerator.process_index)  # the second one's adapters must not count
    trained.check_step()
    trained.losses = [[0.0]] * accelerator.process_index  # as where one of them read an older checkpoint
    with pytest.raises(ValueError, match=r"^processes: expected all at one step, got \[0, 1\]; "):
        trained.check_step()
    trained.losses = []
    while trained.step < trained.total:
        trained.advance()
    save_file(trained.state(), folder / f"{accelerator.process_index}.safetensors")
    accelerator.end_training()
