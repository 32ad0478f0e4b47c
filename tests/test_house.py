"""The rules of the code layout, read from the source: who imports whom, what is never called, what lies where."""

from __future__ import annotations

import ast
import graphlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import fb_kernels

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fb_kernels", "fb_core")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PUBLIC_MODULES = {"testing", "env", "bench"}
TRITON = re.compile(r"fb_kernels/(env|triton/\w+|\w+/(triton(_\w+)?|gluon))\.py")  # who may import it
TRANSFORMERS = ("fb_core/models/", "fb_core/runtime/plain.py", "fb_core/apps/demo/")  # who may import it
DEFINITION = re.compile(r"fb_kernels/\w+/naive\.py")
CALLS = re.compile(r"fb_kernels/\w+/calls\.py")  # they hold the kernels to it on the user's device
FLOORS = """
fb_core.__main__
fb_core.apps.cli
fb_core.apps.serve
fb_core.apps.pipeline
fb_core.apps.settings
fb_core.apps.demo
fb_core.apps.processes fb_core.apps.progress
fb_core.lm_eval fb_core.trl fb_core.hub
fb_core.decode
fb_core.llm fb_core.rerank
fb_core.runtime
fb_core.score
fb_core.models
fb_core.events
fb_core.verify
fb_core._util
"""  # from the top; rooms on one line do not import each other
ROOMS = {room: floor for floor, rooms in enumerate(FLOORS.split("\n")) for room in rooms.split()}
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~$}-])/(?:home|root|work|tmp|usr|opt|mnt|data|etc|var|srv|Users)/|[A-Z]:\\\\")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST, path: str) -> Iterator[tuple[str, str | None]]:
    """(module, name or None) of every import, also those inside functions and through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((str(first.value), None) for first in node.args[:1] if isinstance(first, ast.Constant))


def room_of(module: str) -> str | None:
    return next((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), None)


def goes_down(own: str, other: str) -> bool:
    here, there = room_of(own), room_of(other)
    return here is None or there is None or here == there or ROOMS[here] < ROOMS[there]


def import_faults(tree: ast.AST, path: str) -> Iterator[str]:
    package = path.split("/")[0]
    for module, name in imports(tree, path):
        root, *rest = module.split(".")
        shown = module if name is None else f"{name} from {module}"
        if root in ("benchmarks", "tests") or (root == "fb_core" and package == "fb_kernels"):
            yield f"imports {shown}: imports point the other way"
        if root in UNPICKLERS:
            yield f"imports {shown}: nothing is unpickled"
        naive = root == "fb_kernels" and "naive" in (*rest, name)
        if DEFINITION.fullmatch(path):
            if root not in ("__future__", "torch") and not naive:
                yield f"imports {shown}: a definition stands on torch and other definitions"
        elif naive and package == "fb_kernels" and not CALLS.fullmatch(path):
            yield f"imports {shown}: what a definition is the truth of must not use it"
        if root == "triton" and not TRITON.fullmatch(path):
            yield f"imports {shown}: kernels live in an op's triton.py"
        if root == "peft" and not path.startswith("fb_core/models/"):
            yield f"imports {shown}: peft is met in fb_core/models"
        if root == "transformers" and not path.startswith(TRANSFORMERS):
            yield f"imports {shown}: transformers is met in {', '.join(TRANSFORMERS)}"
        if package == "fb_core" and root == "fb_kernels":
            private_module = bool(rest) and (rest[0] not in PUBLIC_MODULES or len(rest) > 1)
            private_name = not rest and name is not None and name not in {*fb_kernels.__all__, *PUBLIC_MODULES}
            if private_module or private_name:
                yield f"imports {shown}: only fb_kernels' public names are for others"
        if package == "fb_core" and not goes_down(module_of(path), f"{module}.{name}"):
            yield f"imports {shown}: imports go down the floors"


def call_faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in ("eval", "exec", "builtins.eval", "builtins.exec", "torch.load"):
                yield f"calls {function}"
            for keyword in node.keywords:
                if keyword.arg in ("trust_remote_code", "allow_pickle") and ast.unparse(keyword.value) == "True":
                    yield f"passes {keyword.arg}=True"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch" and any(n.name == "load" for n in node.names):
            yield "imports load from torch"
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (
                    key is not None
                    and ast.unparse(key).strip("'\"") == "trust_remote_code"
                    and ast.unparse(value) == "True"
                ):
                    yield "passes trust_remote_code=True"


def operator_faults(tree: ast.AST, path: str) -> Iterator[str]:
    """fb_core calls ops by their public names alone, not as torch.ops.fb.<name>."""
    for node in ast.walk(tree) if path.startswith("fb_core/") else ():
        if isinstance(node, ast.Attribute) and node.attr == "ops":
            yield f"reads {ast.unparse(node)}: only fb_kernels' public names are for others"
        elif isinstance(node, ast.ImportFrom) and "ops" in (node.module or "").split("."):
            yield f"imports from {node.module}: only fb_kernels' public names are for others"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch" and any(n.name == "ops" for n in node.names):
            yield "imports ops from torch: only fb_kernels' public names are for others"


def faults(source: str, path: str) -> list[str]:
    tree = ast.parse(source)
    found = [*import_faults(tree, path), *call_faults(tree), *operator_faults(tree, path)]
    return found + [f"holds the absolute path {match.group()}" for match in ABSOLUTE_PATH.finditer(source)]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, in functions and for type checkers too; sources are by path."""
    modules = {module_of(path) for path in sources}
    graph = {}
    for path, source in sources.items():
        own, found = module_of(path), set()
        for module, name in imports(ast.parse(source), path):
            found |= {f"{module}.{name}"} & modules or {module} & modules
        graph[own] = found - {own}
    return graph


