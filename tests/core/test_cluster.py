"""The same bytes from Ray tasks and from several training processes as from one process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from limits import HANG
from runs import SMALL, contents, settings
from warm import launched, start_futurebridge

from fb_core.apps.pipeline.collect import TrajectoryStage
from fb_core.apps.pipeline.commands import COMMANDS
from fb_core.apps.pipeline.run import Output

HERE = Path(__file__).parent
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}

ON_RAY = """
import pathlib, sys
import ray
import test_cluster
from fb_core.apps.settings.run import RunSettings
from fb_core.apps.pipeline.commands import run_command
from fb_core.apps.pipeline.run import run_stage

ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
settings, folder = RunSettings.model_validate_json(sys.argv[1]), pathlib.Path(sys.argv[2])
run_stage(test_cluster.DyingStage(settings, folder / "run"), "ray")
for command in sys.argv[3:]:
    run_command(command, settings, folder / "run", "ray")
try:
    run_stage(test_cluster.RefusingStage(settings, folder / "refused"), "ray")
except ValueError as problem:
    print(problem)
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["score", "evaluate"])
@pytest.mark.sweep
def test_ray_with_two_workers_gives_the_bytes_of_one_process(undisturbed, tmp_path, last):
    """Though a task's process is killed, which is run again; a mistake in a task is the user's error, and not."""
    pytest.importorskip("ray")
    commands = COMMANDS[: COMMANDS.index(last) + 1]
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, settings().model_dump_json(), tmp_path, *commands],
        env=ONE_THREAD | {"PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trajectories: 2 workers on CPUs" in done.stdout
    assert "valid group" in done.stdout
    assert "expected another shard" in done.stdout
    died = list((tmp_path / "run").glob("*.died"))
    assert len(died) == len(DEADLY)
    for marker in died:
        marker.unlink()
    assert contents(tmp_path / "run") == contents(undisturbed[0][last])


DEADLY = ("train-00001", "validation-00000")


class DyingStage(TrajectoryStage):
    """Its worker process is killed the first time that it is at one of two shards."""

    def work(self, shard: str) -> Output:
        marker = self.run / f"{shard}.died"
        if shard in DEADLY and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().work(shard)


class RefusingStage(TrajectoryStage):
    """Its work fails as a user's mistake would."""

    def work(self, shard: str) -> Output:
        raise ValueError(f"{shard}: expected another shard, got this one; choose again")


@pytest.mark.slow
@pytest.mark.sweep
def test_two_training_processes_of_a_launcher_give_the_bytes_of_one(undisturbed, tmp_path):
    run, called = trains(undisturbed[0]["score"], tmp_path, SMALL)
    launch = ["torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d"]
    command = [sys.executable, "-m", *launch, "--rdzv-endpoint", "127.0.0.1:0", "-m", "fb_core", *called]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(run) == contents(undisturbed[0]["train"])


@pytest.mark.slow
def test_more_processes_than_microbatches_are_refused(undisturbed, tmp_path):
    values = {**SMALL, "train": {**SMALL["train"], "microbatches": 1}}
    _, called = trains(undisturbed[0]["score"], tmp_path, values)
    for rank, process in enumerate(both(called, tmp_path)):
        process.join(HANG)
        assert process.exitcode == 2
        assert "expected at most one per microbatch" in (tmp_path / str(rank) / "stderr").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_two_training_processes_give_the_bytes_of_one(undisturbed, tmp_path, killed):
    run, called = trains(undisturbed[0]["score"], tmp_path, SMALL)
    if killed:
        processes = both(called, tmp_path / "first")
        while not list((run / "training").glob("step-*.json")):
            assert all(process.is_alive() for process in processes)
            time.sleep(0.01)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        assert not (run / "reranker").exists()
    for rank, process in enumerate(both(called, tmp_path / "again")):
        process.join(HANG)
        assert process.exitcode == 0, (tmp_path / "again" / str(rank) / "stderr").read_text()[-3000:]
    assert contents(run) == contents(undisturbed[0]["train"])


def both(called: list[str], folder: Path) -> list[BaseProcess]:
    """`futurebridge` by two processes that know each other as a launcher would have them."""
    places = [folder / str(rank) for rank in range(2)]
    for place in places:
        place.mkdir(parents=True)
    return [start_futurebridge(called, place, **own) for place, own in zip(places, launched(2), strict=True)]


def trains(scored: Path, folder: Path, values: dict[str, Any]) -> tuple[Path, list[str]]:
    """A run's folder, and the arguments with which `futurebridge` trains on it."""
    run, config = folder / "run", folder / "small.yaml"
    shutil.copytree(scored, run)
    config.write_text(yaml.safe_dump(values))
    return run, ["train", "--config", str(config), "--run-dir", str(run)]
