"""Search launch configurations on this GPU: `python -m benchmarks.tune [OP ...] [--seconds N]`.

Public ops are called at the sizes of `benchmarks.shapes` while the table that `fb_kernels.tuning` reads is replaced.
The replacement notes which entries a call looks up, and answers with the candidate under test. Each entry is searched
one parameter at a time from its default, over all calls that look it up; a candidate counts only if every result stays
right. Launches that beat the default go to the user's file of `fb_kernels.devices`, or with `--output fb_kernels/tuned`
to the package's. Each op is searched in a separate process, which a bad candidate may ruin.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks import bench_linear_logprob, bench_neighbours, harness, shapes
from benchmarks.harness import Output
from fb_kernels import BranchLayout, backend, branch_attention, devices, linear_logprob, tuning
from fb_kernels import calls as fb_calls
from fb_kernels.branch_attention import triton as attention_kernels
from fb_kernels.linear_logprob import triton as kernels
from fb_kernels.testing import poisoned_memory
from fb_kernels.timing import elapsed
from fb_kernels.tuning import Launch

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
CAP = 50.0
CHOICES = ("fused", "gluon")  # 0 or 1
SIZES = ("WIDTH", "HALF")  # given by the shape, not searched
BLOCKS = (1, 1 << 14)  # limits of all other parameters


@dataclass
class Table:
    """Replaces the measured launches: remembers the defaults it was asked for, answers with the chosen launches."""

    chosen: dict[str, Launch] = field(default_factory=dict)
    defaults: dict[str, Launch] = field(default_factory=dict)

    def get(self, key: str, default: Launch) -> Launch:
        self.defaults.setdefault(key, dict(default))
        return self.chosen.get(key, default)

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


def neighbour(op: str) -> Iterator[tuple[Function, tuple[Tensor, ...], int]]:
    for rows in shapes.ROWS:
        call = bench_neighbours.neighbour(op, rows)

        def function(*floats: Tensor, call: fb_calls.Call = call) -> Output:
            return call.function(**call.changed(**dict(zip(call.floats, floats, strict=True))))

        yield function, tuple(call.floats.values()), len(call.gradients) if op in TRAINED else 0


def head(_: str) -> Iterator[tuple[Function, tuple[Tensor, ...], int]]:
    """Each form alone first; the choice between them is searched last, and so compares the best of each."""
    if shapes.ON_GPU and not finishes(one_gluon_call):
        kernels.HAS_GLUON = False  # in this op's process only
    for rows in (13, 128, 1664, 8192) if shapes.ON_GPU else (4,):
        hidden, weight, target = bench_linear_logprob.inputs(rows)

        def function(hidden: Tensor, weight: Tensor, target: Tensor = target) -> Output:
            return linear_logprob(hidden, weight, target)

        for form in ("fused", "chunked", "gluon"):  # without "gluon" on this GPU, "fused" runs again
            choice = mock.patch.object(tuning, "linear_logprob_form", lambda *_, form=form: form)
            yield choice(function), (hidden, weight), 0
        yield function, (hidden, weight), 1


def one_gluon_call() -> None:
    hidden, weight, target = bench_linear_logprob.inputs(128)
    with mock.patch.object(tuning, "linear_logprob_form", return_value="gluon"), torch.no_grad():
        linear_logprob(hidden, weight, target).cpu()


def finishes(function: Callable[[], object], seconds: float = 120.0) -> bool:
    """Whether a function returns, in a separate process: kernels whose parts wait for each other may hang."""
    process = get_context("spawn").Process(target=function, daemon=True)
    process.start()
    process.join(seconds)
    process.kill()
    return process.exitcode == 0


def attention(_: str) -> Iterator[tuple[Function, tuple[Tensor, ...], int]]:
    """The benchmarked sizes; some also with a window, with a soft-cap, and with keys that are not 16-byte aligned.

    Long branches first run with each of their kernels alone, as in `head`.
    """
    if shapes.ON_GPU and not finishes(one_gluon_attention):
        attention_kernels.HAS_GLUON = False  # in this op's process only
    for size in shapes.BRANCHES:
        case = shapes.Branches.random(*size)
        floats = (case.q, case.k, case.v, case.prefix_k, case.prefix_v)
        function = partial(attended, layout=case.layout, window=None, softcap=None)
        for form in ("tile", "gluon"):
            choice = mock.patch.object(tuning, "branch_attention_form", lambda *_, form=form: form)
            yield choice(function), floats, 0
    trained = shapes.TRAINED_BRANCHES + shapes.LONG_TRAINED_BRANCHES
    plain = list(dict.fromkeys(shapes.BRANCHES + shapes.ONE_TOKEN_BRANCHES + trained))
    last = [shapes.BRANCHES[-1], shapes.ONE_TOKEN_BRANCHES[-1]]
    sizes = [(size, None, None, False) for size in plain]
    sizes += [
        (size, *form, False) for size in last for form in ((size[2] // 2, None), (None, CAP), (size[2] // 2, CAP))
    ]
    sizes += [(size, None, None, True) for size in dict.fromkeys([*last, trained[0], trained[-1]])]
    for size, window, softcap, unaligned in sizes:
        case = shapes.Branches.random(*size)
        floats, layout = (case.q, case.k, case.v, case.prefix_k, case.prefix_v), case.layout

        function = partial(attended, layout=layout, window=window, softcap=softcap)
        learns = size in trained and window is None and softcap is None
        yield function, tuple(map(shifted, floats)) if unaligned else floats, 5 if learns else 0


def one_gluon_attention() -> None:
    case = shapes.Branches.random(1, 128, 1000)
    with mock.patch.object(tuning, "branch_attention_form", return_value="gluon"), torch.no_grad():
        branch_attention(case.q, case.k, case.v, case.prefix_k, case.prefix_v, case.layout).cpu()


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    *,
    layout: BranchLayout,
    window: int | None,
    softcap: float | None,
) -> Output:
    return branch_attention(q, k, v, prefix_k, prefix_v, layout, window=window, softcap=softcap)


def shifted(x: Tensor) -> Tensor:
    """The same values, starting one element after a 16-byte boundary."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


