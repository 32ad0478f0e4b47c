"""Fragments of tiles that a warp's lanes hold, and tiles in shared memory that descriptors tell of.

From the PTX manual: "Matrix Multiply-Accumulate Instructions" and "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ptx.arithmetic import LANES, from_bfloat16

LANE = np.arange(LANES)
SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the two highest bits of a descriptor


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """16-bit patterns as float32."""
    return from_bfloat16(bits) if kind == "bf16" else bits.view("f2").astype("f4")


def halves(registers: list[np.ndarray]) -> np.ndarray:
    """[register, lane, 2] of registers with two values each."""
    return np.ascontiguousarray(np.stack(registers)).view("u2").reshape(len(registers), LANES, 2)


@cache
def _places_of_a() -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of a 16 x 16 operand, each [register, lane, 2]."""
    register, half = np.arange(4)[:, None, None], np.arange(2)
    lane = LANE[None, :, None]
    return lane // 4 + 8 * (register % 2) + 0 * half, lane % 4 * 2 + half + 8 * (register // 2)


def operand_a(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """[16, 16] from four registers."""
    out = np.empty((16, 16), "f4")
    out[_places_of_a()] = floats(halves(registers), kind)
    return out


def operand_b(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """[8, K] of mma.sync, from a register for every 8 of K."""
    k = 8 * len(registers)
    register, half, lane = np.arange(len(registers))[:, None, None], np.arange(2), LANE[None, :, None]
    out = np.empty((8, k), "f4")
    out[lane // 4 + 0 * half + 0 * register, lane % 4 * 2 + half + 8 * register] = floats(halves(registers), kind)
    return out


@cache
def _places_of_sums(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of 16 rows of float32 sums, each [register, lane]."""
    register = np.arange(columns // 2)[:, None]
    return LANE // 4 + 8 * (register // 2 % 2), register // 4 * 8 + LANE % 4 * 2 + register % 2


def sums_of(registers: list[np.ndarray]) -> np.ndarray:
    """[16, N] from N / 2 registers."""
    columns = 2 * len(registers)
    out = np.empty((16, columns), "f4")
    out[_places_of_sums(columns)] = np.stack(registers).view("f4")
    return out


def registers_of(sums: np.ndarray) -> list[np.ndarray]:
    """The registers that hold sums[16, N]."""
    return list(np.ascontiguousarray(sums[_places_of_sums(sums.shape[1])]).view("u4"))


@cache
def _offsets(rows: int, first: int, transposed: bool, swizzle: int, leading: int, stride: int, low: int) -> np.ndarray:
    """Bytes from 1024-aligned memory of a [rows, 16] tile of 16-bit values that begins `low` bytes after it.

    `transposed`: rows lie next to each other, not the 16 along which products are summed.
    """
    row, k = np.arange(first, first + rows)[:, None], np.arange(16)[None]
    width = swizzle or 16
    if not transposed:
        if swizzle:
            linear = row // 8 * stride + row % 8 * width + 2 * k
        else:
            linear = row // 8 * stride + row % 8 * 16 + k // 8 * leading + k % 8 * 2
    else:
        per = width // 2  # adjacent rows
        across, along = (leading, stride) if swizzle else (stride, leading)
        linear = row // per * across + row % per * 2 + k // 8 * along + k % 8 * width
    at = linear + low
    if swizzle:
        at = at ^ ((at >> 7 & (swizzle // 16 - 1)) << 4)
    return at


def addresses(descriptor: int, rows: int, first: int, transposed: bool) -> np.ndarray:
    """The shared addresses of [rows, 16] values of 16 bits that a descriptor tells of, from row `first` on."""
    start, leading, stride = (16 * (descriptor >> shift & 0x3FFF) for shift in (0, 16, 32))
    assert descriptor >> 49 & 7 == 0, "a base offset"
    swizzle = SWIZZLES[descriptor >> 62]
    low = start % 1024
    return start - low + _offsets(rows, first, transposed, swizzle, leading, stride, low)


def matrices(rows: np.ndarray, transposed: bool) -> list[np.ndarray]:
    """ldmatrix: registers from rows[8 n, 8] of 16-bit values."""
    out = []
    for matrix in rows.reshape(-1, 8, 8):
        matrix = matrix.T if transposed else matrix
        pairs = np.stack([matrix[LANE // 4, LANE % 4 * 2], matrix[LANE // 4, LANE % 4 * 2 + 1]], 1)
        out.append(np.ascontiguousarray(pairs).view("u4")[:, 0])
    return out


def rows_of(registers: list[np.ndarray], transposed: bool) -> np.ndarray:
    """stmatrix: rows[8 n, 8] of 16-bit values from registers."""
    out = []
    for pairs in halves(registers):
        matrix = np.empty((8, 8), "u2")
        matrix[LANE // 4, LANE % 4 * 2], matrix[LANE // 4, LANE % 4 * 2 + 1] = pairs[:, 0], pairs[:, 1]
        out.append(matrix.T if transposed else matrix)
    return np.concatenate(out)
