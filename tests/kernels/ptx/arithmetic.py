"""What PTX instructions compute, as Python text over arrays of a warp's 32 lanes.

A register is an unsigned array of its width, or bool for a predicate. Arrays are never changed in place. Rounding of a
product that is added (`fma`) happens once; approximations (`ex2.approx`) are the nearest float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.program import Instruction, Program, stem, width_of

LANES = 32
TYPES = {"pred": "bool", "f16": "f2", "f32": "f4", "f64": "f8"}
SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid|laneid|warpid|clock|clock64|cluster_\w+|activemask)\b(\.[xyz])?")
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
    "hs": ">="}  # fmt: skip


def dtype_of(type_name: str) -> str:
    """numpy's name of a PTX type."""
    assert type_name in TYPES or (type_name[0] in "bus" and type_name[1:].isdigit()), type_name
    if type_name in TYPES:
        return TYPES[type_name]
    return ("i" if type_name[0] == "s" else "u") + str(width_of(type_name))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype("f8") * b + c).astype("f4")


def fma_down(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    exact = a.astype("f8") * b + c
    near = exact.astype("f4")
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 rounded to nearest, ties to even."""
    bits = x.view("u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype("u2")


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("u4") << 16).view("f4")


def shifted_left(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    width = 8 * x.itemsize
    return np.where(by < width, x << (by % width).astype(x.dtype), 0).astype(x.dtype)


def shifted_right(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return (
        x >> np.minimum(by, 8 * x.itemsize - 1).astype(x.dtype)
        if x.dtype.kind == "i"
        else np.where(by < 8 * x.itemsize, x >> (by % (8 * x.itemsize)).astype(x.dtype), 0).astype(x.dtype)
    )


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integers, towards zero."""
    if a.dtype.kind == "u":
        return a // np.where(b == 0, 1, b)
    low = np.iinfo(a.dtype).min
    safe = np.where((b == 0) | ((b == -1) & (a == low)), 1, b)
    quotient = a // safe
    return (quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))).astype(a.dtype)


def rest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - divided(a, b) * b).astype(a.dtype)


def bits_of(x: np.ndarray, start: np.ndarray, length: np.ndarray, signed: bool) -> np.ndarray:
    width = 8 * x.itemsize
    start, length = (start & 255).astype("i8"), (length & 255).astype("i8")
    value = np.array([int(v) for v in x], object)
    out = []
    for v, s, n in zip(value, start, length, strict=True):
        part = (v >> int(s)) & ((1 << int(n)) - 1)
        if signed and n and (v >> min(int(s + n) - 1, width - 1)) & 1:
            part |= ((1 << width) - 1) & ~((1 << int(n)) - 1)
        out.append(part & ((1 << width) - 1))
    return np.array(out, x.dtype)


