"""`topk_entropy` on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import DEVICE, DTYPES, Case, filled, large, randn, usual
from torch import Tensor

from fb_kernels import topk_entropy
from fb_kernels._runtime import backend

pytestmark = pytest.mark.gpu
SIZES = {"small": (2, 70, 5), "gate": (1, 151_936, 64), "logging": (1024, 151_936, 64), "odd": (5, 12_345, 100)}


def make(size: tuple[int, int, int], dtype: torch.dtype, device: str = DEVICE) -> Case:
    rows, width, k = size

    def op(logits: Tensor) -> tuple[Tensor, ...]:
        return topk_entropy(logits, k)

    return Case(op, None, (3 * randn(rows, width, dtype=dtype, device=device),), exact=(2,))


def hostile(width: int, device: str = DEVICE) -> Tensor:
    """Rows of ties, of zeros of both signs, of NaN, of infinities, and with all of the largest in one place."""
    x = randn(8, width, device=device)
    x[0] = 1.0
    x[1] = torch.where(torch.arange(width, device=device) % 2 == 0, 0.0, -0.0)
    x[2, width // 2] = torch.nan
    x[3] = -torch.inf
    x[4, 3:9] = torch.inf
    x[5, : width // 2] = -torch.inf
    x[6, -70:] += 50
    x[7] = torch.linspace(-1, 1, width, device=device)
    return x


def orders_exactly(logits: Tensor, k: int) -> None:
    """Values, order and entropy as the reference has them."""
    got = topk_entropy(logits, k)
    with backend.override("reference"):
        want = topk_entropy(logits, k)
    assert torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got[0], want[0], equal_nan=True)


test_matches_the_reference, test_promises, test_another_device = usual(make, SIZES, "gate")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "k"), [(100, 64), (151_936, 64), (151_936, 1)], ids=["small", "real", "best"])
def test_orders_exactly(width: int, k: int, dtype: torch.dtype) -> None:
    orders_exactly(hostile(width).to(dtype), k)


def test_more_than_2_31_elements() -> None:
    with large(16):
        logits = filled(14_500, 151_936)
        with backend.override("auto,topk_entropy=triton"):  # few rows and many are not one kernel's
            whole, end = topk_entropy(logits), topk_entropy(logits[-3:].clone())
        assert all(torch.equal(a[-3:], b) for a, b in zip(whole, end, strict=True))
        far = logits[::7249]  # three rows
        assert all(torch.equal(a, b) for a, b in zip(topk_entropy(far), topk_entropy(far.clone()), strict=True))


def test_graphs_side_by_side() -> None:
    """Captured calls share nothing, on whichever streams they run."""
    cases = [make(SIZES["gate"], dtype) for dtype in (torch.bfloat16, torch.float32)]
    want, runs = [case.call() for case in cases], []
    torch.cuda.synchronize()
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = case.call()
        runs.append((graph, torch.cuda.Stream(), outputs))
    for _ in range(200):
        for graph, stream, _ in runs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (*_, outputs), expected in zip(runs, want, strict=True):
        assert all(map(torch.equal, outputs, expected))
