"""Reference pages that are generated from the code: the table of ops, the picture of a layout, the settings."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from benchmarks.gpu.roofline import GREY
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.settings.pair import PairSettings, ServeSettings
from fb_core.apps.settings.run import RunSettings
from fb_kernels import BranchLayout, bench, branch_attention, calls
from fb_kernels._runtime.op import Op
from fb_kernels.calls import Call

ALL = "all"  # fp32, bf16 and fp16

# --- ops --------------------------------------------------------------------------------------------------------------

SMALL = {"n": 4, "d": 64, "v": 300, "f": 96, "g": 2, "k": 6, "l": 3, "p": 20, "hq": 4, "hkv": 2, "e": 64}
SMALL |= {"h": 16, "s": 2, "m": 80}
ORDER = (  # in the table of docs/ops.md; others follow
    *("linear_logprob", "linear_logprob_partials", "combine_logprob_partials"),
    *("branch_attention", "branch_attention_qkv", "decoder_layer", "merge_attention_states"),
    *("topk_entropy", "joint_pool", "candidate_head", "compatibility_targets", "group_cross_entropy"),
    *("rms_norm", "qk_norm_rope", "swiglu", "skinny_linear", "commit_"),
)


def ops() -> list[str]:
    """All public functions, in order."""
    names = calls.by_name()
    return [*(name for name in ORDER if name in names), *(name for name in names if name not in ORDER)]


def small(op: str) -> Call:
    """A small call."""
    _, function = calls.by_name()[op]
    return function.shaped(**{name: SMALL[name] for name in bench.dimensions()[op]})


def kernels(op: str) -> list[str]:
    """The kinds of kernels that an op has."""
    members = vars(importlib.import_module(f"fb_kernels.{calls.by_name()[op][0]}")).values()
    (kinds,) = (member.kinds for member in members if isinstance(member, Op) and member.name == op)
    return kinds


def gradients(op: str) -> list[str]:
    """The arguments to which a small call's results give a gradient, by autograd."""
    call = small(op)
    names = []
    for name, x in call.floats.items():
        try:
            results = call.fresh().run(**{name: x.detach().requires_grad_()})
        except ValueError:  # expected an argument that requires no grad
            continue
        if any(result.requires_grad for result in results[: len(results) - len(call.written)]):
            names.append(name)
    return [*names, *calls.by_name()[op][1].optional]


def taken(op: str) -> str:
    """Its tensors with their shapes, then `name=` for everything else without a default."""
    takes = calls.by_name()[op][1].takes
    needed = [x.name for x in inspect.signature(small(op).function).parameters.values() if x.default is x.empty]
    return ", ".join([takes, *(f"{name}=" for name in needed if not re.search(rf"\b{name}\b", takes))])


def ops_table() -> list[str]:
    """Every public op, in Markdown."""
    rows = []
    for op in ops():
        kinds, (_, about) = kernels(op), calls.by_name()[op]
        triton, cuda = ALL if "triton" in kinds else "", about.cuda if "cuda" in kinds else ""
        rows.append([f"`{op}`", taken(op), about.gives, ", ".join(gradients(op)) or "none", cuda, triton, about.cpu])
    return markdown_table(["op", "takes", "gives", "gradients to", "CUDA kernel", "Triton kernel", "CPU kernel"], rows)


# --- who sees whom ----------------------------------------------------------------------------------------------------

BRANCHES, PREFIXES = [[2, 3], [2]], [(0, 4), (4, 3)]
CELL, LEFT, TOP = 26, 210, 92
COLOURS = ("#3b7dd8", "#c2702c")  # of the groups; legible on white and on black, and distinct for colour-blind people


def seen() -> list[list[bool]]:
    """[rows][prefix keys, then rows]: which keys each row sees, read off a result of `branch_attention`."""
    layout = BranchLayout.of(BRANCHES, PREFIXES, device="cpu")
    rows, keys = sum(map(sum, BRANCHES)), sum(length for _, length in PREFIXES)
    values = torch.eye(keys + rows)[:, None]  # every key's value is its own unit vector
    zero = torch.zeros(keys + rows, 1, keys + rows)
    out = branch_attention(zero[keys:], zero[keys:], values[keys:], zero[:keys], values[:keys], layout)
    return (out[:, 0] > 0).tolist()


