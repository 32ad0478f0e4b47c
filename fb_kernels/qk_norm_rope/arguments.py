"""What the operators of `qk_norm_rope` take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QkNormRope(NamedTuple):
    """The arguments of `qk_norm_rope`."""

    qkv: Tensor  # [T, (Hq + 2 Hkv) E], or [T, (Hq + Hkv) E] without v
    q_weight: Tensor | None  # [E]
    k_weight: Tensor | None
    cos: Tensor  # [S, E]
    sin: Tensor
    positions: Tensor  # [T]
    num_heads: int
    num_kv_heads: int
    eps: float

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of q, k and v, which may have none."""
        width, both = self.cos.shape[1], self.num_heads + self.num_kv_heads
        has_v = not width or self.qkv.shape[1] != both * width
        return self.num_heads, self.num_kv_heads, self.num_kv_heads if has_v else 0


class QkNormRopeOut(NamedTuple):
    """The arguments of `qk_norm_rope_out`."""

    projection: QkNormRope
    k_cache: Tensor  # [slots, Hkv, E]
    v_cache: Tensor
    slots: Tensor  # [T]


class QkNormRopeBackward(NamedTuple):
    """The arguments of its gradient."""

    grad_q: Tensor  # [T, Hq, E]
    grad_k: Tensor  # [T, Hkv, E]
    grad_v: Tensor
    forward: QkNormRope
    needs: list[bool]  # of qkv, q_weight, k_weight
