"""The script of a visit to a GPU machine: parts that fail or hang leave the others their time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from limits import HANG

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *test_fails_gpu*) echo "one thing is wrong"; exit 3 ;;
  *test_hangs_gpu*) sleep 60 ;;
  *summary*) echo "a table of $(ls "$3")" ;;
  *"pip install"*) for last; do :; done; echo "$last" > "$(dirname "$0")/installed" ;;
  *bench_*) echo "{}" > "${@: -1}/written.json"; echo "measured" ;;
  *) echo "3 passed" ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The script among GPU tests of its own, and a Python that only says so."""
    for name in ("fails", "hangs", "works"):
        path = tmp_path / "tests" / "gpu" / f"test_{name}_gpu.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(SCRIPT, tmp_path / "benchmarks")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def visit(tree: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(tree / "python"), "OUT": str(tree / "out"), **settings}
    script = str(tree / "benchmarks" / "gpu_check.sh")
    return subprocess.run([script], env=environment, capture_output=True, text=True, timeout=HANG)


def test_what_fails_or_hangs_leaves_the_others_their_time(tree: Path) -> None:
    done = visit(tree, PARTS="head,tests,decode", LIMIT="30")
    assert done.returncode == 1
    summary = [line for line in done.stdout.splitlines() if ": " in line and not line.startswith("---")]
    assert "written.json" in done.stdout
    assert "--- test_fails failed (3), its end:\none thing is wrong" in done.stdout
    rows = {line.partition(":")[0]: line.partition(": ")[2] for line in summary}
    assert re.fullmatch(r"ok, \d+ s, measured", rows["head"])
    assert rows["test_fails"].startswith("failed, 3")
    assert rows["test_hangs"].startswith("ended at its ")
    assert rows["test_works"] == rows["decode"] == "not begun, 30 s are over"
    log = (tree / "out" / "log.txt").read_text()
    assert "=== test_fails: " in log
    assert "one thing is wrong" in log


def test_all_is_well(tree: Path) -> None:
    for name in ("fails", "hangs"):
        (tree / "tests" / "gpu" / f"test_{name}_gpu.py").unlink()
    done = visit(tree, PARTS="tests,training")
    assert done.returncode == 0, done.stdout
    tests, contract, training = done.stdout.splitlines()[-3:]
    assert re.fullmatch(r"test_works: ok, \d+ s, 3 passed", tests)
    assert re.fullmatch(r"contract: ok, \d+ s, 3 passed", contract)
    assert re.fullmatch(r"training: ok, \d+ s, measured", training)


def test_a_part_that_is_not_there_is_named(tree: Path) -> None:
    done = visit(tree, PARTS="tests,heads")
    assert done.returncode == 2
    assert "got heads" in done.stderr


def test_wheels_that_were_brought_along_are_used_for_the_visit_alone(tree: Path) -> None:
    for name in ("fails", "hangs"):
        (tree / "tests" / "gpu" / f"test_{name}_gpu.py").unlink()
    wheel = tree / "build" / "wheels" / "peer-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    (tree / "python").write_text(PYTHON.replace('echo "3 passed"', 'echo "site $PYTHONPATH"; ls -d "$PYTHONPATH"'))
    done = visit(tree, PARTS="tests", PYTHONPATH="")
    assert (tree / "installed").read_text().split() == ["build/wheels/peer-1.0-py3-none-any.whl"]
    site = done.stdout.rpartition(", ")[2].strip()  # the last line of what the tests printed
    assert f"site {site}" in (tree / "out" / "log.txt").read_text()
    assert site.startswith("/")
    assert not Path(site).exists()
