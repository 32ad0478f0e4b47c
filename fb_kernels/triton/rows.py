"""A tensor with any leading dimensions as rows, for launchers."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """All rows as [N, columns], columns adjacent; a copy only if the rows have no common stride."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def are_aligned(*tensors: Tensor) -> bool:
    """Whether every row of every tensor begins at a multiple of 16 bytes and is dense."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(step * x.itemsize % 16 == 0 for step in (x.shape[-1], *x.stride()[:-1]))
        for x in tensors
    )
