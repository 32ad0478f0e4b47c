"""Ragged groups of rows, given by offsets: reductions without a host sync, an atomic or a stray access.

Everything is float64. One last segment takes the rows after the last group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fb_kernels._runtime import checks


class Segments(NamedTuple):
    """G groups of N rows, and the rows of no group."""

    bounds: Tensor  # [G + 2], from 0 to N, never falling
    ids: Tensor  # [N] segment of each row, G for rows of no group
    sound: Tensor  # bool scalar: whether the offsets were valid
    number: int  # G


def check_offsets(op: str, cu_group: Tensor, rows: int) -> None:
    """ValueError unless the offsets begin with 0, never fall and end with at most `rows`; read on the CPU only."""
    if cu_group.device.type != "cpu":
        return
    entries = cu_group.tolist()
    if entries[0] != 0 or entries[-1] > rows or any(b < a for a, b in pairwise(entries)):
        shown = entries if len(entries) <= 8 else f"{entries[:4]} ... {entries[-2:]}"
        expected = f"offsets that begin with 0, never fall and end with at most {rows}"
        raise checks.error(op, "cu_group", expected, shown, "rebuild them from the group sizes")


def segments(op: str, cu_group: Tensor, rows: int) -> Segments:
    """Groups from offsets, which are checked on the CPU and forced into range elsewhere."""
    check_offsets(op, cu_group, rows)
    sound = (cu_group[0] == 0) & (cu_group.diff() >= 0).all() & (cu_group[-1] <= rows)
    starts = cu_group.long().clamp(0, rows).cummax(0).values
    bounds = torch.cat([starts, starts.new_full((1,), rows)])
    ids = torch.searchsorted(bounds[1:], torch.arange(rows, device=bounds.device), right=True)
    return Segments(bounds, ids, sound, cu_group.shape[0] - 1)


def reduce(values: Tensor, how: str, groups: Segments) -> Tensor:
    """Sum, max or min (NaN wins) of values[N, C] in each segment, [G + 1, C]; empty ones give the neutral element."""
    initial = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[how]
    if values.shape[0] == 0:
        return values.new_full((groups.number + 1, values.shape[1]), initial)
    return torch.segment_reduce(values, how, offsets=groups.bounds, axis=0, unsafe=True, initial=initial)


def spread(per_segment: Tensor, groups: Segments) -> Tensor:
    """Each row's entry, [N, C], of per_segment[G + 1, C]."""
    return per_segment.index_select(0, groups.ids)


def exponentials(x: Tensor, groups: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """(x - max, exp(x - max), sum of these exponentials) in each row's segment, [N, C] each."""
    shifted = x - spread(reduce(x, "max", groups), groups)
    exponential = shifted.exp()
    return shifted, exponential, spread(reduce(exponential, "sum", groups), groups)


def softmax(x: Tensor, groups: Segments) -> Tensor:
    """Softmax of x[N, C] in each group; rows of no group are 0, and everything is NaN if the offsets were invalid."""
    _, exponential, total = exponentials(x, groups)
    inside = (groups.ids < groups.number)[:, None]
    return torch.where(groups.sound, torch.where(inside, exponential / total, 0.0), torch.nan)
