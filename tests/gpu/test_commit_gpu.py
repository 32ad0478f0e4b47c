"""`commit_` on a GPU: its outcome in the host's memory, straight from captured steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu_checks import DEVICE
from torch import Tensor

from fb_core.runtime.cuda_graphs import Graphs
from fb_kernels import DecodeState, Halt, commit_
from fb_kernels._runtime import backend

pytestmark = pytest.mark.gpu
ROWS = 3


def make(device: str, slots: int) -> tuple[DecodeState, dict[str, Tensor]]:
    """A running state, and limits that no step meets."""
    length, halt, budget = (torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in range(3))
    limits = {
        "threshold": torch.tensor(torch.inf, dtype=torch.float64, device=device),
        "eos_ids": torch.tensor([], dtype=torch.int64, device=device),
        "max_length": torch.tensor(slots, dtype=torch.int32, device=device),
    }
    return DecodeState(torch.zeros(ROWS, slots, dtype=torch.int64, device=device), length, halt, budget), limits


def host_sees_every_step(device: str, steps: int) -> None:
    """With the next step enqueued before the result of one is read, as in decoding."""
    state, limits = make(device, steps)
    token = torch.zeros(ROWS, dtype=torch.int64, device=device)
    outcomes = torch.full((2, ROWS, 3), torch.nan, pin_memory=device != "cpu")

    def step(outcome: Tensor) -> None:
        token.add_(1)
        commit_(state, token, token / 4, **limits, outcome=outcome)

    graphs = Graphs(torch.device(device))
    replays = [graphs.ready(place, partial(step, outcome)) for place, outcome in enumerate(outcomes)]
    for value in (token, state.length, state.halt):
        value.zero_()  # the capture ran some
    ended = [torch.cuda.Event() for _ in outcomes] if device != "cpu" else []
    ahead = 1 if ended else 0
    for begun in range(steps + ahead):
        replays[begun % 2]()
        if ended:
            ended[begun % 2].record(torch.cuda.current_stream(device))
        looked = begun - ahead
        if looked < 0:
            continue
        if ended:
            ended[looked % 2].synchronize()
        assert outcomes[looked % 2].tolist() == [[Halt.NONE, looked + 1, (looked + 1) / 4]] * ROWS
    assert state.tokens.tolist() == [list(range(1, steps + 1))] * ROWS


@pytest.mark.parametrize("chosen", ["cuda", "reference"])
def test_the_host_sees_every_step(chosen: str) -> None:
    with backend.override(f"auto,commit={chosen}"):
        host_sees_every_step(DEVICE, 300)


def test_an_outcome_in_memory_that_is_not_pinned_is_refused() -> None:
    state, limits = make(DEVICE, 4)
    token = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="commit_: outcome: expected a tensor on cuda"):
        commit_(state, token, token / 4, **limits, outcome=torch.zeros(ROWS, 3))
