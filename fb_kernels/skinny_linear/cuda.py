"""The compiled kernel of `skinny_linear`, `csrc/skinny_linear.cu`: up to 32 rows of half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import cuda, precision

TAKES = "float16 and bfloat16, up to 32 rows; none in batch-invariant mode"


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    swiglu: bool,
    frozen: bool = False,
) -> Tensor:
    """[N, M], or [N, M / 2] where it is gated, of up to 32 rows."""
    tensors = [value for value in (x, weight, bias, norm_weight, residual) if value is not None]
    conditions = [x.dtype in (torch.float16, torch.bfloat16), not (swiglu and residual is not None)]
    conditions += [value.dtype == x.dtype for value in tensors]
    conditions += [value.shape[-1] < 2 or value.stride(-1) == 1 for value in tensors]
    rows, width = x.shape
    if not all(conditions) or rows > 32 or precision.batch_invariant():
        return NotImplemented
    out = torch.empty(rows, weight.shape[0] // (2 if swiglu else 1), dtype=x.dtype, device=x.device)
    launched = cuda.launch(
        "skinny_linear", x, x=x, x_stride=x.stride(0), weight=weight, weight_stride=weight.stride(0), bias=bias,
        norm_weight=norm_weight, eps=eps, residual=residual,
        residual_stride=0 if residual is None else residual.stride(0), out=out, out_stride=out.stride(0), rows=rows,
        in_features=width, out_features=out.shape[1], swiglu=swiglu, frozen=frozen, dtype=cuda.DTYPES[x.dtype],
    )  # fmt: skip
    return out if launched else NotImplemented
