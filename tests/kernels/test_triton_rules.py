"""What the interpreter forgives and a GPU does not, read from the kernels' source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "fb_kernels"
SOURCES = sorted([*FOLDER.glob("triton/*.py"), *FOLDER.glob("*/triton*.py"), *FOLDER.glob("*/gluon.py")])
FORBIDDEN = {
    "tl.atomic_*": "order of floats is not fixed",
    "tl.make_tensor_descriptor": "cannot mask a slice's end and allocates",
    "triton.autotune": "configurations come from tuning.py",
    "tl.debug_barrier": "no hand-made synchronisation",
    "tl.inline_asm_elementwise": "the interpreter cannot run it",
}
HOST_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique"}


def faults(source: str) -> list[str]:
    tree = ast.parse(source)
    found = list(_anywhere(tree))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            decorators = map(ast.unparse, function.decorator_list)
            jitted = any(each.startswith(("triton.jit", "gluon.jit")) for each in decorators)
            found += [f"{function.name}: {fault}" for fault in (_in_kernel if jitted else _in_launcher)(function)]
    return found + list(_carried_bounds(tree))


def _carried_bounds(tree: ast.AST) -> Iterator[str]:
    """Of Gluon's kernels: a scalar that a loop carries, as the bound of a loop in it or of one in what that calls.

    Gluon's inlining gives such a bound the scalar's first value, in every turn (Triton 3.6.0, 3.7.1).
    """
    kernels = {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("gluon.jit" in ast.unparse(one) for one in node.decorator_list)
    }
    bounds = {  # places of the parameters that bound a loop
        name: {
            place
            for place, argument in enumerate(kernel.args.args)
            if any(argument.arg in _names(loop.iter) for loop in _loops(kernel))
        }
        for name, kernel in kernels.items()
    }
    for name, kernel in kernels.items():
        for loop in _loops(kernel):
            carried = _assigned(kernel.body, before=loop.lineno) & _assigned(loop.body)
            carried -= {each for each in carried if _set_first(loop, each)}
            for inner in (node for statement in loop.body for node in ast.walk(statement)):
                given: list[ast.expr] = [inner.iter] if isinstance(inner, ast.For) else []
                if isinstance(inner, ast.Call) and ast.unparse(inner.func) in bounds:
                    given = [inner.args[place] for place in bounds[ast.unparse(inner.func)] if place < len(inner.args)]
                for found in sorted(carried & {each for one in given for each in _names(one)}):
                    yield f"{name}: line {inner.lineno}: {found} is carried by a loop and bounds one in it"


def _loops(node: ast.AST) -> list[ast.For]:
    return [one for one in ast.walk(node) if isinstance(one, ast.For)]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _assigned(body: list[ast.stmt], before: float = float("inf")) -> set[str]:
    targets = [
        target
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign | ast.AugAssign) and node.lineno < before
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {name for target in targets for name in _names(target)}


def _set_first(loop: ast.For, name: str) -> bool:
    """Whether each turn of a loop sets a name at its top level before anything reads it."""
    for statement in loop.body:
        if isinstance(statement, ast.Assign) and name in {each for one in statement.targets for each in _names(one)}:
            return name not in _names(statement.value)
        if name in _names(statement):
            return False
    return False


def _anywhere(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = re.sub("atomic_[a-z]+", "atomic_*", _as_triton(ast.unparse(node)))
            if name in FORBIDDEN:
                yield f"{name}: {FORBIDDEN[name]}"


def _in_kernel(function: ast.FunctionDef) -> Iterator[str]:
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        name, keywords = _as_triton(ast.unparse(call.func)), {keyword.arg for keyword in call.keywords}
        if name == "tl.load" and ("mask" in keywords or len(call.args) > 1) and "other" not in keywords:
            yield f"line {call.lineno}: a masked load without other"
        if name == "tl.dot" and "input_precision" not in keywords:
            yield f"line {call.lineno}: a product that leaves its precision open"
        if name in ("tl.program_id", "tl.num_programs") and ast.unparse(call.args[0]) != "0":
            yield f"line {call.lineno}: a grid of more than one dimension"
    names = {argument.arg for argument in function.args.args}
    for node in ast.walk(function):
        # row * stride with a 32-bit program index overflows past 2^31 elements
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            parts = {ast.unparse(node.left), ast.unparse(node.right)}
            if "tl.program_id(0)" in set(map(_as_triton, parts)) and any("stride" in name for name in names & parts):
                yield f"line {node.lineno}: a 32-bit address"


def _as_triton(name: str) -> str:
    """The name of an operation in Triton, which has it in Gluon too."""
    return re.sub(r"^gl\.", "tl.", name)


def _in_launcher(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in HOST_READS:
            yield f"line {node.lineno}: .{node.func.attr}() waits for the device"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("bool", "int", "float"):
            calls = [part for part in node.args if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)]
            if calls:
                yield f"line {node.lineno}: {ast.unparse(node.func)}() of a tensor waits for the device"
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda"):
            yield f"line {node.lineno}: asks about the device"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            grid = node.func.slice
            if not (isinstance(grid, ast.Name) or (isinstance(grid, ast.Tuple) and len(grid.elts) == 1)):
                yield f"line {node.lineno}: a grid of more than one dimension"
        is_grid = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "grid"
        if is_grid and not (isinstance(node.value, ast.Tuple) and len(node.value.elts) == 1):
            yield f"line {node.lineno}: a grid of more than one dimension"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kernels_keep_the_rules(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


KERNEL = "@triton.jit\ndef _kernel(x, stride):\n    "


@pytest.mark.parametrize(
    "source",
    [
        KERNEL + "tl.load(x, mask=m)",
        KERNEL + "tl.load(x, m)",
        KERNEL + "tl.dot(a, b)",
        KERNEL + "tl.program_id(1)",
        KERNEL + "tl.program_id(axis)",
        KERNEL + "x + tl.program_id(0) * stride",
        KERNEL + "tl.atomic_add(x, 1.0)",
        KERNEL + "tl.atomic_max(x, 1.0)",
        "@gluon.jit\ndef _kernel(x):\n    gl.load(x, mask=m)",
        "@gluon.jit(noinline=True)\ndef _kernel(x, stride):\n    x + gl.program_id(0) * stride",
        "@gluon.jit\ndef _kernel(x):\n    gl.atomic_add(x, 1.0)",
        "@triton.autotune([])\ndef f(): ...",
        "def launch(x):\n    _kernel[(1, 2)](x)",
        "def launch(x):\n    grid = (1, 2)",
        "def launch(x):\n    return x.max().item()",
        "def launch(x):\n    return bool(x.any())",
        "def launch(x):\n    return torch.cuda.current_device()",
        "def launch(x):\n    return x.is_cuda",
    ],
)
def test_a_broken_rule_is_seen(source: str) -> None:
    assert len(faults(source)) == 1


GLUON = """
@gluon.jit
def _inner(x, low):
    for i in range(low, 9):
        gl.store(x + i, 0)

@gluon.jit
def _kernel(x, n):
    done = 4
    for s in range(n):
        {turn}
"""


def test_a_bound_that_a_loop_of_gluon_carries_is_seen() -> None:
    for turn in (
        "for i in range(done, 9):\n            gl.store(x + i, s)\n        done = 0",
        "_inner(x, done)\n        done = 0",
    ):
        assert len(faults(GLUON.format(turn=turn))) == 1
        assert faults(GLUON.format(turn=turn).replace("@gluon", "@triton")) == []  # Triton compiles it rightly
    for turn in ("done = gl.where(s == 0, 4, 0)\n        _inner(x, done)", "_inner(x, 4)\n        done += 1"):
        assert faults(GLUON.format(turn=turn)) == []


def test_what_is_allowed() -> None:
    assert faults(KERNEL + "tl.load(x, mask=m, other=0.0) + tl.load(x) + tl.dot(a, b, input_precision='ieee')") == []
    assert faults(KERNEL + "row = tl.program_id(0).to(tl.int64)\n    x + row * stride") == []
    assert faults("def launch(x):\n    grid = (4,)\n    _kernel[grid](x)\n    _kernel[(3,)](x)") == []
