"""The script of a visit to a GPU machine: parts that fail or hang leave the others their time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest
from limits import HANG

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *test_fails_gpu*) echo "one thing is wrong"; exit 3 ;;
  *test_hangs_gpu*) sleep 60 ;;
  *summary*) echo "a table of $(ls "$3")" ;;
  *get_device_capability*) echo "sm_90" ;;
  *build_in_place*) test "$FB_BUILD_CUDA" = force && sleep 1; echo "built" ;;
  *"benchmarks.aot --list"*) echo rms_norm rms_norm_backward swiglu ;;
  *benchmarks.aot*) sleep 1; echo "$3 for $5, 9 compiled" ;;
  *--check*) printf 'op  right\nswiglu  yes\n' ;;
  *"--peers compiled"*) echo "compiled peers of $3" ;;
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
    folders = {"OUT": str(tree / "out"), "RESULTS": str(tree / "out" / "results")}
    environment = os.environ | {"PYTHON": str(tree / "python")} | folders | settings
    script = str(tree / "benchmarks" / "gpu_check.sh")
    return subprocess.run([script], env=environment, capture_output=True, text=True, timeout=HANG)


def lines(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """{part: how it ended}."""
    found = re.findall(r"^(\w+): ((?:ok|failed|ended|not begun).*)", done.stdout, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_what_fails_or_hangs_leaves_the_others_their_time(tree: Path) -> None:
    done = visit(tree, PARTS="head,tests,decode", LIMIT="30")
    assert done.returncode == 1
    assert "--- test_fails: failed, its end:" in done.stdout.replace("failed, 3", "failed")
    assert "one thing is wrong" in done.stdout
    rows = lines(done)
    assert list(rows) == ["head", "test_fails", "test_hangs", "test_works", "contract", "decode"]
    assert re.fullmatch(r"ok, \d+ s, measured", rows["head"])
    assert rows["test_fails"].startswith("failed, 3")
    assert rows["test_hangs"].startswith("ended at its ")
    assert re.fullmatch(r"ok, \d+ s, 3 passed", rows["test_works"])  # beside the one that hangs
    assert rows["decode"] == "not begun, 30 s are over"
    assert done.stdout.rstrip().splitlines()[-1] == "a table of written.json"
    log = (tree / "out" / "log.txt").read_text()
    assert "=== test_fails: " in log
    assert "one thing is wrong" in log


def test_compilers_run_beside_each_other_before_all_else(tree: Path) -> None:
    done = visit(tree, PARTS="build,check")
    rows = lines(done)
    assert done.returncode == 0, done.stdout
    assert list(rows) == ["build", "compile_rms_norm", "compile_rms_norm_backward", "compile_swiglu", "check"]
    assert rows["compile_swiglu"].endswith("swiglu for sm_90, 9 compiled")
    assert "op  right\nswiglu  yes\n" in done.stdout
    pieces = [tree / "out" / "parts" / f"{name}.txt" for name in ("build", "compile_rms_norm", "compile_swiglu")]
    begun = [path.read_text().partition(":")[0] for path in pieces]
    assert begun == ["=== build", "=== compile_rms_norm", "=== compile_swiglu"]


@pytest.mark.parametrize(("minutes", "last"), [("10", "attention_kernels"), ("30", "decode_compiled"), ("60", "tune")])
def test_a_longer_visit_does_more(tree: Path, minutes: str, last: str) -> None:
    for name in ("fails", "hangs"):
        (tree / "tests" / "gpu" / f"test_{name}_gpu.py").unlink()
    done = visit(tree, VISIT=minutes)
    assert done.returncode == 0, done.stdout
    rows = list(lines(done))
    assert rows[-1] == last
    compilers = ["build", "compile_rms_norm", "compile_rms_norm_backward", "compile_swiglu"]
    begin = [*compilers, "check", "head", "attention", "decode", "scorer"]
    assert rows[: len(begin)] == begin
    assert ("test_works" in rows) == (minutes != "10")
    log = (tree / "out" / "log.txt").read_text()
    limits = {name: int(limit) for name, limit in re.findall(r"^=== (\w+): at most (\d+) s", log, re.MULTILINE)}
    assert list(limits) == rows
    beside = [compilers, [name for name in rows if name in ("test_works", "contract")]]
    one_by_one = sum(limit for name, limit in limits.items() if name not in chain(*beside))
    assert one_by_one + sum(max(map(limits.get, names), default=0) for names in beside) <= 60 * int(minutes) - 30
    assert (tree / "out" / "results" / "written.json").is_file()


def test_a_visit_of_another_length_is_refused(tree: Path) -> None:
    done = visit(tree, VISIT="15")
    assert done.returncode == 2
    assert done.stderr == "VISIT: expected 10, 30 or 60 minutes, got 15; choose the shorter one\n"


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
    site = lines(done)["contract"].rpartition(", ")[2]  # the last line of what the tests printed
    assert f"site {site}" in (tree / "out" / "log.txt").read_text()
    assert site.startswith("/")
    assert not Path(site).exists()
