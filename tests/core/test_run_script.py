"""The demo's pair through the five commands, driven by a shell script that kills each of them once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import SMALL, contents

SCRIPT = Path(__file__).parent / "run_and_kill.sh"
SECONDS = ("5", "5.5", "5", "7", "6")  # three or four of them pass with imports


@pytest.mark.slow
def test_the_five_commands_killed_and_run_again_end_in_their_tables(undisturbed, tmp_path):
    config, run = tmp_path / "small.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(SMALL))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(SCRIPT), str(config), str(run), *SECONDS],
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for words in ("answer-verified future", "valid group", "by seed", "greedy"):
        assert words in done.stdout
    assert contents(run) == contents(undisturbed[0]["evaluate"])
