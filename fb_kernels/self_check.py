"""Compares every kernel with its definition on this device, and switches off what is wrong there.

On a GPU each op is checked in its own process: kernels compile in parallel, and an illegal access ends only the process
in which it happens. Times are measured afterwards, one call at a time.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fb_kernels import calls
from fb_kernels._runtime import backend, devices, timing, tuning
from fb_kernels.calls import Call
from fb_kernels.testing import assert_close_to_reference, poisoned_memory

REFERENCE = "reference"
ENDED = "it ended its process"
LIMIT = 150.0  # seconds for an op's process: with cold caches it mostly compiles


@dataclass(frozen=True)
class Row:
    """The result for one kernel in one call."""

    op: str  # the folder
    shape: str  # the size that was timed, in words
    kernel: str  # "cuda", "triton", "cpu" or "reference"
    fault: str = ""  # what is wrong with its results; empty if they are right
    absent: str = ""  # why it did not run; empty if it did
    microseconds: float | None = None  # of a call, from a cold cache on a GPU
    share: float | None = None  # of this device's ceiling, set by a copy and a matrix product
    used: bool = False  # whether calls use it from now on

    @property
    def right(self) -> bool:
        """Whether it ran and is right."""
        return not (self.fault or self.absent)


def check(device: str, ops: Sequence[str] = ()) -> list[Row]:
    """Check and time every kernel of these ops, or of all, on "cuda" or "cpu", and update which are switched off.

    Each wrong kernel is also a RuntimeWarning.
    """
    ops = ops or list(calls.every())
    if device == "cuda":
        cores = os.cpu_count() or 1
        workers = min(cores, len(ops))
        with ThreadPoolExecutor(workers) as pool:
            rows_by_op = list(pool.map(lambda op: apart(op, device, cores // workers), ops))
    else:
        rows_by_op = [last_of_each(rows(op, device)) for op in ops]
    bounds = timing.ceilings(device, _dtype(device))
    checked = [row for op, op_rows in zip(ops, rows_by_op, strict=True) for row in timed(op, op_rows, device, bounds)]
    switch(checked, device)
    taken = {op: taken_by(op, device) for op in ops}
    return [replace(row, used=row.right and row.kernel in taken[row.op].get(row.shape, ())) for row in checked]


def rows(op: str, device: str, without: Sequence[str] = ()) -> Iterator[Row]:
    """A row for each call and kernel of an op, except `without`: first with fault `ENDED`, then with the result."""
    dtype = _dtype(device)
    sizes = (calls.checked(op, _size(device, size)) for size in ("checked", "timed"))
    for (function, call), (_, shown) in zip(*sizes, strict=True):
        call = call.cast(dtype)
        wide, plain = (evaluated(each, function.definition) for each in (call.cast(torch.float64), call))
        for kernel, absent in {**backend.kernels(op, device), REFERENCE: ""}.items():
            row = Row(op, shown.shape, kernel, absent=absent)
            if kernel in without:
                continue
            if absent:
                yield row
                continue
            yield replace(row, fault=ENDED)
            with backend.override(f"auto,{op}={kernel}"):
                fault, absent = _verdict(call, shown, kernel, device, wide, plain)
            yield replace(row, fault=fault, absent=absent)


def last_of_each(checked: Iterable[Row]) -> list[Row]:
    """The last row of each call and kernel."""
    return list({(row.shape, row.kernel): row for row in checked}.values())


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _size(device: str, size: str) -> str:
    return size if device == "cuda" else "small"


def _verdict(
    call: Call, shown: Call, kernel: str, device: str, wide: Sequence[Tensor], plain: Sequence[Tensor]
) -> tuple[str, str]:
    """(what is wrong with a kernel, why it did not run) in one call, each empty if it does not apply."""
    try:
        with backend.seen() as ran, poisoned_memory():  # elements that are not written stay NaN
            got = evaluated(call.on(device), Call.run)
        if kernel != REFERENCE and kernel not in ran.values():
            return "", "it has none for this call"
        backward = {kind for name, kind in ran.items() if name.endswith("_backward")}
        if backward and kernel not in backward:  # another kernel computed the gradients
            got = got[: len(got) - len(call.gradients)]
        for index, (actual, expected, native) in enumerate(zip(got, wide, plain, strict=False)):
            if not expected.is_floating_point():
                if not torch.equal(actual.cpu().long(), expected.long()):
                    return f"result {index}: other integers", ""
                continue
            scale = call.scales[index] if index < len(call.scales) else None
            try:
                assert_close_to_reference(actual, expected, native, scale=scale)
            except AssertionError as problem:
                return f"result {index}: {problem}", ""
        if device == "cuda":  # compile for the timed size now, while other ops compile too
            shown.cast(_dtype(device)).on(device).run()
            torch.cuda.synchronize()
    except (backend.NotTakenError, torch.OutOfMemoryError) as problem:
        return "", _line(problem)
    except Exception as problem:  # it does not compile, or a launch fails
        return f"{type(problem).__name__}: {_line(problem)}", ""
    return "", ""


def _line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0][:200]


def evaluated(call: Call, function: Callable[[Call], list[Tensor]]) -> list[Tensor]:
    """The results, then the gradients for fixed upstream gradients of the results that carry them."""
    leaves = {name: call.tensors[name].detach().clone().requires_grad_() for name in call.gradients}
    results = function(call.fresh().with_(**leaves))
    gradients: Sequence[Tensor] = ()
    if leaves:
        carriers = [results[place] for place in call.outputs]
        upstream = [((torch.arange(x.numel()) % 97 - 48) / 64).view(x.shape).to(x) for x in carriers]  # bfloat16 has it
        gradients = torch.autograd.grad(carriers, list(leaves.values()), upstream)
    return [x.detach() for x in (*results, *gradients)]


def apart(op: str, device: str, threads: int, limit: float = LIMIT) -> list[Row]:
    """`rows` in its own process; after a kernel that ends, corrupts or hangs it, a new process does the rest."""
    received: list[Row] = []
    without: list[str] = []
    whole = False
    while not whole:
        these, whole = _apart(op, device, threads, limit, without)
        if not (these or whole):
            return [*received, Row(op, "", REFERENCE, absent="its process did not start")]
        received += these
        if not whole and not these[-1].fault:  # it ended outside of a kernel
            received.append(Row(op, "", REFERENCE, absent="its process ended, or gave no answer, between two kernels"))
            break
        without += [row.kernel for row in these[-1:]]
    return last_of_each(received)


def _apart(op: str, device: str, threads: int, limit: float, without: Sequence[str]) -> tuple[list[Row], bool]:
    """(the rows received, whether they are all)."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, op, device, threads, tuple(without)))
    process.start()
    theirs.close()
    received: list[Row] = []
    stop = time.monotonic() + limit
    try:
        while ours.poll(max(0.0, stop - time.monotonic())):
            row = ours.recv()
            if row is None:
                return received, True
            received.append(row)
        if received and received[-1].fault == ENDED:
            received[-1] = replace(received[-1], fault=f"no answer in {limit:.0f} s")
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    return received, False


