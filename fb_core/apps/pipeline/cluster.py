"""Shards on the workers of a Ray cluster: on this machine, or on several that share the run's folder."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fb_core._util import require

LOOPBACK = "127.0.0.1"
RETRIES = 3  # of a shard whose worker died
PATIENCE = 600  # seconds that a worker may take to start while no other is at work

Work: TypeAlias = Callable[[str], Mapping[str, int]]
"""Computes and writes a shard of a stage; returns its counts."""


class Worker:
    """A process with its own core and, on GPU machines, its own GPU; it keeps models between shards and stages."""

    do: Work

    def begin(self, make: Callable[[], Work]) -> None:
        """Start on a stage."""
        self.do = make()

    def work(self, shard: str) -> Mapping[str, int]:
        """Compute and write a shard; returns its counts."""
        return self.do(shard)


_idle: list[tuple[bool, Any]] = []  # (has a GPU, worker) of this process's idle workers between two stages


def connect() -> bool:
    """Join the cluster that RAY_ADDRESS names, or start Ray on loopback; that one ends with this process.

    Ray's usage statistics are off unless the environment turns them on. Returns False if Ray was running already;
    ImportError if it is not installed.
    """
    options: dict[str, Any] = {}
    if "RAY_ADDRESS" not in os.environ:
        options = {"address": "local", "_node_ip_address": LOOPBACK, "include_dashboard": False}
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray listens everywhere; read where it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    require("engine", "ray", extra="ray")
    import ray

    if ray.is_initialized():
        return False
    ray.init(log_to_driver=False, logging_level="ERROR", **options)
    return True


def work_on_ray(
    make: Callable[[], Work],
    shards: Sequence[str],
    on_gpu: bool,
    on_done: Callable[[str, Mapping[str, int]], None],
    say: Callable[[str], None],
) -> None:
    """Compute and write shards on one worker per GPU of the cluster, or per core if there is no GPU to use.

    `make` makes what works on a shard, in each worker; `on_done` gets a finished shard and its counts, `say` how many
    workers there are. If a worker dies, its shard goes to another one. Afterwards the workers stay idle until the next
    stage or `dismiss`. Without RAY_ADDRESS in the environment, Ray is started on loopback and ends with this process.
    Raises what the work raises, ImportError without Ray, and OSError if workers die again and again.
    """
    if not shards:
        return
    if connect():
        _idle.clear()
    import ray

    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if on_gpu else 0
    kind = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(Worker)
    if any(has_gpu != bool(gpus) for has_gpu, _ in _idle):
        dismiss()
    waiting, died = deque(shards), Counter[str]()
    under_way: dict[Any, tuple[Any, str | None]] = {}

    def hire() -> None:
        worker = _idle.pop()[1] if _idle else kind.remote()
        under_way[worker.begin.remote(make)] = (worker, None)  # it gets a shard once it has started

    try:
        workers = min(len(shards), gpus or max(1, int(resources.get("CPU", 0))))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") if "RAY_ADDRESS" not in os.environ else "its nodes'"
        say(f"{workers} workers, each with one of {gpus} GPUs ({visible})" if gpus else f"{workers} workers on CPUs")
        for _ in range(workers):
            hire()
        while waiting or any(shard is not None for _, shard in under_way.values()):
            done, _ = ray.wait(list(under_way), timeout=PATIENCE)
            if not done:
                if all(shard is None for _, shard in under_way.values()):
                    raise OSError(f"ray: expected a worker to start within {PATIENCE} s, got none; see `ray status`")
                continue
            worker, shard = under_way.pop(done[0])
            try:
                counts = ray.get(done[0])
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as problem:
                task = shard or "start"
                died[task] += 1
                if died[task] > RETRIES:
                    raise OSError(f"ray: expected a worker to survive {task}, got {problem}; see Ray's log") from None
                if shard is not None:
                    waiting.appendleft(shard)
                hire()
                continue
            except ray.exceptions.RayTaskError as problem:
                raise problem.cause from None
            except ray.exceptions.RayError as problem:
                raise OSError(f"ray: expected a worker to go on, got {problem}; see Ray's log") from None
            if shard is None:
                died["start"] = 0
            else:
                on_done(shard, counts)
            if waiting:
                following = waiting.popleft()
                under_way[worker.work.remote(following)] = (worker, following)
            else:
                _idle.append((bool(gpus), worker))
    finally:
        for worker, _ in under_way.values():
            ray.kill(worker)


def dismiss() -> None:
    """End the idle workers, and so free the models that they hold."""
    while _idle:
        import ray

        _, worker = _idle.pop()
        if ray.is_initialized():
            ray.kill(worker)
