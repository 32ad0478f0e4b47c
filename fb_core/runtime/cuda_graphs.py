"""CUDA graphs of fixed computations; without CUDA, the plain computations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

WARM_RUNS = 2  # compile and load every kernel before the capture


class Graphs:
    """Computations over tensors at fixed addresses: captured once and replayed on a GPU, called plainly elsewhere.

    All graphs share one memory pool. That is safe, since they run one after another and results that are kept are
    copied to tensors outside the pool. A capture takes as long as hundreds of replays.
    """

    def __init__(self, device: torch.device, capture: bool = True) -> None:
        self.device = device
        self.captures = capture and device.type == "cuda"
        self.nbytes = 0
        """Memory that the captured graphs hold."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._side: Any = None  # one stream for all captures: blocks of the pool are reused on their own stream only

    def ready(self, key: Hashable, compute: Callable[[], object]) -> Callable[[], object]:
        """What runs the computation: `compute` itself, or a replay of its graph, which is captured now if missing.

        It reads and writes the same tensors every time, without a host sync. A capture runs it several times, which
        must do no harm.
        """
        if not self.captures:
            return compute
        if key not in self._graphs:
            self._capture(key, compute)
        return self._graphs[key].replay

    def runs(self, key: Hashable) -> bool:
        """Whether `ready` would run the computation now, to capture it."""
        return self.captures and key not in self._graphs

    def forget(self) -> None:
        """Drop all graphs, since tensors that they read have moved."""
        self._graphs.clear()
        self._pool, self._side, self.nbytes = None, None, 0

    def _capture(self, key: Hashable, compute: Callable[[], object]) -> None:
        if self._pool is None:
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        current, side = torch.cuda.current_stream(self.device), self._side
        side.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            for _ in range(WARM_RUNS):
                compute()
            side.synchronize()
            torch.cuda.empty_cache()  # a capture empties the cache too, which would hide the memory that it takes
            before = torch.cuda.memory_reserved(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                compute()
            self.nbytes += max(0, torch.cuda.memory_reserved(self.device) - before)
        current.wait_stream(side)
        self._graphs[key] = graph
