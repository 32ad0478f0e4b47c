"""Times an implementation and its peers in one process, interleaved, and only those whose results are right.

On a GPU, times come from CUDA events, and rates are compared with two ceilings that are measured first: a copy and a
bf16 matrix product.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from fb_kernels._runtime import devices
from fb_kernels._runtime import timing as fb_timing
from fb_kernels._runtime.timing import Timed, Timing, timer

OURS, FLOOR = "fb", "floor"
COMPILED = "_compiled"  # suffix of a file that has only compiled peers
KERNELS = "_kernels"  # suffix of a file of longest kernels, which come from a separate run: profiling disturbs timing
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parent.parent
PROC = Path("/proc/self")
EMPTY = ("details", "host_us")  # left out of a file where there are none

LATENCY = (Timing.EAGER, Timing.GRAPH_COLD, Timing.GRAPH_WARM)  # for calls of microseconds
Output = Tensor | tuple[Tensor, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """The least work of a case: floating-point operations, and bytes, each read or written once."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Ceilings:
    """The rates that this GPU reaches: of a copy (read + write) and of a bf16 matrix product."""

    copy_tbps: float
    bf16_tflops: float

    def floor_us(self, cost: Cost) -> float:
        """The time in which no implementation can do this."""
        return max(cost.flops / self.bf16_tflops, cost.bytes / self.copy_tbps) * 1e-6


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case's result, and the truth that it is checked against.

    The truth may have fewer tensors or fewer leading rows than the result; with `rows` it has those rows.
    """

    run: Callable[[], Output]
    expected: Output
    rows: Tensor | None = None
    tolerance: float | None = None  # in place of the case's
    compiled: bool = False  # uses torch.compile, which takes minutes to compile


@dataclass(frozen=True)
class Result:
    """The measurements of one implementation in one case; times are None if it was not timed."""

    op: str
    shape: str
    impl: str
    dtype: str
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    max_error: float
    ok: bool
    peak_bytes: int | None = None
    tflops: float | None = None
    tbps: float | None = None
    fraction_of_ceiling: float | None = None
    details: dict[str, float] = field(default_factory=dict)  # other counts, by name
    host_us: float | None = None  # until a call returns, where that is longer than the GPU works for it
    backend: str = ""  # which implementation ran our ops: one word, or op=word for each if they differ


@dataclass(frozen=True)
class Goal:
    """A bound on this case's speed: peer's median / our median >= ratio."""

    peer: str
    ratio: float


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compare(
    benchmark: BenchmarkFixture,
    op: str,
    shape: str,
    implementations: Mapping[str, Implementation],
    *,
    rounds: int,
    tolerance: float | tuple[float, ...],
    peaks: Mapping[str, int] = MappingProxyType({}),
    timing: Timing = Timing.COLD,
    cost: Cost | None = None,
    dtype: torch.dtype | None = None,
    skipped: dict[str, str] | None = None,
    per: int = 1,
    rest: float = 0.0,
    details: Callable[[str], dict[str, float]] | None = None,
    ran: Mapping[str, str] = MappingProxyType({}),
) -> list[Result]:
    """Check every implementation once (which also warms it up), then time the right ones in turn.

    pytest-benchmark drives the rounds: it times ours, and runs the peers' round as the set-up of each of our rounds.

    Args:
        benchmark: pytest-benchmark's fixture; gets our times, and the peers' medians and ratios as extra_info.
        op: the function's name.
        shape: sizes by name, such as "K=13 H=64 P=512".
        implementations: by name, ours as "fb".
        rounds: how many times each is timed.
        tolerance: largest absolute error that counts as right, one for all tensors or one for each.
        peaks: bytes of memory by name, to be reported with the times; on a GPU they are measured here.
        timing: how a call is timed on a GPU, named in the shape there.
        cost: the least work of the case; on a GPU it gives rates, fractions of the ceiling and a "floor" row.
        dtype: of the inputs, to be reported; the result's own by default.
        skipped: filled with the peers that raised, by name, and the reason; without it they raise here.
        per: tokens, or other units, of one call; times are per unit.
        rest: seconds before each timed call; a server that has answered may work on for a while.
        details: gives further counts to report for an implementation that was timed, by its name.
        ran: which implementation ran each of our ops, as `backend.seen` fills it.

    Returns:
        one result per implementation that ran, in the given order.
    """
    device = _device_of(implementations[OURS])
    ceiling = ceilings() if device == "cuda" else None
    if device == "cuda":
        shape = f"{shape} ({timing.value})"
    errors: dict[str, float] = {}
    dtypes: dict[str, str] = {}
    right: list[str] = []
    calls: dict[str, Timed] = {}
    backends: dict[str, str] = {}
    measured = dict(peaks)
    for name, implementation in implementations.items():
        try:
            got = implementation.run()
            if name.partition(",")[0] == OURS:
                backends[name] = _backend(ran)
            error = max_error(got, implementation.expected, implementation.rows)
            result_dtype = dtype or tensors_of(got)[0].dtype
            bound = tolerance if implementation.tolerance is None else implementation.tolerance
            fine = within(got, implementation.expected, implementation.rows, bound)
            del got
            if device == "cuda" and fine:
                measured.setdefault(name, _peak_on_device(implementation.run))
            if fine:
                calls[name] = timer(implementation.run, device, timing)
        except Exception as reason:
            if name == OURS or skipped is None:
                raise
            skipped[name] = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0][:160]}"
            continue
        errors[name], dtypes[name] = error, str(result_dtype).removeprefix("torch.")
        right += [name] * fine
    times: dict[str, list[float]] = {name: [] for name in errors}

    def timed(name: str) -> None:
        time.sleep(rest)
        times[name].append(calls[name].seconds() / per)

    def time_peers() -> None:
        for name in right:
            if name != OURS:
                timed(name)

    if OURS in right:
        gc.collect()
        benchmark.pedantic(timed, args=(OURS,), setup=time_peers, rounds=rounds)
    results = []
    if cost:
        cost = Cost(cost.flops / per, cost.bytes / per)
    cold = timing in (Timing.COLD, Timing.GRAPH_COLD)
    for name in errors:
        median, low, high = quantiles_us(times[name])
        row = Result(op, shape, name, dtypes[name], median, low, high, errors[name], name in right, measured.get(name))
        host = calls[name].host / per * 1e6 if timing is Timing.COLD and times[name] else 0.0
        row = replace(row, backend=backends.get(name, ""), host_us=host if median and host > median else None)
        if details is not None and times[name]:
            row = replace(row, details=details(name))
        results.append(_rated(row, cost, ceiling, cold))
    if cost and ceiling and cold:
        floor = ceiling.floor_us(cost)
        row = Result(op, shape, FLOOR, dtypes[OURS], floor, None, None, 0.0, True)
        results.append(_rated(row, cost, ceiling, cold))
    benchmark.extra_info.update(
        shape=shape, max_error=errors, peers={row.impl: row.median_us for row in results if row.impl != OURS}
    )
    benchmark.extra_info["ratios"] = {row.impl: ratio(results, row.impl) for row in results if row.impl != OURS}
    return results


def _backend(ran: Mapping[str, str]) -> str:
    kinds = sorted(set(ran.values()))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{name}={kind}" for name, kind in sorted(ran.items()))


def kernels_of(
    op: str, shape: str, implementations: Mapping[str, Implementation], timing: Timing
) -> list[dict[str, str]]:
    """The longest-running GPU kernels of each implementation that runs here, by the profiler."""
    kernels = []
    for name, implementation in implementations.items():
        try:
            implementation.run()
            kernel = longest_kernel(implementation.run)
        except Exception:  # absent, or not for this size: the results show that
            continue
        kernels.append({"op": op, "shape": f"{shape} ({timing.value})", "impl": name, "kernel": kernel})
    return kernels


def longest_kernel(run: Callable[[], Output]) -> str:
    """The kernels that take 90 % of a call's GPU time, longest first, each with its share."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return named({event.key: event.self_device_time_total for event in profiler.key_averages()})


