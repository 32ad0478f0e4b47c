"""`commit_` in plain PyTorch, on any device: without a sync, so that it is captured in the graph of a decode step."""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

from fb_kernels._runtime import checks


class Halt(IntEnum):
    """Why a row of a decode state stopped; the host clears it to go on."""

    NONE = 0
    """Running."""
    NAN = 1
    """The entropy or the threshold is NaN."""
    EVENT = 2
    """The entropy is above the threshold and the budget is not spent."""
    EOS = 3
    """The token ends the sequence; it is not appended."""
    LENGTH = 4
    """The length limit is reached, or the buffer is full."""


def _host_reads(tokens: Tensor) -> bool:
    return tokens.device.type == "cpu"


def commit_(
    tokens: Tensor,
    length: Tensor,
    halt: Tensor,
    budget: Tensor,
    token: Tensor,
    entropy: Tensor,
    threshold: Tensor,
    eos_ids: Tensor,
    max_length: Tensor,
    outcome: Tensor | None,
) -> None:
    """Append token to running rows or set their halt."""
    end = _on_host if _host_reads(tokens) else _on_device
    end(tokens, length, halt, budget, token, entropy, threshold, eos_ids, max_length)
    if outcome is not None:
        seen = torch.stack([values.to(outcome.dtype) for values in (halt, token, entropy)], 1)
        outcome.copy_(seen, non_blocking=True)  # it may be in pinned memory


def _on_device(
    tokens: Tensor,
    length: Tensor,
    halt: Tensor,
    budget: Tensor,
    token: Tensor,
    entropy: Tensor,
    threshold: Tensor,
    eos_ids: Tensor,
    max_length: Tensor,
) -> None:
    width = tokens.shape[1]
    running = halt == Halt.NONE
    full = (length >= max_length) | (length >= width) | (length < 0)
    reasons = (  # the last one that holds wins
        (full, Halt.LENGTH),
        ((token[:, None] == eos_ids).any(1), Halt.EOS),
        ((entropy.double() > threshold.double()) & (budget > 0), Halt.EVENT),
        (entropy.isnan() | threshold.isnan(), Halt.NAN),
    )
    new_halt = torch.zeros_like(halt)
    for holds, reason in reasons:
        new_halt = torch.where(holds, int(reason), new_halt)
    append = running & (new_halt == Halt.NONE)
    if width:
        position = length.clamp(0, width - 1).long()[:, None]
        tokens.scatter_(
            1, position, torch.where(append[:, None], token[:, None].to(tokens.dtype), tokens.gather(1, position))
        )
    length.add_(append)
    halt.copy_(torch.where(running, new_halt, halt))


def _on_host(
    tokens: Tensor,
    length: Tensor,
    halt: Tensor,
    budget: Tensor,
    token: Tensor,
    entropy: Tensor,
    threshold: Tensor,
    eos_ids: Tensor,
    max_length: Tensor,
) -> None:
    """The same with plain numbers, which takes fewer operations for the few rows of a decode step."""
    lengths, ends, width = length.tolist(), eos_ids.tolist(), tokens.shape[1]
    thresholds, limits = (x.tolist() if x.ndim else [x.item()] * len(lengths) for x in (threshold, max_length))
    if any(math.isnan(limit) for limit in thresholds):
        raise checks.error("commit_", "threshold", "numbers", "NaN", "use inf for no events")
    if min(lengths, default=0) < 0:
        raise checks.error("commit_", "state.length", "lengths of 0 or more", min(lengths), "rebuild the state")
    rows = zip(lengths, halt.tolist(), budget.tolist(), token.tolist(), entropy.tolist(), strict=True)
    going: list[tuple[int, int, int]] = []  # row, position, token
    for row, (held, halted, left, taken, nats) in enumerate(rows):
        if halted != Halt.NONE:
            continue
        if math.isnan(nats):
            halt[row] = Halt.NAN
        elif nats > thresholds[row] and left > 0:
            halt[row] = Halt.EVENT
        elif taken in ends:
            halt[row] = Halt.EOS
        elif held >= min(limits[row], width):
            halt[row] = Halt.LENGTH
        else:
            going.append((row, held, taken))
    if len(going) == 1:  # one sequence, where every operation counts
        ((row, held, taken),) = going
        tokens[row, held] = taken
        length[row] = held + 1
    elif going:
        indices, positions, ids = torch.tensor(going).T
        tokens[indices, positions] = ids
        length[indices] = (positions + 1).to(length.dtype)
