"""The compiled kernel of `decoder_layer` for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cpu, precision
from fb_kernels.branch_attention_qkv.cpu import sequence_arguments
from fb_kernels.branch_attention_qkv.reference import check_sequences
from fb_kernels.decoder_layer.arguments import DecoderLayer

ROWS = 64  # maximum; the order of sums does not depend on the number of rows, so a row's bits depend on no other
TAKES = f"float32 and bfloat16, up to {ROWS} rows"


def decoder_layer(call: DecoderLayer) -> Tensor:
    """[N, D]: the whole layer in one call, on the threads of a linear layer."""
    hidden, weights, sequences, eps, window, scale = call
    library, dtype = cpu.library(), hidden.dtype
    rows, model = hidden.shape
    attention, inner = weights.o.shape[1], weights.down.shape[1]
    width, kv_heads = sequences.cos.shape[1], sequences.k_cache.shape[-2]
    if (
        isinstance(library, str)
        or not 0 < rows <= (rows if precision.batch_invariant() else ROWS)
        or not (model and attention and inner)
    ):
        return NotImplemented
    for weight in weights:
        if weight is not None and not weight.is_contiguous():
            return NotImplemented
    where = sequence_arguments(sequences)
    hidden_stride, hidden_step = hidden.stride()
    if dtype not in cpu.STEP or where is None or hidden_step != 1:
        return NotImplemented
    out = hidden.new_empty(rows, model)
    code = library.fbcpu_decoder_layer(
        **{name: 0 if x is None else x.data_ptr() for name, x in weights._asdict().items()}, **where,
        hidden=hidden.data_ptr(), hidden_stride=hidden_stride, out=out.data_ptr(), each=rows // len(sequences.held),
        window=window or 0, heads=attention // width, kv_heads=kv_heads, width=width, eps=eps, scale=scale,
        model=model, inner=inner, threads=cpu.threads(rows * 2 * inner * model), narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    if code:
        check_sequences(sequences, window, "decoder_layer")
        return NotImplemented
    return out
