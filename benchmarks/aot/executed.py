"""Instructions that a kernel executes, counted by the executor of `tests/kernels/ptx` at two small sizes.

Per turn of the main loop they are the difference of the two, and beside the turns what is left: unlike counts of the
machine code these have each branch as often as it is taken, and all warps. PTX has other instructions than the machine
code: counts are scaled by how many of each the whole kernel has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.aot.compiler import ISSUED, PRODUCTS, REACHED, Tile

TESTS = Path(__file__).resolve().parents[2] / "tests" / "kernels"
CLASSES = {
    "tensor": ("wgmma.mma_async", "mma."),
    "memory": ("ld", "st", "cp.", "red.", "atom.", "prefetch", "mbarrier", "fence"),
}
FEW, MORE = 2, 4  # turns


@dataclass(frozen=True)
class Executed:
    """Instructions of all warps of a program, as PTX counts them, by class: tensor, memory, other."""

    turn: Mapping[str, float]  # a turn of the main loop
    beside: Mapping[str, float]  # all but the turns
    ratio: float  # instructions of the machine code for each of PTX

    def of_rate(self, tile: Tile) -> float:
        """The fraction of the reached rate of products at the tile's size."""
        turns = tile.turns + self.beside["tensor"] / self.turn["tensor"]
        products, useful = (count * tile.flops / PRODUCTS / REACHED for count in (turns, tile.turns + tile.own))
        inside, beside = (
            self.ratio * count / ISSUED for count in (tile.turns * sum(self.turn.values()), sum(self.beside.values()))
        )
        return useful / max(products + (0 if tile.overlaps else inside) + beside, inside + beside)

    def __str__(self) -> str:
        parts = [
            ", ".join(f"{count:,.0f} {name}" for name, count in counts.items()) for counts in (self.turn, self.beside)
        ]
        return (
            f"executed with {FEW} and {MORE} turns of the main loop: {parts[0]} a turn and {parts[1]} beside them, of "
            f"all warps of a program; {self.ratio:.2f} instructions of the machine code for each"
        )


def executed(kernel: str, instructions: int, run: Callable[[int], int]) -> Executed:
    """Execute a kernel at both sizes.

    Args:
        kernel: its name.
        instructions: of its machine code.
        run: makes the call with so many turns, and returns how many programs' work it is.
    """
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
