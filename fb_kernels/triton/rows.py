"""How launchers see a tensor of any leading dimensions."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """All rows as [N, columns], columns next to each other; a copy only where one stride cannot tell the rows."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
