"""The compiled kernel of `linear_logprob` for CPU tensors: float32, few rows over a small vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels import cpu
from fb_kernels.linear_logprob import reference

PRODUCTS, LOGITS = 1 << 21, 1 << 16  # the most: from there on BLAS on some threads is ahead
LEAST = 1e-30  # a soft-cap of which float32 has enough


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
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy), each of target's shape."""
    found, float32 = cpu.library(), torch.float32
    rows = target.numel()
    valid, width = weight.shape
    if valid_vocab is not None:
        valid = valid_vocab
    logits = rows * valid
    if isinstance(found, str) or not width or not 0 < logits <= LOGITS or logits * width > PRODUCTS:
        return NotImplemented
    if not (hidden.dtype is weight.dtype is float32 and hidden.is_contiguous() and target.is_contiguous()):
        return NotImplemented
    weight_stride, step = weight.stride()
    if (step != 1 and width > 1) or (softcap is not None and softcap < LEAST):
        return NotImplemented
    bias_at = 0
    if bias is not None:
        if bias.dtype is not float32 or not bias.is_contiguous():
            return NotImplemented
        bias_at = bias.data_ptr()
    logprob = hidden.new_empty(target.shape)
    lse, entropy = torch.empty_like(logprob), torch.empty_like(logprob)
    code = found.fbcpu_linear_logprob(
        hidden.data_ptr(), width, weight.data_ptr(), weight_stride, bias_at,
        target.data_ptr(), target.dtype is torch.int64, ignore_index, logit_scale, softcap or 0.0, temperature,
        logprob.data_ptr(), lse.data_ptr(), entropy.data_ptr(), rows, width, valid,
    )  # fmt: skip
    if code:
        reference.check_targets("linear_logprob", target, ignore_index, valid)
        return NotImplemented
    return logprob, lse, entropy
