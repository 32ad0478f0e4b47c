"""`skinny_linear` in plain PyTorch, on any device, by the fastest product of that device."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.rms_norm.reference import rms_norm
from fb_kernels.swiglu.reference import swiglu as gated


def _is_intel() -> bool:
    """Whether the first processor is Intel's."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as described:
            return "GenuineIntel" in described.read(200)
    except OSError:
        return False


BLAS = torch.backends.mkl.is_available() and _is_intel()  # MKL is 1.1 to 1.2 times as fast there, and slow elsewhere
ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and not BLAS  # in float32, as torch.compile does
SMALL = 1 << 20  # elements of a weight from which oneDNN is faster for a single row


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., M] of x[..., K] and weight[M, K]."""
    if x.is_cpu and x.dtype == torch.bfloat16 and (tail := -x.shape[-1] % 32):  # oneDNN's tiles read into the next row
        x, weight = (torch.nn.functional.pad(matrix, (0, tail)) for matrix in (x, weight))
    if ONEDNN and x.is_cpu and x.dtype == torch.float32 and weight.numel() > (0 if len(x) > 1 else SMALL):
        bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


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
    """[N, M], or [N, M / 2] where it is gated."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps, None)[0]
    if residual is None:
        y = linear(x, weight, bias)
        return gated(y) if swiglu else y.contiguous()
    dtype = accumulation_dtype(x.dtype)  # rounded once
    if x.dtype != dtype:
        wide = linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return wide.add_(residual).to(x.dtype).contiguous()
    if len(x) == 1 and bias is None and weight.numel() <= SMALL:
        return torch.addmm(residual, x, weight.t())
    return linear(x, weight, bias).add_(residual).contiguous()
