"""Distillation of the reranker: group cross-entropy against soft targets, the prefix KV computed once a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fb_core import hf
from fb_core.reranker import TokenReranker
from fb_kernels import group_cross_entropy


@dataclass(frozen=True)
class TrainingGroup:
    """One state: its position in the trajectory, candidates [K], soft target [K], features [K, F] where used."""

    position: int
    candidates: Tensor
    target: Tensor
    features: Tensor | None = None


@dataclass(frozen=True)
class TrainingTrajectory:
    """One problem's tokens [T] with the states that are trained on."""

    tokens: Tensor
    groups: Sequence[TrainingGroup]


@dataclass(frozen=True)
class Recipe:
    """The published recipe; learning rate of the feature weights is `feature_scale` times that of the rest.

    Raises:
        ValueError: a setting out of range.
    """

    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: float = 0.03
    clip: float = 1.0
    groups_per_step: int = 32
    epochs: int = 3
    feature_scale: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "groups_per_step"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {count}; leave it out for the published value")
        for name in ("learning_rate", "weight_decay", "warmup", "clip", "feature_scale"):
            if not 0.0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}: expected 0 or more, got {value}; leave it out for the default")


def train_reranker(
    reranker: TokenReranker,
    trajectories: Sequence[TrainingTrajectory],
    recipe: Recipe | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train adapter, head and feature weights in place by group cross-entropy.

    In scope "candidate" every trajectory's prefix runs once an epoch through the frozen model, and all its candidates
    behind it as one packed forward; a step takes whole trajectories until it holds `groups_per_step` groups. The loss
    of a step is the mean over its groups. Learning rate: linear warm-up, then linear decay to zero.

    Args:
        reranker: as from `TokenReranker.from_base`.
        trajectories: the training states.
        recipe: settings; the published ones if left out.
        on_step: called with (steps done, steps in all, loss).

    Returns:
        the loss of every step, nats.

    Raises:
        ValueError: no groups, a target of another length than its candidates, features missing or of another shape, an
            id outside the vocabulary, or a loss or gradient that is not finite (the reranker then keeps its last finite
            state).
    """
    recipe = recipe or Recipe()
    checked = [_checked(reranker, trajectory) for trajectory in trajectories if trajectory.groups]
    if not checked:
        raise ValueError("trajectories: expected at least one group to train on, got none; collect more states")
    order = torch.Generator().manual_seed(recipe.seed)
    epochs = [_steps(checked, recipe.groups_per_step, order) for _ in range(recipe.epochs)]
    total = sum(len(steps) for steps in epochs)
    fast = [reranker.feature_weight]
    slow = [p for p in reranker.parameters() if p.requires_grad and p is not reranker.feature_weight]
    optimizer = torch.optim.AdamW(
        [
            {"params": slow, "lr": recipe.learning_rate},
            {"params": fast, "lr": recipe.learning_rate * recipe.feature_scale},
        ],
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _linear(step, total, recipe.warmup))
    losses: list[float] = []
    reranker.train()
    try:
        with torch.random.fork_rng(devices=[reranker.base.device] if reranker.base.device.type == "cuda" else []):
            torch.manual_seed(recipe.seed)
            for step in (step for steps in epochs for step in steps):
                loss = _loss(reranker, step)
                if not math.isfinite(value := float(loss.detach())):
                    raise ValueError(
                        f"loss: expected a finite number, got {value} in step {len(losses) + 1}; lower the rate"
                    )
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = float(torch.nn.utils.clip_grad_norm_(slow + fast, recipe.clip))
                if not math.isfinite(norm):
                    raise ValueError(
                        f"gradient: expected a finite norm, got {norm} in step {len(losses) + 1}; lower the rate"
                    )
                optimizer.step()
                schedule.step()
                losses.append(value)
                if on_step is not None:
                    on_step(len(losses), total, value)
    finally:
        reranker.eval()
    return losses


def _linear(step: int, total: int, warmup: float) -> float:
    rising = max(1, math.ceil(total * warmup))
    return (step + 1) / rising if step < rising else max(0.0, (total - step) / max(1, total - rising))


def _steps(
    trajectories: Sequence[TrainingTrajectory], groups: int, order: torch.Generator
) -> list[list[TrainingTrajectory]]:
    """One epoch in random order: whole trajectories until a step holds `groups` groups."""
    steps: list[list[TrainingTrajectory]] = [[]]
    held = 0
    for index in torch.randperm(len(trajectories), generator=order).tolist():
        if held >= groups:
            steps.append([])
            held = 0
        steps[-1].append(trajectories[index])
        held += len(trajectories[index].groups)
    return steps


def _loss(reranker: TokenReranker, trajectories: Sequence[TrainingTrajectory]) -> Tensor:
    groups = [group for trajectory in trajectories for group in trajectory.groups]
    if reranker.scope == "candidate":
        prefilled = hf.prefill_packed(reranker.base, [_needed(trajectory) for trajectory in trajectories])
        prefixes = [
            hf.Prefix(whole.kv, whole.start, group.position)
            for whole, trajectory in zip(prefilled, trajectories, strict=True)
            for group in trajectory.groups
        ]
        features = [group.features for group in groups if group.features is not None] or None
        score = torch.cat(reranker.scores_many(prefixes, [group.candidates for group in groups], features))
    else:
        score = torch.cat(
            [
                reranker.scores(trajectory.tokens[: group.position], group.candidates, features=group.features)
                for trajectory in trajectories
                for group in trajectory.groups
            ]
        )
    cu_group = hf.offsets([len(group.candidates) for group in groups], score.device)
    return group_cross_entropy(score, torch.cat([group.target for group in groups]).to(score), cu_group)


def _needed(trajectory: TrainingTrajectory) -> Tensor:
    return trajectory.tokens[: max(group.position for group in trajectory.groups)]


def _checked(reranker: TokenReranker, trajectory: TrainingTrajectory) -> TrainingTrajectory:
    """The trajectory with its states checked; features of a reranker that has none are left out."""
    tokens = hf.token_ids("tokens", trajectory.tokens, reranker.base)
    names = reranker.feature_names
    groups = []
    for group in trajectory.groups:
        position = hf.check_position(group.position, len(tokens))
        candidates = hf.check_group(reranker.base, position, group.candidates)
        if group.target.shape != candidates.shape or not bool(group.target.isfinite().all()):
            raise ValueError(
                f"target: expected one finite number a candidate, {list(candidates.shape)}, got "
                f"{list(group.target.shape)} {group.target.tolist()}; build targets with group_targets"
            )
        if names and (group.features is None or group.features.shape != (len(candidates), len(names))):
            got = None if group.features is None else list(group.features.shape)
            raise ValueError(
                f"features: expected [{len(candidates)}, {len(names)}] in every group for {', '.join(names)}, got "
                f"{got}; build them with candidate_features"
            )
        groups.append(TrainingGroup(position, candidates, group.target, group.features if names else None))
    return TrainingTrajectory(tokens, groups)