TRAINED = ("rms_norm", "qk_norm_rope", "swiglu", "merge_attention_states", "candidate_head")
OPS: dict[str, Callable[[str], Iterator[tuple[Function, tuple[Tensor, ...], int]]]] = {
    **dict.fromkeys(bench_neighbours.SIZES, neighbour),
    "linear_logprob": head,
    "branch_attention": attention,
}


def calls(op: str) -> Iterator[Call]:
    """The op's forward and, if it has one, backward at every size, with truth from the reference in float64."""
    for function, floats, trained in OPS[op](op):
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
    if name in SIZES:
        return []
    if name in CHOICES:
        return [1 - value]
    near = [value - 1, value + 1] if name in ("num_stages", "STAGES") else [value // 2, value * 2]
    low, high = LIMITS.get(name, BLOCKS)
    return [other for other in near if low <= other <= high]


def search(op: str, seconds: float) -> tuple[dict[str, Launch], set[str], list[str]]:
    """Search one op's entries for so many seconds, without the time to compute the truth.

    Returns:
        (launches that beat their default, all keys that were looked up, lines to be printed).
    """
    table, lines = Table(), []
    users: dict[str, list[Call]] = {}
    with table.used():
        for call in calls(op):
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
    better = {key: launch for key, launch in table.chosen.items() if launch != table.defaults[key]}
    return better, set(table.defaults), lines


def improve(table: Table, key: str, used_by: list[Call], stop: float) -> str:
    """Search one entry, one parameter at a time, until nothing helps or time is up; the best stays in the table."""
    best = dict(table.defaults[key])
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


def write(folder: Path, better: Mapping[str, Launch], looked_up: set[str]) -> Path:
    """Write the launches found to the device's file; keys that were searched without success are removed."""
    name = harness.device_name()
    path = folder / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")).get("launches", {}) if path.exists() else {}
    launches = {key: launch for key, launch in before.items() if key not in looked_up} | dict(better)
    about = {
        name: value for name, value in harness.machine().items() if name in ("device", "torch", "triton", "commit")
    }
    return devices.write(folder, name, about, launches=launches)


def main() -> None:
    parser = argparse.ArgumentParser(description="search launch configurations on this GPU")
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"all by default: {', '.join(OPS)}")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each op (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=f"folder of <device>.json (default: {devices.folder()})")
    options = parser.parse_args()
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"op: expected some of {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    if harness.DEVICE != "cuda" and options.output is None:
        parser.error(
            "expected a CUDA device, got none; times of interpreted kernels say nothing, give --output for them"
        )
    for op in options.ops or OPS:
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                better, looked_up, lines = process.submit(search, op, options.seconds).result()
        except (BrokenProcessPool, RuntimeError) as reason:
            print(f"{op}: given up: {type(reason).__name__}: {reason}", flush=True)
            continue
        print(
            *lines, f"{op}: wrote {write(options.output or devices.folder(), better, looked_up)}", sep="\n", flush=True
        )


if __name__ == "__main__":
    main()
