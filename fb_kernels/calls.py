"""How ops are called: what the self check, `futurebridge bench`, the tests and the ahead-of-time compilers run.

The folder of every op has a `calls.py` whose OPS describe its public functions; `every` finds them. A call is built in
float32 on torch's default device, the same everywhere, and cast and moved from there; on "meta" it has no numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fb_kernels
from fb_kernels import BranchLayout, DecodeState, LayerWeights

EPS = 1e-6
SIZES = ("small", "checked", "timed")  # for a CPU; for a GPU, checked by the definition; a model's, to be timed
INDICES = ("cu_branch", "cu_group", "prefix_start", "prefix_len", "block_table")  # of a layout
DRAWN = 1 << 23  # most random numbers of a tensor, repeated in larger ones: more take longer than the calls
PAGE = 64
CHECKED = 16  # rows of a `Part`
RAGGED = (0, 6, 14)  # offsets of groups of six and eight, in the place of two groups of seven


@dataclass(frozen=True)
class Call:
    """One call; `names` are those of its tensors, `state.halt` or `kv_out.0` where one lies inside an argument."""

    op: str  # the public function's name
    arguments: dict[str, Any]  # by name
    written: tuple[str, ...] = ()  # tensors that the op writes to
    gradients: tuple[str, ...] = ()  # tensors that gradients reach
    outputs: tuple[int, ...] = (0,)  # the results that carry them
    least: dict[str, torch.dtype] = field(default_factory=dict)  # of floats that no cast makes narrower
    shape: str = ""  # the size in words
    scales: tuple[float | None, ...] = ()  # for each result, the magnitude at which ulps count; None for its rows'
    flops: float = 0.0  # of the call
    bytes: float = 0.0  # minimum bytes read and written, with floats of 2 bytes
    part: Part | None = None  # the rows that are checked, if the whole definition takes long
    # ways to do the same in plain torch, by name; they take the arguments
    plain: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # the least that Triton's kernels move in the call and its backward, in bytes by name
    launches: Mapping[str, int] = field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(fb_kernels, self.op)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the arguments, by name."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.arguments.items():
            if isinstance(value, DecodeState | LayerWeights):
                tensors |= {f"{name}.{field}": x for field, x in value._asdict().items() if x is not None}
            elif isinstance(value, BranchLayout):
                fields = {field: getattr(value, field) for field in INDICES}
                tensors |= {f"{name}.{field}": x for field, x in fields.items() if x is not None}
            elif isinstance(value, tuple):
                tensors |= {f"{name}.{place}": x for place, x in enumerate(value) if isinstance(x, Tensor)}
            elif isinstance(value, Tensor):
                tensors[name] = value
        return tensors

    @property
    def floats(self) -> dict[str, Tensor]:
        """The tensors of floating point, by name."""
        return {name: x for name, x in self.tensors.items() if x.is_floating_point()}

    def changed(self, **changes: Any) -> dict[str, Any]:
        """The arguments with others in their places; names with a dot reach inside."""
        built = dict(self.arguments)
        inside: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            outer, _, inner = name.partition(".")
            (inside.setdefault(outer, {}) if inner else built)[inner or outer] = value
        for outer, values in inside.items():
            whole = built[outer]
            if isinstance(whole, DecodeState | LayerWeights):
                built[outer] = whole._replace(**values)
            elif isinstance(whole, BranchLayout):
                built[outer] = replace(whole, **values)
            else:
                built[outer] = tuple(values.get(str(place), x) for place, x in enumerate(whole))
        return built

    def with_(self, **changes: Any) -> Call:
        """The call with other arguments."""
        return replace(self, arguments=self.changed(**changes))

    def cast(self, dtype: torch.dtype) -> Call:
        """The call with its floats in a dtype."""
        floats = self.floats.items()
        return self.with_(**{name: x.to(torch.promote_types(dtype, self.least.get(name, dtype))) for name, x in floats})

    def fresh(self) -> Call:
        """The call with copies of the tensors that it writes, for one more run."""
        return self.with_(**{name: self.tensors[name].clone() for name in self.written})

    def on(self, device: torch.device | str) -> Call:
        """The call with its tensors on a device, with their strides."""
        moved = {name: on(device, x) for name, x in self.tensors.items() if x.device != torch.device(device)}
        return self.with_(**moved) if moved else self

    def run(self, **changes: Any) -> list[Tensor]:
        """What it returns, then what it wrote."""
        call = self.with_(**changes)
        results = call.function(**call.arguments)
        tensors = call.tensors
        return [*([] if results is None else listed(results)), *(tensors[name] for name in self.written)]

    def moved(self, dtype: torch.dtype) -> float:
        """Minimum bytes read and written with floats of this dtype."""
        return self.bytes if self.floats.keys() <= self.least.keys() else self.bytes * dtype.itemsize / 2


class Part(NamedTuple):
    """Some rows of a call's results."""

    alone: Callable[[Call], Call]  # makes of the call one of these rows
    of: Callable[[Sequence[Tensor]], list[Tensor]]  # takes the same rows of whole results


