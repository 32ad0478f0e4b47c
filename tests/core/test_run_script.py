"""The demo's pair through the six commands, driven by a shell script that kills each of them once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from limits import HANG
from runs import SMALL, contents

SCRIPT = Path(__file__).parent / "run_and_kill.sh"


@pytest.mark.slow
def test_the_six_commands_killed_and_run_again_end_in_their_tables(undisturbed, tmp_path):
    config, run = tmp_path / "small.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(SMALL))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(SCRIPT), str(config), str(run)],
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("killed at") == 6
    for words in ("answer-verified future", "valid group", "by seed", "minus greedy"):
        assert words in done.stdout
    assert contents(run) == contents(undisturbed[0]["evaluate"])
