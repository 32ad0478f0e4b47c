"""A visit to a GPU, rehearsed without one: its minutes, kills after every part, `make gpu-check` from a bare Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from limits import HANG

from benchmarks import visit

ROOT = Path(__file__).resolve().parent.parent
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
  *benchmarks.visit*) exec {sys.executable} -E -S "$@" ;;
  *"pip install"*) echo "$*" > installed ;;
  *build_in_place*) echo "built" > built ;;
  *aot*swiglu*) echo "one thing is wrong"; exit 3 ;;
  *--check*) printf 'op  right\\nswiglu  yes\\n' ;;
  *) echo "$FB_KERNELS_DEVICES $PYTHONPATH" ;;
esac
"""
COLLECT = """
import sys, types, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(total_memory=float(sys.argv[1]))
import pytest
from pathlib import Path
from benchmarks import shapes, visit

class Count:
    def pytest_collection_finish(self, session):
        self.count = len(session.items)

for part in [*visit.first(Path("x")), *visit.second(Path("x"))]:
    for name, command in part.commands.items():
        if "pytest" in command:
            given = [word for word in command[command.index("pytest") + 1 :] if word != "-n4"]
            code = pytest.main([*given, "--collect-only", "-qq"], plugins=[count := Count()])
            print("collected", name, count.count if code == 0 else code)
print("collected", "LLM", shapes.LLM["num_hidden_layers"])
"""


class Killed(Exception):
    """In the place of a signal."""


class Machine:
    """A clock, and commands that take all the time they may."""

    def __init__(self, lives: int) -> None:
        self.now, self.lives, self.ran = 0.0, lives, []

    def clock(self) -> float:
        return self.now

    def perform(self, commands: visit.Commands, seconds: float, folder: Path, devices: str) -> dict[str, str]:
        for name in commands:
            (folder / f"{name}.txt").write_text("half of")
        if len(self.ran) == self.lives:
            raise Killed
        self.now += seconds
        self.ran.append([*commands])
        for name in commands:
            (folder / f"{name}.txt").write_text(f"all, with {devices}")
        return dict.fromkeys(commands, "ok")


def held(tar: Path) -> set[str]:
    """The commands whose output the tar has, as told by its record."""
    with tarfile.open(tar) as archive:
        record = archive.extractfile("visit/visit.json")
        assert record is not None
        known = json.load(record)
        assert {f"visit/{name}.txt" for name in known} <= {*archive.getnames()}
    return {*known}


@pytest.fixture(autouse=True)
def counters_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit.shutil, "which", lambda _: "ncu")


@pytest.mark.parametrize("which", visit.MINUTES)
def test_a_visit_is_as_long_as_it_says_and_goes_on_where_it_was_killed(which: str, tmp_path: Path) -> None:
    """After every part it is killed and the machine lost; the tar alone comes back."""
    limit, folder, tar = 60 * visit.MINUTES[which], tmp_path / "build" / "visit", tmp_path / "out" / "visit.tar.gz"
    parts = getattr(visit, which)(folder)
    seconds, before = 0.0, set()
    for part in parts:
        machine = Machine(lives=1)
        try:
            assert visit.visit(parts, limit, folder, tar, perform=machine.perform, clock=machine.clock)
        except Killed:
            assert part is not parts[-1]
        assert machine.ran == [[*part.commands]]
        seconds += machine.now
        assert held(tar) - before == {*part.commands}
        before = held(tar)
        print(f"{which}: killed after {', '.join(part.commands)}; {seconds:.0f} s; the tar holds {len(before)}")
        shutil.rmtree(folder)
    whole, once_more = Machine(lives=99), Machine(lives=0)
    clean = {"folder": tmp_path / "whole" / "visit", "tar": tmp_path / "whole.tar.gz"}
    assert visit.visit(parts, limit, **clean, perform=whole.perform, clock=whole.clock)
    assert whole.now == seconds <= limit
    assert visit.visit(parts, limit, **clean, perform=once_more.perform, clock=once_more.clock)  # nothing is left
    print(f"{which}: {seconds / 60:.2f} minutes of {visit.MINUTES[which]}; the tar: {' '.join(sorted(before))}")