def layout_picture() -> str:
    """An SVG of the layout of docs/ops.md: a row of squares for each row, filled where it sees a key."""
    grid = seen()
    keys = sum(length for _, length in PREFIXES)
    groups = [group for group, branches in enumerate(BRANCHES) for rows in branches for _ in range(rows)]
    width, height = LEFT + len(grid[0]) * CELL + 30, TOP + len(grid) * CELL + 20

    def text(x: float, y: float, said: str, anchor: str = "middle") -> str:
        return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{said}</text>'

    def x_of(column: int) -> int:
        return LEFT + column * CELL + (10 if column >= keys else 0)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="{GREY}">',
        "<title>Which keys each row of two groups sees</title>",
        text(LEFT + keys * CELL / 2, 20, "keys of the prefix"),
        text(x_of(keys) + len(grid) * CELL / 2, 20, "keys of the branches' own rows"),
    ]
    for group, (start, length) in enumerate(PREFIXES):
        x = x_of(start)
        lines.append(text(x + length * CELL / 2, 44, f"of group {group}"))
        lines.append(f'<rect x="{x + 2}" y="52" width="{length * CELL - 4}" height="3" fill="{COLOURS[group]}"/>')
    for column in range(len(grid[0])):
        lines.append(text(x_of(column) + CELL / 2, TOP - 12, str(column if column < keys else column - keys)))
    first = 0
    branches = [(group, rows) for group, lengths in enumerate(BRANCHES) for rows in lengths]
    for branch, (group, rows) in enumerate(branches):
        y = TOP + first * CELL + rows * CELL / 2 + 4
        lines.append(text(LEFT - 36, y, f"group {group}, branch {branch}", "end"))
        lines.append(
            f'<rect x="{LEFT - 30}" y="{TOP + first * CELL + 3}" width="3" height="{rows * CELL - 6}" '
            f'fill="{COLOURS[group]}"/>'
        )
        first += rows
    for row, columns in enumerate(grid):
        lines.append(text(LEFT - 12, TOP + row * CELL + CELL / 2 + 4, str(row)))
        for column, sees in enumerate(columns):
            fill = f'fill="{COLOURS[groups[row]]}"' if sees else f'fill="none" stroke="{GREY}" stroke-opacity="0.5"'
            x, y, side = x_of(column) + 2, TOP + row * CELL + 2, CELL - 4
            lines.append(f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="3" {fill}/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


# --- settings ---------------------------------------------------------------------------------------------------------


def nested(field: FieldInfo) -> type[BaseModel] | None:
    """The settings class of a field that has nested keys."""
    for part in (field.annotation, *get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def kind_of(annotation: Any) -> str:
    """A type in words: "integer", "list of numbers", or the values that it may have."""
    plain = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "null"}
    if annotation in plain:
        return plain[annotation]
    parts = get_args(annotation)
    name = getattr(annotation, "__name__", str(annotation))
    if name == "Literal" or str(annotation).startswith("typing.Literal"):
        return ", ".join(f"`{value}`" for value in parts)
    if hasattr(annotation, "__metadata__"):
        return kind_of(parts[0])
    if getattr(annotation, "__origin__", None) is tuple:
        return f"list of {kind_of(parts[0])}"
    if getattr(annotation, "__origin__", None) is dict:
        return "text by text"
    return " or ".join(kind_of(part) for part in parts)


def told(field: FieldInfo) -> bool:
    """Whether the default shows what kind of value a key takes."""
    value = field.get_default(call_default_factory=True) if not field.is_required() else None
    return value is not None and field.annotation is not None and "Literal" not in str(field.annotation)


def bounds(field: FieldInfo) -> str:
    """The limits of a number, or of each number in a list."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}

    def of(metadata: Any) -> Iterator[str]:
        for constraint in metadata:
            yield from (
                f"{sign} {getattr(constraint, name)}" for name, sign in signs.items() if hasattr(constraint, name)
            )
            yield from of(getattr(constraint, "metadata", ()))

    def inside(annotation: Any) -> Iterator[str]:
        yield from of(getattr(annotation, "__metadata__", ()))
        for part in get_args(annotation):
            yield from inside(part)

    return ", ".join(dict.fromkeys([*of(field.metadata), *inside(field.annotation)]))


def default_of(field: FieldInfo) -> str:
    """The default as written in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, tuple):
        text = f"[{', '.join(map(str, value))}]"
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


def sections(kind: type[BaseModel], name: str) -> Iterator[str]:
    """A heading and a table per section, then its nested sections."""
    yield from ("", f"{'#' * (2 + name.count('.'))} `{name}`", "")
    yield from ((kind.__doc__ or "").strip().partition("\n\n")[0], "")
    rows, below = [], []
    for key, field in kind.model_fields.items():
        if key not in kind.__annotations__:  # of the class that it adds to
            continue
        inner = nested(field)
        if inner:
            below.append((inner, f"{name}.{key}"))
        shown = f"see `{name}.{key}`" if inner else "" if told(field) else kind_of(field.annotation)
        default = "" if inner and field.default is not None else default_of(field)
        meaning = re.sub(r"\bNone\b", "null", " ".join((field.description or "").split()))
        if field.default is None:
            shown = shown.removesuffix(" or null")
        values = ", ".join(part for part in (shown, bounds(field)) if part)
        rows.append([f"`{key}`", default, values, meaning])
    yield from markdown_table(["key", "default", "values", "meaning"], rows)
    for inner, path in dict.fromkeys(below):
        if inner not in {other for other, _ in below[: below.index((inner, path))]}:
            yield from sections(inner, path)


def settings_tables() -> list[str]:
    """Every key of the YAML file of a run, and of that of a pair, in Markdown."""
    lines: list[str] = []
    for name, field in RunSettings.model_fields.items():
        kind = nested(field)
        assert kind is not None
        lines += sections(kind, name)
    return [*lines, *sections(PairSettings, "pair"), *sections(ServeSettings, "serve")]
