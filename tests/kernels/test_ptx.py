"""Compiled kernels, executed without a GPU: each file of ptx/ in a process in which Triton compiles.

`make ptx` runs all of their tests; here those that are not slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "ptx").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this process compiles, and runs them itself")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_compiled_kernels(file: Path, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", str(file)]
    command += ["--all"] * request.config.getoption("all")
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
