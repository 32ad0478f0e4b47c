"""What the operators of `branch_attention` take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fb_kernels.layout import Indices


class BranchAttention(NamedTuple):
    """The arguments of `branch_attention`."""

    q: Tensor  # [T, Hq, E]
    k: Tensor | None  # [T, Hkv, E]
    v: Tensor | None
    prefix_k: Tensor  # [Tp, Hkv, E], or pages [pages, page, Hkv, E]
    prefix_v: Tensor
    cu_branch: Tensor  # [B + 1]
    cu_group: Tensor  # [G + 1]
    prefix_start: Tensor  # [G]
    prefix_len: Tensor  # [G]
    block_table: Tensor | None  # [G, n]
    max_branch_len: int | None
    max_prefix_len: int | None
    window: int | None
    scale: float
    softcap: float | None

    @property
    def indices(self) -> Indices:
        """The layout's tensors."""
        return self.cu_branch, self.cu_group, self.prefix_start, self.prefix_len, self.block_table

    @property
    def capacity(self) -> int:
        """The most keys that a prefix can have."""
        return len(self.prefix_k) if self.block_table is None else self.prefix_k.shape[1] * self.block_table.shape[1]


class BranchAttentionBackward(NamedTuple):
    """The arguments of its gradient."""

    grad_out: Tensor  # [T, Hq, E]
    grad_lse: Tensor | None  # [Hq, T]
    out: Tensor
    lse: Tensor
    forward: BranchAttention
    prefix_grads: bool
