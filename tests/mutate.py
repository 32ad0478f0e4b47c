"""`python tests/mutate.py [--count 200] [--seed 0] [--only WORD]`: do the tests notice small changes of the product?

One change at a time (a comparison, an operator, a constant, a condition), drawn by the seed from the method's core and
the ops, in a copy of the tree; the tests of a file run until the first failure. A change that no test notices is
printed with its place; whether it means the same as before, a reader decides.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from limits import HANG

ROOT = Path(__file__).resolve().parent.parent
CORE = {  # source: its tests, the quickest first
    "fb_core/score/targets.py": ["core/test_targets.py"],
    "fb_core/decode/policy.py": ["core/test_policy.py"],
    "fb_core/decode/asking.py": ["core/test_decoding.py", "core/test_pools.py"],
    "fb_core/decode/selectors.py": ["core/test_decoding.py", "paper/test_baselines.py"],
    "fb_core/decode/decoder.py": ["core/test_decoding.py", "core/test_runtime.py"],
    "fb_core/score/scorer.py": ["core/test_scorer.py"],
    "fb_core/models/packed.py": ["core/test_scorer.py", "core/test_decoder.py"],
    "fb_core/runtime/plain.py": ["core/test_decoding.py", "core/test_llm.py"],
    "fb_core/models/native.py": ["core/test_decoder.py", "core/test_runtime.py"],
    "fb_core/runtime/paged_model.py": ["core/test_runtime.py"],
    "fb_core/runtime/step.py": ["core/test_runtime.py"],
    "fb_core/decode/loop.py": ["core/test_runtime.py", "core/test_engine.py"],
    "fb_core/runtime/loop.py": ["core/test_runtime.py", "core/test_engine.py"],
    "fb_core/runtime/kv_pages.py": ["core/test_engine.py"],
    "fb_core/rerank/reranker.py": ["core/test_reranker.py"],
    "fb_core/rerank/training.py": ["core/test_training.py"],
    "fb_core/llm/local.py": ["core/test_llm.py", "core/test_decoding.py"],
    "fb_kernels/layout.py": ["kernels/test_layout.py", "kernels/test_branch_attention.py"],
    "fb_kernels/_runtime/segments.py": [
        "kernels/test_candidate_head.py",
        "kernels/test_contract.py",
        "kernels/test_group_cross_entropy.py",
    ],
    "fb_kernels/_runtime/checks.py": ["kernels/test_bad_input.py", "kernels/test_memory.py"],
}
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


def sources() -> dict[str, list[str]]:
    """Files that are changed, with pytest's arguments for their tests."""
    found = dict(CORE)
    for folder in sorted(path.parent for path in (ROOT / "fb_kernels").glob("*/naive.py")):
        own = [f"kernels/test_{folder.name}.py"] if (ROOT / f"tests/kernels/test_{folder.name}.py").exists() else []
        shared = [f"kernels/test_{name}.py" for name in ("contract", "memory", "transforms", "op", "bad_input")]
        tests = [*own, *shared, "-k", folder.name]
        found |= {f"fb_kernels/{folder.name}/{name}.py": tests for name in ("__init__", "reference")}
    return found


def places(text: str) -> list[int]:
    """Which nodes of a module, in the order of `ast.walk`, can be changed."""
    return [place for place, node in enumerate(ast.walk(ast.parse(text))) if _is_changeable(node)]


def _is_changeable(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPPED
    if isinstance(node, ast.BinOp | ast.BoolOp):
        return type(node.op) in SWAPPED
    if isinstance(node, ast.Constant):
        return type(node.value) in (bool, int, float)
    return isinstance(node, ast.IfExp | ast.If) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def changed(text: str, place: int) -> tuple[int, str, str]:
    """(line, what becomes of it, the whole module) with one node changed."""
    tree = ast.parse(text)
    node: Any = list(ast.walk(tree))[place]
    shown = node.test if isinstance(node, ast.If) else node
    before = ast.unparse(shown)
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.UnaryOp):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.IfExp | ast.If):
        shown = node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    ast.fix_missing_locations(tree)
    return node.lineno, f"{before} -> {ast.unparse(shown)}", ast.unparse(tree)


def drawn(count: int, seed: int, only: str) -> list[tuple[str, int, str, str]]:
    """(file, line, change, new text), files in proportion to what can be changed in them."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in sources() if only in name}
    found = [(name, place) for name, text in texts.items() for place in places(text)]
    chosen = sorted(random.Random(seed).sample(found, min(count, len(found))))
    return [(name, *changed(texts[name], place)) for name, place in chosen]


def _run(folder: str, tests: list[str]) -> None:
    """The tests in a copy of the tree; ends with pytest's exit code."""
    import pytest

    os.chdir(folder)
    sys.path[:0] = [folder, f"{folder}/tests", f"{folder}/tests/kernels", f"{folder}/tests/core"]
    os.environ["PYTHONPATH"] = folder
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    os._exit(int(pytest.main([*options, *(f"tests/{test}" if test.endswith(".py") else test for test in tests)])))


def main() -> None:
    """Print every change with what the tests said, then the share that was noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a file's name")
    given = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which the preloaded modules do
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "peft", "pytest", "hypothesis"])
    noticed = 0
    plan = drawn(given.count, given.seed, given.only)
    with tempfile.TemporaryDirectory() as name:
        copied = Path(name).resolve() / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "dist")
        shutil.copytree(ROOT, copied, ignore=ignored)
        usual: dict[tuple[str, ...], float] = {}  # seconds without a change

        def said(tests: list[str], limit: float) -> tuple[str, float]:
            began = time.monotonic()
            process = context.Process(target=_run, args=(str(copied), tests))
            process.start()
            process.join(limit)
            hung = process.is_alive()
            process.kill()
            process.join()
            word = "hung" if hung else "noticed" if process.exitcode else "SURVIVED"
            return word, time.monotonic() - began

        for file, line, what, text in plan:
            source, tests = copied / file, sources()[file]
            if tuple(tests) not in usual:
                word, usual[tuple(tests)] = said(tests, HANG)
                if word != "SURVIVED":
                    raise SystemExit(f"{file}: expected tests that pass without a change, got a failure; fix {tests}")
            kept = source.read_text(encoding="utf-8")
            source.write_text(text, encoding="utf-8")
            word, seconds = said(tests, 60 + 5 * usual[tuple(tests)])
            source.write_text(kept, encoding="utf-8")
            noticed += word != "SURVIVED"
            print(f"{word:<9}{seconds:6.0f} s  {file}:{line}  {what}", flush=True)
    print(f"{noticed} of {len(plan)} noticed")


if __name__ == "__main__":
    main()
