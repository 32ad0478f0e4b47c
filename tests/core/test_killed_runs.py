"""Every stage killed with SIGKILL, inside its writes and anywhere, and gone on with: the same bytes, no shard twice."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
from runs import contents, finish, receipts, settings, start

COMMANDS = ("collect", "futures", "score", "train", "evaluate")
KILLS = 6
IN_A_ROW = 4  # kills of one run, each of the process that went on behind the one before


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.sweep(5)
def test_a_killed_stage_goes_on_to_the_same_bytes(undisturbed, tmp_path, command):
    folders, seconds = undisturbed
    expected = contents(folders[command])
    place = COMMANDS.index(command)
    chosen, source = settings(), random.Random(command)
    attempts = killed = in_write = 0
    while killed < KILLS:
        run = tmp_path / "run"
        if place:
            shutil.copytree(folders[COMMANDS[place - 1]], run)  # keeps times
        kept, here = receipts(run), 0
        while here < min(IN_A_ROW, KILLS - killed):
            attempts += 1
            assert attempts < 10 * KILLS
            writes = in_write < KILLS // 2 or source.random() < 0.3
            process = start(command, chosen, run, dies=source.randint(1, 12) if writes else None, seed=attempts)
            if writes:
                process.join()
            else:
                process.join(source.uniform(0, seconds[command]))
                process.kill()
                process.join()
            kept = _kept(kept, run, expected)
            if process.exitcode != -signal.SIGKILL:  # it had finished
                assert process.exitcode == 0
                break
            here += 1
            in_write += writes
        killed += here
        finish(command, chosen, run)
        _kept(kept, run, expected)
        assert contents(run) == expected
        shutil.rmtree(run)
    assert in_write >= KILLS // 2


def _kept(before: dict[str, int], run: Path, expected: dict[str, str]) -> dict[str, int]:
    """The finished shards: those of before untouched, all with the bytes of the run that nobody disturbed."""
    after = receipts(run)
    lasting = {name: time for name, time in before.items() if "/step-" not in name}  # checkpoints make room
    assert lasting.items() <= after.items()
    done = {name.removesuffix(".json") for name in after}
    for name, value in contents(run).items():
        if name.rpartition(".")[0] in done and name in expected:
            assert value == expected[name], name
    return after


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
