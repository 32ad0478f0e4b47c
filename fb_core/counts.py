"""The one check of the counts that callers give."""

from __future__ import annotations

from numbers import Integral
from typing import Any

LARGEST = (1 << 63) - 1  # what 64 bits hold


def check_count(
    name: str, count: Any, least: int, remedy: str = "leave it out for the default", bound: str = "{} or more"
) -> int:
    """The count as a plain int, if it is one of `least` or more that 64 bits hold; ValueError with the remedy if not.

    `bound` are the error's words for the smallest count.
    """
    huge = isinstance(count, int) and abs(count) > LARGEST
    if huge or not isinstance(count, Integral) or isinstance(count, bool) or count < least:
        expected = bound.format(least) + ", within 64 bits" * huge
        got = f"an int of {count.bit_length()} bits" if huge else f"{count!r:.80}"
        raise ValueError(f"{name}: expected {expected}, got {got}; {remedy}")
    return int(count)
