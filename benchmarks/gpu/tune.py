"""Search launch configurations on this GPU: `python -m benchmarks.gpu.tune [OP ...] [--seconds N]`.

Public ops are called at the sizes of `benchmarks.shapes` while the table that `fb_kernels/_runtime/tuning.py` reads is
replaced. The replacement notes which entries a call looks up, and answers with the candidate under test. Each entry is
searched one parameter at a time from the launch in use, over all calls that look it up; a candidate counts only if
every result stays right. What beats the default goes to the user's file of `fb_kernels._runtime.devices`, or with
`--output fb_kernels/tuned` to the package's. Each op is searched in a separate process, which a bad candidate may ruin.

Gluon's form is not searched, since it might hang: `--gluon OP` calls it once and writes a file that asks for it, with
which a visit (`benchmarks.visit`) times it. `--visit FOLDER` writes the forms that were faster there, and what a search
found there; given an OP, it then searches the launches of that form at the sizes that were timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import bench_linear_logprob, bench_neighbours, harness, shapes
from benchmarks.harness import Output
from fb_kernels import branch_attention, linear_logprob
from fb_kernels import calls as fb_calls
from fb_kernels._runtime import backend, devices, tuning
from fb_kernels._runtime.timing import elapsed
from fb_kernels._runtime.tuning import Launch
from fb_kernels.testing import poisoned_memory

GAIN = 0.98  # of the best time so far: a smaller gain is noise
LIMITS = {
    "num_warps": (1, 16),
    "num_stages": (1, 6),
    "rows": (256, 1 << 16),
    "columns": (256, 1 << 18),
    "maxnreg": (64, 255),
    "STAGES": (2, 6),  # of gluon.py
    "TILES": (1, 32),  # likewise: one of 32 bits per tile
}
CHOICES = ("fused",)  # 0 or 1
FIXED = ("WIDTH", "HALF", "gluon")  # given by the shape, or chosen after a visit
LONG = (1664, 8192)  # rows of the LM head for which both forms are timed
BLOCKS = (1, 1 << 14)  # limits of all other parameters


@dataclass
class Table:
    """Replaces the measured launches: remembers the defaults it was asked for, answers with the chosen launches."""

    chosen: dict[str, Launch] = field(default_factory=dict)
    defaults: dict[str, Launch] = field(default_factory=dict)

    def get(self, key: str, default: Launch) -> Launch:
        self.defaults.setdefault(key, dict(default))
        launch = self.chosen.get(key, default)
        return launch if launch.keys() == default.keys() else default

    @contextmanager
    def used(self) -> Iterator[None]:
        with mock.patch.object(devices, "launches", return_value=self):
            yield


@dataclass
class Call:
    """An op at one size, its truth, and the largest error of a right result."""

    run: Callable[[], Output]
    expected: Output
    tolerance: float

    def right(self) -> bool:
        """Whether one call is right, in memory full of NaN: otherwise unwritten elements could keep an older result."""
        try:
            with poisoned_memory():
                return harness.max_error(self.run(), self.expected) <= self.tolerance
        except Exception:  # does not compile or does not fit
            return False

    def seconds(self) -> float:
        """The median time of some calls with a cold cache."""
        return elapsed(self.run, harness.DEVICE)


Function = Callable[..., Output]


Case = tuple[Function, tuple[Tensor, ...], int]  # what is called, its floats, how many of them have gradients


def neighbour(op: str) -> Iterator[Case]:
    for rows in shapes.ROWS:
        call = bench_neighbours.neighbour(op, rows)

        def function(*floats: Tensor, call: fb_calls.Call = call) -> Output:
            return call.function(**call.changed(**dict(zip(call.floats, floats, strict=True))))

        yield function, tuple(call.floats.values()), len(call.gradients) if op in TRAINED else 0


def head(_: str, counts: Sequence[int] = (13, 128, *LONG)) -> Iterator[Case]:
    for rows in counts if shapes.ON_GPU else (4,):
        hidden, weight, target = bench_linear_logprob.inputs(rows)
        yield partial(linear_logprob, target=target), (hidden, weight), int(counts != LONG)


def attention(_: str) -> Iterator[Case]:
    trained = shapes.TRAINED_BRANCHES + shapes.LONG_TRAINED_BRANCHES
    for size in dict.fromkeys(shapes.BRANCHES + shapes.ONE_TOKEN_BRANCHES + trained):
        yield branches(size, 5 if size in trained else 0)


def branches(size: tuple[int, int, int], trained: int = 0) -> Case:
    case = shapes.Branches.random(*size)
    floats = (case.q, case.k, case.v, case.prefix_k, case.prefix_v)
    return partial(branch_attention, layout=case.layout), floats, trained


TRAINED = ("rms_norm", "qk_norm_rope", "swiglu", "merge_attention_states", "candidate_head")
Ops = Mapping[str, Callable[[str], Iterator[Case]]]
OPS: Ops = dict.fromkeys(bench_neighbours.SIZES, neighbour) | {"linear_logprob": head, "branch_attention": attention}
TIMED: Ops = {  # the sizes at which a visit times both forms
    "linear_logprob": partial(head, counts=LONG),
    "branch_attention": lambda _: map(branches, shapes.BRANCHES),
}


def form_of(op: str, shape: str, dtype: str) -> tuple[str, Launch]:
    """The entry by which a benchmarked case chooses its kernel, and its default."""
    table, of = Table(), {name: int(value) for name, value in re.findall(r"\b([A-Z])=(\d+)", shape)}
    with table.used():
        if op == "linear_logprob":
            tuning.linear_logprob_form(getattr(torch, dtype), of["N"], of["V"], of["D"])
        else:
            tuning.branch_attention_form(getattr(torch, dtype), 128, 2)  # Qwen3-1.7B's heads
    ((key, default),) = table.defaults.items()
    return key, default


def ask_for_gluon(op: str, folder: Path) -> Path:
    """After one call of an op's Gluon kernel, write a file that asks for it where both forms are timed."""
    function, floats, _ = branches((1, 128, 1000)) if op == "branch_attention" else next(head(op, (128,)))
    with mock.patch.object(tuning, f"{op}_form", return_value="gluon"), torch.no_grad():
        carriers(function(*floats))[0].cpu()
    shown = [f"N={rows} D={bench_linear_logprob.HIDDEN} V={bench_linear_logprob.VOCABULARY}" for rows in LONG]
    forms = dict(form_of(op, shape, "bfloat16") for shape in shown)
    return write(folder, {key: default | {"gluon": 1} for key, default in forms.items()}, set())


