"""What a decode step's attention takes; a whole layer takes the same sequences."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CachedSequences(NamedTuple):
    """G sequences in a cache, and where the rows that continue them stand: rotary table, positions, slots."""

    cos: Tensor  # [S, E]
    sin: Tensor
    positions: Tensor  # [N]
    k_cache: Tensor  # [slots, Hkv, E], or pages [pages, page, Hkv, E]
    v_cache: Tensor
    held: Tensor  # [G]
    slots: Tensor | None  # [N]
    block_table: Tensor | None  # [G, n]


class BranchAttentionQkv(NamedTuple):
    """The arguments of `branch_attention_qkv`."""

    qkv: Tensor  # [N, (Hq + 2 Hkv) E]
    q_weight: Tensor | None  # [E]
    k_weight: Tensor | None
    sequences: CachedSequences
    num_heads: int
    num_kv_heads: int
    eps: float
    window: int | None
    scale: float
