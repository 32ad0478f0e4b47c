"""`branch_attention_qkv` from the kernels of its parts, used if there is no compiled kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fb_kernels.branch_attention.triton import branch_attention
from fb_kernels.branch_attention_qkv.reference import on_device
from fb_kernels.qk_norm_rope.triton import qk_norm_rope, qk_norm_rope_out


def branch_attention_qkv(*arguments: Any) -> Tensor:
    """[N, Hq, E]."""
    inputs, (k_cache, v_cache, held, slots, block_table, *options, window, scale) = arguments[:6], arguments[6:]
    if torch.float64 in (inputs[0].dtype, inputs[3].dtype):  # of qkv, of cos
        return NotImplemented
    parts = (qk_norm_rope, qk_norm_rope_out, branch_attention)
    return on_device(*parts, inputs, k_cache, v_cache, held, slots, block_table, tuple(options), window, scale)
