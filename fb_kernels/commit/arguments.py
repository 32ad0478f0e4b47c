"""What `commit_` takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DecodeState(NamedTuple):
    """What a captured decode step reads and writes; B rows, all tensors on one device."""

    tokens: Tensor
    """[B, S] int64: prompt and new tokens; entries from `length` on are free."""
    length: Tensor
    """[B] int32: tokens present."""
    halt: Tensor
    """[B] int32: a `Halt`; anything but `Halt.NONE` keeps the row as it is."""
    budget: Tensor
    """[B] int32: events left; counted down by the host."""


class Commit(NamedTuple):
    """The arguments of `commit_`."""

    state: DecodeState
    token: Tensor  # [B]
    entropy: Tensor  # [B]
    threshold: Tensor  # [] or [B]
    eos_ids: Tensor  # [n]
    max_length: Tensor  # [] or [B]
    outcome: Tensor | None  # [B, 3]
