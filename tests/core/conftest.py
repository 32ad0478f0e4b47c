"""What several files of tests share: a small run that nobody disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

COMMANDS = ("collect", "futures", "score", "rollouts", "train", "evaluate")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, float]]:
    """(the run's folder after every command, seconds of each command) of a run that nobody disturbed."""
    from runs import finish, settings

    folder = tmp_path_factory.mktemp("undisturbed")
    before, folders, seconds = folder / "start", {}, {}
    before.mkdir()
    for command in COMMANDS:
        after = folder / command
        shutil.copytree(before, after)
        seconds[command] = finish(command, settings(), after)
        folders[command], before = after, after
    return folders, seconds
