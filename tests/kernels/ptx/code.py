"""What PTX instructions do beyond a warp's registers, as Python text; and blocks of a program as Python functions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from ptx.arithmetic import Emitter, dtype_of
from ptx.memory import ALIGNED
from ptx.program import JUMPS, Block, Instruction, Program, width_of

PARAMS, APART = 1 << 60, 1 << 12  # the address of the first parameter, and bytes between two


class Code(Emitter):
    """A program as Python functions of (warp, registers, mask), each written when it is first needed.

    Attributes:
        shared: bytes of shared memory.
        variables: address and bytes of what the program keeps in global memory, from one launch to the next.
        cell: the fewest bytes that an access has, at most 2.
    """

    def __init__(self, program: Program, dynamic: int) -> None:
        symbols: dict[str, int] = {}
        self.variables: list[tuple[int, int]] = []
        self.kept: list[object] = []
        self.shared = 0
        for variable in program.variables:
            if variable.space == "shared":
                align = variable.align if variable.bytes is not None else ALIGNED
                self.shared = -(-self.shared // align) * align
                symbols[variable.name] = ALIGNED + self.shared
                self.shared += dynamic if variable.bytes is None else variable.bytes
            elif variable.bytes:
                symbols[variable.name] = self._allocate(variable.values or bytes(variable.bytes))
        for place, param in enumerate(program.params):
            symbols[param.name] = PARAMS + APART * place
        super().__init__(program, symbols)
        instructions = [i for block in program.blocks for i in block.instructions]
        for i in instructions:
            for name in re.findall(r"[%\w$.]+", " ".join([i.predicate or "", *i.operands])):
                if self.is_register(name):
                    self.number(name)
        self.cell = min([2, *(width_of(i.parts[-1]) for i in instructions if i.name in ("ld", "st", "atom"))])
        self.functions: dict[tuple[int, bool], Callable[[Any, list[Any], Any], Any]] = {}
        self.operands: dict[tuple[str, str], Callable[[Any, list[Any]], Any]] = {}

    def _allocate(self, values: bytes) -> int:
        space = ctypes.create_string_buffer(len(values) + 256)
        self.kept.append(space)
        start = -(-ctypes.addressof(space) // 256) * 256
        ctypes.memmove(start, values, len(values))
        self.variables.append((start, len(values)))
        return start

    def operand(self, text: str, type_name: str) -> Callable[[Any, list[Any]], Any]:
        """An operand, or an address in brackets, as a function of (warp, registers)."""
        if (text, type_name) not in self.operands:
            value = self._address(text, type_name) if text.startswith("[") else self.value(text, type_name)
            self.operands[text, type_name] = eval(f"lambda w, R: {value}", self.names)
        return self.operands[text, type_name]

    def function(self, index: int, masked: bool) -> Callable[[Any, list[Any], Any], Any]:
        """A block of the program as a Python function of (warp, registers, mask)."""
        key = index, masked
        if key not in self.functions:
            lines = self._text(self.program.blocks[index], masked)
            names = self.names
            source = "def block(w, R, m):\n" + "".join(f"    {line}\n" for line in lines or ["pass"])
            exec(compile(source, f"{self.program.name}, block {index}", "exec"), names)
            self.functions[key] = names["block"]
        return self.functions[key]

    def _text(self, block: Block, masked: bool) -> list[str]:
        lines = []
        for i in block.instructions:
            mask = self.mask_of(i, masked)
            if i.name in JUMPS:
                lines.append(f"return {mask if i.predicate else None}")
                continue
            computed = self.compute(i, masked)
            if computed is None:
                computed = self._acts(i, mask)
            lines += computed
        return lines

    def _acts(self, i: Instruction, mask: str | None) -> list[str]:
        """Statements for an instruction with an effect beyond the warp's registers, or across its lanes."""
        name = i.name
        given = mask or "None"
        if name in ("ld", "st"):
            return self._access(i, mask)
        if name in ("atom", "red"):
            return self._atomic(i, given)
        if name == "shfl":
            target, _, valid = i.operands[0].partition("|")
            values = ", ".join(self.value(each, "b32") for each in i.operands[1:4])
            lines = [f"x, y = w.shuffle({i.parts[2]!r}, {values}, {given})"]
            return lines + self.put(target, "x", "u4", mask) + (self.put(valid, "y", "bool", mask) if valid else [])
        if name == "elect":
            target, _, chosen = i.operands[0].partition("|")
            lines = [f"x, y = w.elect({given})"]
            return lines + self.put(target, "x", "u4", mask) + self.put(chosen, "y", "bool", mask)
        if name == "redux":
            value = self.value(i.operands[1], i.parts[-1])
            return self.put(i.operands[0], f"w.reduce({i.parts[2]!r}, {value}, {given})", dtype_of(i.parts[-1]), mask)
        if name == "vote":
            assert i.parts[2] == "ballot", i.text
            value = self.value(i.operands[1].lstrip("!"), "pred")
            if i.operands[1].startswith("!"):
                value = f"~{value}"
            return self.put(i.operands[0], f"w.ballot({value}, {given})", "u4", mask)
        if name in ("ldmatrix", "stmatrix", "mma", "wgmma"):
            return self._matrix(i)
        if i.opcode.startswith("cp.async.bulk"):
            return self._bulk(i, given)
        if name == "cp":
            if "commit_group" in i.parts:
                return ["w.commit_copies()"]
            if "wait_group" in i.parts:
                return [f"w.land_copies({int(i.operands[0])})"]
            if "wait_all" in i.parts:
                return ["w.commit_copies()", "w.land_copies(0)"]
            size = int(i.operands[2], 0)
            read = self.value(i.operands[3], "u32") if len(i.operands) > 3 else "None"
            to, source = self._address(i.operands[0], "u32"), self._address(i.operands[1], "u64")
            return [f"w.copy({to}, {source}, {size}, {read}, {given}, {i.text!r})"]
        if name == "mbarrier":
            to = self._address(i.operands[0 if i.parts[1] in ("init", "inval") else 1], "u32")
            if i.parts[1] == "init":
                return [f"w.cta.new_barrier({to}, {self.value(i.operands[1], 'u32')}, {given}, {i.text!r})"]
            assert i.parts[1] == "arrive", i.text
            expects = "expect_tx" in i.parts
            number = self.value(i.operands[2], "u32") if len(i.operands) > 2 else "None"
            return [f"w.arrive({to}, {number}, {expects}, {given}, {i.text!r})"]
        if name == "fence":
            return ["w.fence()"] if "proxy" in i.parts else []
        if i.opcode in ("bar.warp.sync", "griddepcontrol.launch_dependents"):
            return []
        if name == "createpolicy":
            return self.put(i.operands[0], self.constant(0, "u8"), "u8", mask)
        if name == "mapa":
            address, rank = self.value(i.operands[1], i.parts[-1]), self.value(i.operands[2], "u32")
            return self.put(i.operands[0], f"w.map_shared({address}, {rank})", dtype_of(i.parts[-1]), mask)
        raise NotImplementedError(i.text)

    def _address(self, operand: str, type_name: str) -> str:
        inside = operand.strip("[] ")
        base, _, offset = (each.strip() for each in inside.partition("+"))
        text = self.value(base, type_name)
        if offset and int(offset, 0):
            text = f"({text} + {self.constant(int(offset, 0), dtype_of(type_name))})"
        return text

    def _access(self, i: Instruction, mask: str | None) -> list[str]:
        type_name = i.parts[-1]
        width = width_of(type_name)
        space = _space(i)
        where, what = (0, 1) if i.name == "ld" else (1, 0)
        registers = [each.strip() for each in i.operands[where].strip("{}").split(",")]
        if space == "param":
            return self._param(i, registers, mask)
        address = self._address(i.operands[what], "u32" if space == "shared" else "u64")
        bits = f"b{8 * width}"
        if i.name == "ld":
            lines = [f"t = w.load({space!r}, {address}, {mask or 'None'}, {width}, {len(registers)}, {i.text!r})"]
            sign = "i" if type_name[0] == "s" else "u"
            for place, register in enumerate(registers):
                lines += self.put(register, f"t[{place}].view('{sign}{width}')", f"{sign}{width}", mask)
            return lines
        values = ", ".join(self.value(each, bits) for each in registers)
        return [f"w.store({space!r}, {address}, {mask or 'None'}, [{values}], {i.text!r})"]

    def _param(self, i: Instruction, registers: list[str], mask: str | None) -> list[str]:
        type_name = i.parts[-1]
        width = width_of(type_name)
        dtype = ("i" if type_name[0] == "s" else "u") + str(width)
        base, _, offset = (each.strip() for each in i.operands[1].strip("[]").partition("+"))
        lines = []
        for place, register in enumerate(registers):
            at = int(offset or "0") + width * place
            if self.is_register(base):
                text = f"w.machine.params_at({self.value(base, 'b64')}, {at}, '{dtype}', {mask})"
            else:
                text = f"w.machine.param({base!r}, {at}, '{dtype}')"
            lines += self.put(register, text, dtype, mask)
        return lines

    def _atomic(self, i: Instruction, given: str) -> list[str]:
        type_name = i.parts[-1]
        operation = next(each for each in i.parts if each in ("add", "inc", "max", "min", "exch", "cas", "or", "and"))
        space = _space(i)
        operands = i.operands if i.name == "atom" else ("_", *i.operands)
        address = self._address(operands[1], "u32" if space == "shared" else "u64")
        values = ", ".join(self.value(each, type_name) for each in operands[2:])
        dtype, mask = dtype_of(type_name), None if given == "None" else given
        line = f"x = w.atomic({space!r}, {operation!r}, {address}, [{values}], '{dtype}', {given}, {i.text!r})"
        return [line, *self.put(operands[0], "x", dtype, mask)]

    def _numbers(self, operand: str) -> tuple[int, ...]:
        return tuple(self.number(each.strip()) for each in operand.strip("{}").split(","))

    def _list(self, operand: str) -> str:
        return "[" + ", ".join(f"R[{n}]" for n in self._numbers(operand)) + "]"

    def _matrix(self, i: Instruction) -> list[str]:
        if i.name in ("ldmatrix", "stmatrix"):
            transposed, load = "trans" in i.parts, i.name == "ldmatrix"
            registers = self._numbers(i.operands[0 if load else 1])
            address = self._address(i.operands[1 if load else 0], "u32")
            if load:
                targets = ", ".join(f"R[{n}]" for n in registers)
                return [f"{targets}, = w.load_matrices({address}, {len(registers)}, {transposed}, {i.text!r})"]
            return [f"w.store_matrices({address}, {self._list(i.operands[1])}, {transposed}, {i.text!r})"]
        if i.name == "mma":
            shape, kinds = i.parts[3], i.parts[7:9]
            assert shape == "m16n8k16", i.text
            assert kinds[0] in ("bf16", "f16"), i.text
            targets = ", ".join(f"R[{n}]" for n in self._numbers(i.operands[0]))
            a, b, c = (self._list(each) for each in i.operands[1:4])
            return [f"{targets}, = w.multiply({a}, {b}, {c}, {kinds[0]!r}, {kinds[1]!r})"]
        if i.parts[1] == "fence":
            return []
        if i.parts[1] == "commit_group":
            return ["w.commit_products()"]
        if i.parts[1] == "wait_group":
            return [f"w.finish_products({int(i.operands[0])})"]
        shape = re.fullmatch(r"m64n(\d+)k16", i.parts[4])
        assert shape, i.text
        assert i.parts[5] == "f32", i.text
        assert i.parts[6] in ("bf16", "f16"), i.text
        sums, a, b, adds, scale_a, scale_b, *transposed = i.operands
        assert (scale_a, scale_b) == ("1", "1"), i.text
        registers = a.startswith("{")
        flags = [False] * registers + [int(each) == 1 for each in transposed]
        first = self._list(a) if registers else self.value(a, "b64")
        return [
            f"w.issue_product({self._numbers(sums)}, {first}, {self.value(b, 'b64')}, {self.value(adds, 'pred')}, "
            f"{int(shape[1])}, {flags}, {tuple(i.parts[6:8])}, {i.text.split()[0]!r})"
        ]

    def _bulk(self, i: Instruction, given: str) -> list[str]:
        assert i.opcode.startswith("cp.async.bulk.tensor"), i.text
        source, _, coordinates = i.operands[1].strip("[]").partition(",")
        where = ", ".join(self.value(each.strip(), "s32") for each in coordinates.strip(" {}").split(","))
        to, barrier = (self._address(each, "u32") for each in (i.operands[0], i.operands[2]))
        return [f"w.bulk_copy({to}, {self.value(source.strip(), 'b64')}, [{where}], {barrier}, {given}, {i.text!r})"]


def _space(i: Instruction) -> str:
    """Which memory an instruction reads or writes."""
    names = [each.partition("__")[0] for each in i.parts[1:]]
    return next((each for each in names if each in ("param", "shared", "global", "const", "local")), "generic")
