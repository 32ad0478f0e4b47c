"""Models and tokenizers from folders and the hub, and what their files say without loading them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from fb_core.models.facts import Tokenizer, ending, max_positions, misfit, state_layers, token_bytes
from fb_core.models.native import NativeDecoder
from fb_core.models.packed import unpackable

WHOLE_FILE, SAMPLES = 64 << 20, 4096  # bytes of files hashed whole; blocks hashed of larger ones
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_id(path: str) -> bool:
    """Whether a path can be a hub id: "owner/name", where neither path nor owner is a local folder."""
    owner, _, _ = path.partition("/")
    return bool(HUB_ID.fullmatch(path)) and not os.path.isdir(path) and not os.path.isdir(owner)


@contextmanager
def _reading(path: str, wanted: str) -> Iterator[None]:
    """Name the path in what fails inside; one that is no folder and cannot be a hub id is refused at once.

    Raises:
        OSError: nothing usable there.
    """
    if not os.path.isdir(path) and not is_hub_id(path):
        hint = "check the path" if "/" in path else "a hub id has an owner in front, as in Qwen/Qwen3-1.7B"
        raise OSError(f"{path}: expected a folder or hub id of {wanted}, got no such folder; {hint}")
    try:
        yield
    except (OSError, HFValidationError) as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise OSError(f"{path}: expected a folder or hub id of {wanted}, got: {reason}") from problem
    except (SafetensorError, json.JSONDecodeError) as problem:
        raise OSError(
            f"{path}: expected {wanted}, got a damaged file ({problem}); copy it again, in a clone with git lfs pull"
        ) from problem


def _check_loaded(path: str, model: PreTrainedModel, loaded: dict[str, Any]) -> None:
    """ValueError unless the files had all weights of the model, and no others but those of heads beside it."""
    missing, inside = loaded["missing_keys"], {*model._modules, *model.base_model._modules}
    wrong = {
        "nothing for": missing,
        "another shape of": {name for name, *_ in loaded["mismatched_keys"]},
        "no place for": {x for x in loaded["unexpected_keys"] if missing or x.partition(".")[0] in inside},
    }
    if got := [f"{what} {min(names)} ({len(names)} in all)" for what, names in wrong.items() if names]:
        raise ValueError(
            f"{path}: expected the weights of the {type(model).__name__} in config.json, got {', '.join(got)}; "
            "compare the files' names with the model's, and save it again"
        )


def load_model(path: str, device: str = "auto", dtype: str = "auto") -> tuple[PreTrainedModel, Tokenizer]:
    """A causal LM in eval mode and its tokenizer, from a folder or the hub; safetensors only, no code of its own.

    The dtype is torch's, by name, or "auto" for the checkpoint's own; the device "auto" is a GPU if there is one.

    Raises:
        OSError: nothing usable there.
        ValueError: a kind of model that transformers knows only with remote code, weights that are not those of its
            configuration, or with an adapter beside them, which may be merged or not, or a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as problem:  # as torch has it
        got = f"{device} ({str(problem).splitlines()[0]})"
        raise ValueError(f"device: expected one of this machine, got {got}; auto is a GPU if there is one") from None
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    with _reading(path, "a model in safetensors"):
        safe = {"use_safetensors": True, "trust_remote_code": False}
        told = {"ignore_mismatched_sizes": True, "output_loading_info": True}  # what is wrong is refused here
        model, loaded = AutoModelForCausalLM.from_pretrained(path, dtype=kind, **safe, **told)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if getattr(model, "_hf_peft_config_loaded", False) and _has_file(path, "config.json"):
        raise ValueError(
            f"{path}: expected weights alone, got an adapter beside them, which would be applied to them (again, if "
            "they are merged); move adapter_config.json away if they are, else merge and save them first"
        )
    _check_loaded(path, model, loaded)
    return model.to(device).eval().requires_grad_(False), tokenizer


