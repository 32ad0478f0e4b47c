"""Shards as Ray tasks: on this machine, or on a cluster that shares the run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fb_core.config import RunSettings
from fb_core.pipeline.stage import Stage, work_and_put

RETRIES = 3  # of a task whose process or node died


def work_on_ray(stage: Stage, shards: Sequence[str], on_done: Callable[[str], None]) -> None:
    """Compute and write shards as tasks, each with a core and, where there are any, a GPU of its own.

    A task whose process or node dies is run again; models stay loaded in a worker between tasks. Without RAY_ADDRESS in
    the environment a Ray of this machine is started, on loopback, and ended.

    Raises:
        ValueError: Ray is not installed, or what the work raises.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("engine: expected Ray to be installed, got none; pip install 'futurebridge[ray]'") from None

    if not shards:
        return
    own = not ray.is_initialized()
    if own:
        local: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="ERROR", **({} if "RAY_ADDRESS" in os.environ else local))
    try:
        gpus = 1 if torch.cuda.is_available() or ray.cluster_resources().get("GPU") else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_work)
        under_way = {task.remote(type(stage), stage.settings, stage.run.resolve(), shard): shard for shard in shards}
        while under_way:
            for handle in ray.wait(list(under_way))[0]:
                ray.get(handle)
                on_done(under_way.pop(handle))
    except ray.exceptions.RayTaskError as problem:
        raise problem.as_instanceof_cause() from None
    except ray.exceptions.RayError as problem:
        raise OSError(f"ray: expected tasks to finish, got {problem}; run the command again") from problem
    finally:
        if own:
            ray.shutdown()


def _work(kind: type[Stage], settings: RunSettings, run: Path, shard: str) -> None:
    work_and_put(_stage(kind, settings, run), shard)


@lru_cache(maxsize=1)
def _stage(kind: type[Stage], settings: RunSettings, run: Path) -> Stage:
    """The stage that a worker is at, with what it has loaded."""
    return kind(settings, run)