def visited(folder: Path) -> tuple[dict[str, Any], dict[str, Launch]]:
    """(about the machine, launches that were faster) of a visit: Gluon's form where it was right and faster.

    Raises:
        ValueError: results of no commit or of several, or of several devices.
    """
    cases: dict[str, dict[tuple[str, str], dict[str, Any]]] = {"results": {}, "gluon": {}}
    abouts, found = [], {}
    for form, op in itertools.product(cases, TIMED):
        for path in folder.glob(f"{form}/*/{op}.json"):
            abouts.append(json.loads(path.read_text()))
            rows = [row for row in abouts[-1]["cases"] if row["impl"] == harness.OURS]
            cases[form] |= {(row["op"], row["shape"]): row for row in rows}
    for path in sorted(folder.glob("tuned/*.json")):
        abouts.append(json.loads(path.read_text()))
        found = abouts[-1]["launches"]
    if len({(about["device"], about["commit"]) for about in abouts}) != 1:
        commits = ", ".join(sorted({about["commit"] for about in abouts})) or "none"
        raise ValueError(f"{folder}: expected results of one commit on one device, got {commits}; measure them again")
    ratios: dict[str, list[float]] = {}
    launches: dict[str, Launch] = {}
    for (op, shape), row in cases["gluon"].items():
        key, default = form_of(op, shape, row["dtype"])
        usual = cases["results"].get((op, shape), {}).get("median_us")
        ratios.setdefault(key, []).append(row["median_us"] / usual if usual and row["median_us"] else math.inf)
        launches[key] = default | {"gluon": 1}
    faster = {key for key, each in ratios.items() if math.prod(each) < GAIN ** len(each)}
    return abouts[0], found | {key: launch for key, launch in launches.items() if key in faster}


def calls(op: str, ops: Ops = OPS) -> Iterator[Call]:
    """The op's forward and, if it has one, backward at every size, with truth from the reference in float64."""
    for function, floats, trained in ops[op](op):
        for run in (forward, backward) if trained else (forward,):
            prepared = run(function, floats, trained)
            with backend.override("reference"):
                expected = run(function, tuple(x.double() for x in floats), trained)()
                plain = run(function, floats, trained)()
            yield Call(prepared, expected, harness.allowed_error(plain, expected))


def forward(function: Function, floats: tuple[Tensor, ...], _: int) -> Callable[[], tuple[Tensor, ...]]:
    """A call that gives the function's floating-point results."""

    @torch.no_grad()
    def run() -> tuple[Tensor, ...]:
        return carriers(function(*floats))

    return run


def backward(function: Function, floats: tuple[Tensor, ...], trained: int) -> Callable[[], tuple[Tensor, ...]]:
    """A call that gives gradients of the leading floats; the forward runs here."""
    leaves = [x.detach().requires_grad_(index < trained) for index, x in enumerate(floats)]
    outputs = [x for x in carriers(function(*leaves)) if x.requires_grad]
    upstream = [torch.cos(torch.arange(x.numel(), device=x.device) % 97).view(x.shape).to(x.dtype) for x in outputs]
    return lambda: torch.autograd.grad(outputs, leaves[:trained], upstream, retain_graph=True)


def carriers(outputs: Output) -> tuple[Tensor, ...]:
    return tuple(x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.is_floating_point())


