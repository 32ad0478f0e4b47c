"""When the small model asks: its own uncertainty against a calibrated threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fb_core.counts import check_count
from fb_kernels import topk_entropy

if TYPE_CHECKING:
    from fb_core import hf


@dataclass(frozen=True, eq=False)
class AskHead:
    """Predicts from the SLM's own state, before the LLM is asked, what asking is worth (`fb_core.value.fit_ask`).

    Attributes:
        weight: [D] float32, of the hidden state after the SLM's final norm.
        entropy_weight: of the entropy in nats.
        bias: added.
        least: the LLM is asked only where the worth is above this.

    Raises:
        ValueError: a weight of another shape, or a number that is not finite.
    """

    weight: Tensor
    entropy_weight: float
    bias: float
    least: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.entropy_weight, self.bias, self.least)
        if self.weight.ndim != 1 or not bool(self.weight.isfinite().all()) or not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"AskHead: expected finite weights [D] and numbers, got {list(self.weight.shape)} and {numbers}; "
                "fit it with fit_ask"
            )

    def to(self, device: torch.device) -> AskHead:
        """The head on a device."""
        return replace(self, weight=self.weight.to(device))

    def worth(self, hidden: Tensor, entropy: Tensor) -> Tensor:
        """[n] expected gain in success over the SLM's own token, from hidden [n, D] and entropy [n]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight.to(wide) + self.entropy_weight * entropy + self.bias


@dataclass(frozen=True)
class RequestPolicy:
    """Ask where the entropy of the SLM's `top_k` largest logits exceeds a threshold (strictly).

    A subclass may override `entropy` and `asks`; a decoder with `max_length` (the fast loop) refuses such a policy.

    Attributes:
        threshold: nats; inf never asks, -inf always does.
        top_k: number of largest logits that count, clamped to the vocabulary.
        ask: if given, the worth that it predicts must also be above its `least`.

    Raises:
        TypeError: a threshold that is not a number.
        ValueError: a NaN threshold or one that a float cannot hold, or top_k below 1.
    """

    threshold: float
    top_k: int = 64
    ask: AskHead | None = None

    def __post_init__(self) -> None:
        try:
            wrong = "NaN" if math.isnan(self.threshold) else None
        except OverflowError:
            wrong = "one that no float holds"
        except TypeError:
            kind = type(self.threshold).__name__
            raise TypeError(f"threshold: expected a number of nats, got {kind}; convert it with float()") from None
        if wrong is not None:
            raise ValueError(f"threshold: expected a number of nats, got {wrong}; use inf to never ask")
        check_count("top_k", self.top_k, 1, "the published value is 64")

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
        place = quantile * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return cls(float(torch.lerp(ordered[below], ordered[above], place - below)), top_k)

    def entropy(self, logits: Tensor) -> Tensor:
        """Nats [...] of the softmax over the `top_k` largest of logits [..., V]; NaN where a row has no softmax."""
        return topk_entropy(logits.detach(), min(self.top_k, logits.shape[-1]))[0]

    def asks(self, entropy: Tensor) -> Tensor:
        """Bool of entropy's shape: True where the LLM is asked."""
        return entropy > self.threshold


def check_ask(ask: AskHead, slm: hf.CausalLM) -> AskHead:
    """The head on the SLM's device.

    Raises:
        ValueError: a head made for hidden states of another width.
    """
    width = slm.get_input_embeddings().weight.shape[1]
    if len(ask.weight) != width:
        raise ValueError(
            f"policy: expected an AskHead for hidden states of {width}, got one for {len(ask.weight)}; fit it on this "
            "SLM"
        )
    return ask.to(slm.device)


def gate(policy: RequestPolicy, step: hf.Step, logits: Tensor, budget: float) -> tuple[list[float], list[int]]:
    """(entropy of every row in nats, indices of the rows that the policy admits and that have events left).

    Args:
        policy: when to ask.
        step: the rows' current step.
        logits: [B, V] the step's logits over the ids that count.
        budget: maximum events of a row.

    Raises:
        ValueError: a row without a softmax.
    """
    entropy = policy.entropy(logits)
    nats: list[float] = entropy.tolist()
    for row, value in zip(step.rows, nats, strict=True):
        if math.isnan(value):
            raise not_finite(step.index, row.index)
    wanted = policy.asks(entropy)
    if policy.ask is not None:
        assert step.hidden is not None
        wanted &= policy.ask.worth(step.hidden, entropy) > policy.ask.least
    asks = wanted.tolist()
    return nats, [place for place, row in enumerate(step.rows) if asks[place] and len(row.events) < budget]


def not_finite(step: int, prompt: int) -> ValueError:
    """The error for a small model whose logits have no softmax."""
    return ValueError(
        f"slm: expected finite logits, got NaN or infinite ones at step {step} of prompt {prompt}; check its weights "
        "and dtype"
    )