def circle_in(sources: Mapping[str, str]) -> list[str]:
    try:
        graphlib.TopologicalSorter(import_graph(sources)).prepare()
    except graphlib.CycleError as found:
        return list(found.args[1])
    return []


def test_no_import_goes_round_in_a_circle() -> None:
    paths = [path for package in (*PACKAGES, "benchmarks") for path in (ROOT / package).rglob("*.py")]
    assert circle_in({relative(path): path.read_text(encoding="utf-8") for path in paths}) == []


@pytest.mark.parametrize(
    "back", ["from a import b", "import a.b", "def f():\n    from a.b import x", "if TYPE_CHECKING:\n    import a.b"]
)
def test_a_circle_is_seen(back: str) -> None:
    sources = {"a/__init__.py": "from a.b import x", "a/b.py": "from a.c import y", "a/c.py": back}
    assert set(circle_in(sources)) == {"a.b", "a.c"}
    assert circle_in(sources | {"a/c.py": "import torch"}) == []
    assert set(circle_in(sources | {"a/c.py": "from a import x"})) == {"a", "a.b", "a.c"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_sources_keep_the_rules(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8"), relative(path)) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("fb_kernels/a.py", "import fb_core"),
        ("fb_kernels/a.py", "from fb_core.score.scorer import CompatibilityScorer"),
        ("fb_kernels/a.py", "import triton.language as tl"),
        ("fb_kernels/a/__init__.py", "import triton"),
        ("fb_kernels/a.py", "def f():\n    from transformers import AutoModel"),
        ("fb_kernels/a/naive.py", "import math"),
        ("fb_kernels/a/naive.py", "from fb_kernels.swiglu.reference import swiglu"),
        ("fb_kernels/a/naive.py", "from fb_kernels import swiglu"),
        ("fb_kernels/a/reference.py", "from fb_kernels.swiglu.naive import swiglu"),
        ("fb_kernels/a/triton.py", "from fb_kernels.a import naive"),
        ("fb_kernels/a/__init__.py", "from . import naive"),
        ("fb_core/a.py", "from fb_kernels.swiglu.naive import swiglu"),
        ("fb_core/a.py", "from fb_kernels.swiglu.reference import swiglu"),
        ("fb_core/a.py", "from fb_kernels import backend"),
        ("fb_core/a.py", "import fb_kernels._runtime.backend"),
        ("fb_core/a.py", "import triton"),
        ("fb_core/a.py", "op = torch.ops.fb.skinny_linear.default"),
        ("fb_core/a.py", "from torch import ops"),
        ("fb_core/a.py", "from torch.ops import fb"),
        ("fb_core/a.py", "import importlib\nimportlib.import_module('peft')"),
        ("fb_core/a.py", "import peft.tuners"),
        ("fb_core/apps/demo/a.py", "from peft import LoraConfig"),
        ("fb_core/a.py", "from transformers import AutoModel"),
        ("fb_core/trl.py", "from .apps import cli"),
        ("fb_core/models/a.py", "from fb_core.apps.settings.config import PairSettings"),
        ("fb_core/llm/a.py", "from fb_core.rerank.reranker import TokenReranker"),
        ("fb_core/a.py", "from tests import conftest"),
        ("fb_core/a.py", "import pickle"),
        ("fb_core/a.py", "x = torch.load('a.pt')"),
        ("fb_core/a.py", "from torch import load"),
        ("fb_core/a.py", "eval('1')"),
        ("fb_core/a.py", "f(trust_remote_code=True)"),
        ("fb_core/a.py", "f(**{'trust_remote_code': True})"),
        ("fb_core/a.py", "np.load(p, allow_pickle=True)"),
        ("fb_core/a.py", "p = '/" + "home/me/model'"),
        ("fb_core/a.py", "# see /" + "tmp/x"),
    ],
)
def test_a_broken_rule_is_seen(path: str, source: str) -> None:
    assert len(faults(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "fb_core/a.py",
            "import fb_kernels\nfrom fb_kernels import linear_logprob\nfrom fb_kernels.testing import poison_",
        ),
        ("fb_core/models/adapters.py", "import peft, transformers"),
        ("fb_core/apps/demo/a.py", "from transformers import AutoModel"),
        ("fb_core/apps/cli/main.py", "from fb_core import scorer"),
        ("fb_core/a.py", "model.eval()\nf(trust_remote_code=config.trust)\nurl = 'http://host/data/x'"),
        ("fb_kernels/a/naive.py", "import torch\nfrom fb_kernels.swiglu.naive import swiglu"),
        ("fb_kernels/swiglu/calls.py", "from fb_kernels.swiglu import naive"),
        ("fb_kernels/triton/a.py", "import triton"),
        ("fb_kernels/a/triton_layout.py", "import triton"),
    ],
)
def test_what_is_allowed(path: str, source: str) -> None:
    assert faults(source, path) == []


