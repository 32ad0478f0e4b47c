"""What the package index serves can be installed: every set, and the newest of everything, for every Python.

Nothing that lies on this machine counts: no local wheels, no configuration file, no installed package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
SETS = ("constraints.txt", *sorted(f"constraints/{path.name}" for path in (ROOT / "constraints").glob("torch-*.txt")))
SOURCE_ALONE = ("deepspeed", "rouge-score", "sqlitedict", "word2number")  # the index has no wheel of them
LOCAL = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "PIP_CONSTRAINT", "UV_FIND_LINKS", "UV_CONSTRAINT")
pytestmark = pytest.mark.index


def clean() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LOCAL}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}


@cache
def resolve(python: str, machine: str, *options: str, asked: str = "pyproject.toml") -> dict[str, str]:
    """{package: version} as the index serves them to a Linux machine, wheels alone where there are any."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python", sys.executable]  # else uv fetches the Python that it resolves for
    command += ["--python-version", python, "--python-platform", f"{machine}-unknown-linux-gnu"]
    command += ["--only-binary", ":all:", *(f"--no-binary={name}" for name in SOURCE_ALONE), *options, asked]
    done = subprocess.run(command, cwd=ROOT, env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.split() if "==" in line)


def pins(file: str) -> dict[str, str]:
    """{package: version} that a constraints file and those that it includes fix."""
    found: dict[str, str] = {}
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith("-c "):
            found |= pins(str((Path(file).parent / line[3:]).as_posix()))
        elif "==" in line:
            name, _, version = line.partition("==")
            found[name] = version
    return found


WHERE = [*zip(PYTHONS * 2, MACHINES * 3, strict=True)]  # all six
# The part of the sweep that always runs has each set once, and every Python and machine.
CASES = [(name, *WHERE[(at + k) % len(WHERE)]) for at, name in enumerate(SETS) for k in range(len(WHERE))]


@pytest.mark.parametrize(("constraints", "python", "machine"), CASES)
@pytest.mark.sweep(len(WHERE))
def test_every_set_resolves(constraints: str, python: str, machine: str) -> None:
    found = resolve(python, machine, "--constraint", constraints, "--extra", "dev", "--extra", "ray", "--extra", "data")
    fixed = pins(constraints)
    assert {name: found[name] for name in fixed if name in found} == {n: v for n, v in fixed.items() if n in found}
    assert {"torch", "triton", "numpy", "transformers", "antlr4-python3-runtime", "pytest"} <= found.keys()


@pytest.mark.parametrize(("python", "machine"), WHERE[::-1])
@pytest.mark.sweep(len(WHERE))
def test_the_newest_of_everything_resolves(python: str, machine: str, tmp_path: Path) -> None:
    """Also with the newest torch: no requirement of an extra pulls it back."""
    extras = ("run", "gpu", "data", "ray", "lm-eval", "serve", "serve-ray")
    found = resolve(python, machine, *(f"--extra={extra}" for extra in extras))
    assert "antlr4-python3-runtime" in found
    (tmp_path / "alone.in").write_text("torch\n")
    assert found["torch"] == resolve(python, machine, asked=str(tmp_path / "alone.in"))["torch"]


def test_without_extras_little_is_installed() -> None:
    found = resolve("3.13", "x86_64")
    assert {"torch", "transformers", "peft", "safetensors", "numpy"} <= found.keys()
    extras = {"math-verify", "antlr4-python3-runtime", "pyarrow", "matplotlib", "datasets", "ray", "lm-eval"}
    assert not extras & found.keys()


def test_a_set_that_does_not_go_together_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("torch==2.13.0\ntriton==3.6.0\n")
    with pytest.raises(AssertionError, match=r"triton"):
        resolve("3.13", "x86_64", "--constraint", str(wrong), "--extra", "dev")


@pytest.mark.slow
@pytest.mark.sweep
def test_pip_finds_the_default_set_for_this_python(tmp_path: Path) -> None:
    target = ["--only-binary=:all:", f"--no-binary={','.join(SOURCE_ALONE)}", "--target", str(tmp_path)]
    newest_pip = [sys.executable, "-m", "uv", "tool", "run", "--quiet", "--python", sys.executable, "pip"]
    lazily = ["--dry-run", "--use-feature=fast-deps"]  # reads what the wheels need, not 3 GB of wheels
    command = [*newest_pip, "install", *lazily, "--quiet", "--ignore-installed", *target]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = ("run", "gpu", "data", "ray", "lm-eval", "serve", "serve-ray", "dev")
    asked = [*project["dependencies"], *(line for extra in wanted for line in extras[extra])]
    requirements = [line for line in asked if not line.startswith("futurebridge[")]  # those are asked for already
    assert len(requirements) > 20
    command += ["--constraint", "constraints.txt", *requirements]
    done = subprocess.run(command, cwd=ROOT, env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