def test_what_time_or_a_hanging_kernel_leaves_out_is_said_and_runs_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tar, hangs = tmp_path / "build" / "visit", tmp_path / "visit.tar.gz", Machine(lives=99)

    def perform(commands: visit.Commands, seconds: float, *rest: Path) -> dict[str, str]:
        ended = hangs.perform(commands, seconds, *rest)
        return ended | {name: "ended at its 20 s" for name in commands if name == "gluon_attention"}

    given = {"folder": folder, "tar": tar, "clock": hangs.clock, "perform": perform}
    assert not visit.visit(visit.first(folder), 170, **given)
    said = capsys.readouterr().out
    assert "gluon_attention: ended at its 20 s" in said
    assert "attention_gluon: left out, gluon_attention is not ok" in said
    assert hangs.now == 170
    assert "head_gluon: not begun, time is over" in said
    ran = len(hangs.ran)
    visit.visit(visit.first(folder), 480, **given)
    assert hangs.ran[ran] == ["head_gluon"]
    visit.visit(visit.first(folder), 480, **given, chosen=["gluon_attention", "check"])
    assert hangs.ran[-2:] == [["check"], ["gluon_attention"]]


def test_commands_run_beside_each_other_and_end_with_all_that_they_began(tmp_path: Path) -> None:
    begun, body = (
        time.monotonic(),
        "import subprocess, time; print(1, flush=True); subprocess.run(['sleep', '77']); print(2)",
    )
    commands: Mapping[str, Sequence[str]] = {
        "hangs": [sys.executable, "-c", body],
        "works": ["bash", "-c", "echo $FB_KERNELS_DEVICES"],
        "fails": ["bash", "-c", "exit 3"],
    }
    ended = visit.perform(commands, visit.GRACE + 2, tmp_path, "asked")
    assert ended == {"hangs": "ended at its 5 s", "works": "ok", "fails": "failed, 3"}
    assert time.monotonic() - begun < 60
    assert (tmp_path / "works.txt").read_text() == f"{tmp_path / 'asked'}\n"
    assert (tmp_path / "hangs.txt").read_text().startswith("1\nTraceback")


def test_make_gpu_check_under_a_bare_python(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name in ("Makefile", "benchmarks/__init__.py", "benchmarks/visit.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for op in ("rms_norm", "swiglu"):
        (tmp_path / "fb_kernels" / op).mkdir(parents=True)
        (tmp_path / "fb_kernels" / op / "triton.py").touch()
    (tmp_path / "fb_kernels" / "libfb_kernels.so").touch()  # carried, so that nothing is built
    wheel = tmp_path / "build" / "wheels" / "peer-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OUT": "out"}
    command = ["make", "gpu-check", f"GPU_PYTHON={python}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode, done.stderr  # one kernel does not compile
    assert "compile_swiglu: failed, 3, " in done.stdout
    assert "one thing is wrong" in done.stdout
    assert done.stdout.count("failed") == 1, done.stdout
    assert not (tmp_path / "built").exists()
    assert str(wheel) in (tmp_path / "installed").read_text()
    assert {"compile_rms_norm", "check", "attention_gluon", "scorer", "test_runtime"} < held(
        tmp_path / "out" / "visit.tar.gz"
    )
    logs = tmp_path / "build" / "visit"
    assert (logs / "check.txt").read_text() == "op  right\nswiglu  yes\n"
    folder, site = (logs / "head_gluon.txt").read_text().split()
    assert folder == str(logs / "asked_head")
    assert not Path(site).exists()  # the wheels were for this visit alone
    done = subprocess.run([*command, "VISIT=third"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "invalid choice: 'third'" in done.stderr


@pytest.mark.slow
@pytest.mark.sweep
def test_what_a_visit_chooses_is_there_on_a_gpu() -> None:
    """All of pytest's selections, at the sizes of an H100, whose memory has no room for the 64 layers of the 32B."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-c", COLLECT, "85e9"]
    done = subprocess.run(
        command, cwd=ROOT, env=outer | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("collected ")]
    found = {name: int(count) for _, name, count in lines}
    tests = {name: found.pop(name) for name in [*found] if name.startswith("test_")}
    assert len(tests) == 4
    assert min(tests.values()) > 0
    rest = {name: found.pop(name) for name in ("kernels", "training", "scorer", "backward", "end_to_end", "LLM")}
    assert found == {"floors": 11, "attention": 6, "attention_gluon": 6, "head": 2, "head_gluon": 2, "decode": 4}
    assert rest == {"kernels": 8, "training": 1, "scorer": 5, "backward": 9, "end_to_end": 1, "LLM": 36}