def candidates(name: str, value: int) -> list[int]:
    """The values next to the present one."""
    if name in FIXED:
        return []
    if name in CHOICES:
        return [1 - value]
    near = [value - 1, value + 1] if name in ("num_stages", "STAGES") else [value // 2, value * 2]
    low, high = LIMITS.get(name, BLOCKS)
    return [other for other in near if low <= other <= high]


def search(op: str, seconds: float, timed: bool = False) -> tuple[dict[str, Launch], set[str], list[str]]:
    """Search one op's entries for so many seconds, without the time to compute the truth, from what is known here.

    Returns:
        (launches that beat their default, all keys that were looked up, lines to be printed).
    """
    table, lines = Table(dict(devices.launches(harness.device_name()))), []
    users: dict[str, list[Call]] = {}
    with table.used():
        for call in calls(op, TIMED if timed else OPS):
            table.defaults, seen = {}, table.defaults
            if not call.right():
                lines.append(f"{op}: wrong with its default launch at one size, which is left out")
                table.defaults = seen
                continue
            for key in table.defaults:
                users.setdefault(key, []).append(call)
            table.defaults = seen | table.defaults
        if not users:
            lines.append(f"{op}: looks up no launch here (no kernel, or another backend)")
        stop = time.monotonic() + seconds
        for index, key in enumerate(users):
            share = (stop - time.monotonic()) / (len(users) - index)
            lines.append(improve(table, key, users[key], time.monotonic() + share))
            if ruined():
                lines.append(f"{op}: a candidate ruined the process; what was found before it is kept")
                break
    better = {key: table.chosen[key] for key, default in table.defaults.items() if table.get(key, default) != default}
    return better, set(table.defaults), lines


def improve(table: Table, key: str, used_by: list[Call], stop: float) -> str:
    """Search one entry, one parameter at a time, until nothing helps or time is up; the best stays in the table."""
    best = dict(table.get(key, table.defaults[key]))
    table.chosen[key] = best
    before = [call.seconds() for call in used_by]
    ratio, tried, moved = 1.0, {tuple(best.items())}, True
    while moved:
        moved = False
        for name in best:
            for value in candidates(name, best[name]):
                launch = best | {name: value}
                if tuple(launch.items()) in tried or time.monotonic() > stop:
                    continue
                tried.add(tuple(launch.items()))
                table.chosen[key] = launch
                reached = measure(used_by, before)
                if reached < GAIN * ratio:
                    best, ratio, moved = launch, reached, True
                table.chosen[key] = best
                if ruined():
                    return f"{key}: {best}, {ratio:.2f} of the default's time"
    return f"{key}: {best}, {ratio:.2f} of the default's time, {len(tried)} tried"


def measure(used_by: list[Call], before: list[float]) -> float:
    """Geometric mean of the calls' times relative to the default's; infinite if a result is wrong."""
    if not all(call.right() for call in used_by):
        return math.inf
    return math.exp(
        sum(math.log(call.seconds() / base) for call, base in zip(used_by, before, strict=True)) / len(used_by)
    )


def ruined() -> bool:
    """Whether an illegal access has ended this process's use of the GPU."""
    try:
        if harness.DEVICE == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def write(
    folder: Path, better: Mapping[str, Launch], looked_up: set[str], measured: Mapping[str, Any] | None = None
) -> Path:
    """Write the launches found to the device's file; keys that were searched without success are removed.

    `measured` is about the device, if it is not this one.
    """
    about = measured or harness.machine()
    name = devices.file_name(about["device"]) if measured else harness.device_name()
    path = folder / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")).get("launches", {}) if path.exists() else {}
    launches = {key: launch for key, launch in before.items() if key not in looked_up} | dict(better)
    about = {key: about[key] for key in ("device", "torch", "triton", "commit")}
    return devices.write(folder, name, about, launches=launches)


def main() -> None:
    parser = argparse.ArgumentParser(description="search launch configurations on this GPU")
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"all by default: {', '.join(OPS)}")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each op (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=f"folder of <device>.json (default: {devices.folder()})")
    parser.add_argument("--gluon", choices=TIMED, metavar="OP", help="call its Gluon kernel and ask for it")
    parser.add_argument("--visit", type=Path, metavar="FOLDER", help="write what was faster in a visit")
    options = parser.parse_args()
    folder = options.output or devices.folder()
    known = TIMED if options.visit else OPS
    unknown = set(options.ops) - set(known)
    if unknown:
        parser.error(f"op: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if harness.DEVICE != "cuda" and options.output is None:
        parser.error(
            "expected a CUDA device, got none; times of interpreted kernels say nothing, give --output for them"
        )
    if options.visit:
        try:
            about, launches = visited(options.visit)
        except (OSError, ValueError) as reason:
            parser.error(f"--visit: {reason}")
        print(f"wrote {write(folder, launches, set(), about)}", *launches.items(), sep="\n", flush=True)
    if options.gluon:
        print(f"wrote {ask_for_gluon(options.gluon, folder)}")
    for op in options.ops or (() if options.visit or options.gluon else OPS):
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                better, looked_up, lines = process.submit(search, op, options.seconds, bool(options.visit)).result()
        except (BrokenProcessPool, RuntimeError) as reason:
            print(f"{op}: given up: {type(reason).__name__}: {reason}", flush=True)
            continue
        print(*lines, f"{op}: wrote {write(folder, better, looked_up)}", sep="\n", flush=True)


if __name__ == "__main__":
    main()
