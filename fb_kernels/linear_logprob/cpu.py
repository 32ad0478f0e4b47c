"""The compiled kernels of `linear_logprob` for CPU tensors.

The bfloat16 kernel reads the head as it is, multiplies in bfloat16 if the processor can, and sums in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fb_kernels._runtime import cpu
from fb_kernels.linear_logprob import reference
from fb_kernels.linear_logprob.options import SMALL

LEAST = 1e-30  # minimum soft-cap: float32 is exact enough above it
TAKES = f"bfloat16; float32 with up to {reference.FEW_ROWS} rows, {reference.VOCAB_BLOCK:,} tokens and {SMALL:,} logits"


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    valid_vocab: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape."""
    library, dtype = cpu.library(), hidden.dtype
    rows, (valid, width) = target.numel(), weight.shape
    if valid_vocab is not None:
        valid = valid_vocab
    narrow = dtype is torch.bfloat16
    if isinstance(library, str) or not (rows > 0 and valid > 0 and (narrow or _few(hidden, rows, valid))):
        return NotImplemented
    if weight.dtype is not dtype or not target.is_contiguous() or (softcap is not None and softcap < LEAST):
        return NotImplemented
    bias_at = cpu.address(bias, dtype)
    if bias_at < 0:
        return NotImplemented
    x = hidden if hidden.ndim == 2 else hidden.reshape(rows, width)
    (x_stride, x_step), (weight_stride, weight_step), weight_at = x.stride(), weight.stride(), weight.data_ptr()
    along = x_step == weight_step == 1
    if narrow and width and not along:
        return NotImplemented
    if not narrow and not (width and along and rows <= cpu.ROWS):
        x, x_stride, weight_at = linear(x, weight[:valid]), valid, 0  # the products, contiguous
    logprob = torch.empty_like(target, dtype=torch.float32)  # faster than from a shape
    lse, entropy, largest = torch.empty_like(logprob), torch.empty_like(logprob), torch.empty_like(logprob)
    code = library.fbcpu_linear_logprob(
        x=x.data_ptr(), x_stride=x_stride, weight=weight_at, weight_stride=weight_stride, bias=bias_at,
        target=target.data_ptr(), wide=target.dtype is torch.int64, ignore_index=ignore_index, scale=logit_scale,
        softcap=softcap or 0.0, temperature=temperature, logprob=logprob.data_ptr(), lse=lse.data_ptr(),
        entropy=entropy.data_ptr(), largest=largest.data_ptr(), rows=rows, width=width, vocabulary=valid,
        threads=cpu.threads(rows * width * valid), narrow=narrow,
    )  # fmt: skip
    if code:
        reference.check_targets("linear_logprob", target, ignore_index, valid)
        return NotImplemented
    return logprob, lse, entropy, largest


def _few(hidden: Tensor, rows: int, valid: int) -> bool:
    """Whether a float32 call is small enough to be faster on few threads."""
    few = rows <= reference.FEW_ROWS and valid <= reference.VOCAB_BLOCK and rows * valid <= SMALL
    return few and hidden.dtype is torch.float32
