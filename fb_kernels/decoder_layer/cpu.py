"""The compiled kernel of `decoder_layer` for CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import cpu
from fb_kernels.branch_attention_qkv.cpu import cache_arguments
from fb_kernels.branch_attention_qkv.reference import check_sequences
from fb_kernels.decoder_layer import LayerWeights

ROWS = 64  # maximum; the order of sums does not depend on the number of rows, so a row's bits depend on no other
TAKES = f"float32 and bfloat16, up to {ROWS} rows"


def decoder_layer(hidden: Tensor, *rest: Any) -> Tensor:
    """[N, D]: the whole layer in one call, on the threads of a linear layer; arguments are those of the reference."""
    weights = dict(zip(LayerWeights._fields, rest, strict=False))
    cos, sin, positions, k_cache, v_cache, held, slots, block_table, eps, window, scale = rest[len(weights) :]
    o, down = weights["o"], weights["down"]
    library, dtype = cpu.library(), hidden.dtype
    rows, model = hidden.shape
    sequences, attention, inner = held.shape[0], o.shape[1], down.shape[1]
    width, kv_heads = cos.shape[1], k_cache.shape[-2]
    if isinstance(library, str) or not 0 < rows <= ROWS or not (model and attention and inner):
        return NotImplemented
    if dtype not in cpu.STEP or not cos.dtype is sin.dtype is torch.float32:
        return NotImplemented
    for weight in weights.values():
        if weight is not None and not weight.is_contiguous():
            return NotImplemented
    where = cache_arguments(k_cache, v_cache, held, slots, block_table)
    hidden_stride, hidden_step = hidden.stride()
    if where is None or hidden_step != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        return NotImplemented
    if not positions.is_contiguous():
        return NotImplemented
    out = hidden.new_empty(rows, model)
    code = library.fbcpu_decoder_layer(
        **{name: 0 if x is None else x.data_ptr() for name, x in weights.items()}, **where, hidden=hidden.data_ptr(),
        hidden_stride=hidden_stride, cos=cos.data_ptr(), sin=sin.data_ptr(), length=cos.shape[0],
        positions=positions.data_ptr(), wide_positions=positions.dtype is torch.int64, out=out.data_ptr(),
        sequences=sequences, each=rows // sequences, window=window or 0, heads=attention // width, kv_heads=kv_heads,
        width=width, eps=eps, scale=scale, model=model, inner=inner, threads=cpu.threads(rows * 2 * inner * model),
        narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    if code:
        check_sequences(cos, positions, k_cache, held, slots, block_table, window, "decoder_layer")
        return NotImplemented
    return out
