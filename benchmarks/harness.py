"""Times an implementation and its peers in one process, interleaved, and only those whose results are right."""

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
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

OURS = "fb"
ROOT = Path(__file__).resolve().parent.parent
PROC = Path("/proc/self")


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case's result, and the truth that its leading rows are checked against."""

    run: Callable[[], Tensor]
    expected: Tensor


@dataclass(frozen=True)
class Result:
    """What was measured of one implementation of one case; the times are None where it was not timed."""

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
    tolerance: float,
    peaks: Mapping[str, int] = MappingProxyType({}),
) -> list[Result]:
    """Check every implementation once (which also warms it up), then time the right ones in turn.

    pytest-benchmark drives the rounds: it calls ours, and before each of our rounds the peers' round as its set-up.

    Args:
        benchmark: pytest-benchmark's fixture; gets our times, and the peers' medians and ratios as extra_info.
        op: the function's name.
        shape: sizes by name, such as "K=13 H=64 P=512".
        implementations: by name, ours as "fb".
        rounds: how many times each is timed.
        tolerance: largest absolute error that counts as right.
        peaks: bytes of memory by name, to be reported beside the times.

    Returns:
        one result an implementation, in the given order.
    """
    errors: dict[str, float] = {}
    dtypes: dict[str, str] = {}
    for name, implementation in implementations.items():
        got = implementation.run()
        errors[name] = max_error(got, implementation.expected)
        dtypes[name] = str(got.dtype).removeprefix("torch.")
    right = [name for name, error in errors.items() if error <= tolerance]
    times: dict[str, list[float]] = {name: [] for name in implementations}

    def timed(name: str) -> None:
        start = time.perf_counter()
        implementations[name].run()
        times[name].append(time.perf_counter() - start)

    def time_peers() -> None:
        for name in right:
            if name != OURS:
                timed(name)

    if OURS in right:
        gc.collect()
        benchmark.pedantic(timed, args=(OURS,), setup=time_peers, rounds=rounds)
    results = []
    for name in implementations:
        median, low, high = quantiles_us(times[name])
        results.append(
            Result(op, shape, name, dtypes[name], median, low, high, errors[name], name in right, peaks.get(name))
        )
    benchmark.extra_info.update(
        shape=shape, max_error=errors, peers={row.impl: row.median_us for row in results if row.impl != OURS}
    )
    benchmark.extra_info["ratios"] = {row.impl: ratio(results, row.impl) for row in results if row.impl != OURS}
    return results


def max_error(got: Tensor, expected: Tensor) -> float:
    """The largest absolute error in the leading rows that `expected` has; infinite for another shape or for NaN."""
    got = got[: len(expected)]
    if got.shape != expected.shape:
        return math.inf
    error = float((got.double() - expected.double()).abs().max())
    return math.inf if math.isnan(error) else error


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
    lines = [f"{first.op}: {first.shape}", head + (f" {'memory':>10}" if first.peak_bytes is not None else "")]
    wanted = {goal.peer: goal.ratio for goal in goals}
    for row in results:
        line = f"{row.impl:{wide}}"
        if row.median_us is None or row.p10_us is None or row.p90_us is None:
            line += f" {'not timed: ' + ('fb failed' if row.ok else 'FAILED the check'):>44}"
        else:
            times = (f"{value / 1e3:,.2f} ms" for value in (row.median_us, row.p10_us, row.p90_us))
            line += "".join(f" {value:>11}" for value in times) + f" {ratio(results, row.impl):>7.2f}x"
        line += f" {row.max_error:>10.1e}"
        if row.peak_bytes is not None:
            line += f" {row.peak_bytes / 2**20:>6,.0f} MiB"
        if row.impl in wanted:
            reached = ratio(results, row.impl)
            verdict = "met" if reached is not None and reached >= wanted[row.impl] else "MISSED"
            line += f"  goal {wanted[row.impl]:g}x: {verdict}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def peak_memory(prepare: Callable[..., Callable[[], object]], *arguments: object) -> int | None:
    """Bytes by which a first call of prepare(*arguments)() raises the peak resident memory of a process of its own.

    The kernel's own accounts are read (VmHWM after the call less VmRSS before it), so that whatever the call touches
    counts: tensors, libraries' scratch memory, thread stacks. None where the system keeps no such accounts.
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
    return {
        "device": f"{_processor()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The checked-out commit, with "+" where files differ from it."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain"])
    try:
        done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for command in commands]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done[0].stdout.strip() + ("+" if done[1].stdout.strip() else "")


def write_results(directory: Path, results: dict[str, list[Result]]) -> list[Path]:
    """Write <directory>/<bench>.json for every bench; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for bench, rows in results.items():
        path = directory / f"{bench}.json"
        cases = [asdict(row) for row in rows]
        path.write_text(json.dumps({**machine(), "cases": cases}, indent=1) + "\n", encoding="utf-8")
        paths.append(path)
    return paths
