"""PTX text to instructions in blocks of straight code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
DIRECTIVE = re.compile(r"^\s*\.(loc|file|section)\b[^\n]*$", re.MULTILINE)  # lines that no semicolon ends
ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<params>.*?)\)(?P<options>[^{;]*)\{", re.DOTALL)
PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>\w+)\s.*?(?P<name>[\w$]+)\s*(?:\[(?P<bytes>\d+)\])?$")
VARIABLE = re.compile(
    r"\.(?P<space>shared|global|const)\s+\.align\s+(?P<align>\d+)\s+\.(?P<type>\w+)\s+(?P<name>[\w$]+)"
    r"(?:\[(?P<count>\d*)\])?(?:\s*=\s*(?P<values>\{[^}]*\}|[^;]+))?"
)
WIDTHS = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
OPERAND = re.compile(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,{\[])+")  # brackets may hold braces
INSTRUCTION = re.compile(
    r"(?:@(?P<not>!?)(?P<predicate>[\w%$.]+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.DOTALL
)
TOGETHER = ("shfl", "elect", "redux", "vote", "ldmatrix", "stmatrix", "mma", "wgmma", "match")
WAITS = ("bar.sync", "bar.red", "barrier", "griddepcontrol.wait", "mbarrier.try_wait", "setmaxnreg")
JUMPS = ("bra", "brx", "ret", "exit")


def width_of(type_name: str) -> int:
    """Bytes of a PTX type."""
    return WIDTHS.get(type_name) or int(re.sub(r"\D", "", type_name)) // 8


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@!p op.a.b x, y` has predicate "p", negated, parts ("op", "a", "b") and operands ("x", "y")."""

    text: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None = None
    negated: bool = False

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True)
class Param:
    """A parameter; `bytes` counts those of an aggregate."""

    name: str
    type: str
    bytes: int


@dataclass(frozen=True)
class Variable:
    """An array that the program declares; None bytes where the launch says how many."""

    name: str
    space: str
    bytes: int | None
    align: int
    values: bytes | None


@dataclass
class Block:
    """Straight code, at most its last instruction a jump; or one instruction at which a warp may have to wait."""

    instructions: list[Instruction] = field(default_factory=list)
    together: bool = False  # begins with what a warp does as one, so its lanes have to meet before
    waits: bool = False


@dataclass
class Program:
    """One kernel."""

    name: str
    params: list[Param]
    variables: list[Variable]
    blocks: list[Block]
    labels: dict[str, int]  # to blocks
    tables: dict[str, list[str]]  # of indirect branches
    widths: dict[str, int]  # bytes of registers, by name without its number
    threads: int | None  # a block
    registers: int | None  # a thread, at the start


def parse(text: str) -> dict[str, Program]:
    """The kernels of a PTX file by name."""
    text = DIRECTIVE.sub("", COMMENT.sub("", text))
    variables = [_variable(match) for match in VARIABLE.finditer(_outside(text))]
    programs = {}
    for match in ENTRY.finditer(text):
        params = [PARAM.search(" ".join(line.split())) for line in match["params"].split(",") if line.strip()]
        body = text[match.end() : _closing(text, match.end())]
        statements = list(_statements(body))
        program = Program(
            match["name"],
            [Param(p["name"], p["type"], int(p["bytes"] or 0) * width_of(p["type"])) for p in params if p],
            [each for each in variables if each.name in body] + _declared(statements),
            [], {}, {}, {},
            _option(match["options"], "reqntid"),
            _option(match["options"], "maxnreg"),
        )  # fmt: skip
        _fill(program, statements)
        programs[program.name] = program
    return programs


def _declared(statements: list[str]) -> list[Variable]:
    return [_variable(match) for line in statements if (match := VARIABLE.match(line))]


def _outside(text: str) -> str:
    """The declarations before and between kernels."""
    kept, at = [], 0
    for match in ENTRY.finditer(text):
        kept.append(text[at : match.start()])
        at = _closing(text, match.end())
    return "".join([*kept, text[at:]])


def _closing(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return match.start()
    raise AssertionError("a kernel without an end")


def _option(text: str, name: str) -> int | None:
    match = re.search(rf"\.{name}\s+(\d+)", text)
    return int(match[1]) if match else None


def _variable(match: re.Match[str]) -> Variable:
    width, values = width_of(match["type"]), None
    if match["values"]:
        numbers = [int(each, 0) for each in re.findall(r"-?\w+", match["values"])]
        values = b"".join((each & ((1 << 8 * width) - 1)).to_bytes(width, "little") for each in numbers)
    count = match["count"]
    size = None if count == "" else int(count or 1) * width
    return Variable(match["name"], match["space"], size, int(match["align"]), values)


def _statements(body: str) -> Iterator[str]:
    """Instructions, declarations and `label:`; names of inner scopes are made unlike any others."""
    scopes: list[dict[str, str]] = []
    count = 0
    for raw in re.split(r"(?<=;)|(?<=:)\s|\n(?=\s*[{}]\s*\n)", body):
        line = " ".join(raw.split())
        while line and line[0] in "{}":
            if line[0] == "{":
                scopes.append({})
                count += 1
            elif scopes:
                scopes.pop()
            line = line[1:].strip()
        line = line.removesuffix(";").strip()
        if not line:
            continue
        if scopes and (declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", line)):
            for name in declared[2].split(","):
                if "<" not in name:
                    scopes[-1][name.strip()] = f"{name.strip()}.{count}"
        elif scopes and line.endswith(":"):
            scopes[-1].setdefault(line[:-1], f"{line[:-1]}.{count}")
        for scope in scopes:
            for name, own in scope.items():
                line = re.sub(rf"(?<![\w%$.]){re.escape(name)}(?![\w$.])", own, line)
        yield line


def _fill(program: Program, statements: list[str]) -> None:
    """Cut the statements into blocks."""
    blocks = program.blocks
    blocks.append(Block())
    met = False  # whether lanes have met since the block began

    def begin() -> None:
        nonlocal met
        if blocks[-1].instructions:
            blocks.append(Block())
        met = False

    for place, line in enumerate(statements):
        if line.endswith(":"):
            if not (place + 1 < len(statements) and statements[place + 1].startswith(".branchtargets")):
                begin()
                program.labels[line[:-1]] = len(blocks) - 1
        elif line.startswith(".branchtargets"):
            program.tables[statements[place - 1][:-1]] = [each.strip() for each in line[14:].split(",")]
        elif declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", line):
            for name in declared[2].split(","):
                program.widths[stem(name.split("<")[0].strip())] = width_of(declared[1])
        elif not line.startswith("."):
            instruction = decoded(line)
            waits = instruction.opcode.startswith(WAITS) and instruction.opcode != "bar.warp.sync"
            together = waits or instruction.name in TOGETHER or instruction.opcode == "bar.warp.sync"
            if waits or (together and not met):
                begin()
                blocks[-1].together, blocks[-1].waits = True, waits
                met = True
            blocks[-1].instructions.append(instruction)
            if waits or instruction.name in JUMPS:
                begin()
    if not blocks[-1].instructions:
        blocks.pop()


def stem(register: str) -> str:
    """A register's name without its number."""
    return register if "." in register else register.rstrip("0123456789")


def decoded(line: str) -> Instruction:
    """An instruction from its text, without the semicolon."""
    match = INSTRUCTION.fullmatch(line)
    assert match, line
    operands = tuple(each.strip() for each in OPERAND.findall(match["operands"]))
    parts = tuple(match["opcode"].replace("::", "__").split("."))
    return Instruction(line, parts, operands, match["predicate"], match["not"] == "!")
