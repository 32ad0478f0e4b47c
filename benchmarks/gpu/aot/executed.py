"""Instructions that a kernel executes, counted by the executor of `tests/kernels/ptx` at two small sizes.

Per turn of the main loop they are the difference of the two, and beside the turns what is left: unlike counts of the
machine code these have each branch as often as it is taken, and all warps. PTX has other instructions than the machine
code: counts are scaled by how many of each the whole kernel has.

They give a tile's time: its products, and what part of the other instructions and exponentials those do not hide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.aot.compiler import ISSUED, PRODUCTS, REACHED, Architecture, Compiled, Cost, Tile

TESTS = Path(__file__).resolve().parents[3] / "tests" / "kernels"
CLASSES = {
    "tensor": ("wgmma.mma_async", "mma."),
    "exponential": ("ex2",),
    "memory": ("ld", "st", "cp.", "red.", "atom.", "prefetch", "mbarrier", "fence"),
}
FEW, MORE = 2, 4  # turns
EXPONENTIALS = 16 / 32  # per cycle of a multiprocessor, as instructions of a warp
# Fitted to five cases of an H100 (measured.py). Results of later visits are compared there before one of these changes.
LAUNCH_US = 24.1  # a launch from a cold cache, with what goes before it and its last tile's end
TILE_US = 0.98  # a round of tiles
EXPOSED = 0.889  # the share of other instructions and exponentials that no product hides


@dataclass(frozen=True)
class Executed:
    """Instructions of all warps of a program, as PTX counts them, by class: tensor, memory, other."""

    turn: Mapping[str, float]  # a turn of the main loop
    beside: Mapping[str, float]  # all but the turns
    ratio: float  # instructions of the machine code for each of PTX

    def shares(self, tile: Tile) -> tuple[float, float, float]:
        """Cycles of a tile's products, of what else is in its turns, and of what is beside them."""
        turns = tile.turns + self.beside["tensor"] / self.turn["tensor"]
        inside, beside = (
            self.ratio * sum(counts.values()) / ISSUED + counts["exponential"] / EXPONENTIALS
            for counts in (self.turn, self.beside)
        )
        return turns * tile.flops / PRODUCTS / REACHED, tile.turns * inside, beside

    def cycles(self, tile: Tile) -> float:
        """Of one tile on a multiprocessor of its own."""
        products, inside, beside = self.shares(tile)
        return max(products + EXPOSED * (beside + (0 if tile.overlaps else inside)), inside + beside)

    def predicted(self, row: Compiled, tile: Tile, cost: Cost, arch: Architecture) -> Compiled:
        """The row with time and rate predicted from what its tiles execute, in rounds of one on each multiprocessor."""
        us = TILE_US + self.cycles(tile) / cycles_per_us(arch)
        useful = (tile.turns + tile.own) * tile.flops / PRODUCTS / REACHED / cycles_per_us(arch)
        return replace(row, of_rate=useful / us, predicted_us=LAUNCH_US + rounds(tile, cost, arch) * us)

    def __str__(self) -> str:
        parts = [
            ", ".join(f"{count:,.0f} {name}" for name, count in counts.items()) for counts in (self.turn, self.beside)
        ]
        return (
            f"executed with {FEW} and {MORE} turns of the main loop: {parts[0]} a turn and {parts[1]} beside them, of "
            f"all warps of a program; {self.ratio:.2f} instructions of the machine code for each"
        )


def cycles_per_us(arch: Architecture) -> float:
    """Of a multiprocessor, at the rate that products reach."""
    return arch.tflops * 1e6 / PRODUCTS / REACHED / arch.processors


def rounds(tile: Tile, cost: Cost, arch: Architecture) -> int:
    """How many tiles one multiprocessor takes; programs without work are none."""
    return math.ceil(cost.flops / ((tile.turns + tile.own) * tile.flops) / arch.processors)


def executed(kernel: str, instructions: int, run: Callable[[int], int]) -> Executed:
    """Execute a kernel at both sizes; `run` makes the call with so many turns, and returns their programs' number."""
    sys.path[:0] = [str(TESTS)] * (str(TESTS) not in sys.path)
    launches = import_module("ptx.launches")  # only in a clone
    static: list[int] = []

    def seen(text: str) -> str:
        if f".entry {kernel}(" in text:
            static.append(sum(len(block.instructions) for block in launches.parsed(text).blocks))
        return text

    counts = []
    for turns in (FEW, MORE):
        with launches.executed(processors=1, changed=seen) as done:
            programs = run(turns)
        opcodes = next(each.opcodes for each in done if each.kernel == kernel)
        counts.append({name: _sum(opcodes, name) / programs for name in (*CLASSES, "other")})
    few, more = counts
    turn = {name: (more[name] - few[name]) / (MORE - FEW) for name in more}
    beside = {name: few[name] - FEW * turn[name] for name in more}
    return Executed(turn, beside, instructions / static[-1])


def _sum(opcodes: Mapping[str, int], wanted: str) -> int:
    """How many instructions are of a class."""

    def kind(opcode: str) -> str:
        return next((name for name, starts in CLASSES.items() if opcode.startswith(starts)), "other")

    return sum(count for opcode, count in opcodes.items() if kind(opcode) == wanted)