def named(times: Mapping[str, float]) -> str:
    """The longest of several kernels that together take 90 % of the time, with their shares; a single one by name."""
    total, kept, seen = sum(times.values()), [], 0.0
    for name, spent in sorted(times.items(), key=lambda item: -item[1]):
        if seen < 0.9 * total:
            kept.append((name[:120], spent / total))
        seen += spent
    return ", ".join(name if share > 0.995 else f"{name} {share:.0%}" for name, share in kept)


def _device_of(implementation: Implementation) -> str:
    return tensors_of(implementation.expected)[0].device.type


def _peak_on_device(run: Callable[[], Output]) -> int:
    """Peak bytes that a call allocates, including its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


@cache
def ceilings() -> Ceilings:
    """Both ceilings, measured once per process."""
    copied, multiplied = fb_timing.ceilings(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    return Ceilings(copied * 1e-12, multiplied * 1e-12)


def _rated(row: Result, cost: Cost | None, ceiling: Ceilings | None, cold: bool) -> Result:
    """The row with rates and, from a cold cache, its fraction of the ceiling that bounds it."""
    if cost is None or ceiling is None or row.median_us is None:
        return row
    tflops, tbps = (amount / row.median_us * 1e-6 for amount in (cost.flops, cost.bytes))
    fraction = ceiling.floor_us(cost) / row.median_us if cold else None
    return replace(row, tflops=tflops, tbps=tbps, fraction_of_ceiling=fraction)


def tensors_of(output: Output) -> tuple[Tensor, ...]:
    """The tensors of a result."""
    return output if isinstance(output, tuple) else (output,)


def max_error(got: Output, expected: Output, rows: Tensor | None = None) -> float:
    """The largest absolute error in the rows that `expected` has; infinite for a wrong shape or for NaN."""
    worst = 0.0
    for actual, truth in zip(tensors_of(got), tensors_of(expected), strict=False):
        actual = actual[: len(truth)] if rows is None else actual[rows]
        if actual.shape != truth.shape:
            return math.inf
        if truth.numel():
            error = float((actual.double() - truth.double()).abs().max())
            worst = math.inf if math.isnan(error) else max(worst, error)
    return worst if len(tensors_of(got)) >= len(tensors_of(expected)) else math.inf


def within(got: Output, expected: Output, rows: Tensor | None, tolerance: float | tuple[float, ...]) -> bool:
    """Whether the error of all tensors is at most the tolerance, or that of each tensor at most its own."""
    if not isinstance(tolerance, tuple):
        return max_error(got, expected, rows) <= tolerance
    parts = zip(tensors_of(got), tensors_of(expected), tolerance, strict=True)
    return all(max_error(actual, truth, rows) <= bound for actual, truth, bound in parts)


def allowed_error(plain: Output, expected: Output, ulps: float = 4.0) -> float:
    """The error rule: twice the error of plain PyTorch in the case's dtype, plus a few ulps of the largest value."""
    allowance = max(
        ulps * torch.finfo(value.dtype).eps * float(truth.abs().max())
        for value, truth in zip(tensors_of(plain), tensors_of(expected), strict=True)
    )
    return 2 * max_error(plain, expected) + allowance


