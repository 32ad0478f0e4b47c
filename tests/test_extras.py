"""What an installation without extras can do: environments made of links to no more than their packages need."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_wheel import readme_example

from fb_core._util import RUN

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fb_kernels", "fb_core")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CORE, WHOLE = PROJECT["dependencies"], [*PROJECT["dependencies"], *EXTRAS["run"]]
BROUGHT = {  # comes with a declared package and is imported for its sake alone
    "antlr4-python3-runtime": "math-verify",
    "huggingface-hub": "transformers",
    "latex2sympy2-extended": "math-verify",
    "sympy": "math-verify",
    "markupsafe": "jinja2",
    "pydantic-core": "pydantic",
    "safetensors": "transformers",
    "tokenizers": "transformers",
    "tqdm": "lm-eval",
}
SENTENCE = "{}: expected the extra [{}] to be installed, got no {}; pip install '.[{}]' in the clone\n"


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements bring, as the installed ones declare it."""
    waiting = [(Requirement(line), "") for line in requirements]
    found: set[tuple[str, str]] = set()  # with an extra
    while waiting:
        wanted, asker = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": asker}):
            continue
        for extra in ("", *wanted.extras):
            if (one := (canonicalize_name(wanted.name), extra)) not in found:
                found.add(one)
                waiting += [(Requirement(line), extra) for line in metadata.requires(wanted.name) or ()]
    return {name for name, _ in found}


@pytest.fixture
def python(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """A Python that sees this project and what some requirements bring, and then code that does nothing yet."""
    for package in PACKAGES:
        (tmp_path / package).symlink_to(ROOT / package)
    for name in closure(request.param):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(distribution.locate_file(top)))
    return [sys.executable, "-I", "-S", "-c", f"import sys\nsys.path.append({str(tmp_path)!r})\n"]


def command(*arguments: str, absent: Iterable[str] = ()) -> str:
    """The entry point of pyproject.toml, where packages are absent besides."""
    module, function = PROJECT["scripts"]["futurebridge"].split(":")
    given = f"sys.modules.update(dict.fromkeys({[*absent]}))\nsys.argv = ['futurebridge', *{arguments}]\n"
    return f"{given}from {module} import {function}\n{function}()"


OPS = readme_example("## Ops in your own model")
METHOD = readme_example("## Score candidates") + readme_example("## Decode with a pair")
VERIFIED = """
from fb_core import *
with Verifier() as v:
    print(v.verify('\\\\boxed{\\\\frac{1}{2}}', '0.5'))
"""
NO_RUN = "math_verify, matplotlib, pyarrow"
CASES = {
    "ops": (["torch"], OPS, ""),
    "method": (CORE, METHOD, ""),
    "verifier": (CORE, "from fb_core import Verifier", SENTENCE.format("Verifier", "run", "math_verify", "run")),
    "lm-eval": (CORE, "import fb_core.lm_eval", SENTENCE.format("fb_core.lm_eval", "lm-eval", "lm_eval", "lm-eval")),
    "collect": (CORE, command("collect", "--config", "tiny"), SENTENCE.format("futurebridge", "run", NO_RUN, "run")),
    "bare": (
        CORE,
        command("--help", absent=[*RUN, "torch", "transformers"]),
        SENTENCE.format("futurebridge", "run", ", ".join(RUN), "run"),
    ),
    "run": (WHOLE, VERIFIED + "\n" + command("collect", "--config", "tiny", "--dry-run"), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize(("python", "code", "refused"), CASES.values(), ids=CASES, indirect=["python"])
@pytest.mark.sweep(4)
def test_what_an_installation_can_do(python: list[str], code: str, refused: str, tmp_path: Path) -> None:
    *start, before = python
    done = subprocess.run([*start, before + code], cwd=tmp_path, capture_output=True, text=True)
    if refused:
        assert done.returncode, done.stdout
        assert done.stderr.endswith(refused)
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout


def imported(path: Path) -> set[str]:
    """The roots of all modules that a file imports, also inside functions."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, *PACKAGES}


def test_what_is_imported_is_declared() -> None:
    extras = ("run", "gpu", "data", "ray", "lm-eval", "trl", "serve", "serve-ray")
    lines = [*CORE, *(line for extra in extras for line in EXTRAS[extra])]
    declared, homes = {canonicalize_name(Requirement(line).name) for line in lines}, metadata.packages_distributions()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for name in (canonicalize_name(homes[root][0]) for root in imported(path)):
            assert {name, BROUGHT.get(name)} & declared, f"{path}: {name}"
    run = {canonicalize_name(Requirement(line).name) for line in EXTRAS["run"]}
    assert {canonicalize_name(homes[package][0]) for package in RUN} == run  # what the sentence names
