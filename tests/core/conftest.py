"""What several files of tests share: a small run that nobody disturbed."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Once = Callable[[str, Callable[[Path], None]], Path]
COMMANDS = ("collect", "futures", "score", "rollouts", "train", "evaluate")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Once:
    """Makes a named folder once for all of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                folder.mkdir()
                make(folder)
                (folder / "made").touch()
        assert (folder / "made").exists(), f"{name} could not be made"
        return folder

    return made


@pytest.fixture(scope="session")
def undisturbed(once: Once) -> tuple[dict[str, Path], dict[str, float]]:
    """(the run's folder after every command, seconds of each command) of a run that nobody disturbed."""
    from runs import finish, settings

    def make(folder: Path) -> None:
        before, seconds = folder / "start", {}
        before.mkdir()
        for command in COMMANDS:
            after = folder / command
            shutil.copytree(before, after)
            seconds[command] = finish(command, settings(), after)
            before = after
        (folder / "seconds.json").write_text(json.dumps(seconds))

    folder = once("undisturbed", make)
    return {command: folder / command for command in COMMANDS}, json.loads((folder / "seconds.json").read_text())
