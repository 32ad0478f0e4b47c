"""Reads machine code as `cuobjdump --dump-sass` prints it: instructions, loops, and counts in loops with products."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Code = Sequence[tuple[int, str]]
"""(address, instruction) each."""

_FUNCTION = re.compile(r"\s*Function : (?P<name>\w+)|\s*code for (?P<arch>sm_\w+)")
_INSTRUCTION = re.compile(r"\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?)\s*;")
_BRANCH = re.compile(r"\bBRA\b.*?0x(?P<target>[0-9a-f]+)")
_NAME = re.compile(r"(?:@!?U?P\w+\s+)?(\S+)")


@dataclass(frozen=True)
class Loop:
    """An innermost loop with HGMMA: how many instructions of each kind a warp executes per iteration."""

    instructions: int
    hgmma: int
    arrive: int  # starts of batches of products
    wait: int  # waits for batches
    local: int  # loads and stores of spilled registers

    @property
    def serialised(self) -> bool:
        """Whether the loop waits for every product separately."""
        return self.arrive >= self.hgmma > 4


@dataclass(frozen=True)
class MachineCode:
    """A kernel's loops with HGMMA (none if it has no HGMMA), and its spills."""

    loops: tuple[Loop, ...]
    epilogue: int  # instructions after the last product
    local: int
    instructions: int

    @property
    def main(self) -> Loop | None:
        """The loop that does most of the work: the one with the fewest instructions per product."""
        return min(self.loops, key=lambda loop: loop.instructions / loop.hgmma, default=None)

    @classmethod
    def of(cls, code: Code) -> MachineCode:
        products = [index for index, (_, text) in enumerate(code) if "HGMMA" in text]
        after = len(code) - 1 - products[-1] if products else 0
        return cls(tuple(_loop(part) for part in inner_loops(code, "HGMMA")), after, _loop(code).local, counted(code))


def functions(listing: str) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """The code of each (mangled name, architecture)."""
    code: dict[tuple[str, str], list[tuple[int, str]]] = {}
    arch, lines = "", []
    for line in listing.splitlines():
        head, instruction = _FUNCTION.match(line), _INSTRUCTION.match(line)
        if head and head["arch"]:
            arch = head["arch"]
        elif head:
            lines = code.setdefault((head["name"], arch), [])
        elif instruction:
            lines.append((int(instruction["address"], 16), instruction["text"]))
    return code


def loops(code: Code) -> list[range]:
    """Every loop as a range of indices into the code, from its first instruction to the jump back."""
    indices = {address: index for index, (address, _) in enumerate(code)}
    last = max((index for index, (_, text) in enumerate(code) if "EXIT" in text), default=len(code))
    ranges = []
    for end, (address, text) in enumerate(code[:last]):  # the jumps back after EXIT only reconverge divided warps
        branch = _BRANCH.search(text)
        if branch and int(branch["target"], 16) < address:
            ranges.append(range(indices[int(branch["target"], 16)], end + 1))
    return ranges


def inner_loops(code: Code, holding: str = "") -> list[Code]:
    """The loops that hold such an instruction and contain no other such loop."""
    candidates = [loop for loop in loops(code) if any(holding in code[index][1] for index in loop)]
    inner = [loop for loop in candidates if not any(contains(loop, other) for other in candidates)]
    return [code[loop.start : loop.stop] for loop in inner]


def contains(loop: range, other: range) -> bool:
    """Whether the loop contains the other one."""
    return loop != other and loop.start <= other.start and other.stop <= loop.stop


def counted(code: Code) -> int:
    """The number of instructions, without NOPs."""
    return sum(not text.startswith("NOP") for _, text in code)


def _loop(code: Code) -> Loop:
    names = [match[1].split(".") for _, text in code if (match := _NAME.match(text))]
    counts = Counter(".".join(name[:2]) if name[0] == "WARPGROUP" else name[0] for name in names)
    return Loop(
        counted(code),
        counts["HGMMA"],
        counts["WARPGROUP.ARRIVE"],
        counts["WARPGROUP.DEPBAR"],
        counts["LDL"] + counts["STL"],
    )
