"""The demo's pair through the five commands, each of them killed once from outside and then run to its end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import yaml
from runs import SMALL, contents
from warm import futurebridge, start_futurebridge

COMMANDS = ("collect", "futures", "score", "train", "evaluate")


@pytest.mark.slow
@pytest.mark.sweep
def test_the_five_commands_killed_and_run_again_end_in_their_tables(undisturbed, tmp_path):
    config, run, shown = tmp_path / "small.yaml", tmp_path / "run", []
    config.write_text(yaml.safe_dump(SMALL))
    run.mkdir()
    for command in COMMANDS:
        called = [command, "--config", config, "--run-dir", run]
        _kill_in_its_shards(called, run, tmp_path)
        done = futurebridge(*called)
        assert done.returncode == 0, done.stderr[-3000:]
        shown.append(done.stdout)
    for words in ("answer-verified future", "valid group", "by seed", "minus greedy"):
        assert words in "".join(shown)
    assert contents(run) == contents(undisturbed[0]["evaluate"])


def _kill_in_its_shards(called: list[object], run: Path, folder: Path) -> None:
    """The command, ended by SIGKILL once it has finished some of its shards."""
    before = _shards(run)
    process = start_futurebridge(called, folder)
    while _shards(run) <= before:
        assert process.is_alive(), (folder / "stderr").read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _shards(run: Path) -> int:
    return sum(path.name != "manifest.json" for path in run.rglob("*.json"))
