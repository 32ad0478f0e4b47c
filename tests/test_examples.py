"""Every example runs as its docstring says, checks itself and prints what it shows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
RUNS = {
    "home_made_decoder.py": ([], "largest difference from each branch run alone"),
    "vocab_parallel.py": (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "largest difference from the whole head",
    ),
    "grpo.py": ([], "mean reward"),
    "hf_logprobs.py": ([], "largest tensor without logits"),
    "serving_engine.py": ([], "largest difference from contiguous prefixes"),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=HANG)


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    launcher, shown = RUNS[name]
    done = run(*launcher, str(EXAMPLES / name))
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_one_process_without_torchrun_has_the_whole_head() -> None:
    done = run(str(EXAMPLES / "vocab_parallel.py"))
    assert done.returncode == 0, done.stderr
    assert "process 0 of 1: ids 0 to 1001" in done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_docstring_says_how_to_run_it(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    assert f"examples/{name}" in docstring
