"""What machine code says of loops with matrix products."""

from __future__ import annotations

from benchmarks.gpu.sass import MachineCode, functions

BATCH = ["WARPGROUP.ARRIVE", *["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"] * 6, "WARPGROUP.DEPBAR.LE gsb0, 0x1"]
ALONE = [text for _ in range(6) for text in (BATCH[0], BATCH[1], BATCH[-1])]


def code(*texts: str) -> list[tuple[int, str]]:
    return [(16 * place, text) for place, text in enumerate(texts)]


def loop(body: list[str]) -> list[str]:
    return ["MOV R1, R2", *body, "@!P0 BRA 0x10", "FADD R1, R2, R3", "NOP", "STL [R1], R2", "EXIT"]


def test_a_batch_of_products_is_not_serialised() -> None:
    found = MachineCode.of(code(*loop(BATCH)))
    (inner,) = found.loops
    assert (inner.instructions, inner.hgmma, inner.arrive, inner.wait, inner.local) == (9, 6, 1, 1, 0)
    assert not inner.serialised
    assert found.main == inner
    assert (found.epilogue, found.local) == (6, 1)


def test_products_that_are_waited_for_one_by_one_are() -> None:
    assert MachineCode.of(code(*loop(ALONE))).loops[0].serialised
    assert not MachineCode.of(code(*loop(ALONE[:12]))).loops[0].serialised  # so few cost little


def test_spills_in_a_loop_are_its_own() -> None:
    assert MachineCode.of(code(*loop([*BATCH, "@P1 LDL R4, [R1]", "STL [R1], R4"]))).loops[0].local == 2


def test_a_kernel_without_products_has_no_loops_here() -> None:
    found = MachineCode.of(code(*loop(["FADD R1, R1, R2"])))
    assert (found.loops, found.main, found.epilogue) == ((), None, 0)


def test_functions_by_name_and_architecture() -> None:
    listing = """
\tcode for sm_90a
\t\tFunction : _first
        /*0000*/                   MOV R1, c[0x0][0x28] ;                       /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 EXIT ;                                       /* 0x000000000000894d */
"""
    assert functions(listing) == {("_first", "sm_90a"): [(0, "MOV R1, c[0x0][0x28]"), (16, "@!P0 EXIT")]}
