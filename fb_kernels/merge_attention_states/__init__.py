"""Attention over two sets of keys, from the attention state of each set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, signature
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.merge_attention_states import reference


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states over disjoint keys into the state over all of them.

    lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. Under torch.autocast
    out_a and out_b of two dtypes are cast to the wider one (float64 stays).

    Args:
        out_a: [T, Hq, E] float.
        lse_a: [Hq, T] float32 (float64 for float64 out), natural log; -inf, or +inf as other libraries write it, marks
            a state without keys, whose out is not read.
        out_b: like out_a.
        lse_b: like lse_a.

    Returns:
        (out, lse), with shapes and dtypes of out_a and lse_a. Two empty states merge to an empty one: out 0, lse -inf.
        Gradients flow to all four arguments.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or device.
    """
    key = signature((out_a, lse_a, out_b, lse_b))
    run = _merge.checked.get(key) if key else None
    if run is None:
        op = "merge_attention_states"
        out_a, out_b = precision.promoted(out_a, out_b)
        checks.floating(op, "out_a", out_a)
        checks.shape(op, "out_a", out_a, (None, None, None), "[T, Hq, E]", "reshape it")
        checks.floating(op, "out_b", out_b, like=out_a)
        checks.shape(op, "out_b", out_b, tuple(out_a.shape), "[T, Hq, E]", "give both states the same rows")
        rows, heads, _ = out_a.shape
        for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
            checks.floating(op, name, lse)
            checks.same_device(op, name, lse, out_a)
            dtype = accumulation_dtype(out_a.dtype)
            if lse.dtype != dtype:
                raise checks.error(
                    op, name, f"dtype {dtype} for this out", lse, f"convert it with .to({dtype})", TypeError
                )
            checks.shape(op, name, lse, (heads, rows), "[Hq, T]", "transpose it if it is [T, Hq]")
        run = _merge.passed(key, out_a)
    return run(out_a, lse_a, out_b, lse_b)


_merge = Op(
    "merge_attention_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    fake=lambda out_a, lse_a, *_: (out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)),
    triton=True,
    cpu=True,
)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
    out_a, lse_a, out_b, lse_b = ctx.saved_tensors
    weight_a, weight_b, _ = reference.merge_weights(lse_a, lse_b)  # [Hq, T]
    grad = grad_out.to(lse_a.dtype)
    dot_a, dot_b = (
        torch.where(lse.isinf(), 0.0, torch.linalg.vecdot(grad, out.to(grad.dtype)).T)
        for out, lse in ((out_a, lse_a), (out_b, lse_b))
    )
    spread = weight_a * weight_b * (dot_a - dot_b)  # moves weight from b to a
    on_a, on_b = ((grad * weight.T[..., None]).to(out_a.dtype) for weight in (weight_a, weight_b))
    return on_a, weight_a * grad_lse + spread, on_b, weight_b * grad_lse - spread


_merge.differentiate(to=("out_a", "lse_a", "out_b", "lse_b"), setup_context=_save, backward=_backward)
