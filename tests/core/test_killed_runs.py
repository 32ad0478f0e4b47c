"""Every stage killed with SIGKILL, inside its writes and anywhere, and gone on with: the same bytes, no shard twice."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
from runs import contents, finish, receipts, settings, start

COMMANDS = ("collect", "futures", "score", "rollouts", "train", "evaluate")
KILLS = 20


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_stage_goes_on_to_the_same_bytes(undisturbed, tmp_path, command):
    folders, seconds = undisturbed
    expected = contents(folders[command])
    place = COMMANDS.index(command)
    chosen, source = settings(), random.Random(command)
    killed = in_write = 0
    for attempt in range(10 * KILLS):
        if killed == KILLS:
            break
        run = tmp_path / str(attempt)
        if place:
            shutil.copytree(folders[COMMANDS[place - 1]], run)  # keeps times
        before = receipts(run)
        writes = in_write < KILLS // 2 or source.random() < 0.3
        process = start(command, chosen, run, dies=source.randint(1, 12) if writes else None, seed=attempt)
        if writes:
            process.join()
        else:
            process.join(source.uniform(0, seconds[command]))
            process.kill()
            process.join()
        if process.exitcode != -signal.SIGKILL:  # it had finished
            assert process.exitcode == 0
            continue
        killed += 1
        in_write += writes
        kept = receipts(run)
        assert before.items() <= kept.items()
        finish(command, chosen, run)
        after = receipts(run)
        gone = {name for name in kept if "/step-" in name}  # checkpoints make room for later ones
        assert {name: time for name, time in kept.items() if name not in gone}.items() <= after.items()
        assert contents(run) == expected
        shutil.rmtree(run)
    assert killed == KILLS
    assert in_write >= KILLS // 2


def test_a_second_run_does_nothing(undisturbed, tmp_path):
    folders, _ = undisturbed
    run = tmp_path / "run"
    shutil.copytree(folders["evaluate"], run)
    before = receipts(run)
    for command in COMMANDS:
        finish(command, settings(), run)
    assert receipts(run) == before


def test_runs_leave_nothing_beside_their_files(undisturbed):
    folders, _ = undisturbed
    names = {path.name for path in Path(folders["evaluate"]).rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith(".part") or name.startswith("step-")]
