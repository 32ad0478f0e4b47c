"""How calls are timed: by the self check, `futurebridge bench` and the benchmarks.

On a GPU between CUDA events, from a cold cache unless asked otherwise. Work queued before a cold call lasts longer than
the host takes for the call, so that the events see the GPU alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

CALLS = 15  # calls that are timed
GRAPH_CALLS = 20  # per replay, when a graph is timed with a warm cache
HIDDEN = 0.03  # most seconds of the host's work for a call that queued work hides
LEAST, MOST = 0.2, 3.0  # seconds of `steady`; more if the times are noisy


class Timing(Enum):
    """How a call is timed on a GPU; on a CPU all are the same."""

    COLD = "cold L2"  # the call is queued behind a write of more than the cache holds
    EAGER = "eager, warm L2"  # on an idle GPU, including the host's launches
    GRAPH_COLD = "graph, cold L2"  # one call per replay, queued behind a write of more than the cache holds
    GRAPH_WARM = "graph, warm L2"  # a replay of many calls, divided by their number


@dataclass(frozen=True)
class Timed:
    """How to time a call, and how long the host works for it."""

    seconds: Callable[[], float]  # times one call
    host: float  # seconds until a call returns, on an idle device


def timer(run: Callable[[], object], device: str, timing: Timing = Timing.COLD) -> Timed:
    """Graphs are captured here."""
    if device == "cpu":
        return Timed(lambda: _returned(run), 0.0)
    calls, work = GRAPH_CALLS if timing is Timing.GRAPH_WARM else 1, run
    if timing in (Timing.GRAPH_COLD, Timing.GRAPH_WARM):
        graph = torch.cuda.CUDAGraph()
        # The outer context restores the stream if capturing fails.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        graph.replay()
        work = graph.replay
    host = math.inf
    for _ in range(3):
        torch.cuda.synchronize()
        host = min(host, _returned(work))
        if host > HIDDEN:
            break
    flushes = 1 + math.ceil(1.5 * min(host, HIDDEN) / _flush_seconds()) if "cold" in timing.value else 0

    def seconds() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(flushes):
            _flusher().zero_()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / calls

    return Timed(seconds, host / calls)


def _returned(run: Callable[[], object]) -> float:
    """Seconds until a call returns."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@cache
def _flusher() -> Tensor:
    """A buffer many times as large as the L2 cache: writing it empties the cache."""
    return torch.empty(1 << 30, dtype=torch.int8, device="cuda")


@cache
def _flush_seconds() -> float:
    """How long one write of that buffer keeps the GPU busy."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _flusher().zero_()
    start.record()
    _flusher().zero_()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


def elapsed(run: Callable[[], object], device: str, timing: Timing = Timing.COLD) -> float:
    """Median seconds of a few calls, after one that warms up."""
    run()
    seconds = timer(run, device, timing).seconds
    return float(torch.tensor([seconds() for _ in range(CALLS)], dtype=torch.float64).median())


def steady(run: Callable[[], object], device: str) -> float:
    """The same, on a CPU of as many calls as make the median steady."""
    if device == "cuda":
        return elapsed(run, device)
    timed = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return float(timed.adaptive_autorange(min_run_time=LEAST, max_run_time=MOST).median)


def ceilings(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes per second of a copy, reads plus writes; operations per second of a matrix product), of random data."""
    length, size = (1 << 30, 8192) if device == "cuda" else (1 << 26, 1024)
    source = torch.empty(length, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    copied = elapsed(lambda: target.copy_(source), device, Timing.EAGER)
    multiplied = elapsed(lambda: torch.mm(a, b, out=out), device, Timing.EAGER)
    return 2 * source.nbytes / copied, 2.0 * size**3 / multiplied
