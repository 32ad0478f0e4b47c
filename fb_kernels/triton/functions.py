"""Functions that several kernels compute elementwise."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """To 2 ulps: a Taylor polynomial where 1 - exp(-2 |x|) would cancel."""
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925))))))
    fallen = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1 - fallen) / (1 + fallen)
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))
