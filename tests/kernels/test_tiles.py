"""What products of bfloat16 in the tile registers of AMX promise, real or emulated."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import OPS
from cases.branch_attention_qkv import CACHES, INPUTS, OP, TABLES
from cases.skinny_linear import BOTH, VARIANTS
from test_contract import check, evaluate
from ways import SOURCES, running

from fb_kernels import BranchLayout, branch_attention, branch_attention_qkv, qk_norm_rope, skinny_linear
from fb_kernels._runtime import cpu
from fb_kernels.branch_attention import reference

PRODUCT = """
#define INLINE static inline __attribute__((always_inline))
#include "tiles.h"
extern "C" bool granted() { return tiles::granted(); }
extern "C" void product(const void* a, const void* b, float* c) {
  const tiles::Registers registers;
  tiles::load<0>(c, 64);
  tiles::load<1>(a, 64);
  tiles::load<2>(b, 64);
  tiles::multiply<0, 1, 2>();
  tiles::store<0>(c, 64);
}
"""
Product = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
SUM, PAIRS = (16, 16), (16, 16, 2)


def compiled(folder: Path, *flags: str) -> Product:
    """c + a b of c[16, 16] and pairs a[row, pair, 2], b[pair, column, 2], which are bfloat16 as bits."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    target = folder / f"product{len(flags)}.so"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", *flags, f"-I{SOURCES}", "-x", "c++", "-"]
    done = subprocess.run([*command, "-o", str(target)], input=PRODUCT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.granted.restype = ctypes.c_bool
    if not library.granted():
        pytest.skip("the system does not grant tile registers")

    def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        sums = c.copy()
        library.product(*(x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, sums)))
        return sums

    return product


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_a_product_is_two_chains_and_then_the_sum(tmp_path: Path) -> None:
    """Of numbers whose products and sums a float64 holds: then each step is rounded once."""
    product, draw = compiled(tmp_path, "-DEMULATED_TILES"), np.random.default_rng(0)
    for _ in range(20):
        sizes, signs = draw.integers(0x3C00, 0x4200, (2, *PAIRS)), draw.choice([0, 0x8000], (2, *PAIRS))
        a, b = (sizes | signs).astype(np.uint16)
        c = draw.normal(0, 8, SUM).astype(np.float32)
        chains = np.zeros((2, *SUM), np.float32)
        for pair in range(16):
            for odd in range(2):
                terms = widened(a[:, pair, odd])[:, None] * widened(b[pair, :, odd])
                chains[odd] = (terms + chains[odd]).astype(np.float32)
        assert np.array_equal(product(a, b, c), c + (chains[0] + chains[1]))


def test_what_is_subnormal_is_zero(tmp_path: Path) -> None:
    product = compiled(tmp_path, "-DEMULATED_TILES")
    ones, tiny = np.full(PAIRS, 0x3F80, np.uint16), np.full(PAIRS, 0x0001, np.uint16)
    nothing, subnormal = np.zeros(SUM, np.float32), np.full(SUM, 1e-39, np.float32)
    for a, b, c in (ones, tiny, nothing), (tiny, ones, nothing), (0 * ones, ones, subnormal):
        assert np.array_equal(product(a, b, c), nothing)


@pytest.mark.skipif("amx_bf16" not in Path("/proc/cpuinfo").read_text(), reason="needs a processor with AMX")
def test_emulated_products_have_the_processors_bits(tmp_path: Path) -> None:
    emulated, real = compiled(tmp_path, "-DEMULATED_TILES"), compiled(tmp_path)
    draw = np.random.default_rng(0)
    for _ in range(2000):
        a, b = (draw.integers(0, 1 << 16, PAIRS).astype(np.uint16) for _ in "ab")
        c = draw.integers(0, 1 << 32, SUM).astype(np.uint32).view(np.float32)
        ours, theirs = emulated(a, b, c), real(a, b, c)
        assert np.array_equal(ours, theirs, equal_nan=True)
        assert np.array_equal(np.signbit(ours)[ours == 0], np.signbit(theirs)[ours == 0])


@pytest.mark.parametrize("options", VARIANTS, ids=["plain", "residual", "swiglu"])
@pytest.mark.parametrize("width", [1, 31, 64, 576, 4100])
def test_a_linear_layer_takes_any_number_of_rows(width: int, options: dict) -> None:
    op = OPS["skinny_linear"]
    for rows, outputs in (17, 5), (32, 16), (33, 47), (70, 64), (600, 33):
        case = op.cast(op.make(rows, width, outputs, **options), torch.bfloat16)
        with running("cpu tiles"):
            assert cpu.variant() == "amx"
            together = evaluate(case.fresh())
            check(op, case, *together)
            for row in {0, rows // 2, rows - 1}:
                one = {name: x[row : row + 1] for name, x in case.tensors.items() if name in ("x", "residual")}
                assert torch.equal(skinny_linear(**case.arguments | one)[0], together[0][0][row])


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OPS["skinny_linear"].make(300, 200, 500, given=BOTH, behind="residual")
    given, found = OPS["skinny_linear"].cast(case, torch.bfloat16).arguments, []
    with running("cpu tiles"):
        for threads in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            found.append(skinny_linear(**given))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("window", [None, 40])
def test_a_decoded_row_has_the_bits_of_a_scored_one(window: int | None) -> None:
    """A row of a long branch behind another, and the same after those before it in a cache, flat or in pages."""
    given = OP.cast(OP.make(rows=320, half=12, held=0, spare=0, keep="none"), torch.bfloat16).arguments
    with running("cpu tiles"):
        q, k, v = qk_norm_rope(**{name: given[name] for name in INPUTS})
        scored = branch_attention(q, k, v, k, v, BranchLayout.of([[20, 300]], [(0, 0)]), window=window)[20:]
        given |= {name: given[name].float() for name in TABLES} | {"window": window}
        for row in (0, 1, 31, 32, 100, 255, 256, 299):
            own = {name: given[name][[20 + row]] for name in ("qkv", "positions")} | {"held": torch.tensor([row])}
            for table in (None, torch.arange(15)[None]):
                caches = (x[20 : 20 + row] if table is None else x[20:].unflatten(0, (15, 20)) for x in (k, v))
                own |= dict(zip(CACHES, caches, strict=True), block_table=table)
                assert torch.equal(branch_attention_qkv(**given | own)[0], scored[row])


@pytest.mark.parametrize("length", [1, 3, 17, 40, 250])
def test_what_lay_in_memory_before_does_not_count(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles reach beyond the last key: with NaN of the call before, the reference would compute those rows anew."""
    for name in ("branch_attention", "branch_attention_backward"):
        monkeypatch.setattr(reference, name, None)
    strange = torch.full((400, 1000), torch.nan, dtype=torch.bfloat16)
    op = OPS["branch_attention"]
    case = op.cast(op.make([([length, 3], 1, length)], width=24), torch.bfloat16)
    with running("cpu tiles"):
        skinny_linear(strange, strange)
        made = evaluate(case.fresh())
    check(op, case, *made)
