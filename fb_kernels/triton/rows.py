"""A tensor with any leading dimensions as rows, for launchers."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """All rows as [N, columns], columns adjacent; a copy only if the rows have no common stride."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
