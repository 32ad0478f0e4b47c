"""`commit_` in plain PyTorch, on any device: without a sync, so that it is captured in the graph of a decode step."""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels.commit.arguments import Commit


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


def commit_(call: Commit) -> None:
    """Append token to running rows or set their halt."""
    end = _on_host if _host_reads(call.state.tokens) else _on_device
    end(call)
    if (outcome := call.outcome) is not None:
        results = torch.stack([x.to(outcome.dtype) for x in (call.state.halt, call.token, call.entropy)], 1)
        outcome.copy_(results, non_blocking=True)  # it may be in pinned memory


def _on_device(call: Commit) -> None:
    (tokens, length, halt, budget), token, entropy, threshold, eos_ids, max_length, _ = call
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


def _on_host(call: Commit) -> None:
    """End a step with plain numbers: fewer operations than tensors take for the few rows of a decode step."""
    (tokens, length, halt, budget), token, entropy, threshold, eos_ids, max_length, _ = call
    lengths, ends, width = length.tolist(), eos_ids.tolist(), tokens.shape[1]
    thresholds, limits = (x.tolist() if x.ndim else [x.item()] * len(lengths) for x in (threshold, max_length))
    if any(math.isnan(limit) for limit in thresholds):
        raise checks.error("commit_", "threshold", "numbers", "NaN", "use inf for no events")
    if min(lengths, default=0) < 0:
        raise checks.error("commit_", "state.length", "lengths of 0 or more", min(lengths), "rebuild the state")
    rows = zip(lengths, halt.tolist(), budget.tolist(), token.tolist(), entropy.tolist(), strict=True)
    appends: list[tuple[int, int, int]] = []  # row, position, token
    for row, (position, halted, events, next_token, nats) in enumerate(rows):
        if halted != Halt.NONE:
            continue
        if math.isnan(nats):
            halt[row] = Halt.NAN
        elif nats > thresholds[row] and events > 0:
            halt[row] = Halt.EVENT
        elif next_token in ends:
            halt[row] = Halt.EOS
        elif position >= min(limits[row], width):
            halt[row] = Halt.LENGTH
        else:
            appends.append((row, position, next_token))
    if len(appends) == 1:  # one sequence, where every operation counts
        ((row, position, next_token),) = appends
        tokens[row, position] = next_token
        length[row] = position + 1
    elif appends:
        indices, positions, ids = torch.tensor(appends).T
        tokens[indices, positions] = ids
        length[indices] = (positions + 1).to(length.dtype)
