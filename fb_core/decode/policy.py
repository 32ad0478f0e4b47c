"""When the small model asks: its own uncertainty against a calibrated threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from fb_core._util import check_count
from fb_core.runtime.plain import Step, not_finite
from fb_kernels import topk_entropy


@dataclass(frozen=True)
class RequestPolicy:
    """Ask where the entropy of the SLM's `top_k` largest logits exceeds a threshold (strictly).

    A subclass may override `entropy` and `asks`; the fast loop refuses such a policy.

    Attributes:
        threshold: nats; inf never asks, -inf always does.
        top_k: number of largest logits that count, clamped to the vocabulary.

    Raises:
        TypeError: a threshold that is not a number.
        ValueError: a NaN threshold or one that a float cannot hold, or top_k below 1 or beyond 64 bits.
    """

    threshold: float
    top_k: int = 64

    def __post_init__(self) -> None:
        try:
            wrong = "NaN" if math.isnan(self.threshold) else None
        except OverflowError:
            wrong = "one that no float holds"
        except (TypeError, ValueError):  # the second from a tensor of several numbers
            kind = type(self.threshold).__name__
            raise TypeError(f"threshold: expected a number of nats, got {kind}; convert it with float()") from None
        if wrong is not None:
            raise ValueError(f"threshold: expected a number of nats, got {wrong}; use inf to never ask")
        object.__setattr__(self, "threshold", float(self.threshold))  # as a tensor takes it
        object.__setattr__(self, "top_k", check_count("top_k", self.top_k, 1, "the published value is 64"))

    @classmethod
    def calibrate(cls, entropies: Tensor | Sequence[float], quantile: float = 0.99, top_k: int = 64) -> RequestPolicy:
        """The policy whose threshold is a quantile of the entropies seen.

        Args:
            entropies: nats at every position of every calibration trajectory, in any shape.
            quantile: 0 to 1; interpolated linearly between two samples.
            top_k: the number of logits that the entropies were taken over.

        Raises:
            TypeError: a quantile that is not a number.
            ValueError: no entropies, one that is not finite, or a quantile outside [0, 1].
        """
        if not isinstance(quantile, Real):
            kind = type(quantile).__name__
            raise TypeError(f"quantile: expected a number from 0 to 1, got {kind}; convert it with float()")
        if not 0.0 <= quantile <= 1.0:
            raise ValueError(f"quantile: expected 0 to 1, got {quantile}; the published value is 0.99")
        ordered = torch.as_tensor(entropies, dtype=torch.float64).flatten().sort().values
        if not len(ordered):
            raise ValueError("entropies: expected at least one position, got none; collect trajectories first")
        if not bool(ordered.isfinite().all()):
            bad = int((~ordered.isfinite()).sum())
            raise ValueError(f"entropies: expected finite numbers, got {bad} that are not; check the model's logits")
        position = quantile * (len(ordered) - 1)
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return cls(float(torch.lerp(ordered[below], ordered[above], position - below)), top_k)

    def entropy(self, logits: Tensor) -> Tensor:
        """Nats [...] of the softmax over the `top_k` largest of logits [..., V]; NaN where a row has no softmax."""
        return topk_entropy(logits.detach(), min(self.top_k, logits.shape[-1]))[0]

    def asks(self, entropy: Tensor) -> Tensor:
        """Bool of entropy's shape: True where the LLM is asked."""
        return entropy > self.threshold


def gate(policy: RequestPolicy, step: Step, logits: Tensor, budget: float) -> tuple[list[float], list[int]]:
    """(entropy of every row in nats, indices of the rows with fewer than `budget` events that the policy admits).

    Logits are [B, V], the step's over the ids that count; ValueError for a row without a softmax.
    """
    entropy = policy.entropy(logits)
    nats: list[float] = entropy.tolist()
    for row, value in zip(step.rows, nats, strict=True):
        if math.isnan(value):
            raise not_finite(step.index, row.index)
    asks = policy.asks(entropy).tolist()
    return nats, [index for index, row in enumerate(step.rows) if asks[index] and len(row.events) < budget]
