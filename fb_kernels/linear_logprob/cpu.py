"""The compiled kernels of `linear_logprob` for CPU tensors.

They read the head as it is, multiply in bfloat16 if that is its dtype and the processor can, and sum in float32. Where
they multiply in bfloat16, the gradient to the logits is rounded to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import cpu
from fb_kernels._runtime.op import fake_gradients
from fb_kernels.linear_logprob import reference
from fb_kernels.linear_logprob.options import Options

LEAST = 1e-30  # minimum soft-cap: float32 is exact enough above it
TAKES = "float32 and bfloat16"
PANEL = 32  # columns that are pulled together: a whole number of any processor's


def linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape."""
    return _forward(hidden, weight, target, bias, Options(*rest), None)


def linear_logprob_frozen(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """The same, then the gradient of lse to hidden [..., D]."""
    rows, width = target.numel(), weight.shape[1]
    if hidden.dtype not in cpu.STEP or not width:
        return NotImplemented
    pull = hidden.new_zeros(rows, width + -width % PANEL, dtype=torch.float32)
    results = _forward(hidden, weight, target, bias, Options(*rest), pull)
    if results is NotImplemented:
        return NotImplemented
    return *results, pull[:, :width].contiguous().view(hidden.shape)


def _forward(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, pull: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four results; to `pull` [N, n], of zeros, it adds the gradient of lse."""
    library, dtype = cpu.library(), hidden.dtype
    rows, width, valid = target.numel(), weight.shape[1], options.rows(weight)
    if isinstance(library, str) or dtype not in cpu.STEP or not (rows > 0 and valid > 0):
        return NotImplemented
    if weight.dtype is not dtype or not target.is_contiguous() or (options.softcap or 1.0) < LEAST:
        return NotImplemented
    bias_at = cpu.address(bias, dtype)
    x = hidden if hidden.ndim == 2 else hidden.reshape(rows, width)
    (x_stride, x_step), (weight_stride, weight_step) = x.stride(), weight.stride()
    if bias_at < 0 or (width > 1 and not x_step == weight_step == 1):
        return NotImplemented
    logprob = torch.empty_like(target, dtype=torch.float32)  # faster than from a shape
    lse, entropy, largest = torch.empty_like(logprob), torch.empty_like(logprob), torch.empty_like(logprob)
    top = None if pull is None else logprob.new_full((rows,), -torch.inf)
    code = library.fbcpu_linear_logprob(
        x=x.data_ptr(), x_stride=x_stride, weight=weight.data_ptr(), weight_stride=weight_stride, bias=bias_at,
        target=target.data_ptr(), wide=target.dtype is torch.int64, ignore_index=options.ignore_index,
        scale=options.logit_scale, softcap=options.softcap or 0.0, temperature=options.temperature,
        logprob=logprob.data_ptr(), lse=lse.data_ptr(), entropy=entropy.data_ptr(), largest=largest.data_ptr(),
        pulled=0 if pull is None else pull.data_ptr(), top=0 if top is None else top.data_ptr(),
        pull_stride=0 if pull is None else pull.shape[1], rows=rows, width=width, vocabulary=valid,
        threads=cpu.threads(rows * width * valid), narrow=dtype is torch.bfloat16,
    )  # fmt: skip
    if code:
        reference.check_targets("linear_logprob", target, options.ignore_index, valid)
        return NotImplemented
    return logprob, lse, entropy, largest


def linear_logprob_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias."""
    return reference.gradient(_project_back, *arguments)


def _project_back(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    library, (hidden, weight, target, _, bias, *upstream, options, needs) = cpu.library(), given
    rows, width, valid, dtype = target.numel(), weight.shape[1], options.rows(weight), hidden.dtype
    x, bias_at = hidden.reshape(rows, width), cpu.address(bias, dtype)
    along = x.stride(1) == weight.stride(1) == 1 and bias_at >= 0 and (options.softcap or 1.0) >= LEAST
    if weight.dtype is dtype in cpu.STEP and along and rows * width * valid and not isinstance(library, str):
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
            narrow=dtype is torch.bfloat16,
        )  # fmt: skip
        if not code:
            return dx, dweight, dbias
    return partial(reference._project_back, normed=True)(*given)
