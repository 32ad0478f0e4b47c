"""What `decoder_layer` takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fb_kernels.branch_attention_qkv.arguments import CachedSequences


class LayerWeights(NamedTuple):
    """The weights of a layer, all of one dtype and on one device; F is the width of the MLP."""

    input_norm: Tensor
    """[D]."""
    qkv: Tensor
    """[(Hq + 2 Hkv) E, D]: the heads of q, then of k, then of v."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """[E], or None for no norm."""
    k_norm: Tensor | None
    o: Tensor
    """[D, Hq E]."""
    o_bias: Tensor | None
    post_norm: Tensor
    """[D], of the norm before the MLP."""
    gate_up: Tensor
    """[2F, D]: the gate's rows, then up's."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[D, F]."""
    down_bias: Tensor | None


class DecoderLayer(NamedTuple):
    """The arguments of `decoder_layer`."""

    hidden: Tensor  # [N, D]
    weights: LayerWeights
    sequences: CachedSequences
    eps: float
    window: int | None
    scale: float