def quantiles_us(seconds: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """(median, 10th, 90th percentile) in microseconds; None where nothing was timed."""
    if not seconds:
        return None, None, None
    values = torch.tensor(seconds, dtype=torch.float64) * 1e6
    median, low, high = values.quantile(torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)).tolist()
    return median, low, high


def ratio(results: Sequence[Result], peer: str) -> float | None:
    """How many times longer the peer takes than ours, by medians; None where one was not timed."""
    median = {row.impl: row.median_us for row in results}
    ours, theirs = median.get(OURS), median.get(peer)
    return None if ours is None or theirs is None else theirs / ours


def table(results: Sequence[Result], goals: Sequence[Goal] = ()) -> str:
    """The results as text: times, how many times faster ours is, errors, memory, and which goals are met."""
    first = results[0]
    wide = max(len(row.impl) for row in results)
    head = f"{'':{wide}} {'median':>11} {'p10':>11} {'p90':>11} {'vs fb':>8} {'max error':>10}"
    if first.fraction_of_ceiling is not None:
        head += f" {'of ceiling':>10}"
    lines = [f"{first.op}: {first.shape}", head + (f" {'memory':>10}" if first.peak_bytes is not None else "")]
    wanted = {goal.peer: goal.ratio for goal in goals}
    for row in results:
        line = f"{row.impl:{wide}}"
        if row.median_us is None:
            line += f" {'not timed: ' + ('fb failed' if row.ok else 'FAILED the check'):>44}"
        else:
            times = (_shown(value) for value in (row.median_us, row.p10_us, row.p90_us))
            compared = ratio(results, row.impl)
            line += "".join(f" {value:>11}" for value in times)
            line += f" {'' if compared is None else f'{compared:.2f}x':>8}"
        line += f" {row.max_error:>10.1e}"
        if row.fraction_of_ceiling is not None:
            line += f" {row.fraction_of_ceiling:>10.1%}"
        if row.peak_bytes is not None:
            line += f" {row.peak_bytes / 2**20:>6,.0f} MiB"
        if row.impl in wanted:
            reached = ratio(results, row.impl)
            verdict = "met" if reached is not None and reached >= wanted[row.impl] else "MISSED"
            line += f"  goal {wanted[row.impl]:g}x: {verdict}"
        if row.host_us is not None:
            line += f"  and the host {_shown(row.host_us)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _shown(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    return f"{microseconds:,.2f} us" if microseconds < 1000 else f"{microseconds / 1e3:,.2f} ms"


def peak_memory(prepare: Callable[..., Callable[[], object]], *arguments: object) -> int | None:
    """Bytes by which a first call of prepare(*arguments)() raises the peak resident memory of a separate process.

    They come from the operating system (VmHWM after the call minus VmRSS before it), so everything that the call
    touches counts: tensors, libraries' scratch memory, thread stacks. None on a system without these counters.
    """
    if not (PROC / "status").exists():
        return None
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_peak_memory, prepare, arguments).result()


def _peak_memory(prepare: Callable[..., Callable[[], object]], arguments: tuple) -> int:
    torch.set_num_threads(cores())
    run = prepare(*arguments)
    gc.collect()
    (PROC / "clear_refs").write_text("5")  # forget earlier peaks
    before = _status("VmRSS")
    kept = run()
    after = _status("VmHWM")
    del kept
    return after - before


