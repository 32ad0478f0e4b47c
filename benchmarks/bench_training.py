"""An optimiser step of the sweep of rerankers, per group and run: prefixes shared by all runs against one per run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from benchmarks import peers, shapes
from benchmarks.harness import OURS, Implementation
from benchmarks.shapes import CANDIDATES
from fb_core import TokenReranker
from fb_core.rerank.training import Optimisation, RerankerRun, Sweep, TrainingGroup, TrainingTrajectory

EPOCHS = 1000  # more steps than are timed
FROZEN = Optimisation(learning_rate=0.0, groups_per_step=1 << 20, epochs=EPOCHS)  # every step does the same


def trajectories(slm: PreTrainedModel) -> list[TrainingTrajectory]:
    """Random trajectories with states evenly spaced over the second half and random soft targets."""
    count, states, length = shapes.TRAINED_TRAJECTORIES
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        tokens = torch.randint(slm.config.vocab_size, (length,), generator=generator)
        groups = []
        for state in range(states):
            ids = torch.randperm(slm.config.vocab_size, generator=generator)[:CANDIDATES]
            target = torch.randn(CANDIDATES, generator=generator).softmax(0)
            position = length // 2 + (state + 1) * length // (2 * states)
            groups.append(TrainingGroup(position, ids.to(slm.device), target.to(slm.device)))
        made.append(TrainingTrajectory(tokens.to(slm.device), groups))
    return made


def rerankers(slm: PreTrainedModel) -> list[TokenReranker]:
    """Equal runs without dropout, so that their losses can be compared."""
    return [peers.as_trained(slm, dropout=0.0) for _ in range(shapes.RUNS)]


def step(sweeps: Sequence[Sweep]) -> torch.Tensor:
    """[R] losses of one step, from one sweep or from several."""
    return torch.tensor([loss for sweep in sweeps for loss in sweep.advance()])


def peft_step(
    slm: PreTrainedModel,
    runs: Sequence[tuple[torch.nn.Module, torch.Tensor]],
    given: Sequence[TrainingTrajectory],
    optimizer: torch.optim.Optimizer | None,
) -> torch.Tensor:
    """[R] losses with plain PEFT: for every run and state the prefix, then the candidates over its cache."""
    losses = []
    groups = sum(len(trajectory.groups) for trajectory in given)
    for adapted, head in runs:
        total = torch.zeros((), dtype=head.dtype, device=head.device)
        for trajectory in given:
            for group in trajectory.groups:
                with torch.no_grad():
                    cache = peers.prefill(slm, trajectory.tokens[: group.position])
                scores = peers.candidate_scores(adapted, head, group.candidates, cache)
                loss = -(group.target.to(scores.dtype) * scores.log_softmax(0)).sum() / groups
                if optimizer is not None:
                    loss.backward()
                total += loss.detach()
        losses.append(total)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).cpu()


def test_training_step(compare: Callable, slm: PreTrainedModel) -> None:
    given = trajectories(slm)
    groups = sum(len(trajectory.groups) for trajectory in given)
    alone, plain = rerankers(slm), rerankers(slm)
    together = Sweep([RerankerRun(reranker) for reranker in rerankers(slm)], given, FROZEN)
    apart = [Sweep([RerankerRun(reranker)], given, FROZEN) for reranker in alone]
    trained = [parameter for reranker in plain for parameter in reranker.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    wide = copy.deepcopy(plain[0].adapted).to(shapes.WIDE)
    with torch.no_grad():  # of the first run: all are equal
        base = copy.deepcopy(slm).to(shapes.WIDE)
        expected = peft_step(base, [(wide, plain[0].head.detach().to(shapes.WIDE))], given, None)
    runs = [(reranker.adapted, reranker.head) for reranker in plain]
    compare(
        "training_step",
        f"R={shapes.RUNS} G={groups} K={CANDIDATES} P<={len(given[0].tokens)} (a group and run)",
        {
            OURS: Implementation(lambda: step([together]), expected),
            "runs one after the other": Implementation(lambda: step(apart), expected),
            "PEFT, a cache for every group": Implementation(lambda: peft_step(slm, runs, given, optimizer), expected),
        },
        rounds=3,
        tolerance=2e-2 if shapes.ON_GPU else 1e-4,
        dtype=slm.dtype,
        per=shapes.RUNS * groups,
    )
