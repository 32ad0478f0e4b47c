"""`branch_attention_qkv` from the kernels of its parts, used if there is no compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels.branch_attention.triton import branch_attention
from fb_kernels.branch_attention_qkv.arguments import BranchAttentionQkv
from fb_kernels.branch_attention_qkv.reference import on_device
from fb_kernels.qk_norm_rope.triton import qk_norm_rope, qk_norm_rope_out


def branch_attention_qkv(call: BranchAttentionQkv) -> Tensor:
    """[N, Hq, E]."""
    if torch.float64 in (call.qkv.dtype, call.sequences.cos.dtype):
        return NotImplemented
    return on_device(qk_norm_rope, qk_norm_rope_out, branch_attention, call)
