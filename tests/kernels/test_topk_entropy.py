"""What is peculiar to `topk_entropy`: its order, of signed zeros, of any NaN and of equal values."""

from __future__ import annotations

import math

import pytest
import torch
from cases.topk_entropy import OP
from torch import Tensor
from ways import names, running, running_small, with_dtypes

from fb_kernels import topk_entropy
from fb_kernels._runtime import cuda
from fb_kernels.testing import poison_
from fb_kernels.topk_entropy import reference

of_every_way = pytest.mark.parametrize("way", names(OP))
of_every_dtype = pytest.mark.parametrize(("way", "dtype"), with_dtypes(OP))


@of_every_dtype
@pytest.mark.sweep(3)
def test_ties_go_to_the_lowest_index(way: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 5000, dtype=dtype)
    logits[:, ::2] = -0.0
    logits[1, 4500] = 1.0
    with running_small(OP, way):
        entropy, values, indices = topk_entropy(logits)
    assert indices[0].tolist() == list(range(64))
    assert indices[1].tolist() == [4500, *range(63)]
    assert values[0].signbit().tolist() == [True, False] * 32
    torch.testing.assert_close(entropy[0].item(), math.log(64))


@of_every_dtype
def test_non_finite_rows(way: str, dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [[0.0, nan, 1.0, nan], [-inf] * 4, [1.0, inf, 2.0, inf], [-inf, 1.0, -inf, 1.0], [inf, -inf, nan, 0.0]],
        dtype=dtype,
    )
    with running_small(OP, way):
        entropy, values, indices = topk_entropy(logits, 3)
    assert indices.tolist() == [[1, 3, 2], [0, 1, 2], [1, 3, 2], [1, 3, 0], [2, 0, 3]]
    assert entropy.isnan().tolist() == [True, True, True, False, True]
    torch.testing.assert_close(entropy[3].item(), math.log(2))
    assert values[3].tolist() == [1.0, 1.0, -inf]


@of_every_way
@pytest.mark.parametrize("bits", [-1, -4194304, 0x7F800001, 0x7FFFFFFF])
def test_any_nan_payload_counts_as_the_largest(way: str, bits: int) -> None:
    logits = torch.tensor([0.0, 0.0, math.inf, 0.0, 0.0])
    logits.view(torch.int32)[1] = bits
    logits[4] = math.nan
    with running(way):
        assert topk_entropy(logits, 3)[2].tolist() == [1, 4, 2]


@of_every_way
def test_negative_and_subnormal_order(way: str) -> None:
    logits = torch.tensor([-1e-45, 1e-45, -3.0, -1e30, 0.0, -2.9999998])
    with running(way):
        assert topk_entropy(logits, 6)[2].tolist() == [1, 4, 0, 5, 2, 3]


@pytest.mark.parametrize(("way", "dtype"), [each for each in with_dtypes(OP) if each[0] != "triton"])
@pytest.mark.sweep(3)
def test_ties_across_every_border(way: str, dtype: torch.dtype) -> None:
    """Where a kernel's bound is itself one of the keys."""
    both = (torch.eye(33)[:31] + torch.eye(33).roll(1, 1)[:31]).to(dtype)
    with running(way):
        one, two = (torch.cat([topk_entropy(rows, k)[2] for rows in both.split(8)]) for k in (1, 2))
    assert one[:, 0].tolist() == list(range(31))
    assert two.tolist() == [[row, row + 1] for row in range(31)]


def test_k_is_64_where_it_is_not_given() -> None:
    logits = torch.randn(2, 70)
    assert torch.equal(topk_entropy(logits)[2], topk_entropy(logits, 64)[2])


def test_blocks_of_rows_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50)
    with running("reference"):
        whole = topk_entropy(logits, 5)
        monkeypatch.setattr(reference, "ELEMENT_BLOCK", 100)
        for ours, want in zip(topk_entropy(logits, 5), whole, strict=True):
            assert torch.equal(ours, want)


def test_a_k_that_follows_the_vocabulary_compiles_once() -> None:
    def run(logits: Tensor) -> tuple[Tensor, ...]:
        return topk_entropy(logits, min(64, logits.shape[-1]))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for width in range(3, 15):  # more than torch compiles one function
        logits = torch.randn(2, width)
        assert all(torch.equal(a, b) for a, b in zip(compiled(logits), run(logits), strict=True))


def call(logits: Tensor, k: int, stream: int) -> tuple[Tensor, ...]:
    """The C function; returns the workspace too."""
    rows, width = logits.shape
    entropy, values = torch.empty(rows), torch.empty(rows, k)
    indices, workspace = (poison_(torch.empty(size, dtype=torch.int64)) for size in (rows * k, rows * (width + 1)))
    found = cuda.library()
    assert not isinstance(found, str)
    tensors = {"logits": logits, "workspace": workspace, "entropy": entropy, "values": values, "indices": indices}
    numbers = {"stride": logits.stride(0), "rows": rows, "width": width, "k": k, "dtype": 0, "stream": stream}
    assert found.fb_topk_entropy(**{name: x.data_ptr() for name, x in tensors.items()}, **numbers) == 0
    return entropy, values, indices.view(rows, k), workspace


@pytest.mark.skipif(torch.cuda.is_available(), reason="its library takes host pointers")
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("stream", [1, 2])  # on a host 1 stands for one that captures
def test_a_launch_has_counters_of_its_stream(stream: int) -> None:
    logits = torch.randn(3, 1100)
    want = topk_entropy(logits, 9)
    for _ in range(2):
        *got, workspace = call(logits, 9, stream)
        assert all(map(torch.equal, got, want))
        groups = workspace.ne(torch.iinfo(torch.int64).max).sum()
        assert groups % 3 == 0
        assert workspace[groups:].eq(torch.iinfo(torch.int64).max).all()  # no counters there, so nothing to clear
    *got, eager = call(logits, 9, stream=0)
    assert all(map(torch.equal, got, want))
    assert eager[:groups].equal(workspace[:groups])
    assert eager[groups:].view(torch.int32)[:3].tolist() == [0] * 3  # as a replay of a graph needs to find them
