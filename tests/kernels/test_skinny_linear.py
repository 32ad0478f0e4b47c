"""What is peculiar to `skinny_linear`: its fused parts, and rows that do not know of each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cases.base import Sizes
from cases.skinny_linear import BOTH, OP, VARIANTS, make, scales, wide_chip
from ways import names, running, with_dtypes

from fb_kernels import skinny_linear, swiglu
from fb_kernels._runtime import backend, cpu
from fb_kernels.skinny_linear.naive import skinny_linear as naive
from fb_kernels.testing import assert_close_to_reference, poisoned_memory

NAN, INF = float("nan"), float("inf")
COMPILED = [way for way in names(OP) if way.startswith("c")]
CPU = [way for way in COMPILED if way.startswith("cpu")]
of_every_way = pytest.mark.parametrize("way", names(OP))
of_compiled = pytest.mark.parametrize("way", COMPILED)
of_every_variant = pytest.mark.parametrize("options", VARIANTS, ids=["plain", "residual", "swiglu"])


def given(way: str, rows: int, width: int, outputs: int, **options: object) -> dict:
    """Arguments in the first dtype of an implementation."""
    return OP.cast(make(rows, width, outputs, **options), OP.way(way).dtypes[0]).arguments


@pytest.mark.parametrize("way", ["reference", "triton", "cuda"])
def test_a_residual_is_added_before_rounding(way: str) -> None:
    one = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)  # 1 + 2^-8 alone rounds to 1
    with running(way):
        assert skinny_linear(one, weight, residual=-one[:, :1]).item() == 2.0**-8


@of_compiled
@of_every_variant
def test_a_row_alone_has_the_same_bits(way: str, options: Sizes) -> None:
    for rows, width, outputs in (9, 37, 11), (16, 300, 40), (13, 1, 1), (7, 264, 20), (16, 4616, 9), (15, 2049, 5):
        arguments = given(way, rows, width, outputs, **options)
        with running(way):
            together = skinny_linear(**arguments)
            for row in {0, 1, rows // 2, rows - 1}:
                one = {name: arguments[name][row : row + 1] for name in ("x", "residual") if name in arguments}
                assert torch.equal(skinny_linear(**arguments | one)[0], together[row])


@pytest.mark.parametrize("way", [*CPU, "triton invariant"])
@of_every_variant
def test_any_number_of_rows_gives_a_row_the_same_bits(way: str, options: Sizes) -> None:
    """From those that read a weight as it lies to those that are in lanes or tiles, and in any place among them."""
    for width, outputs in (37, 11), (300, 70), (512, 33):
        arguments = given(way, 96, width, outputs, **options)
        with running(way), OP.way(way).small():
            together = skinny_linear(**arguments)
            plain = arguments | {"swiglu": False}
            assert not arguments.get("swiglu") or torch.equal(swiglu(skinny_linear(**plain)), together)
            for first, last in (0, 1), (1, 3), (2, 6), (5, 12), (30, 38), (3, 20), (40, 89):
                some = {name: arguments[name][first:last] for name in ("x", "residual") if name in arguments}
                assert torch.equal(skinny_linear(**arguments | some), together[first:last])


@of_every_variant
@pytest.mark.parametrize("width", [2056, 2600, 4616, 2049])  # of a piece and less, in two windows, element by element
@pytest.mark.sweep(5)
def test_blocks_that_share_the_columns(width: int, options: Sizes) -> None:
    """Are right for any number of rows, each of which has the bits it has alone; a residual shows those of the sums."""
    for rows in (1, 8, 13, 16, 26) if width < 2600 else (1, 16):
        case = OP.cast(make(rows, width, 20, **options), torch.float16)
        arguments = case.arguments
        with running("cuda"), wide_chip(), poisoned_memory():
            if "residual" in arguments:
                arguments["residual"] -= skinny_linear(**arguments)
            shared = skinny_linear(**arguments)
            again = skinny_linear(**arguments)
            for row in {0, rows - 1}:
                one = {name: arguments[name][row : row + 1] for name in ("x", "residual") if name in arguments}
                assert torch.equal(skinny_linear(**arguments | one)[0], shared[row])
        assert torch.equal(shared, again)
        truth, plain = (naive(**OP.cast(case, dtype).arguments) for dtype in (torch.float64, torch.float16))
        assert_close_to_reference(shared, truth, plain, scale=scales(case, [truth])[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the multiprocessors that it has")
@pytest.mark.parametrize(
    ("width", "outputs", "split"), [(2056, 48, True), (2056, 49, False), (2048, 48, False), (2049, 20, True)]
)
@pytest.mark.parametrize("norm", [(), ("norm_weight",)])
def test_which_columns_are_shared(width: int, outputs: int, split: bool, norm: Sequence[str]) -> None:
    """Sums in another order show in what rounding leaves of them."""
    arguments = given("cuda", 2, width, outputs, given=norm)
    with running("cuda"):
        arguments["residual"] = -skinny_linear(**arguments)
        plain = skinny_linear(**arguments)
        with wide_chip():
            assert torch.equal(skinny_linear(**arguments), plain) != split


@of_every_way
@pytest.mark.parametrize("width", [264, 33])
@pytest.mark.parametrize("behind", ["", "swiglu"])
def test_a_strange_weight_reaches_its_output_alone(way: str, width: int, behind: str) -> None:
    arguments = given(way, 3, width, 19, behind=behind)
    with running(way):
        before = skinny_linear(**arguments)
        for row in (0, 7, 8, 15, 16, 18):
            weight = arguments["weight"].clone()
            weight[row] = NAN
            after = skinny_linear(**arguments | {"weight": weight})
            assert after[:, row].isnan().all()
            others = [index for index in range(19) if index != row]
            assert torch.equal(after[:, others], before[:, others])


@pytest.mark.parametrize(("way", "dtype"), with_dtypes(OP))
def test_gates_far_from_zero(way: str, dtype: torch.dtype) -> None:
    values = torch.tensor([-6e4, -300.0, -90.0, -20.0, -0.0, 20.0, 90.0, 6e4], dtype=dtype)
    weight = torch.cat([values, torch.ones_like(values)])[:, None]
    with running(way):
        out = skinny_linear(weight.new_ones(1, 1), weight, swiglu=True)
    exact, plain = (naive(w.new_ones(1, 1), w, swiglu=True) for w in (weight.double(), weight))
    assert_close_to_reference(out.T, exact.T, plain.T)


@pytest.mark.parametrize("way", CPU)
def test_gating_of_every_size(way: str) -> None:
    """silu from where its exponential overflows to where it vanishes; in many rows with the bits that it has alone."""
    gate = torch.cat((torch.linspace(-130, 130, 4001), torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1e-40, -3e38, 3e38])))
    weight = torch.cat((gate, torch.ones_like(gate)))[:, None]
    with running(way):
        out = skinny_linear(torch.ones(1, 1), weight, swiglu=True)[0]
    expected = torch.nn.functional.silu(gate.double())
    whole = (gate > -88) & (gate.abs() > 1e-37)  # below, the exponential is inf, as in PyTorch
    torch.testing.assert_close(out[whole], expected[whole].float(), rtol=6e-7, atol=0)
    torch.testing.assert_close(out[~whole], expected[~whole].float(), rtol=0, atol=6e-37, equal_nan=True)
    for many in ([torch.randn(rows, 64).to(dtype) for rows in (300, 96)] for dtype in (torch.float32, torch.bfloat16)):
        assert torch.equal(skinny_linear(*many, swiglu=True), swiglu(skinny_linear(*many)))


@pytest.mark.parametrize("way", CPU)
@pytest.mark.parametrize("behind", ["residual", "swiglu"])
def test_any_number_of_threads_gives_the_bits_of_one(monkeypatch: pytest.MonkeyPatch, way: str, behind: str) -> None:
    monkeypatch.setattr(cpu, "SHARE", 1)
    for rows, width, outputs in ((1, 40, 2), (1, 512, 260), (5, 33, 18), (16, 300, 1002)):
        arguments = given(way, rows, width, outputs // 2 if behind == "swiglu" else outputs, given=BOTH, behind=behind)
        with running(way), poisoned_memory():
            found = []
            for threads in (1, 2, 3, 8):  # of the last some have nothing to do
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                found.append(skinny_linear(**arguments))
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the memory in use")
@pytest.mark.skipif(bool(cpu.why_not()), reason="no compiled kernels for the CPU")
def test_a_large_buffer_is_not_kept_for_the_next_call() -> None:
    def megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    x, weight = torch.randn(16, 1_200_000), torch.randn(1, 1_200_000)  # 77 MB of rows are normed there
    with backend.override("cpu"):
        skinny_linear(x[:, :64].contiguous(), weight[:, :64].contiguous(), norm_weight=weight[0, :64])
        before = megabytes()
        skinny_linear(x, weight, norm_weight=weight[0])
        assert megabytes() - before < 40