def test_every_op_has_its_files_under_one_stem() -> None:
    functions = [getattr(fb_kernels, name) for name in fb_kernels.__all__]
    stems = {function.__module__.removeprefix("fb_kernels.") for function in functions if inspect.isfunction(function)}
    assert len(stems) > 1
    for stem in sorted(stems):
        for file in (f"fb_kernels/{stem}/{name}.py" for name in ("naive", "reference", "calls")):
            assert (ROOT / file).is_file(), file


def test_every_op_module_is_public() -> None:
    public = {inspect.getmodule(getattr(fb_kernels, name)).__name__ for name in fb_kernels.__all__}
    for path in (ROOT / "fb_kernels").glob("*/reference.py"):
        assert f"fb_kernels.{path.parent.name}" in public, path


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


NO_TRITON = "import sys\nsys.modules.update(triton=None, flash_attn=None)\n"  # neither found nor imported


def run_alone(code: str) -> None:
    """Run code in a process of its own with no GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packages_import_and_run_on_a_bare_machine() -> None:
    run_alone(
        NO_TRITON + "import torch, fb_kernels, fb_core, fb_kernels.env\n"
        "fb_kernels.env.report()\n"
        "x = torch.ones(2, 4)\n"
        "assert fb_kernels.linear_logprob(x, x, torch.tensor([0, 1])).shape == (2,)\n"
    )


def test_importing_fb_core_leaves_others_alone() -> None:
    run_alone("import sys, fb_core\nassert not {'transformers', 'peft', 'lm_eval'} & sys.modules.keys()\n")


def test_importing_fb_kernels_leaves_triton_alone() -> None:
    run_alone(
        "import sys, fb_kernels\nassert not {'transformers', 'peft', 'triton', 'flash_attn'} & sys.modules.keys()\n"
    )


def texts_of(pattern: str) -> list[str]:
    """The files that a pattern of the table names; one after a minus is left out."""
    wanted, *left_out = pattern.split(" - ")
    others = {path for each in left_out for path in ROOT.glob(each)}
    return [path.read_text(encoding="utf-8") for path in {*ROOT.glob(wanted)} - others]


def test_every_part_keeps_its_budget() -> None:
    """The table of CONTRIBUTING.md: what grows beyond it shrinks something else, or says why it does not."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| `(.+)` \| ([\d,]+) (lines|words) \|$", page, re.M)
    assert len(rows) >= 6
    for pattern, most, unit in rows:
        found = sum(len(text.splitlines() if unit == "lines" else text.split()) for text in texts_of(pattern))
        assert found <= int(most.replace(",", "")), f"{pattern}: {found} {unit}"
