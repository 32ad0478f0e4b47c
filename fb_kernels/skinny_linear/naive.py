"""What `skinny_linear` means."""

from torch import Tensor

from fb_kernels.rms_norm.naive import rms_norm
from fb_kernels.swiglu.naive import swiglu as gated


def skinny_linear(
    x: Tensor,  # [N, K]
    weight: Tensor,  # [M, K]
    bias: Tensor | None = None,  # [M]
    *,
    norm_weight: Tensor | None = None,  # [K]
    eps: float = 1e-6,
    residual: Tensor | None = None,  # [N, M]
    swiglu: bool = False,
    frozen: bool = False,
) -> Tensor:
    """rms_norm(x) weight^T + bias, then `swiglu` of it or residual added: [N, M] or [N, M / 2]; `frozen` is a hint."""
    if norm_weight is not None:
        x, _ = rms_norm(x, norm_weight, eps)
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    if swiglu:
        y = gated(y)
    return y if residual is None else y + residual
