"""Shards on workers of a Ray cluster: on this machine, or on many that share the run's folder."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fb_core.stages.stage import Stage, work_and_put

LOOPBACK = "127.0.0.1"
RETRIES = 3  # of a shard whose worker died
PATIENCE = 600  # seconds for a worker to find a place when none is at work


class Worker:
    """A process with a core and perhaps a GPU of its own, that keeps its models between shards and stages."""

    stage: Stage

    def begin(self, make: Callable[[], Stage]) -> None:
        """Turns to a stage."""
        self.stage = make()

    def work(self, shard: str) -> Mapping[str, int]:
        """Compute and write a shard; what it holds, by name."""
        return work_and_put(self.stage, shard)


_resting: list[tuple[bool, Any]] = []  # workers of this process between two stages, by whether they have a GPU


def connect() -> bool:
    """Join the cluster that RAY_ADDRESS names, or start a Ray on loopback that ends with this process.

    Nothing is reported to Ray's makers. False where this process has one already.

    Raises:
        ValueError: Ray is not installed.
    """
    here: dict[str, Any] = {}
    if "RAY_ADDRESS" not in os.environ:
        here = {"address": "local", "_node_ip_address": LOOPBACK, "include_dashboard": False}
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray listens everywhere; read where it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ValueError("engine: expected Ray to be installed, got none; pip install 'futurebridge[ray]'") from None
    if ray.is_initialized():
        return False
    ray.init(log_to_driver=False, logging_level="ERROR", **here)
    return True


def work_on_ray(stage: Stage, shards: Sequence[str], on_done: Callable[[str, Mapping[str, int]], None]) -> None:
    """Compute and write shards on as many workers as the cluster has GPUs, or cores where it has none.

    The shard of a worker that dies, with its process or its node, goes to another one. Workers then rest until the next
    stage, or `dismiss`. Without RAY_ADDRESS in the environment a Ray of this machine is started, on loopback; it ends
    with this process.

    Raises:
        ValueError: Ray is not installed, or what the work raises.
        OSError: what the work raises, or workers that die again and again.
    """
    if not shards:
        return
    if connect():
        _resting.clear()
    import ray

    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if stage.on_gpu else 0
    kind = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(Worker)
    if any(has_gpu != bool(gpus) for has_gpu, _ in _resting):
        dismiss()
    waiting, died = deque(shards), Counter[str]()
    under_way: dict[Any, tuple[Any, str | None]] = {}

    def hire() -> None:
        worker = _resting.pop()[1] if _resting else kind.remote()
        begun = worker.begin.remote(stage.elsewhere(stage.run.resolve()))
        under_way[begun] = (worker, None)  # a shard only once it is up

    try:
        for _ in range(min(len(shards), gpus or max(1, int(resources.get("CPU", 0))))):
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
                place = shard or "start"
                died[place] += 1
                if died[place] > RETRIES:
                    raise OSError(f"ray: expected {place} to be lived through, got {problem}; see Ray's log") from None
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
                _resting.append((bool(gpus), worker))
    finally:
        for worker, _ in under_way.values():
            ray.kill(worker)


def dismiss() -> None:
    """End the workers that rest, and with them the models that they hold."""
    while _resting:
        import ray

        _, worker = _resting.pop()
        if ray.is_initialized():
            ray.kill(worker)
