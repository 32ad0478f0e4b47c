"""A new op is four files and a line: all that lists, checks, times, tests and compiles ops finds it by its folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NAIVE = """
from torch import Tensor


def halve(x: Tensor) -> Tensor:
    return x / 2
"""
REFERENCE = """
from torch import Tensor


def halve(x: Tensor) -> Tensor:
    return (x * 0.5).contiguous()
"""
INIT = '''
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op, signature


def halve(x: Tensor) -> Tensor:
    """x / 2, of any shape."""
    key = signature((x,))
    run = _halve.checked.get(key) if key else None
    if run is None:
        checks.floating("halve", "x", x)
        run = _halve.passed(key, x)
    return run(x)


_halve = Op("halve", "(Tensor x) -> Tensor", fake=lambda x: x.new_empty(x.shape), triton=True)
_halve.differentiate(to=("x",), setup_context=lambda *_: None, backward=lambda _, grad: halve(grad))
'''
CALLS = """
from fb_kernels.calls import Call, Calls, by_definition, randn
from fb_kernels.halve import naive


def halve(n: int = 4096, d: int = 2048) -> Call:
    return Call(
        "halve",
        {"x": randn(n, d)},
        gradients=("x",),
        shape=f"N={n} D={d}",
        bytes=4.0 * n * d,
        plain={"torch eager": lambda x: x / 2},
    )


OPS = (
    Calls("halve", halve, by_definition(naive.halve), sizes={"small": (5, 40)}, takes="x[N, D]", gives="[N, D]"),
)
"""
TRITON = """
import torch
import triton
import triton.language as tl


@triton.jit
def _halve_kernel(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * 0.5, mask=at < count)


def halve(x):
    if x.dtype == torch.float64:
        return NotImplemented
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _halve_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with one more op."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("benchmarks", "csrc", "fb_core", "pyproject.toml", "tests"):
        (tree / name).symlink_to(ROOT / name)
    package = tree / "fb_kernels"
    shutil.copytree(ROOT / "fb_kernels", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "halve").mkdir()
    files = {"naive": NAIVE, "reference": REFERENCE, "__init__": INIT, "calls": CALLS, "triton": TRITON}
    for name, text in files.items():
        (package / "halve" / f"{name}.py").write_text(text)
    names = package / "__init__.py"
    text = names.read_text().replace(
        "__all__ = [", 'from fb_kernels.halve import halve\n\n__all__ = [\n    "halve",', 1
    )
    names.write_text(text)
    return tree


def run(tree: Path, *command: str, interpreted: bool = True) -> str:
    environment = os.environ | {"PYTHONPATH": str(tree), "TRITON_INTERPRET": "01"[interpreted]}
    done = subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed_checked_and_timed(tree: Path) -> None:
    code = """
from benchmarks.pages import reference
from fb_kernels import bench, calls, env, halve, self_check
assert "halve" in calls.every()
assert "triton" in env.report().partition("  halve ")[2]
rows = self_check.check("cpu", ["halve"])
assert {row.kernel for row in rows} == {"reference", "triton"}, rows
assert all(row.right and row.microseconds for row in rows), rows
found = bench.bench("halve", {"n": 3, "d": 4}, device="cpu")
assert [(row.name, bool(row.seconds)) for row in found.rows] == [("reference", True), ("torch eager", True)]
(row,) = (row for row in reference.ops_table() if row.startswith("| `halve`"))
assert [cell.strip() for cell in row.split("|")[2:5]] == ["x[N, D]", "[N, D]", "x"], row
"""
    run(tree, "-c", code)


def test_its_contract_is_tested(tree: Path) -> None:
    options = ("-n0", "--all", "-p", "no:cacheprovider", "-k", "halve")
    out = run(tree, "-m", "pytest", *options, "tests/kernels/test_contract.py")
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None, out
    assert int(passed[1]) >= 10, out


def test_it_is_compiled(tree: Path) -> None:
    code = """
from benchmarks.gpu.aot import calls, compiler
assert "halve" in calls.ops()
(case,) = calls.cases("halve")
hopper = next(arch for arch in compiler.ARCHITECTURES if arch.name == "sm_90")
assert [launch.name for launch in compiler.launches(case, hopper)] == ["_halve_kernel"] * 2  # and its gradient's
"""
    run(tree, "-c", code, interpreted=False)
