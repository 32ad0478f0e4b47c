"""Benchmarks of one op at a given shape: its kernels and plain torch, checked first, then timed.

`futurebridge bench` shows the results. An implementation that fails its check against the definition is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from fb_kernels import calls, self_check
from fb_kernels._runtime import backend, timing
from fb_kernels.calls import Call, Calls, listed
from fb_kernels.testing import assert_close_to_reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Timed:
    """One way to compute the op."""

    name: str  # of an implementation ("cuda", "triton", "cpu", "reference") or of a way in plain torch
    ours: bool = False  # whether it is an implementation of the op
    used: bool = False  # whether a call of the op runs it here
    fault: str = ""  # why it was not timed; empty if it was
    seconds: float | None = None  # median time of a call; on a GPU from a cold cache


@dataclass(frozen=True)
class Results:
    """The results for an op at one shape."""

    op: str  # its public name
    shape: str  # the size in words
    device: str
    dtype: str  # of the floats
    flops: float  # of a call
    bytes: float  # minimum that a call reads and writes
    copied: float  # seconds that a copy of that many bytes takes on this device
    multiplied: float  # seconds that a matrix product with that many operations takes on this device
    rows: tuple[Timed, ...]  # what was timed, ours first

    @property
    def floor(self) -> float:
        """Seconds that torch's copy or product takes, whichever is longer; 0 if too little is moved to tell."""
        return max(self.copied, self.multiplied)

    def ratio(self, row: Timed) -> float | None:
        """The time of the fastest other way divided by this one's; None if either is missing."""
        others = [other.seconds for other in self.rows if other is not row and other.seconds]
        return min(others) / row.seconds if others and row.seconds else None

    @property
    def unit(self) -> str:
        """Of rates: GFLOP/s if operations set the floor, else GB/s."""
        return "GFLOP/s" if self.multiplied > self.copied else "GB/s"

    def rate(self, row: Timed) -> float | None:
        """How fast it went, in `unit`; None if it was not timed or moves too little."""
        if row.seconds is None or not self.floor:
            return None
        return (self.flops if self.multiplied > self.copied else self.bytes) / row.seconds * 1e-9


def dimensions() -> dict[str, dict[str, int]]:
    """{op: {dimension: default}} of all ops that can be timed."""
    return {op: function.dimensions() for op, (_, function) in calls.by_name().items()}


def bench(op: str, sizes: Mapping[str, int], dtype: str | None = None, device: str | None = None) -> Results:
    """Check and time the implementations of an op, such as "linear_logprob", and ways to do the same in plain torch.

    Sizes are by dimension, at least 1 each; a dimension that is left out has its default. The device, "cpu" or "cuda",
    is a GPU by default if there is one, the dtype bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ValueError: an unknown op, dimension, dtype or device, or a device that is not there.
    """
    defaults = dimensions()
    if op not in defaults:
        _refuse("an op of " + ", ".join(defaults), repr(op), "name one")
    if wrong := [name for name in sizes if name not in defaults[op]]:
        wanted = ", ".join(f"--{name}" for name in defaults[op]) or "no dimension"
        _refuse(f"{wanted} for {op}", f"--{wrong[0]}", "leave it out")
    if small := [name for name, size in sizes.items() if size < 1]:
        _refuse(f"--{small[0]} of at least 1", str(sizes[small[0]]), "give another size")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        _refuse("cpu, or cuda where there is a GPU", repr(device), "see `futurebridge env`")
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    if dtype is not None and dtype not in DTYPES:
        _refuse(", ".join(DTYPES), repr(dtype), "give one of them as --dtype")
    kind = DTYPES[dtype] if dtype else kind
    chosen = {**defaults[op], **sizes}
    folder, function = calls.by_name()[op]
    call = function.shaped(**chosen).cast(kind)
    copy, product = timing.ceilings(device, kind)
    return Results(
        op,
        " ".join(f"{name.capitalize()}={size}" for name, size in chosen.items()) or call.shape,
        torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)",
        str(kind).removeprefix("torch."),
        call.flops,
        call.moved(kind),
        call.moved(kind) / copy,
        call.flops / product,
        tuple(_rows(op, folder, function, call, device)),
    )


def _refuse(expected: str, got: str, remedy: str) -> NoReturn:
    raise ValueError(f"bench: expected {expected}, got {got}; {remedy}")


def _rows(op: str, folder: str, function: Calls, call: Call, device: str) -> list[Timed]:
    """All ways, checked and timed."""
    some = call.part.alone(call) if call.part else call
    here = call.on(device)
    with torch.no_grad():
        truth, native = (function.definition(each.on(device)) for each in (some.cast(torch.float64), some))
        emulated = ("cuda", "triton") if device == "cpu" else ()
        kernels = {name: why for name, why in backend.kernels(op, device).items() if name not in emulated}
        with backend.seen() as ran:
            here.fresh().run()
        taken = set(ran.values()) or {self_check.REFERENCE}
        rows = []
        for kernel, absent in {**kernels, self_check.REFERENCE: ""}.items():
            row = Timed(kernel, ours=True, used=kernel in taken, fault=absent)
            with backend.override(f"auto,{folder}={kernel}"):
                takes = "" if kernel == self_check.REFERENCE else backend.takes(kernel, folder)
                rows.append(row if absent else _timed(row, here, call.function, truth, native, device, takes))
        for name, way in call.plain.items():
            rows.append(_timed(Timed(name), here, way, truth, native, device))
    return rows


def _timed(
    row: Timed,
    call: Call,
    way: Callable[..., Any],
    truth: Sequence[Tensor],
    native: Sequence[Tensor],
    device: str,
    takes: str = "",
) -> Timed:
    """The row with its time, or with the reason why it has none, such as that a kernel only takes other calls."""
    call = call.fresh()
    run = partial(way, **call.arguments)
    try:
        with backend.seen() as ran:
            results = run()
        if row.ours and row.name != self_check.REFERENCE and row.name not in ran.values():
            return replace(row, fault=f"it takes only {takes}")
        shown = [] if results is None else listed(results)
        if row.ours:
            shown += (call.tensors[name] for name in call.written)
        if call.part:
            shown = call.part.of(shown)
        for index, (got, expected, plain) in enumerate(zip(shown, truth, native, strict=False)):
            if not expected.is_floating_point():
                if not torch.equal(got.long(), expected.long()):
                    return replace(row, fault=f"wrong: result {index} has other integers")
                continue
            scale = call.scales[index] if index < len(call.scales) else None
            assert_close_to_reference(got, expected, plain, scale=scale)
    except AssertionError as problem:
        return replace(row, fault=f"wrong: {problem}")
    except backend.NotTakenError:
        return replace(row, fault=f"it takes only {takes}")
    except RuntimeError as problem:  # no memory, or not for this size
        return replace(row, fault=f"did not run: {str(problem).strip().partition(chr(10))[0][:160]}")
    return replace(row, seconds=timing.steady(run, device))
