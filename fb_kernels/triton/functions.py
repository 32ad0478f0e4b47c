"""Functions that several kernels compute elementwise, and their constants."""

from __future__ import annotations

import math

import triton
import triton.language as tl

FAR_BELOW = tl.constexpr(-1e4)  # relative to the maximum: exp is already 0, and 0 * -inf must not enter the entropy
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def tanh(x):
    """Tanh to 2 ulps: (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)), and a Taylor polynomial where this would cancel."""
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925))))))
    fallen = tl.exp2(tl.abs(x) * -2.8853900817779268)  # -2 log2(e)
    far = (1 - fallen) / (1 + fallen)
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def shift_of(top):
    """The shift of logits before exp: their maximum, or 0 where it is infinite, since inf - inf is NaN."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)