def outlook(path: str) -> list[str]:
    """What will run of a model, and how, in lines: by its config.json alone, no weights are read.

    Raises:
        OSError: no configuration there.
        ValueError: a configuration of no causal LM.
    """
    try:
        with _reading(path, "a model"), torch.device("meta"):
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except OSError:
        raise
    except Exception as problem:  # of the configuration's own checks
        got = str(problem).strip().partition("\n")[0]
        raise ValueError(
            f"{path}: expected the config.json of a causal LM that transformers knows, got: {got:.200}"
        ) from problem
    dtype = getattr(config, "dtype", None) or torch.float32
    count, size = sum(each.numel() for each in model.parameters()), model.get_input_embeddings().weight.shape[0]
    name = f"{type(model).__name__}: {count / 1e9:.3g} billion parameters, {count * dtype.itemsize / 1e9:.3g} GB in "
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        name = f"{type(model).__name__}: {count / 1e9:.3g} billion parameters, quantized ({method}), computed in "
    facts = f"{str(dtype).removeprefix('torch.')}, {size} ids, {max_positions(model) or 'any number of'} positions"
    if (reason := misfit(model)) is not None:
        return [name + facts, f"refused: {reason}"]
    native = NativeDecoder.fits(model) and not quantized
    modules = "modules" if (reason := unpackable(model)) is None else f"refused: {reason}"
    return [
        name + facts,
        f"decoding: {'native' if native else 'plain, in padded batches'}",
        f"serving: {'native' if native else 'one sequence after another'}",
        f"scoring, reranking: {'native' if native else modules}",
        f"gradients: {modules}",
        "When it is loaded, a few tokens are compared with the model's own forward"
        + ("; it is refused if its states cannot be continued by several tokens." if state_layers(model) else "."),
    ]


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a folder or hub id; OSError if nothing usable is there."""
    with _reading(path, "a tokenizer"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def has_tokenizer(path: str) -> bool:
    """Whether the tokenizer of a folder or hub id is on this machine."""
    return any(_has_file(path, file) for file in ("tokenizer.json", "tokenizer_config.json"))


def _has_file(path: str, file: str) -> bool:
    """Whether this machine has a file of a folder or hub id."""
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, file))
    return bool(HUB_ID.fullmatch(path)) and isinstance(try_to_load_from_cache(path, file), str)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """A hash of everything that turns text into ids and back, the chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = sorted(tokenizer.get_vocab().items())
    if backend is not None:
        rules = {**json.loads(backend.to_str()), "padding": None, "truncation": None}  # they change with its use
    template = getattr(tokenizer, "chat_template", None)
    settled = json.dumps([rules, tokenizer.special_tokens_map, template], sort_keys=True, default=str)
    return hashlib.sha256(settled.encode()).hexdigest()


def checkpoint_files(path: str, download: bool = True) -> list[Path]:
    """config.json and the weights of a folder or hub id; OSError without a checkpoint in safetensors."""
    folder, wanted = Path(path), ["*.json", "*.safetensors"]
    with _reading(path, "a model in safetensors"):
        if not folder.is_dir():
            folder = Path(snapshot_download(path, allow_patterns=wanted, local_files_only=not download))
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").is_file():
        raise OSError(f"{path}: expected config.json and weights in safetensors, got none; convert the checkpoint")
    return [folder / "config.json", *weights]


def checkpoint_size(path: str) -> int | None:
    """Number of weights of a checkpoint, from its files' headers; None if it is not on this machine."""
    total = 0
    try:
        for file in checkpoint_files(path, download=False)[1:]:
            with safe_open(file, "pt") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return total


def checkpoint_memory(path: str, dtype: str = "auto") -> tuple[int, int] | None:
    """(bytes of its weights, of a token's keys and values) of a checkpoint as `load_model` loads it; None as above."""
    if (count := checkpoint_size(path)) is None:
        return None
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    kind = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
    return count * kind.itemsize, token_bytes(config.get_text_config(decoder=True), kind)


def checkpoint_hash(path: str) -> str:
    """A hash of a checkpoint's config and weights (large files: header and samples), without loading it.

    OSError without a checkpoint in safetensors.
    """
    config, *weights = checkpoint_files(path)
    digest = hashlib.sha256(config.read_bytes())
    if (generation := config.with_name("generation_config.json")).is_file():
        digest.update(generation.read_bytes())  # it has the end-of-sequence ids
    for file in weights:
        size = file.stat().st_size
        digest.update(repr([file.name, size]).encode())
        if size <= WHOLE_FILE:
            digest.update(file.read_bytes())
            continue
        with file.open("rb") as data:
            digest.update(data.read(min(int.from_bytes(data.read(8), "little"), WHOLE_FILE)))
            for sample in range(SAMPLES):
                data.seek(size * sample // SAMPLES)
                digest.update(data.read(256))
    return digest.hexdigest()


def checkpoint_vocabulary(path: str) -> int:
    """The number of ids that a checkpoint takes, without loading it."""
    return int(AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True).vocab_size)


def checkpoint_ends(path: str, *tokenizers: Tokenizer) -> frozenset[int]:
    """As `eos_ids` of a checkpoint, without loading it."""
    generation = None
    with suppress(OSError):  # the checkpoint may have no generation config
        generation = GenerationConfig.from_pretrained(path)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True)
    return ending(generation, config, *tokenizers)
