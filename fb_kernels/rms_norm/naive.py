"""What `rms_norm` means (Zhang & Sennrich 2019, equation 4)."""

from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """((offset + weight) * s / sqrt(mean(s^2) + eps), s) with s = x + residual, each [..., D]."""
    s = x if residual is None else x + residual
    unit = s / (s.square().mean(-1, keepdim=True) + eps).sqrt()
    return unit if weight is None else unit * (offset + weight.to(s.dtype)), s
