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
PULLS = ("on_target", "on_all", "on_entropy", "shift", "dx", "dweight", "dbias")
PANEL = 32  # columns that are pulled together: a whole number of any processor's


def linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any, pull: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape; adds lse's gradient to `pull` [N, n]."""
    options = Options(*rest)
    logprob = torch.empty_like(target, dtype=torch.float32)  # faster than from a shape
    lse, entropy, largest = torch.empty_like(logprob), torch.empty_like(logprob), torch.empty_like(logprob)
    top = None if pull is None else logprob.new_full((target.numel(),), -torch.inf)
    done = _called(
        "linear_logprob", hidden, weight, target, bias, options, ignore_index=options.ignore_index,
        logprob=logprob.data_ptr(), lse=lse.data_ptr(), entropy=entropy.data_ptr(), largest=largest.data_ptr(),
        pulled=0 if pull is None else pull.data_ptr(), top=0 if top is None else top.data_ptr(),
        pull_stride=0 if pull is None else pull.shape[1],
    )  # fmt: skip
    return (logprob, lse, entropy, largest) if done else NotImplemented


def linear_logprob_frozen(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The same, then the gradient of lse to hidden [..., D]."""
    width = weight.shape[1]
    pull = hidden.new_zeros(target.numel(), width + -width % PANEL, dtype=torch.float32)
    results = linear_logprob(hidden, weight, target, *rest, pull=pull)
    if results is NotImplemented:
        return NotImplemented
    return *results, pull[:, :width].contiguous().view(hidden.shape)


def target_logits(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Logits of target[..., K]."""
    options, out = Options(*rest), torch.empty_like(target, dtype=torch.float32)
    more = {"out": out.data_ptr(), "count": target.shape[-1], "ignore_index": options.ignore_index}
    done = not target.numel() or _called("target_logits", hidden, weight, target, bias, options, **more)
    return out if done else NotImplemented


def _called(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, **more: int
) -> bool:
    """Whether a kernel takes these, and did so."""
    library, dtype = cpu.library(), hidden.dtype
    rows, width, valid = hidden.shape[:-1].numel(), weight.shape[1], options.rows(weight)
    if isinstance(library, str) or dtype not in cpu.STEP or not (target.numel() and valid):
        return False
    if weight.dtype is not dtype or not target.is_contiguous() or (options.softcap or 1.0) < LEAST:
        return False
    bias_at = cpu.address(bias, dtype)
    x = hidden if hidden.ndim == 2 else hidden.reshape(rows, width)
    (x_stride, x_step), (weight_stride, weight_step) = x.stride(), weight.stride()
    if bias_at < 0 or (width > 1 and not x_step == weight_step == 1):
        return False
    code = getattr(library, f"fbcpu_{name}")(
        x=x.data_ptr(), x_stride=x_stride, weight=weight.data_ptr(), weight_stride=weight_stride, bias=bias_at,
        target=target.data_ptr(), wide=target.dtype is torch.int64, scale=options.logit_scale,
        softcap=options.softcap or 0.0, temperature=options.temperature, rows=rows, width=width, vocabulary=valid,
        threads=cpu.threads(rows * width * more.get("count", valid)), narrow=dtype is torch.bfloat16, **more,
    )  # fmt: skip
    if code:
        reference.check_targets("linear_logprob", target, options.ignore_index, valid)
    return not code


def linear_logprob_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias."""
    return reference.gradient(_project_back, *arguments)


def _project_back(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    hidden, weight, target, _, bias, *upstream, options, needs = given
    if hidden.numel() and hidden.dtype in cpu.STEP:
        dx, dweight, dbias = grads = fake_gradients(weight, (hidden, weight, bias), needs)
        valid = options.rows(weight)
        dweight[valid:], dbias[valid:] = 0, 0
        pulls = [each if each is None else each.reshape(-1).contiguous() for each in upstream]
        numbers = (0 if each is None else each.data_ptr() for each in (*pulls, *grads))
        more = dict(zip(PULLS, numbers, strict=True))
        if _called("linear_logprob_backward", hidden, weight, target.contiguous(), bias, options, **more):
            return dx, dweight, dbias
    return partial(reference._project_back, normed=True)(*given)