def inserted(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    one = b.dtype.type(1)
    mask = (shifted_left(np.full_like(b, one), length.astype(b.dtype)) - one).astype(b.dtype)
    mask = shifted_left(mask, start.astype(b.dtype))
    return (b & ~mask) | (shifted_left(a, start.astype(b.dtype)) & mask)


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype("u8") | (b.astype("u8") << np.uint64(32))
    out = np.zeros(LANES, "u4")
    for place in range(4):
        choice = (selector >> (4 * place)) & 15
        byte = (both >> (8 * (choice & 7)).astype("u8")).astype("u4") & 255
        byte = np.where(choice & 8, np.where(byte & 128, 255, 0), byte)
        out |= (byte << (8 * place)).astype("u4")
    return out


def funnel(low: np.ndarray, high: np.ndarray, by: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    by = (by & 31 if wrap else np.minimum(by, 32)).astype("u8")
    both = low.astype("u8") | (high.astype("u8") << np.uint64(32))
    return ((both << by) >> np.uint64(32) if left else both >> by).astype("u4")


def counted(x: np.ndarray) -> np.ndarray:
    return np.array([int(v).bit_count() for v in x], "u4")


FUNCTIONS: dict[str, Any] = {
    each.__name__: each
    for each in (
        fma, fma_down, to_bfloat16, from_bfloat16, shifted_left, shifted_right, divided, rest, bits_of, inserted,
        permuted, funnel, counted,
    )
}  # fmt: skip


TEXTS = {  # of what is computed the same way in every type but bfloat16
    "add": "{} + {}",
    "sub": "{} - {}",
    "rem": "rest({}, {})",
    "and": "{} & {}",
    "or": "{} | {}",
    "xor": "{} ^ {}",
    "not": "~{}",
    "neg": "-{}",
    "prmt": "permuted({}, {}, {})",
    "rsqrt": "(1 / np.sqrt({}.astype('f8'))).astype('f4')",
}


class Emitter:
    """Writes instructions of one program as Python text; `names` is what the text refers to."""

    def __init__(self, program: Program, symbols: dict[str, int]) -> None:
        self.program, self.symbols = program, symbols
        self.numbers: dict[str, int] = {}  # registers
        self.widths: list[int] = []
        self.names: dict[str, Any] = {"np": np, **FUNCTIONS}
        self.constants: dict[tuple[str, Any], str] = {}

    def number(self, register: str) -> int:
        """A register's place."""
        if register not in self.numbers:
            self.numbers[register] = len(self.widths)
            self.widths.append(self.program.widths[stem(register)])
        return self.numbers[register]

    def is_register(self, operand: str) -> bool:
        return stem(operand) in self.program.widths

    def constant(self, value: Any, dtype: str) -> str:
        """The name of an array of this value in every lane."""
        key = dtype, value
        if key not in self.constants:
            self.constants[key] = f"K{len(self.constants)}"
            if dtype[0] in "ui":
                value = value & ((1 << 8 * int(dtype[1:])) - 1)
                array = np.full(LANES, value, f"u{dtype[1:]}").view(dtype)
            else:
                array = np.full(LANES, value, dtype)
            array.flags.writeable = False
            self.names[self.constants[key]] = array
        return self.constants[key]

    def value(self, operand: str, type_name: str) -> str:
        """An operand as an array of a PTX type."""
        dtype = dtype_of(type_name)
        if match := re.fullmatch(r"0[fd]([0-9a-fA-F]+)", operand):
            return self._bits(int(match[1], 16), len(match[1]) // 2, dtype)
        if SPECIAL.fullmatch(operand):
            text = f"w.special({operand[1:]!r})"
            return text if dtype == "u4" else f"{text}.astype('{dtype}')"
        if self.is_register(operand):
            number = self.number(operand)
            width = self.widths[number]
            text = f"R[{number}]"
            if dtype == "bool":
                return text
            if width != int(dtype[1:]):
                return f"{text}.astype('u{dtype[1:]}').view('{dtype}')"
            return text if dtype[0] == "u" else f"{text}.view('{dtype}')"
        if dtype == "bool":
            return self.constant(bool(int(operand, 0)), "bool")
        name, _, offset = operand.partition("+")
        if name.strip() in self.symbols:
            return self.constant(self.symbols[name.strip()] + int(offset or "0", 0), dtype)
        if dtype[0] == "f":
            return self._bits(int(operand, 0), int(dtype[1:]), dtype)
        return self.constant(int(operand.removesuffix("U"), 0), dtype)

    def _bits(self, bits: int, width: int, dtype: str) -> str:
        key = "bits", (bits, width, dtype)
        if key not in self.constants:
            self.constants[key] = f"K{len(self.constants)}"
            self.names[self.constants[key]] = np.full(LANES, bits, f"u{width}").view(dtype)
        return self.constants[key]

    def put(self, operand: str, text: str, dtype: str, mask: str | None) -> list[str]:
        """Write an array of a numpy type to a register, in the lanes of a mask."""
        if operand == "_":
            return []
        number = self.number(operand)
        width = self.widths[number]
        if dtype != "bool":
            if width != int(dtype[1:]):
                text = f"({text}).astype('{dtype[0] if dtype[0] == 'i' else 'u'}{width}')"
                dtype = f"{dtype[0] if dtype[0] == 'i' else 'u'}{width}"
            if dtype[0] != "u":
                text = f"({text}).view('u{width}')"
        if mask:
            text = f"np.where({mask}, {text}, R[{number}])"
        return [f"R[{number}] = {text}"]

    def mask_of(self, instruction: Instruction, masked: bool) -> str | None:
        """The lanes in which an instruction acts; None for all."""
        guard = None
        if instruction.predicate:
            guard = f"{'~' if instruction.negated else ''}R[{self.number(instruction.predicate)}]"
        if masked:
            return f"(m & {guard})" if guard else "m"
        return f"({guard})" if guard else None

    def compute(self, i: Instruction, masked: bool) -> list[str] | None:
        """Statements for an instruction that only reads and writes registers; None if it is another."""
        mask = self.mask_of(i, masked)
        assert i.name == "cvt" or not {"sat", "cc"} & set(i.parts), i.text
        if i.parts[-1] in ("bf16", "bf16x2", "f16x2") and i.name in ("add", "sub", "mul", "fma", "min", "max"):
            return self._of_halves(i, mask)
        if i.name in TEXTS:
            return self._simple(i, mask, TEXTS[i.name], i.parts[-1])
        emit: Callable[[Instruction, str | None], list[str]] | None = getattr(self, f"_{i.name}", None)
        return emit(i, mask) if emit else None

    def _of_halves(self, i: Instruction, mask: str | None) -> list[str]:
        """Arithmetic on one or two numbers of 16 bits, each rounded from float32."""
        kind, pair = i.parts[-1].removesuffix("x2"), i.parts[-1].endswith("x2")
        text = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "fma": "fma({}, {}, {})"}.get(i.name)
        text = text or f"np.{'maximum' if i.name == 'max' else 'minimum'}({{}}, {{}})"
        if i.name in ("min", "max") and "NaN" not in i.parts:
            text = f"np.f{i.name}({{}}, {{}})"
        widen = "from_bfloat16({}.astype('u2'))" if kind == "bf16" else "{}.astype('u2').view('f2').astype('f4')"
        narrow = "to_bfloat16({})" if kind == "bf16" else "({}).astype('f2').view('u2')"
        values = [self.value(each, "b32" if pair else "b16") for each in i.operands[1:]]
        low = narrow.format(text.format(*map(widen.format, values)))
        if not pair:
            return self.put(i.operands[0], low, "u2", mask)
        up = self.constant(16, "u4")
        high = narrow.format(text.format(*(widen.format(f"({value} >> {up})") for value in values)))
        return self.put(i.operands[0], f"({high}.astype('u4') << {up}) | {low}.astype('u4')", "u4", mask)

    def _simple(
        self, i: Instruction, mask: str | None, text: str, type_name: str, result: str | None = None
    ) -> list[str]:
        values = [self.value(each, type_name) for each in i.operands[1:]]
        return self.put(i.operands[0], text.format(*values), result or dtype_of(type_name), mask)

    def _mov(self, i: Instruction, mask: str | None) -> list[str]:
        target, source = i.operands
        type_name = i.parts[1]
        if source.startswith("{"):
            parts = [each.strip() for each in source.strip("{}").split(",")]
            width = width_of(type_name) // len(parts)
            dtype = f"u{width_of(type_name)}"
            pieces = [
                f"({self.value(each, f'b{8 * width}')}.astype('{dtype}') << {self.constant(8 * width * n, dtype)})"
                for n, each in enumerate(parts)
            ]
            return self.put(target, " | ".join(pieces), dtype, mask)
        if target.startswith("{"):
            parts = [each.strip() for each in target.strip("{}").split(",")]
            width = width_of(type_name) // len(parts)
            whole, dtype = self.value(source, type_name.replace("f", "b")), f"u{width_of(type_name)}"
            lines = [f"x = {whole}"]
            for n, each in enumerate(parts):
                piece = f"(x >> {self.constant(8 * width * n, dtype)}).astype('u{width}')"
                lines += self.put(each, piece, f"u{width}", mask)
            return lines
        if type_name != "pred":
            type_name = f"b{8 * width_of(type_name)}"
        return self.put(target, self.value(source, type_name), dtype_of(type_name), mask)

    def _cvta(self, i: Instruction, mask: str | None) -> list[str]:
        if i.parts[1] == "shared":
            return self.put(i.operands[0], f"w.generic({self.value(i.operands[1], 'u64')})", "u8", mask)
        if i.parts[1] == "to" and i.parts[2] == "shared":
            return self.put(i.operands[0], f"w.in_shared({self.value(i.operands[1], 'u64')})", "u8", mask)
        return self.put(i.operands[0], self.value(i.operands[1], "u64"), "u8", mask)

    def _mul(self, i: Instruction, mask: str | None) -> list[str]:
        type_name = i.parts[-1]
        if type_name[0] == "f":
            return self._simple(i, mask, "{} * {}", type_name)
        return self._product(i, mask, "{product}")

    def _mad(self, i: Instruction, mask: str | None) -> list[str]:
        if i.parts[-1][0] == "f":
            return self._fma(i, mask)
        return self._product(i, mask, "{product} + {addend}")

    def _product(self, i: Instruction, mask: str | None, text: str) -> list[str]:
        kind, type_name = i.parts[1], i.parts[2]
        width, sign = width_of(type_name), "i" if type_name[0] == "s" else "u"
        a, b = (self.value(each, type_name) for each in i.operands[1:3])
        if kind == "lo":
            dtype = f"u{width}"
            a, b = (self.value(each, f"b{8 * width}") for each in i.operands[1:3])
            product = f"({a} * {b})"
        else:
            wide = f"{sign}{2 * width}"
            product = f"({a}.astype('{wide}') * {b}.astype('{wide}'))"
            if kind == "hi":
                assert width <= 4, i.text
                product, dtype = f"({product} >> {self.constant(8 * width, wide)}).astype('u{width}')", f"u{width}"
            else:
                product, dtype = f"{product}.view('u{2 * width}')", f"u{2 * width}"
        addend = self.value(i.operands[3], f"b{8 * int(dtype[1:])}") if len(i.operands) > 3 else ""
        return self.put(i.operands[0], text.format(product=product, addend=addend), dtype, mask)

    def _fma(self, i: Instruction, mask: str | None) -> list[str]:
        name = "fma_down" if "rm" in i.parts else "fma"
        assert i.parts[-1] == "f32", i.text
        return self._simple(i, mask, name + "({}, {}, {})", "f32")

    def _div(self, i: Instruction, mask: str | None) -> list[str]:
        type_name = i.parts[-1]
        return self._simple(i, mask, "{} / {}" if type_name[0] == "f" else "divided({}, {})", type_name)

    def _abs(self, i: Instruction, mask: str | None) -> list[str]:
        if i.parts[-1] in ("bf16", "bf16x2", "f16", "f16x2"):
            pair = i.parts[-1].endswith("x2")
            bits = self.constant(0x7FFF7FFF if pair else 0x7FFF, "u4" if pair else "u2")
            return self._simple(i, mask, "{} & " + bits, "b32" if pair else "b16")
        return self._simple(i, mask, "np.abs({})", i.parts[-1])

    def _extreme(self, i: Instruction, mask: str | None, whole: str, of_floats: str) -> list[str]:
        type_name = i.parts[-1]
        name = of_floats if type_name[0] == "f" and "NaN" not in i.parts else whole
        lines = self._simple(i, mask, f"np.{name}({{}}, {{}})", type_name)
        if "relu" in i.parts:
            zero = self.constant(0, dtype_of(type_name))
            lines = self._simple(i, mask, f"np.maximum(np.{name}({{}}, {{}}), {zero})", type_name)
        return lines

    def _min(self, i: Instruction, mask: str | None) -> list[str]:
        return self._extreme(i, mask, "minimum", "fmin")

    def _max(self, i: Instruction, mask: str | None) -> list[str]:
        return self._extreme(i, mask, "maximum", "fmax")

    def _shift(self, i: Instruction, mask: str | None, name: str, symbol: str) -> list[str]:
        type_name, by = i.parts[-1], i.operands[2]
        x = self.value(i.operands[1], type_name)
        if by.isdigit() and int(by) < 8 * width_of(type_name):
            text = f"{x} {symbol} {self.constant(int(by), dtype_of(type_name))}"
        else:
            text = f"{name}({x}, {self.value(by, 'u32')})"
        return self.put(i.operands[0], text, dtype_of(type_name), mask)

    def _shl(self, i: Instruction, mask: str | None) -> list[str]:
        return self._shift(i, mask, "shifted_left", "<<")

    def _shr(self, i: Instruction, mask: str | None) -> list[str]:
        return self._shift(i, mask, "shifted_right", ">>")

    def _bfe(self, i: Instruction, mask: str | None) -> list[str]:
        type_name, (target, x, start, length) = i.parts[-1], i.operands
        width = 8 * width_of(type_name)
        if start.isdigit() and length.isdigit() and int(start) + int(length) <= width:
            dtype = dtype_of(type_name)
            up = self.constant(width - int(start) - int(length), dtype)
            down = self.constant(width - int(length), dtype)
            return self.put(target, f"({self.value(x, type_name)} << {up}) >> {down}", dtype, mask)
        values = self.value(x, f"b{width}"), self.value(start, "u32"), self.value(length, "u32")
        return self.put(target, f"bits_of({', '.join(values)}, {type_name[0] == 's'})", f"u{width // 8}", mask)

    def _bfi(self, i: Instruction, mask: str | None) -> list[str]:
        target, a, b, start, length = i.operands
        values = [self.value(each, i.parts[-1]) for each in (a, b)]
        values += [self.value(each, "u32") for each in (start, length)]
        return self.put(target, f"inserted({', '.join(values)})", dtype_of(i.parts[-1]), mask)

    def _shf(self, i: Instruction, mask: str | None) -> list[str]:
        return self._simple(i, mask, f"funnel({{}}, {{}}, {{}}, {i.parts[1] == 'l'}, {i.parts[2] == 'wrap'})", "b32")

    def _popc(self, i: Instruction, mask: str | None) -> list[str]:
        return self._simple(i, mask, "counted({})", i.parts[-1], "u4")

    def _selp(self, i: Instruction, mask: str | None) -> list[str]:
        a, b = (self.value(each, i.parts[-1]) for each in i.operands[1:3])
        text = f"np.where({self.value(i.operands[3], 'pred')}, {a}, {b})"
        return self.put(i.operands[0], text, dtype_of(i.parts[-1]), mask)

    def _setp(self, i: Instruction, mask: str | None) -> list[str]:
        type_name, comparison, targets = i.parts[-1], i.parts[1], i.operands[0].split("|")
        halves = ["", ""]
        if type_name in ("bf16", "bf16x2", "f16", "f16x2"):
            wide = "b32" if type_name.endswith("x2") else "b16"
            a, b = (self.value(each, wide) for each in i.operands[1:3])
            convert = "{}.astype('u2').view('f2').astype('f4')"
            if type_name.startswith("b"):
                convert = "from_bfloat16({}.astype('u2'))"
            pairs = [[convert.format(x) for x in (a, b)]]
            if wide == "b32":
                up = self.constant(16, "u4")
                pairs.append([convert.format(f"({x} >> {up})") for x in (a, b)])
            halves = [self._comparison(comparison, *pair) for pair in pairs]
        else:
            a, b = (self.value(each, type_name) for each in i.operands[1:3])
            text = self._comparison(comparison, a, b) if type_name[0] == "f" else f"({a} {COMPARED[comparison]} {b})"
            halves = [text, f"~{text}"]
        if len(i.parts) > 3 and i.parts[2] in ("and", "or", "xor"):
            other = self.value(i.operands[3], "pred")
            symbol = {"and": "&", "or": "|", "xor": "^"}[i.parts[2]]
            halves = [f"({half}) {symbol} {other}" for half in halves]
        lines = [f"y{place} = {half}" for place, half in enumerate(halves[: len(targets)])]
        for place, target in enumerate(targets):
            lines += self.put(target.strip(), f"y{place}", "bool", mask)
        return lines

    def _comparison(self, name: str, a: str, b: str) -> str:
        """Of floats: false with a NaN, but true for the unordered forms."""
        strange = f"(np.isnan({a}) | np.isnan({b}))"
        if name in ("num", "nan"):
            return f"~{strange}" if name == "num" else strange
        if name.endswith("u") and name[:-1] in COMPARED:
            return f"(({a} {COMPARED[name[:-1]]} {b}) | {strange})"
        return f"(({a} != {b}) & ~{strange})" if name == "ne" else f"({a} {COMPARED[name]} {b})"

    def _cvt(self, i: Instruction, mask: str | None) -> list[str]:
        to, source = i.parts[-2:]
        if to in ("bf16x2", "f16x2"):
            convert = "to_bfloat16({}).astype('u4')" if to == "bf16x2" else "{}.astype('f2').view('u2').astype('u4')"
            high, low = (convert.format(self.value(each, "f32")) for each in i.operands[1:3])
            return self.put(i.operands[0], f"({high} << {self.constant(16, 'u4')}) | {low}", "u4", mask)
        x = self.value(i.operands[1], "b16" if source == "bf16" else source)
        if source == "bf16":
            x = f"from_bfloat16({x})"
        if to == "bf16":
            return self.put(i.operands[0], f"to_bfloat16({x}.astype('f4'))", "u2", mask)
        dtype = dtype_of(to)
        assert to[0] == "f" or source[0] in "su", i.text  # none rounds a float to an integer
        if "sat" in i.parts:
            assert to[0] == "f", i.text
            x = f"np.clip(np.where(np.isnan({x}), 0, {x}), 0, 1)"
        return self.put(i.operands[0], f"{x}.astype('{dtype}')", dtype, mask)

    def _ex2(self, i: Instruction, mask: str | None) -> list[str]:
        text = f"np.exp2({self.value(i.operands[1], 'f32')})"
        if "ftz" in i.parts:
            least = self.constant(2.0**-126, "f4")
            text = f"(lambda x: np.where(x < {least}, 0, x).astype('f4'))({text})"
        return self.put(i.operands[0], text, "f4", mask)