@dataclass(frozen=True)
class Calls:
    """A public function and how it is called."""

    op: str  # its name
    shaped: Callable[..., Call]  # a call in float32; its positional parameters are dimensions, each with a default
    # what a call returns, then what it writes, by `naive.py`, in the dtype of its arguments
    definition: Callable[[Call], list[Tensor]]
    # dimensions of the calls that are compared with the definition, at each of SIZES that has others
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    checked: Callable[[str], Iterable[Call]] | None = None  # such calls at one of SIZES, if not of those dimensions
    # the calls whose Triton kernels are compiled ahead of time; None for `shaped()` in bfloat16
    compiled: Callable[[], Iterable[Call]] | None = None
    takes: str = ""  # its tensors with their shapes; those in brackets may be None
    gives: str = ""  # its results
    cpu: str = ""  # dtypes of its kernel for CPU tensors
    cuda: str = ""  # dtypes of its CUDA kernel
    optional: tuple[str, ...] = ()  # further arguments that gradients reach, which `shaped` does not pass

    def dimensions(self) -> dict[str, int]:
        """The dimensions of `shaped`, with their defaults."""
        parameters = inspect.signature(self.shaped).parameters.values()
        return {x.name: x.default for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD}

    def at(self, size: str) -> Iterable[Call]:
        """The calls that are compared with the definition at one of SIZES."""
        return self.checked(size) if self.checked else [self.shaped(*self.sizes.get(size, ()))]


@cache
def every() -> dict[str, tuple[Calls, ...]]:
    """The public functions of all ops, by folder."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/calls.py"))
    return {folder: import_module(f"fb_kernels.{folder}.calls").OPS for folder in folders}


def by_name() -> dict[str, tuple[str, Calls]]:
    """(folder, function) of all public functions, by name."""
    return {op.op: (folder, op) for folder, ops in every().items() for op in ops}


def checked(folder: str, size: str) -> list[tuple[Calls, Call]]:
    """The calls by which an op is checked, at one of SIZES."""
    return [(op, call) for op in every()[folder] for call in op.at(size)]


def by_definition(naive: Callable[..., Any]) -> Callable[[Call], list[Tensor]]:
    """What a definition of the same arguments returns, then what it writes."""

    def definition(call: Call) -> list[Tensor]:
        own = call.fresh()
        results, tensors = naive(**own.arguments), own.tensors
        return [*([] if results is None else listed(results)), *(tensors[name] for name in call.written)]

    return definition


def on(device: torch.device | str, x: Tensor) -> Tensor:
    """The tensor on a device, with its strides; `to` changes those of a tensor with gaps."""
    storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def listed(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The results of an op as a list."""
    return [results] if isinstance(results, Tensor) else list(results)


def randn(*shape: int, seed: int = 0, heavy: int = 0) -> Tensor:
    """Random numbers, repeated in large tensors; the last `heavy` rows are doubled, so that leaving them out shows."""
    if torch.get_default_device().type == "meta":
        return torch.empty(shape)
    count = torch.Size(shape).numel()
    source = torch.Generator().manual_seed(seed + sum(shape))
    numbers = torch.randn(min(count, DRAWN), generator=source, device="cpu").to(torch.get_default_device())
    x = numbers.repeat(-(-count // max(len(numbers), 1)))[:count].view(shape)
    if heavy:
        x[-heavy:] *= 2
    return x


def ids(limit: int, count: int) -> Tensor:
    """Random ids below a limit."""
    if torch.get_default_device().type == "meta":
        return torch.empty(count, dtype=torch.int64)
    source = torch.Generator().manual_seed(limit + count)
    return torch.randint(limit, (count,), generator=source, device="cpu").to(torch.get_default_device())


def widen(x: Tensor) -> Tensor:
    """The tensor in the dtype of sums: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def offsets(groups: int, size: int) -> Tensor:
    """Where groups of one size begin, and where the last one ends."""
    return torch.arange(groups + 1, dtype=torch.int32) * size


def angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotary tables, [S, E]."""
    angle = torch.outer(torch.arange(float(length)), 1e4 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
    return angle.cos(), angle.sin()


def sample_rows(rows: int) -> Tensor:
    """Up to CHECKED of the numbers 0 to rows - 1, evenly spaced."""
    return torch.linspace(0, rows - 1, min(rows, CHECKED)).long()


def sequences(lengths: tuple[int, ...], rows: int) -> tuple[int, dict[str, Tensor]]:
    """(number of pages, indices) of `rows` rows after each sequence, in pages of PAGE tokens."""
    held, groups = torch.tensor(lengths, dtype=torch.int32), len(lengths)
    columns = -(-(max(lengths) + rows) // PAGE)
    order = torch.randperm(groups * columns, generator=torch.Generator().manual_seed(groups))
    table = order.view(groups, columns).int()
    token = held[:, None] + torch.arange(rows, dtype=torch.int32)
    slots = table.gather(1, (token // PAGE).long()) * PAGE + token % PAGE
    positions = held.repeat_interleave(rows)
    return groups * columns, {"positions": positions, "held": held, "slots": slots.flatten(), "block_table": table}
