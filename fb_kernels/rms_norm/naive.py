"""What `rms_norm` means (Zhang & Sennrich 2019, equation 4)."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weight * s / sqrt(mean(s^2) + eps), s) with s = x + residual, each [..., D]."""
    s = x if residual is None else x + residual
    return s / (s.square().mean(-1, keepdim=True) + eps).sqrt() * weight, s
