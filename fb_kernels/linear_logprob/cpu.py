"""The compiled kernels of `linear_logprob` for CPU tensors.

The bfloat16 kernel reads the head as it is, multiplies in bfloat16 if the processor can, and sums in float32. Its
backward is for AMX.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fb_kernels._runtime import cpu
from fb_kernels._runtime.op import fake_gradients
from fb_kernels.linear_logprob import reference
from fb_kernels.linear_logprob.options import SMALL, Options

LEAST = 1e-30  # minimum soft-cap: float32 is exact enough above it
TAKES = f"bfloat16; float32 with up to {reference.FEW_ROWS} rows, {reference.VOCAB_BLOCK:,} tokens and {SMALL:,} logits"


def linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape."""
    library, dtype, options = cpu.library(), hidden.dtype, Options(*rest)
    rows, width, valid = target.numel(), weight.shape[1], options.rows(weight)
    narrow = dtype is torch.bfloat16
    if isinstance(library, str) or not (rows > 0 and valid > 0 and (narrow or _few(hidden, rows, valid))):
        return NotImplemented
    if weight.dtype is not dtype or not target.is_contiguous() or (options.softcap or 1.0) < LEAST:
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
        target=target.data_ptr(), wide=target.dtype is torch.int64, ignore_index=options.ignore_index,
        scale=options.logit_scale, softcap=options.softcap or 0.0, temperature=options.temperature,
        logprob=logprob.data_ptr(), lse=lse.data_ptr(), entropy=entropy.data_ptr(), largest=largest.data_ptr(),
        rows=rows, width=width, vocabulary=valid, threads=cpu.threads(rows * width * valid), narrow=narrow,
    )  # fmt: skip
    if code:
        reference.check_targets("linear_logprob", target, options.ignore_index, valid)
        return NotImplemented
    return logprob, lse, entropy, largest


def linear_logprob_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias: by tiles where bfloat16 has AMX, else the reference's."""
    return reference.gradient(_project_back, *arguments)


def _project_back(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    library, (hidden, weight, target, _, bias, *upstream, options, needs) = cpu.library(), given
    rows, width, valid = target.numel(), weight.shape[1], options.rows(weight)
    x, bias_at = hidden.reshape(rows, width), cpu.address(bias, torch.bfloat16)
    along = x.stride(1) == weight.stride(1) == 1 and bias_at >= 0 and (options.softcap or 1.0) >= LEAST
    taken = along and rows * width * valid and weight.dtype is torch.bfloat16 and cpu.variant() == "amx"
    if taken and not isinstance(library, str):
        target, grads = target.contiguous(), fake_gradients(weight, (hidden, weight, bias), needs)
        dx, dweight, dbias = grads
        dweight[valid:], dbias[valid:] = 0, 0
        pulls = [each if each is None else each.reshape(-1).contiguous() for each in upstream]
        numbers = [0 if each is None else each.data_ptr() for each in (*pulls, *grads)]
        names = ("on_target", "on_all", "on_entropy", "shift", "dx", "dweight", "dbias")
        code = library.fbcpu_linear_logprob_backward(
            x=x.data_ptr(), x_stride=x.stride(0), weight=weight.data_ptr(), weight_stride=weight.stride(0),
            bias=bias_at, target=target.data_ptr(), wide=target.dtype is torch.int64, scale=options.logit_scale,
            softcap=options.softcap or 0.0, temperature=options.temperature, **dict(zip(names, numbers, strict=True)),
            rows=rows, width=width, vocabulary=valid, threads=cpu.threads(rows * width * valid),
        )  # fmt: skip
        if not code:
            return dx, dweight, dbias
    return partial(reference._project_back, normed=True)(*given)


def _few(hidden: Tensor, rows: int, valid: int) -> bool:
    """Whether a float32 call is small enough to be faster on few threads."""
    few = rows <= reference.FEW_ROWS and valid <= reference.VOCAB_BLOCK and rows * valid <= SMALL
    return few and hidden.dtype is torch.float32
