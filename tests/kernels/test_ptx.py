"""Compiled kernels, executed without a GPU: the files of ptx/ in a process in which Triton compiles.

`make ptx` runs all of their tests; here those that are not slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "ptx"


@pytest.mark.slow
@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this process compiles, and runs them itself")
def test_compiled_kernels(request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", str(FOLDER)]
    command += ["--all"] * request.config.getoption("all")
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
