"""Stage 3: the [K, H] log-likelihood matrix of every group, stored once for all horizons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fb_core.pipeline.collect import LoggedState, Trajectory
from fb_core.scorer import BranchGroup, CompatibilityScorer


def score_states(
    scorer: CompatibilityScorer,
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    futures: Sequence[Tensor],
    horizon: int,
    on_done: Callable[[int], None] | None = None,
    batch: int = 64,
) -> list[Tensor]:
    """One float32 [K, horizon] a state, in the order of `states`.

    Args:
        scorer: over the frozen SLM.
        trajectories: as from `collect`.
        states: the groups to score.
        futures: one [n >= horizon] a state; what lies past the horizon is cut.
        horizon: tokens of the future to score.
        on_done: called with the number of groups finished.
        batch: trajectories between two calls of `on_done`.

    Raises:
        ValueError: a future shorter than the horizon.
    """
    members: dict[int, list[int]] = {}
    for index, (state, future) in enumerate(zip(states, futures, strict=True)):
        if len(future) < horizon:
            raise ValueError(
                f"futures: expected {horizon} tokens or more, got {len(future)} for state {index}; drop short futures"
            )
        members.setdefault(state.trajectory, []).append(index)
    matrices: dict[int, Tensor] = {}
    order = list(members)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        packed = [
            (
                trajectories[trajectory].tokens,
                [
                    BranchGroup(states[i].position, states[i].pool.ids, futures[i][:horizon])
                    for i in members[trajectory]
                ],
            )
            for trajectory in part
        ]
        for trajectory, scores in zip(part, scorer.score_trajectories(packed), strict=True):
            matrices.update(zip(members[trajectory], scores, strict=True))
        if on_done is not None:
            on_done(len(matrices))
    return [matrices[index] for index in range(len(states))]