def _send(connection: Connection, op: str, device: str, threads: int, without: Sequence[str]) -> None:
    torch.set_num_threads(threads)
    for row in rows(op, device, without):
        connection.send(row)
        if row.fault and _ruined(device):
            return
    connection.send(None)


def _ruined(device: str) -> bool:
    """Whether an illegal access has made the GPU unusable for this process."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def timed(op: str, checked: Sequence[Row], device: str, ceiling: tuple[float, float]) -> Iterator[Row]:
    """The rows of an op, with times for those that are right."""
    dtype = _dtype(device)
    shown = {call.shape: call for _, call in calls.checked(op, _size(device, "timed"))}
    for row in checked:
        if not row.right:
            yield row
            continue
        call = shown[row.shape].cast(dtype).on(device).fresh()
        with backend.override(f"auto,{op}={row.kernel}"), torch.no_grad():
            seconds = timing.elapsed(partial(call.function, **call.arguments), device)
        least = max(call.moved(dtype) / ceiling[0], call.flops / ceiling[1])
        yield replace(row, microseconds=1e6 * seconds, share=least / seconds if least else None)


def taken_by(op: str, device: str) -> dict[str, set[str]]:
    """{shape: the implementations that run such a call from now on}."""
    by_shape = {}
    for _, call in calls.checked(op, _size(device, "timed")):
        with backend.seen() as ran, torch.no_grad():
            call.cast(_dtype(device)).on(device).fresh().run()
        by_shape[call.shape] = set(ran.values()) or {REFERENCE}  # `seen` does not record an op without kernels
    return by_shape


def switch(checked: Sequence[Row], device: str) -> None:
    """Write which kernels are off: wrong ones among those checked; kernels not checked stay as they were."""
    name = "cpu" if device == "cpu" else tuning._device()
    full = "the CPU" if device == "cpu" else torch.cuda.get_device_name()
    before = {f"{op}/{kind}": why for kind in backend.KERNELS for op, why in devices.off(name, kind).items()}
    ran = {f"{row.op}/{row.kernel}" for row in checked if not row.absent}
    wrong = {f"{row.op}/{row.kernel}": row.fault for row in reversed(checked) if row.fault}
    off = {key: why for key, why in before.items() if key not in ran}
    off |= {key: why for key, why in wrong.items() if not key.endswith(f"/{REFERENCE}")}
    path = devices.folder() / f"{name}.json"
    if off != before:
        devices.write(path.parent, name, {"device": full, "torch": torch.__version__}, off=off)
    for key, why in wrong.items():
        op, _, kernel = key.partition("/")
        said = f"{path} switches it off there" if key in off else "no other implementation can take its place"
        warnings.warn(
            f"{op}: expected its {kernel} kernel to be right on {full}, got wrong results ({why}); {said}, please "
            "report this with the table of `python -m fb_kernels.env --check`",
            RuntimeWarning,
        )


def table(checked: Sequence[Row]) -> str:
    """The rows as a text table, followed by the faults."""
    head = ("op", "size", "kernel", "right", "microseconds", "of the ceiling", "used")
    lines = [head]
    for row in checked:
        right = "no" if row.fault else ("not run" if row.absent else "yes")
        spent = "" if row.microseconds is None else f"{row.microseconds:,.1f}"
        share = "" if row.share is None else f"{row.share:.0%}"
        lines.append((row.op, row.shape, row.kernel, right, spent, share, "yes" if row.used else ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for row in checked:
        if row.fault or row.absent:
            said = f"wrong: {row.fault}" if row.fault else f"not run: {row.absent}"
            text.append(f"{row.op}, {row.kernel}, {row.shape}: {said}")
    return "\n".join(text)
