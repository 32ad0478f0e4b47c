"""What the benchmark of decoding compares: tokens before the first near tie."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks import bench_decode


class Model:
    """Says the same logits of its last positions, whatever it is given."""

    device = "cpu"

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, ids: Tensor, logits_to_keep: int) -> SimpleNamespace:
        assert ids.shape == (1, 2 + logits_to_keep - 1)  # the last token's own logits are not needed
        return SimpleNamespace(logits=self.logits[None, :logits_to_keep])


def test_tokens_are_settled_up_to_the_first_near_tie() -> None:
    truth = torch.tensor([[3.0, 0.0, 1.0], [0.0, 2.0, 1.0], [0.0, 1.0, 1.15], [5.0, 0.0, 0.0]])
    ids, new = torch.tensor([7, 8]), torch.tensor([0, 1, 2, 0])

    def settled(error: float, count: int = 4) -> int:
        rounded = truth + error * torch.tensor([1.0, -1.0, 1.0])
        return bench_decode.settled(Model(rounded), Model(truth), ids, new[:count])  # type: ignore[arg-type]

    assert settled(0.0) == settled(0.05) == 4
    assert settled(0.1) == 2  # either of the two may be off by that
    assert settled(0.6) == 1
    assert settled(2.0) == 0
    assert settled(0.1, count=2) == 2
