"""The compiled `skinny_linear` on a GPU, at the shapes of Qwen3-1.7B and Qwen3-32B."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import DEVICE, PROMISES, Case, matches_the_reference, needs_memory, randn, second_device, shifted
from torch import Tensor

from fb_kernels._runtime import cuda
from fb_kernels.skinny_linear import cuda as kernels
from fb_kernels.skinny_linear.naive import skinny_linear as naive

pytestmark = pytest.mark.gpu
EPS = 1e-6
SIZES = {  # columns, outputs, what stands beside the projection
    "small": (264, 40, "norm"),
    "small residual": (33, 21, "bias residual"),
    "small swiglu": (40, 19, "bias norm swiglu"),
    "split": (2600, 300, "bias norm residual"),
    "split swiglu": (2049, 300, "bias norm swiglu"),
    "qkv": (2048, 4096, "norm"),
    "o": (2048, 2048, "residual"),
    "gate_up": (2048, 6144, "norm swiglu"),
    "down": (6144, 2048, "residual"),
    "head": (2048, 151_936, "norm"),
    "qkv of 0.6B": (1024, 4096, "norm"),
    "down of 0.6B": (3072, 1024, "residual"),
    "gate_up of 32B": (5120, 25_600, "norm swiglu"),
    "down of 32B": (25_600, 5120, "residual"),
}
LAYER = ("qkv", "o", "gate_up", "down")
SPLIT = ("qkv of 0.6B", "down of 0.6B")  # the second has blocks that share the columns


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Only where there is a library for CUDA tensors."""
    if reason := cuda.why_not(DEVICE):
        pytest.skip(reason)


def make(size: tuple[int, int, str], dtype: torch.dtype, device: str = DEVICE, *, rows: int = 1) -> Case:
    columns, outputs, options = size
    swiglu, weight_rows = "swiglu" in options, outputs * (2 if "swiglu" in options else 1)
    optional = [name for name in ("bias", "norm", "residual") if name in options]

    def plain(x: Tensor, weight: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(optional, values, strict=True))
        if "norm" in given:
            x = F.rms_norm(x, x.shape[-1:], given["norm"], EPS)
        y = F.linear(x, weight, given.get("bias"))
        if swiglu:
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up
        return y + given["residual"] if "residual" in given else y

    def op(x: Tensor, weight: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(optional, values, strict=True))
        if x.dtype == torch.float64:
            rest = {"norm_weight": given.get("norm"), "residual": given.get("residual"), "swiglu": swiglu}
            return naive(x, weight, given.get("bias"), eps=EPS, **rest)
        out = kernels.skinny_linear(x, weight, given.get("bias"), given.get("norm"), EPS, given.get("residual"), swiglu)
        assert out is not NotImplemented
        return out

    generator = torch.Generator(device).manual_seed(1)
    weight = torch.empty(weight_rows, columns, dtype=dtype, device=device).normal_(generator=generator)
    shapes = {"bias": (weight_rows,), "norm": (columns,), "residual": (rows, outputs)}
    values = [randn(*shapes[name], dtype=dtype, device=device, seed=2 + i) for i, name in enumerate(optional)]
    return Case(op, plain, (randn(rows, columns, dtype=dtype, device=device), weight.div_(columns**0.5), *values))


def taken(size: str, rows: int) -> bool:
    """Many rows of many columns are left to the reference."""
    return rows <= 16 or rows * SIZES[size][0] <= 1 << 16


@pytest.mark.parametrize(
    ("size", "rows"), [(size, rows) for size in SIZES for rows in (1, 8, 13, 16, 26, 32) if taken(size, rows)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matches_plain_float64(size: str, dtype: torch.dtype, rows: int) -> None:
    if DEVICE == "cuda":
        needs_memory(12)
    matches_the_reference(make(SIZES[size], dtype, rows=rows))


@pytest.mark.parametrize("rows", [1, 26])
def test_unaligned_rows(rows: int) -> None:
    case = make(SIZES["qkv"], torch.bfloat16, rows=rows)
    case.floats = tuple(shifted(value) for value in case.floats)
    matches_the_reference(case)


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("size", [*LAYER, "split", "down of 0.6B"])
def test_promises(size: str, promise: Callable[[Case], None]) -> None:
    promise(make(SIZES[size], torch.bfloat16))


@pytest.mark.parametrize("size", [*LAYER, "split", "split swiglu", "down of 0.6B"])
def test_a_row_does_not_depend_on_the_others(size: str) -> None:
    case = make(SIZES[size], torch.bfloat16, rows=32 if taken(size, 32) else 16)
    x, weight, *values = case.floats
    whole = case.op(x, weight, *values)
    for index in (0, 8, len(x) - 1):
        own = [value[index : index + 1] if value.ndim == 2 else value for value in values]
        assert torch.equal(case.op(x[index : index + 1], weight, *own)[0], whole[index])


@pytest.mark.parametrize("layer", [LAYER, SPLIT])
def test_a_chain_of_dependent_launches(layer: tuple[str, ...]) -> None:
    """A launch may begin before the previous one ends, but must not read what is not yet written."""
    cases = [make(SIZES[size], torch.bfloat16, rows=4) for size in layer]
    first = cases[0].floats[0]

    def chain(wait: bool) -> Tensor:
        x = first
        for _ in range(8):
            for case in cases:
                x = case.op(x[:, : case.floats[1].shape[1]], *case.floats[1:])
                if wait and x.is_cuda:
                    torch.cuda.synchronize()
        return x

    expected = chain(wait=True)
    assert all(torch.equal(chain(wait=False), expected) for _ in range(50))


def test_another_device() -> None:
    device = second_device()
    with torch.cuda.device(device):  # as the public op does
        matches_the_reference(make(SIZES["small"], torch.bfloat16, device))


def test_small_a_weight_that_the_kernel_before_writes() -> None:
    """Dependent launches overlap: only what is said to be frozen may be read ahead."""
    a, b, x = randn(32, 256, dtype=torch.bfloat16), randn(264, 256, dtype=torch.bfloat16), randn(3, 264).bfloat16()
    whole = kernels.skinny_linear(a, b, None, None, EPS, None, False)
    torch.cuda.synchronize()
    expected = kernels.skinny_linear(x, whole, None, None, EPS, None, False)
    for _ in range(200):
        made = kernels.skinny_linear(a, b, None, None, EPS, None, False)
        assert torch.equal(kernels.skinny_linear(x, made, None, None, EPS, None, False), expected)
        made.zero_()
