"""What a kernel's machine code says of its speed: the loops with matrix products, and what comes after them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)(.*?);", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class Loop:
    """An innermost loop with HGMMA: how many instructions of each kind a warp meets a turn."""

    instructions: int
    hgmma: int
    arrive: int  # begins of a batch of products
    wait: int  # waits for batches
    local: int  # loads and stores of spilled registers

    @property
    def serialised(self) -> bool:
        """Whether every product is waited for by itself."""
        return self.arrive >= self.hgmma > 4


@dataclass(frozen=True)
class MachineCode:
    """Of one kernel."""

    loops: tuple[Loop, ...]
    epilogue: int  # instructions after the last product
    local: int

    @property
    def main(self) -> Loop | None:
        """The loop that most work is done in: the one with the fewest instructions a product."""
        return min(self.loops, key=lambda loop: loop.instructions / loop.hgmma, default=None)


def read(listing: str) -> MachineCode:
    """From what `cuobjdump --dump-sass` prints."""
    found = [(int(address, 16), name, rest) for address, name, rest in _INSTRUCTION.findall(listing)]
    names = [name for _, name, _ in found]
    place = {address: index for index, (address, _, _) in enumerate(found)}
    loops: list[tuple[int, int]] = []
    for index, (_, name, rest) in enumerate(found):
        target = _TARGET.search(rest) if name.split(".")[0] == "BRA" else None
        first = place[int(target[1], 16)] if target else index
        if any(name.startswith("HGMMA") for name in names[first:index]):
            loops.append((first, index + 1))
    innermost = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    last = max((index for index, name in enumerate(names) if name.startswith("HGMMA")), default=len(names) - 1)
    local = _local(Counter(_stems(names)))
    return MachineCode(tuple(_loop(names[first:end]) for first, end in innermost), len(names) - 1 - last, local)


def _loop(names: Sequence[str]) -> Loop:
    counts = Counter(_stems(names))
    return Loop(len(names), counts["HGMMA"], counts["WARPGROUP.ARRIVE"], counts["WARPGROUP.DEPBAR"], _local(counts))


def _local(counts: Counter[str]) -> int:
    return counts["LDL"] + counts["STL"]


def _stems(names: Sequence[str]) -> list[str]:
    return [".".join(name.split(".")[:2]) if name.startswith("WARPGROUP") else name.split(".")[0] for name in names]
