"""Reference pages that are generated from the code: the table of ops, the picture of a layout, the settings."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from benchmarks.roofline import GREY
from fb_core.config import PairSettings, RunSettings, ServeSettings
from fb_core.page import markdown_table
from fb_kernels import BranchLayout, bench, branch_attention
from fb_kernels._op import Op
from fb_kernels.self_check_calls import SHAPED

# --- ops --------------------------------------------------------------------------------------------------------------

SMALL = {"n": 4, "d": 64, "v": 300, "f": 96, "g": 2, "k": 6, "l": 3, "p": 20, "hq": 4, "hkv": 2, "e": 64}
SMALL |= {"h": 16, "s": 2, "m": 80}


@dataclass(frozen=True)
class Row:
    """What a reader wants to know about an op beyond its signature.

    Attributes:
        op: its public name.
        takes: its tensors with their shapes; those in brackets may be None.
        gives: its results.
        floats: names of the float tensors of its call in `fb_kernels.self_check_calls`, in that order.
        cpu: dtypes of its kernel for CPU tensors.
        cuda: dtypes of its CUDA kernel.
    """

    op: str
    takes: str
    gives: str
    floats: tuple[str, ...] = ()
    cpu: str = ""
    cuda: str = ""


BOTH, HALF, ALL = "fp32, bf16", "bf16, fp16", "fp32, bf16, fp16"
CACHE = "k_cache[slots, Hkv, E] or pages[pages, page, Hkv, E], v_cache, held[G], (slots[N]), (block_table[G, n])"
OPS = (
    Row(
        "linear_logprob",
        "hidden[..., D], weight[V, D], target[...], (bias[V])",
        "logprob[...], on request lse, entropy and the row's largest log-prob, all fp32",
        ("hidden", "weight"),
        cpu=BOTH,
    ),
    Row(
        "linear_logprob_partials",
        "hidden[..., D], weight_shard[Vs, D], target[...], (bias[Vs])",
        "max[...], sumexp[...], target_logit[...], fp32",
        ("hidden", "weight_shard"),
    ),
    Row(
        "combine_logprob_partials",
        "max[S, N], sumexp[S, N], target_logit[S, N], fp32 or fp64",
        "logprob[N], lse[N]",
        ("max", "sumexp", "target_logit"),
    ),
    Row(
        "branch_attention",
        "q[T, Hq, E], (k[T, Hkv, E]), (v), prefix_k[Tp, Hkv, E] or pages [pages, page, Hkv, E], prefix_v, layout",
        "out[T, Hq, E], on request lse[Hq, T] fp32",
        ("q", "k", "v", "prefix_k", "prefix_v"),
        cpu=BOTH,
        cuda=HALF,
    ),
    Row(
        "branch_attention_qkv",
        f"qkv[N, (Hq + 2 Hkv) E], (q_weight[E]), (k_weight[E]), cos[S, E], sin[S, E], positions[N], {CACHE}",
        "out[N, Hq, E]; writes k and v to their slots",
        cpu=BOTH,
        cuda=HALF,
    ),
    Row(
        "decoder_layer",
        f"hidden[N, D], LayerWeights, cos[S, E], sin[S, E], positions[N], {CACHE}",
        "hidden[N, D]; writes k and v to their slots",
        cpu=BOTH,
    ),
    Row(
        "merge_attention_states",
        "out_a[T, Hq, E], lse_a[Hq, T] fp32, out_b, lse_b",
        "out[T, Hq, E], lse[Hq, T]",
        ("out_a", "out_b", "lse_a", "lse_b"),
        cpu="fp32",
    ),
    Row(
        "topk_entropy",
        "logits[..., V]",
        "entropy[...], values[..., k], fp32; indices[..., k] int64",
        cpu=BOTH,
        cuda=ALL,
    ),
    Row(
        "joint_pool",
        "slm_ids[..., Ks], llm_ids[..., Kt], int32 or int64",
        "ids[..., Ks + Kt], count[...], source[..., Ks + Kt]",
    ),
    Row(
        "candidate_head",
        "hidden[N, D], (norm_weight[D]), head_weight[D], cu_group[G + 1], (head_bias[1])",
        "score[N], prob[N], fp32; best[G] int64",
        ("hidden", "norm_weight", "head_weight"),
        cpu="fp32",
        cuda=ALL,
    ),
    Row(
        "compatibility_targets",
        "logprob[N, H], cu_group[G + 1], (local[N])",
        "B[N, horizons], q[N, horizons], fp32",
    ),
    Row(
        "group_cross_entropy",
        "score[N], target[N], cu_group[G + 1]",
        "loss, or [G] with reduction none, fp32",
        ("score", "target"),
    ),
    Row(
        "rms_norm",
        "x[..., D], weight[D], (residual[..., D])",
        "normed[..., D], sum[..., D]",
        ("x", "weight", "residual"),
        cpu=BOTH,
    ),
    Row(
        "qk_norm_rope",
        "qkv[T, (Hq + 2 Hkv) E], (q_weight[E]), (k_weight[E]), cos[S, E], sin[S, E], positions[T], (kv_out)",
        "q[T, Hq, E], k[T, Hkv, E], v[T, Hkv, E]; with kv_out writes k and v to their slots",
        ("qkv", "q_weight", "k_weight", "cos", "sin"),
        cpu="fp32",
    ),
    Row("swiglu", "gate_up[..., 2 F]", "[..., F]", ("gate_up",), cpu="fp32"),
    Row(
        "skinny_linear",
        "x[N, K], weight[M, K], (bias[M]), (norm_weight[K]), (residual[N, M])",
        "[N, M], with swiglu [N, M / 2]",
        cpu=BOTH,
        cuda=HALF,
    ),
    Row(
        "commit_",
        "DecodeState, token[B], entropy[B], threshold[] or [B], eos_ids[n], max_length[] or [B], (outcome[B, 3])",
        "writes the state",
        cuda="fp32 entropy",
    ),
)
OPTIONAL = {"linear_logprob": ("bias",), "linear_logprob_partials": ("bias",), "candidate_head": ("head_bias",)}


def kernels(op: str) -> list[str]:
    """The kinds of kernels that an op has."""
    call = SHAPED[op](**{name: SMALL[name] for name in bench.dimensions()[op]})
    members = vars(importlib.import_module(f"fb_kernels.{call.op}")).values()
    (kinds,) = (member.kinds for member in members if isinstance(member, Op) and member.name == op)
    return kinds


def gradients(row: Row) -> list[str]:
    """The arguments to which a small call's results give a gradient, by autograd."""
    call = SHAPED[row.op](**{name: SMALL[name] for name in bench.dimensions()[row.op]})
    floats, indices = call.given(torch.float32, "cpu")
    names = []
    for name, x in zip(row.floats, floats, strict=False):
        try:
            outputs = call.ours(*(tensor.detach().requires_grad_(tensor is x) for tensor in floats), *indices)
        except ValueError:  # expected an argument that requires no grad
            continue
        if any(output.requires_grad for output in (outputs if isinstance(outputs, tuple) else (outputs,))):
            names.append(name)
    return [*names, *OPTIONAL.get(row.op, ())]


