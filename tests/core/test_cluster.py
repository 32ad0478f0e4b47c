"""The same bytes from Ray tasks and from several training processes as from one process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from limits import HANG
from runs import SMALL, contents, settings

from fb_core.stages.stage import Output, run_stage
from fb_core.stages.trajectories import TrajectoryStage

HERE = Path(__file__).parent
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}

ON_RAY = """
import pathlib, sys
import ray
from fb_core.config import RunSettings
from fb_core.stages.commands import run_command

ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
settings, run = RunSettings.model_validate_json(sys.argv[1]), pathlib.Path(sys.argv[2])
for command in ("collect", "futures", "score", "rollouts", "train", "evaluate"):
    run_command(command, settings, run, "ray")
ray.shutdown()
"""

STAGE_ON_RAY = """
import pathlib, sys
import test_cluster
from fb_core.config import RunSettings
from fb_core.stages.stage import run_stage

stage = getattr(test_cluster, sys.argv[1])(RunSettings.model_validate_json(sys.argv[2]), pathlib.Path(sys.argv[3]))
try:
    run_stage(stage, "ray")
except ValueError as problem:
    print(problem)
"""


def alone(code: str, *arguments: str) -> str:
    """What a process prints that runs the code."""
    paths = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=ONE_THREAD | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_ray_with_two_workers_gives_the_bytes_of_one_process(undisturbed, tmp_path):
    pytest.importorskip("ray")
    shown = alone(ON_RAY, settings().model_dump_json(), str(tmp_path / "run"))
    assert "valid group" in shown
    assert contents(tmp_path / "run") == contents(undisturbed[0]["evaluate"])


DEADLY = ("train-00001", "train-00002", "validation-00000")


class DyingStage(TrajectoryStage):
    """Its worker process is killed the first time that it is at one of three shards."""

    def work(self, shard: str) -> Output:
        marker = self.run / f"{shard}.died"
        if shard in DEADLY and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().work(shard)


@pytest.mark.slow
def test_a_task_whose_process_is_killed_is_run_again(undisturbed, tmp_path):
    pytest.importorskip("ray")
    alone(STAGE_ON_RAY, "DyingStage", settings().model_dump_json(), str(tmp_path))
    assert len(list(tmp_path.glob("*.died"))) == len(DEADLY)
    expected = contents(undisturbed[0]["evaluate"])
    assert (
        contents(tmp_path / "trajectories").items()
        == {
            name.removeprefix("trajectories/"): value
            for name, value in expected.items()
            if name.startswith("trajectories/")
        }.items()
    )


class RefusingStage(TrajectoryStage):
    """Its work fails as a user's mistake would."""

    def work(self, shard: str) -> Output:
        raise ValueError(f"{shard}: expected another shard, got this one; choose again")


@pytest.mark.slow
def test_a_mistake_in_a_task_is_the_users_error_and_not_retried(tmp_path):
    pytest.importorskip("ray")
    shown = alone(STAGE_ON_RAY, "RefusingStage", settings().model_dump_json(), str(tmp_path))
    assert "expected another shard" in shown


@pytest.mark.slow
def test_two_training_processes_give_the_bytes_of_one(undisturbed, tmp_path):
    done, run = trained_by_two(undisturbed[0]["rollouts"], tmp_path, SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(run) == contents(undisturbed[0]["train"])


@pytest.mark.slow
def test_more_processes_than_microbatches_are_refused(undisturbed, tmp_path):
    values = {**SMALL, "train": {**SMALL["train"], "microbatches": 1}}
    done, _ = trained_by_two(undisturbed[0]["rollouts"], tmp_path, values)
    assert done.returncode != 0
    assert "expected at most one a microbatch" in done.stderr


@pytest.mark.slow
def test_two_training_processes_killed_and_started_again_give_the_bytes_of_one(undisturbed, tmp_path):
    run, command = by_two(undisturbed[0]["rollouts"], tmp_path, SMALL)
    both = subprocess.Popen(command, env=ONE_THREAD, start_new_session=True, stdout=subprocess.DEVNULL)
    while not list((run / "training").glob("step-*.json")):
        assert both.poll() is None
        time.sleep(0.01)
    os.killpg(both.pid, signal.SIGKILL)
    both.wait()
    assert not (run / "reranker").exists()
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(run) == contents(undisturbed[0]["train"])


def trained_by_two(scored: Path, folder: Path, values: dict[str, Any]) -> tuple[subprocess.CompletedProcess[str], Path]:
    """`futurebridge train` by two processes to its end, and the run's folder."""
    run, command = by_two(scored, folder, values)
    return subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=HANG), run


def by_two(scored: Path, folder: Path, values: dict[str, Any]) -> tuple[Path, list[str]]:
    """A run's folder, and `futurebridge train` on it by two processes."""
    run, config = folder / "run", folder / "small.yaml"
    shutil.copytree(scored, run)
    config.write_text(yaml.safe_dump(values))
    launch = ["torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d"]
    train = ["fb_core", "train", "--config", str(config), "--run-dir", str(run)]
    return run, [sys.executable, "-m", *launch, "--rdzv-endpoint", "127.0.0.1:0", "-m", *train]


def test_the_local_engine_runs_the_same_stage(tmp_path):
    manifest = run_stage(TrajectoryStage(settings(), tmp_path))
    assert TrajectoryStage(settings(), tmp_path).folder.finished() == manifest
    assert manifest["complete"]
