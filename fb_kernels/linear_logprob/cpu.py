"""The compiled kernel of `linear_logprob` for CPU tensors: float32, few rows over a small vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fb_kernels import cpu
from fb_kernels.linear_logprob import reference

LOGITS = 1 << 16  # the most: from there on torch's threads are ahead
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape."""
    found, float32 = cpu.library(), torch.float32
    rows, (valid, width) = target.numel(), weight.shape
    if valid_vocab is not None:
        valid = valid_vocab
    if isinstance(found, str) or not 0 < rows <= reference.FEW_ROWS or not 0 < valid <= reference.VOCAB_BLOCK:
        return NotImplemented
    if rows * valid > LOGITS or not (hidden.dtype is weight.dtype is float32 and target.is_contiguous()):
        return NotImplemented
    if softcap is not None and softcap < LEAST:
        return NotImplemented
    bias_at = 0
    if bias is not None:
        if bias.dtype is not float32 or not bias.is_contiguous():
            return NotImplemented
        bias_at = bias.data_ptr()
    x = hidden if hidden.ndim == 2 else hidden.reshape(rows, width)
    (x_stride, x_step), (weight_stride, weight_step), weight_at = x.stride(), weight.stride(), weight.data_ptr()
    if rows > cpu.ROWS or not (width and x_step == weight_step == 1):
        x, x_stride, weight_at = linear(x, weight[:valid]), valid, 0  # its products, contiguous
    logprob = torch.empty_like(target, dtype=float32)  # quicker than from a shape
    lse, entropy, largest = torch.empty_like(logprob), torch.empty_like(logprob), torch.empty_like(logprob)
    code = found.fbcpu_linear_logprob(
        x.data_ptr(), x_stride, weight_at, weight_stride, bias_at, target.data_ptr(), target.dtype is torch.int64,
        ignore_index, logit_scale, softcap or 0.0, temperature, logprob.data_ptr(), lse.data_ptr(), entropy.data_ptr(),
        largest.data_ptr(), rows, width, valid, cpu.threads(rows * width * valid),
    )  # fmt: skip
    if code:
        reference.check_targets("linear_logprob", target, ignore_index, valid)
        return NotImplemented
    return logprob, lse, entropy, largest