def ops_table() -> list[str]:
    """Every public op, in Markdown."""
    rows = []
    for row in OPS:
        kinds = kernels(row.op)
        cuda = row.cuda if "cuda" in kinds else ""
        reached = ", ".join(gradients(row)) or "none"
        rows.append([f"`{row.op}`", row.takes, row.gives, reached, cuda, ALL if "triton" in kinds else "", row.cpu])
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
    """A type in words: "whole number", "list of numbers", or the values that it may have."""
    plain = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if annotation in plain:
        return plain[annotation]
    parts = get_args(annotation)
    name = getattr(annotation, "__name__", str(annotation))
    if name == "Literal" or str(annotation).startswith("typing.Literal"):
        return ", ".join(f"`{value}`" for value in parts)
    if hasattr(annotation, "__metadata__"):
        return kind_of(parts[0])
    if getattr(annotation, "__origin__", None) is tuple:
        return f"list of: {kind_of(parts[0])}"
    if getattr(annotation, "__origin__", None) is dict:
        return "text by text"
    return " or ".join(kind_of(part) for part in parts)


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
        return "must be given"
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
        what = f"see `{name}.{key}`" + (" or null" if not field.is_required() and field.default is None else "")
        shown = what if inner else kind_of(field.annotation)
        default = "" if inner and field.default is not None else default_of(field)
        meaning = re.sub(r"\bNone\b", "null", " ".join((field.description or "").split()))
        rows.append([f"`{key}`", shown, default, bounds(field), meaning])
    yield from markdown_table(["key", "type", "default", "bounds", "meaning"], rows)
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
