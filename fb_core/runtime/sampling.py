"""Drawing tokens: temperature, top-p and top-k over the likeliest ones, with noise that depends on no batch."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fb_core._util import LARGEST


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits, above 0.
        top_p: nucleus, in (0, 1]: the fewest of the `top_k` tokens that hold this share of their probability.
        top_k: number of largest logits kept, 0 for all that are known.
        seed: an integer within 1,024 bits; a sample is a function of the seed, the prompt's tokens and its index among
            the samples of that prompt.
        min_p: tokens below this share of the likeliest one's probability are dropped; 0 for none.

    Raises:
        TypeError: a setting that is not a number.
        ValueError: a setting out of range.
    """

    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"temperature": Real, "top_p": Real, "top_k": Integral, "seed": Integral, "min_p": Real}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"{name}: expected a number, got {value!r:.80}; leave it out for the default")
            try:
                float(value)
            except OverflowError:
                raise ValueError(f"{name}: expected a size below 2**1024, got more; take a smaller one") from None
            object.__setattr__(self, name, int(value) if kind is Integral else float(value))  # as a tensor takes it
        if not 0.0 < self.temperature < math.inf or not 0.0 < self.top_p <= 1.0 or not 0 <= self.top_k <= LARGEST:
            raise ValueError(
                "temperature, top_p, top_k: expected above 0, in (0, 1] and 0 or more within 64 bits, got "
                f"{self.temperature}, {self.top_p}, {self.top_k}; leave sampling out for greedy decoding"
            )
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p: expected 0 to 1, got {self.min_p}; leave it out to drop no token")

    @classmethod
    def of_transformers(cls, settings: Mapping[str, Any]) -> Sampling:
        """What transformers' `generate` settings ask for; the seed comes from torch's generator, as its draws do."""
        values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}  # transformers' own
        values |= {name: settings[name] for name in values if settings.get(name) is not None}
        return cls(**values, seed=int(torch.randint(1 << 62, ())))

    def draw(self, prompt: Sequence[int], sample: int = 0) -> Draw:
        """What the sample of this index draws with after a prompt."""
        key = seeded(self.seed, prompt, sample).getrandbits(63)
        return Draw(self.temperature, self.top_p, self.top_k, key, self.min_p)

    def draws(self, prompts: Sequence[Sequence[int]]) -> list[Draw]:
        """Of many prompts; equal ones are different samples."""
        return [self.draw(prompt, sample) for prompt, sample in zip(prompts, occurrences(prompts), strict=True)]


def occurrences(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each prompt, how many equal ones come before it."""
    seen: Counter[tuple[int, ...]] = Counter()
    earlier = []
    for prompt in map(tuple, prompts):
        earlier.append(seen[prompt])
        seen[prompt] += 1
    return earlier


def check_sampling(given: object) -> None:
    """TypeError for what is no `Sampling`."""
    if not isinstance(given, Sampling):
        raise TypeError(
            f"sampling: expected type Sampling, got {type(given).__name__}; leave it out for greedy decoding"
        )


class Draw(NamedTuple):
    """How one sequence draws."""

    temperature: float  # 0 takes the likeliest token
    top_p: float
    top_k: int
    key: int  # of the noise, 63 bits
    min_p: float = 0.0


GREEDY = Draw(0.0, 1.0, 1, 0)


class Draws(NamedTuple):
    """How each row of a step draws, on its device."""

    temperature: Tensor  # float64 [B]
    top_p: Tensor  # float64 [B]
    top_k: Tensor  # int64 [B]
    key: Tensor  # int64 [B]
    min_p: Tensor  # float64 [B]

    @classmethod
    def of(cls, draws: Sequence[Draw], device: torch.device) -> Draws:
        """Of sequences, one each."""
        columns = zip(cls._fields, zip(*draws, strict=True), strict=True)
        kinds = dict.fromkeys(("temperature", "top_p", "min_p"), torch.float64)
        return cls(*(torch.tensor(each, dtype=kinds.get(name, torch.int64), device=device) for name, each in columns))


def drawn(values: Tensor, ids: Tensor, how: Draws, position: Tensor) -> Tensor:
    """One token of each row: the largest of log-prob plus Gumbel noise over the kept tokens, which is a draw of them.

    The noise is a function of key, position and token id, so that a draw depends neither on the batch nor on the order
    of equal logits.

    Args:
        values: [B, k] the largest logits in falling order.
        ids: [B, k] int64 theirs.
        how: of each row; at temperature 0 the first token is taken.
        position: [B] tokens before this one, the prompt's included.

    Returns:
        [B] int64 token ids.
    """
    rank = torch.arange(values.shape[1], device=values.device)
    most = how.top_k.where(how.top_k > 0, values.shape[1])[:, None]
    exact = values.double()
    scaled = ((exact - exact[:, :1]) / how.temperature.clamp_min(1e-300)[:, None]).where(rank < most, -torch.inf)
    probability = scaled.softmax(-1)
    before = probability.cumsum(-1) - probability
    noise = -torch.log(-torch.log(_uniform(how.key, position, ids)))
    kept = (before < how.top_p[:, None]) & (probability >= how.min_p[:, None] * probability[:, :1])
    best = (scaled + noise).where(kept, -torch.inf).argmax(-1)
    return ids.gather(1, best.where(how.temperature > 0, 0)[:, None])[:, 0]


def _uniform(key: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """float64 [B, k] in (0, 1), of 53 bits."""
    row = _mixed(key + position.long() * -0x61C8864680B583EB)  # 2^64 over the golden ratio, as a signed number
    return (_shifted(_mixed(row[:, None] ^ ids), 11).double() + 0.5) * 2.0**-53


def _mixed(bits: Tensor) -> Tensor:
    """64 bits that all depend on all bits given: the last steps of SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Bits to the right, with zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def seeded(seed: int, tokens: Sequence[int], stream: int = 0) -> random.Random:
    """A generator that is a function of seed, tokens and stream alone: the same in any batch, on any machine."""
    return random.Random(hashlib.sha256(repr((seed, stream, list(tokens))).encode()).digest())