def _status(name: str) -> int:
    for line in (PROC / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{PROC / 'status'}: expected a line {name}, got none; measure on Linux")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    about: dict[str, Any] = {"device": f"{_processor()}, {torch.get_num_threads()} threads", "isa": _instructions()}
    if DEVICE == "cuda":
        about = {"device": torch.cuda.get_device_name(), "driver": _driver(), "cuda": torch.version.cuda}
    return {
        **about,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
        "changed": changed(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    """What a command prints; None if it is absent or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _driver() -> str | None:
    """The NVIDIA driver's version, by its own tool."""
    said = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
    return said.partition("\n")[0].strip() or None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else ()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _instructions() -> list[str]:
    """This processor's instruction sets, of those that matter to kernels for CPUs."""
    info = Path("/proc/cpuinfo")
    known = set(info.read_text().split()) if info.exists() else set()
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in known]


def _commit() -> str:
    """The checked-out commit, with "+" if files other than results differ from it."""
    return (_said("git", "rev-parse", "HEAD") or "unknown") + "+" * bool(changed())


def changed() -> list[str]:
    """The files other than results that differ from the checked-out commit."""
    found = _said("git", "status", "--porcelain", "--", ".", ":!benchmarks/results") or ""
    return [line[3:] for line in found.splitlines()]


def device_name() -> str:
    """The name of the folder of this device's results: "h200" for an NVIDIA H200, "cpu" for AVX-512 without AMX."""
    if DEVICE == "cuda":
        return devices.file_name(torch.cuda.get_device_name())
    kinds = {"amx_bf16": "cpu-amx", "avx512f": "cpu", "avx2": "cpu-avx2"}
    return next((kinds[name] for name in reversed(_instructions()) if name in kinds), f"cpu-{platform.machine()}")


def write_results(directory: Path, results: Mapping[str, Sequence[Result | dict[str, str]]]) -> list[Path]:
    """Write <directory>/<device>/<bench>.json for every bench, each as a whole or not at all; returns the paths."""
    folder = directory / device_name()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    about = machine() | ({"ceilings": asdict(ceilings())} if DEVICE == "cuda" else {})  # before a file changes
    for bench, rows in results.items():
        path = folder / f"{bench}.json"
        records = [row if isinstance(row, dict) else asdict(row) for row in rows]
        cases = [{key: value for key, value in row.items() if value or key not in EMPTY} for row in records]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**about, "cases": cases}, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
        paths.append(path)
    return paths


def write_result(name: str, result: Mapping[str, Any]) -> None:
    """Write benchmarks/results/<name>/<device>.json."""
    folder = ROOT / "benchmarks" / "results" / name
    folder.mkdir(exist_ok=True)
    (folder / f"{DEVICE}.json").write_text(json.dumps(result, indent=1) + "\n")


def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of some calls by name, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def available(makers: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
    """What can be made here by name, and why others cannot: absent packages, other versions, unsupported sizes."""
    made, skipped = {}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except Exception as reason:
            skipped[name] = f"{type(reason).__name__}: {reason}"
    return made, skipped


def shown_commit(result: Mapping[str, Any], digits: int = 10) -> str:
    """The first digits of the commit that was measured, with the `+` of a tree with changes of its own."""
    commit = result["commit"]
    return commit[:digits] + "+" * commit.endswith("+")


def commit_and_changes(result: Mapping[str, Any]) -> str:
    """The commit, and in which files the tree that was measured differed from it; older results have no such list."""
    names = ", ".join(result["changed"]) if "changed" in result else "changed files not recorded"
    return shown_commit(result) + (f" ({names})" if result["commit"].endswith("+") else "")


def of_its_commit(result: Mapping[str, Any]) -> bool:
    """Whether the kernels were those of the commit that a result names, as far as is recorded."""
    return not any(name.startswith(("fb_kernels/", "csrc/")) for name in result.get("changed", ()))


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """{bench: its file} of a device; compiled peers and the kernels that ran are merged into the cases."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for name in [name for name in results if name.endswith(COMPILED)]:
        alone = results.pop(name)
        whole = results.setdefault(name.removesuffix(COMPILED), alone)
        if whole is not alone:
            whole["cases"] += [case for case in alone["cases"] if case["impl"] not in (OURS, FLOOR)]
    for name in [name for name in results if name.endswith(KERNELS)]:
        ran = {(case["op"], case["shape"], case["impl"]): case["kernel"] for case in results.pop(name)["cases"]}
        for case in results.get(name.removesuffix(KERNELS), {"cases": ()})["cases"]:
            case["kernel"] = ran.get((case["op"], case["shape"], case["impl"]), "")
    return results
