"""Where transformers and peft are met: packed forwards through the attention interface, caches, heads, adapters.

A packed forward goes through the native decoder where the model has one, and through the model's own modules otherwise:
there its attention is switched to `fb_branch` for one call, and what was there is put back whatever happens.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import operator
import os
import re
import reprlib
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import Cache as HFCache

from fb_core.native import NativeDecoder
from fb_kernels import branch_attention, linear_logprob

ATTENTION = "fb_branch"  # a name containing "flash" would be taken over by transformers
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")
WHOLE_FILE, SAMPLES = 64 << 20, 4096  # bytes of weights hashed whole; blocks hashed of a larger file
LARGEST = torch.finfo(torch.float32).max
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SUPPORTED_LAYERS = ("full_attention", "sliding_attention")

CausalLM: TypeAlias = PreTrainedModel
Cache: TypeAlias = DynamicCache
AdapterConfig: TypeAlias = LoraConfig
Tokenizer: TypeAlias = PreTrainedTokenizerBase


@dataclass(frozen=True)
class PrefixKV:
    """Keys and values of frozen prefixes, one pair a layer: flat [Tp, Hkv, E], or paged [rows, S, Hkv, E]."""

    layers: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def from_cache(cls, cache: HFCache, length: int) -> PrefixKV:
        """Views of a Hugging Face cache [B, Hkv, S, E]: each of its rows is one page of S slots, nothing is copied.

        Raises:
            ValueError: a layer holds another number of tokens than `length` (a sliding layer that dropped some).
        """
        layers = []
        for index, layer in enumerate(cache.layers):
            slots = 0 if layer.keys is None else layer.keys.shape[-2]
            filled = int(layer.get_seq_length())
            if slots != length or filled != length:
                held = f"{filled} in {slots} slots" if slots != filled else str(filled)
                raise ValueError(
                    f"cache: expected {length} tokens in every layer, got {held} in layer {index}; "
                    "fill a DynamicCache() made without config with exactly this prefix"
                )
            layers.append((layer.keys.transpose(1, 2).detach(), layer.values.transpose(1, 2).detach()))
        return cls(layers)


@dataclass(frozen=True)
class Prefix:
    """One sequence's slice of a `PrefixKV`: slots start to start + length (of page `row` where it is paged)."""

    kv: PrefixKV
    start: int
    length: int
    row: int = 0


@dataclass
class Layout:
    """Which rows of a packed forward are whose: the index arguments of `branch_attention`."""

    cu_branch: Tensor  # [B + 1]
    cu_group: Tensor  # [G + 1]
    prefix_start: Tensor  # [G]
    prefix_len: Tensor  # [G]
    max_branch_len: int
    max_prefix_len: int
    block_table: Tensor | None = None  # [G, 1] where the prefix is paged
    prefix: PrefixKV | None = None  # None: the packed rows themselves are the prefix
    captured: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> its packed k, v
    capture: bool = False
    windows: list[int | None] = field(default_factory=list)  # of every attention call of a forward through modules

    @classmethod
    def build(cls, groups: Sequence[tuple[Sequence[int], int, int]], device: torch.device, **options: Any) -> Layout:
        """From (branch lengths, prefix start, prefix length) of every group, in row order."""
        lengths = [length for branches, _, _ in groups for length in branches]
        counts = [len(branches) for branches, _, _ in groups]
        starts, prefixes = [start for _, start, _ in groups], [length for _, _, length in groups]
        return cls(
            offsets(lengths, device),
            offsets(counts, device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(prefixes, dtype=torch.int32, device=device),
            max(lengths, default=0),
            max(prefixes, default=0),
            **options,
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scale: float | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one layer, (out[T, Hq, E], lse[Hq, T]); its k and v are kept where `capture` is set."""
        if self.capture:
            self.captured[layer] = (k.detach(), v.detach())
        prefix_k, prefix_v = (k.detach(), v.detach()) if self.prefix is None else self.prefix.layers[layer]
        out, lse = branch_attention(
            q,
            k,
            v,
            prefix_k,
            prefix_v,
            cu_branch=self.cu_branch,
            cu_group=self.cu_group,
            prefix_start=self.prefix_start,
            prefix_len=self.prefix_len,
            max_branch_len=self.max_branch_len,
            max_prefix_len=self.max_prefix_len,
            block_table=self.block_table,
            window=window,
            scale=scale,
            softcap=softcap,
            return_lse=True,
        )
        return out, lse


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [n + 1]: the running sum of lengths, beginning with 0."""
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    if lengths:
        sums[1:] = torch.tensor(lengths).cumsum(0)
    return sums.to(device)


def _fb_branch(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, E]
    key: Tensor,  # [1, Hkv, T, E]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    fb_layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer of a packed forward, called by the model's own attention module."""
    if dropout:
        raise ValueError(
            f"{type(module).__name__}: expected no attention dropout, got {dropout}; call model.eval() first"
        )
    problem = None
    if fb_layout is None:
        problem = "attention without the arguments of packed_forward"
    elif value.shape[-1] != query.shape[-1]:
        problem = f"head sizes {query.shape[-1]} and {value.shape[-1]}"
    elif attention_mask is not None:  # no mask is made for this implementation: the model adds something of its own
        problem = "a mask of the model's own"
    if fb_layout is None or problem is not None:
        raise ValueError(
            f"{type(module).__name__}: expected plain attention with one head size, got {problem}; "
            "use a model of a supported family"
        )
    q, k, v = (states[0].transpose(0, 1).to(query.dtype) for states in (query, key, value))  # [T, heads, E]
    layer: int = module.layer_idx  # type: ignore[assignment]
    fb_layout.windows.append(sliding_window)
    out, lse = fb_layout.attend(layer, q, k, v, sliding_window, scaling, softcap)
    if s_aux is not None:  # attention sinks take part in the softmax only
        out = out * torch.sigmoid(lse.T - s_aux).to(out.dtype)[..., None]
    return out[None], None


AttentionInterface.register(ATTENTION, _fb_branch)


_ONE_AT_A_TIME = threading.RLock()  # or threads on one model would put back each other's implementation


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation; what was there is put back whatever happens."""
    config = model.config
    with _ONE_AT_A_TIME:
        parts = {key: getattr(config, key, None) for key in config.sub_configs}  # a multimodal model's may differ
        before = {key: part._attn_implementation for key, part in {"": config, **parts}.items() if part is not None}
        try:
            model.set_attn_implementation(name)
            yield
        finally:
            config._attn_implementation = before


def packed_forward(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, layout: Layout, rows: Tensor | None = None
) -> Tensor:
    """Hidden states (after the final norm) of packed rows, every decoder layer run once.

    Without gradients and autocast a model of the Llama family runs in its native decoder, which packs its weights on
    first sight (`fb_core.native`); everything else goes through the model's own modules.

    Args:
        model: a causal LM that `check_supported` lets pass.
        ids: [T] int64.
        positions: [T] int64, a row's position in its own sequence.
        layout: the rows' groups and their prefixes.
        rows: [N] int64, which rows are returned; None for all.

    Returns:
        [T, D], or [N, D] with rows.

    Raises:
        ValueError: active dropout, or the model did not route every layer, with its window, through the attention
            interface.
    """
    check_no_dropout(model)
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled(ids.device.type):
        native = NativeDecoder.of(model)
        if native is not None:
            return native.forward(ids, positions, layout.attend, rows)
    hidden = forward_through_modules(model, ids, positions, layout)
    return hidden if rows is None else hidden[rows]


def forward_through_modules(model: PreTrainedModel, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """`packed_forward` by the model's own modules, with their gradients: [T, D]."""
    layout.windows.clear()
    with _attention(model, ATTENTION):
        hidden = model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, fb_layout=layout
        ).last_hidden_state[0]
    slides = _sliding_layers(model)
    if len(layout.windows) != len(slides):
        raise ValueError(
            f"{type(model).__name__}: expected {len(slides)} attention layers to go through "
            f"the attention interface, got {len(layout.windows)}; use a model of a supported family"
        )
    for layer, (sliding, window) in enumerate(zip(slides, layout.windows, strict=True)):
        if sliding and window is None:
            raise ValueError(
                f"{type(model).__name__}: expected the sliding window of layer {layer} to go through the attention "
                "interface, got none (the model puts it into its mask alone); use a model of a supported family"
            )
    return hidden


def check_no_dropout(model: PreTrainedModel) -> None:
    """Refuse a model whose hidden states are random.

    Raises:
        ValueError: a dropout layer in training mode.
    """
    if model.training:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Dropout) and layer.training and layer.p > 0:
                raise ValueError(f"{type(model).__name__}: expected no dropout, got {layer.p} in {name}; call .eval()")


def _sliding_layers(model: PreTrainedModel) -> list[bool]:
    """Which layers attend to a window, by the configuration."""
    config = text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return [kind == "sliding_attention" for kind in kinds]
    makes_windows = hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    return [makes_windows and getattr(config, "sliding_window", None) is not None] * config.num_hidden_layers


def prefill_packed(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Prefix]:
    """The sequences' keys and values from one packed forward without gradients, as slices of one flat buffer."""
    device = model.device
    lengths = [len(tokens) for tokens in sequences]
    layout = Layout.build([([length], 0, 0) for length in lengths], device, capture=True)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    with torch.no_grad():
        packed_forward(model, torch.cat(list(sequences)), positions, layout, rows=positions[:0])
    kv = PrefixKV([layout.captured[layer] for layer in sorted(layout.captured)])
    starts = layout.cu_branch.tolist()
    return [Prefix(kv, start, length) for start, length in zip(starts, lengths, strict=False)]


def cached_prefix(cache: object, model: PreTrainedModel, length: int) -> Prefix:
    """The one sequence of `length` tokens that a user's cache holds.

    Raises:
        TypeError: not a Hugging Face cache.
        ValueError: more than one sequence, another number of tokens, or keys that are not of this model.
    """
    if not isinstance(cache, HFCache):
        raise TypeError(
            f"cache: expected a transformers cache, got {type(cache).__name__}; pass the DynamicCache of a forward"
        )
    config = text_config(model)
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"cache: expected the {config.num_hidden_layers} layers of {type(model).__name__}, got "
            f"{len(cache.layers)}; fill it with this model"
        )
    kv = PrefixKV.from_cache(cache, length)
    for index, (keys, _) in enumerate(kv.layers):
        if len(keys) != 1:
            raise ValueError(f"cache: expected one sequence, got {len(keys)}; select one with batch_select_indices")
        if keys.dtype != model.dtype or keys.device != model.device:
            raise ValueError(
                f"cache: expected {model.dtype} on {model.device}, got {keys.dtype} on {keys.device} in layer {index}; "
                "fill it with this model"
            )
    return Prefix(kv, 0, length)


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model itself."""
    return model.config.get_text_config(decoder=True)


def check_supported(model: object) -> None:
    """Refuse by name what a packed forward would get wrong.

    Raises:
        TypeError: not a transformers model.
        ValueError: encoder-decoder, linear or chunked attention, length-dependent rotary scaling, no LM head, or
            attention that does not go through the attention interface.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers causal LM, got {type(model).__name__}; load one with AutoModelForCausalLM"
        )
    name = type(model).__name__
    config = text_config(model)

    def refuse(reason: str) -> ValueError:
        return ValueError(
            f"model: expected a decoder with softmax attention and fixed positions, got {name} with {reason}; "
            "use a model such as Qwen3, Qwen2, Llama, Mistral, Phi3 or Gemma2"
        )

    if model.config.is_encoder_decoder:
        raise refuse("an encoder and a decoder")
    other = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in SUPPORTED_LAYERS})
    if other:
        raise refuse(f"layers of type {', '.join(other)}")
    for kind in _rope_types(config):
        if kind in LENGTH_DEPENDENT_ROPE:
            raise refuse(f"rotary scaling {kind}, which depends on the length")
    if model.get_output_embeddings() is None:
        raise refuse("no LM head")
    if not model._supports_attention_backend or not getattr(config, "is_causal", True):
        raise refuse("attention outside transformers' AttentionInterface")


def _rope_types(config: Any) -> set[str]:
    found: set[str] = set()

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            kind = value.get("rope_type", value.get("type"))
            if isinstance(kind, str):
                found.add(kind)
            for inner in value.values():
                visit(inner)

    for attribute in ("rope_parameters", "rope_scaling"):
        visit(getattr(config, attribute, None))
    return found


@dataclass(frozen=True)
class Head:
    """A model's LM head in the terms of `linear_logprob`."""

    weight: Tensor  # [V, D]
    bias: Tensor | None
    logit_scale: float
    softcap: float | None


def check_place(path: str, wanted: str) -> None:
    """Refuse at once what is no folder and cannot be a hub id, or lies in a folder that is here.

    Raises:
        OSError: no such folder.
    """
    owner, slash, _ = path.partition("/")
    if not os.path.isdir(path) and (not HUB_ID.fullmatch(path) or os.path.isdir(owner)):
        hint = "a hub id has an owner in front, as in Qwen/Qwen3-1.7B" if not slash else "check the path"
        raise OSError(f"{path}: expected a folder or hub id of {wanted}, got no such folder; {hint}")


def load_model(path: str, device: str = "auto", dtype: str = "auto") -> tuple[PreTrainedModel, Tokenizer]:
    """A causal LM in eval mode and its tokenizer, from a folder or the hub; safetensors only, no code of its own.

    Args:
        path: the folder or hub id.
        device: "auto" for a GPU where there is one.
        dtype: a name of torch's, or "auto" for the checkpoint's own.

    Raises:
        OSError: nothing usable there.
        ValueError: a kind of model that transformers does not know without foreign code.
    """
    check_place(path, "a model in safetensors")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, use_safetensors=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except OSError as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise OSError(f"{path}: expected a folder or hub id of a model in safetensors, got: {reason}") from problem
    return model.to(device).eval().requires_grad_(False), tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a folder or hub id.

    Raises:
        OSError: nothing usable there.
    """
    check_place(path, "a tokenizer")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except OSError as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise OSError(f"{path}: expected a folder or hub id with a tokenizer, got: {reason}") from problem


def has_tokenizer(path: str) -> bool:
    """Whether the tokenizer of a folder or hub id is on this machine."""
    files = ("tokenizer.json", "tokenizer_config.json")
    if os.path.isdir(path):
        return any(os.path.isfile(os.path.join(path, file)) for file in files)
    return bool(HUB_ID.fullmatch(path)) and any(isinstance(try_to_load_from_cache(path, file), str) for file in files)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """A hash of everything that turns text into ids and back, the chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = sorted(tokenizer.get_vocab().items())
    if backend is not None:
        rules = {**json.loads(backend.to_str()), "padding": None, "truncation": None}  # these come and go with its use
    template = getattr(tokenizer, "chat_template", None)
    settled = json.dumps([rules, tokenizer.special_tokens_map, template], sort_keys=True, default=str)
    return hashlib.sha256(settled.encode()).hexdigest()


def _checkpoint_files(path: str, download: bool = True) -> list[Path]:
    """config.json and the weights of a folder or hub id.

    Raises:
        OSError: no checkpoint in safetensors there.
    """
    folder = Path(path)
    check_place(path, "a model in safetensors")
    if not folder.is_dir():
        try:
            wanted = ["*.json", "*.safetensors"]
            folder = Path(snapshot_download(path, allow_patterns=wanted, local_files_only=not download))
        except (OSError, ValueError) as problem:
            reason = str(problem).strip().partition("\n")[0]
            raise OSError(f"{path}: expected a folder or hub id of a model in safetensors, got: {reason}") from None
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").is_file():
        raise OSError(f"{path}: expected config.json and weights in safetensors, got none; convert the checkpoint")
    return [folder / "config.json", *weights]


def checkpoint_size(path: str) -> int | None:
    """Number of weights of a checkpoint, from the headers of its files; None where it is not on this machine."""
    total = 0
    try:
        for file in _checkpoint_files(path, download=False)[1:]:
            with safe_open(file, "pt") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return total


def checkpoint_hash(path: str) -> str:
    """A hash of a checkpoint that needs no model in memory: its config and weights, of large files headers and samples.

    Raises:
        OSError: no checkpoint in safetensors there.
    """
    config, *weights = _checkpoint_files(path)
    found = hashlib.sha256(config.read_bytes())
    if (generation := config.with_name("generation_config.json")).is_file():
        found.update(generation.read_bytes())  # where the ends of a generation stand
    for file in weights:
        size = file.stat().st_size
        found.update(repr([file.name, size]).encode())
        if size <= WHOLE_FILE:
            found.update(file.read_bytes())
            continue
        with file.open("rb") as data:
            found.update(data.read(min(int.from_bytes(data.read(8), "little"), WHOLE_FILE)))
            for place in range(SAMPLES):
                data.seek(size * place // SAMPLES)
                found.update(data.read(256))
    return found.hexdigest()


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, open for the answer: by the tokenizer's chat template, thinking off, or plain.

    Raises:
        ValueError: a text that the tokenizer has no ids for.
    """
    plain = not getattr(tokenizer, "chat_template", None)
    text = "\n".join(message["content"] for message in messages)
    if not plain:
        text = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )
    try:
        return list(tokenizer(text, add_special_tokens=plain)["input_ids"])
    except Exception as problem:
        if type(problem) is not Exception:  # which is what tokenizers raises
            raise
        raise ValueError(
            f"prompt: expected words of the tokenizer's vocabulary, got {text[:80]!r} ({problem}); use those words, or "
            "a model that takes any text"
        ) from None


def lm_head(model: PreTrainedModel) -> Head:
    """The LM head of the model: weight, bias, scale (Cohere, Granite) and soft-cap (Gemma 2)."""
    config, layer = text_config(model), model.get_output_embeddings()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight.detach(), getattr(layer, "bias", None), float(scale) / float(divisor), softcap)


def max_positions(model: PreTrainedModel) -> int | None:
    """The number of positions the model was made for, None where its configuration sets none."""
    return getattr(text_config(model), "max_position_embeddings", None)


def vocabulary(model: PreTrainedModel) -> int:
    """The number of ids the model takes."""
    return int(model.get_input_embeddings().weight.shape[0])


def valid_ids(valid_vocab: Any, model: PreTrainedModel) -> int:
    """The number of ids that count: `valid_vocab`, or all that the model takes for None.

    Raises:
        TypeError: not an int.
        ValueError: none, or more than the model takes.
    """
    size = vocabulary(model)
    if valid_vocab is None:
        return size
    if not isinstance(valid_vocab, int) or isinstance(valid_vocab, bool):
        raise TypeError(f"valid_vocab: expected an int, got {type(valid_vocab).__name__}; pass the tokenizer's size")
    if not 1 <= valid_vocab <= size:
        raise ValueError(f"valid_vocab: expected 1 to {size}, got {valid_vocab}; pass the tokenizer's size or None")
    return valid_vocab


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 4 << 30


def checkpoint_vocabulary(path: str) -> int:
    """The number of ids that a checkpoint takes which is not loaded."""
    return int(AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True).vocab_size)


def checkpoint_ends(path: str) -> frozenset[int]:
    """The ids that end a generation of a checkpoint that is not loaded."""
    value = None
    with suppress(OSError):  # it may have none of its own
        value = GenerationConfig.from_pretrained(path).eos_token_id
    if value is None:
        value = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True).eos_token_id
    return frozenset([] if value is None else [value] if isinstance(value, int) else value)


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a generation."""
    generation = getattr(model, "generation_config", None)
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = getattr(text_config(model), "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset([int(value)] if isinstance(value, int) else [int(entry) for entry in value])


def new_cache() -> DynamicCache:
    """An empty cache whose layers keep every token: made with a config, sliding layers would keep only their window."""
    return DynamicCache()


def token_ids(name: str, value: Tensor | Sequence[int], model: PreTrainedModel) -> Tensor:
    """`value` as int64 [n] on the model's device, every id inside its vocabulary.

    Raises:
        TypeError: not integers.
        ValueError: more than one dimension, another device, or an id outside the vocabulary.
    """
    ids = value if isinstance(value, Tensor) else torch.tensor(_listed(name, value), dtype=torch.int64).to(model.device)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: expected int64 token ids, got {ids.dtype}; convert them with .long()")
    if ids.ndim != 1:
        row = f", such as {name}[0]" if ids.ndim > 1 else ""
        raise ValueError(f"{name}: expected one dimension, got shape {list(ids.shape)}; pass one sequence{row}")
    if ids.device != model.device:
        raise ValueError(
            f"{name}: expected a tensor on the model's device {model.device}, got {ids.device}; "
            f"move it with .to('{model.device}')"
        )
    size = vocabulary(model)
    outside = (ids < 0) | (ids >= size)
    if bool(outside.any()):
        raise ValueError(
            f"{name}: expected ids from 0 below {size}, got {int(ids[outside][0])}; use the model's own tokenizer"
        )
    return ids.long()


def _listed(name: str, value: object) -> list[int]:
    """The ids of a sequence that is no tensor, each an int64; raises TypeError as `token_ids`."""

    def refusal(got: str, wanted: str = "a sequence of token ids") -> TypeError:
        return TypeError(f"{name}: expected {wanted}, got {got}")

    if isinstance(value, str | bytes):
        raise refusal("a text; encode it with the tokenizer")
    if isinstance(value, Mapping):
        raise refusal(f"{type(value).__name__}; pass its input_ids")
    if isinstance(value, Set) or not isinstance(value, Iterable):
        raise refusal(f"{type(value).__name__}; pass a list of ints")
    ids: list[Any] = [entry.item() if isinstance(entry, Tensor) and not entry.ndim else entry for entry in value]
    for place, entry in enumerate(ids):
        if hasattr(entry, "__len__") and not isinstance(entry, str | bytes):
            raise refusal(f"a {type(entry).__name__} at place {place}; pass one sequence, such as {name}[{place}]")
        if isinstance(entry, bool | float):
            raise refusal(f"{entry} at place {place}; convert them with int()", "int64 token ids")
        if not isinstance(entry, Integral):
            raise refusal(f"{reprlib.repr(entry)} at place {place}; pass a list of ints")
        if not -(1 << 63) <= int(entry) < 1 << 63:
            raise refusal(f"{reprlib.repr(entry)} at place {place}, beyond int64; use the model's own tokenizer")
    return ids


def check_position(position: int, length: int) -> int:
    """A state's position in a trajectory of `length` tokens as a plain int.

    Raises:
        TypeError: not an integer.
        ValueError: past the trajectory.
    """
    try:
        place = operator.index(position)
    except TypeError:
        raise TypeError(
            f"position: expected an int, got {type(position).__name__}; count the prefix's tokens"
        ) from None
    if place > length:
        raise ValueError(f"position: expected 1 to {length} for this trajectory, got {place}; count its tokens")
    return place


def check_group(model: PreTrainedModel, position: int, candidates: Tensor | Sequence[int], future: int = 1) -> Tensor:
    """The candidates of a state behind `position` tokens as checked ids; `future` is how many positions they need.

    Raises:
        TypeError: ids that are not integers.
        ValueError: no prefix, no candidate, an id given twice or outside the vocabulary, or too many positions.
    """
    ids = token_ids("candidates", candidates, model)
    if len(ids) == 0:
        raise ValueError("candidates: expected at least one token id, got none; ask for a pool first")
    if len(ids.unique()) < len(ids):
        raise ValueError(f"candidates: expected no id twice, got {ids.tolist()}; remove duplicates with joint_pool")
    if position < 1:
        raise ValueError(f"prefix: expected at least 1 token, got {position}; a state needs a token before it")
    limit = max_positions(model)
    if limit is not None and position + future > limit:
        raise ValueError(
            f"prefix: expected at most {limit} positions with candidate and future, got {position} + {future}; "
            "shorten the prefix or the future"
        )
    return ids


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module tree over the same storage, packed first: adapters put into it stay out of the model."""
    NativeDecoder.of(model)  # weights that are packed later would be no longer those of the copy
    shared: dict[int, Any] = {}
    for parameter in model.parameters():
        plain = type(parameter) is nn.Parameter
        shared[id(parameter)] = nn.Parameter(parameter.data, requires_grad=False) if plain else parameter
    for buffer in model.buffers():
        shared[id(buffer)] = buffer
    return copy.deepcopy(model, shared)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the architecture and of sampled weights rounded to bfloat16: float32 and bfloat16 copies agree."""
    config = text_config(model)
    digest = hashlib.sha256()
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    digest.update(repr([config.model_type, *(getattr(config, entry, None) for entry in shape)]).encode())
    for name, parameter in model.named_parameters():
        if "lora_" in name or parameter.numel() == 0:
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16)
        digest.update(sample.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


# Entries of an adapter_config.json that change nothing, or that the names of the weights settle.
HARMLESS_ENTRIES = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
)
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")  # qkv_proj: Phi3


def add_adapter(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """LoRA on the attention projections of a weight-sharing copy; only the adapter's parameters require grad."""
    if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
        raise ValueError(
            f"model: expected a plain base model, got {type(model).__name__} with adapters in it; "
            "merge_and_unload them first"
        )
    present = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    config.target_modules = sorted(present.intersection(ATTENTION_PROJECTIONS))
    if not config.target_modules:
        raise ValueError(
            f"model: expected linear layers named {', '.join(ATTENTION_PROJECTIONS)}, got {type(model).__name__} "
            "without any; use a model such as Qwen3, Qwen2, Llama, Mistral, Phi3 or Gemma2"
        )
    config.task_type = config.modules_to_save = None
    return get_peft_model(share_weights(model), config)


def adapter_tensors(adapted: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors under the names of a PEFT checkpoint; they share the parameters' storage."""
    return get_peft_model_state_dict(adapted)


def classifier_config(adapted: PeftModel) -> dict[str, Any]:
    """The adapter's configuration as PEFT writes it for a sequence classifier with one label."""
    config = adapted.peft_config[adapted.active_adapter].to_dict()
    config.update(task_type="SEQ_CLS", modules_to_save=["classifier", "score"], inference_mode=True)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}


def is_float32(value: object) -> bool:
    """Whether a value is a number that float32 has room for."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def lora_config(rank: Any, alpha: Any, dropout: Any) -> LoraConfig:
    """A plain LoRA configuration.

    Raises:
        ValueError: a number out of range, or none at all.
    """
    if not isinstance(rank, Integral) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank: expected 1 or more, got {rank!r:.80}; the published rank is 16")
    if not is_float32(alpha) or alpha <= 0:
        raise ValueError(
            f"alpha: expected a number above 0 that float32 holds, got {alpha!r:.80}; the published value is 32"
        )
    if not is_float32(dropout) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: expected 0 up to 1, got {dropout!r:.80}; the published value is 0.05")
    return LoraConfig(r=int(rank), lora_alpha=alpha, lora_dropout=dropout)  # type: ignore[arg-type]


def read_adapter_config(values: dict[str, Any]) -> LoraConfig:
    """The plain LoRA configuration in an adapter_config.json; the file decides about rank, alpha and dropout alone.

    Raises:
        ValueError: another kind of adapter, a number out of range, or a setting that would change what is computed or,
            like some of PEFT's initialisations, the base weights.
    """
    config = lora_config(values.get("r"), values.get("lora_alpha"), values.get("lora_dropout"))
    for name, plain in config.to_dict().items():
        given = values.get(name, plain)  # another version of PEFT may not know the entry
        if name in HARMLESS_ENTRIES or given == plain or not (given or plain):
            continue
        if name == "init_lora_weights" and (isinstance(given, bool | None) or given == "gaussian"):
            continue  # the weights come from the file
        raise ValueError(
            f"expected a plain LoRA adapter with {name} {plain!r}, got {given!r:.200}; "
            "use one that save_pretrained wrote"
        )
    return config


def merged_projections(adapted: PeftModel) -> dict[str, Tensor]:
    """`layers.<i>.self_attn.<projection>` -> weight with the adapter folded in, in the base weight's dtype."""
    merged = {}
    for name, layer in adapted.named_modules():
        if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer"):
            base = layer.base_layer.weight.detach()
            delta = layer.get_delta_weight(adapted.active_adapter).detach()
            merged[name[name.index("layers.") :]] = (base.to(delta.dtype) + delta).to(base.dtype)
    return merged


def adapter_dropouts(adapted: PeftModel) -> list[nn.Module]:
    """The adapter's dropout layers."""
    return [layer for name, layer in adapted.named_modules() if ".lora_dropout." in name]


def causal_lm(adapted: PeftModel) -> PreTrainedModel:
    """The causal LM inside, adapters active."""
    return adapted.get_base_model()


@torch.no_grad()
def check_packed_forward(model: PreTrainedModel) -> None:
    """Compare a packed forward of a few tokens with plain ones, so that no model is silently scored wrong.

    Raises:
        ValueError: NaN logits, or log-probabilities that differ.
    """
    size, device = vocabulary(model), model.device
    a, b, c, d = size // 7, size // 3, size // 2, size - 1
    branches = torch.tensor([[a, b, c, d], [a, b, d, c]], device=device)
    if getattr(text_config(model), "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
        warnings.warn(
            f"{type(model).__name__} caps its attention logits and 'sdpa' leaves that out: load it with "
            "attn_implementation='eager' so that decoding and scoring see the same model",
            stacklevel=3,
        )
    with _attention(model, "eager"):
        plain = model(input_ids=branches, use_cache=False).logits[:, -2:].float()
    layout = Layout.build([([2], 0, 0), ([2, 2], 0, 2)], device)
    ids = torch.cat([branches[0, :2], branches[0, 2:], branches[1, 2:]])
    positions = torch.tensor([0, 1, 2, 3, 2, 3], device=device)
    hidden = packed_forward(model, ids, positions, layout)[2:]
    if bool(plain.isnan().any()):
        raise ValueError(f"model: expected finite logits, got NaN from {type(model).__name__}; check its weights")
    head = lm_head(model)
    targets = branches[:, 1:3].reshape(-1)
    ours = linear_logprob(hidden, head.weight, targets, head.bias, logit_scale=head.logit_scale, softcap=head.softcap)
    theirs = plain.log_softmax(-1).view(4, -1).gather(1, targets[:, None])[:, 0]
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if not torch.allclose(ours.float(), theirs, rtol=tolerance, atol=tolerance * float(plain.abs().amax())):
        raise ValueError(
            f"model: expected packed and plain forwards to agree, got log-probabilities {ours.tolist()} and "
            f"{theirs.tolist()} from {type(model).__name__}; use a model of a supported family"
        )


def check_decodable(name: str, model: CausalLM) -> None:
    """Refuse what cannot decode deterministically.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model in training mode.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{name}: expected a transformers causal LM, got {type(model).__name__}; load one with AutoModelForCausalLM"
        )
    if model.training:
        raise ValueError(f"{name}: expected a model in eval mode, got one in training mode; call .eval() first")


def left_padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Token ids [B, S] with each sequence at the right end, and their mask [B, S] (None where all have one length)."""
    longest = max(len(tokens) for tokens in sequences)
    ids = torch.stack([nn.functional.pad(tokens, (longest - len(tokens), 0)) for tokens in sequences])
    if all(len(tokens) == longest for tokens in sequences):
        return ids, None
    lengths = torch.tensor([len(tokens) for tokens in sequences], device=ids.device)
    return ids, (torch.arange(longest, device=ids.device) >= longest - lengths[:, None]).long()


@torch.no_grad()
def last_logits(model: CausalLM, ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
    """float32 [B, V] behind the last token of each row; a cache is extended by the new tokens.

    Args:
        model: a causal LM.
        ids: [B, n] the new tokens.
        mask: [B, cached + n], 0 at left padding; None for none.
        cache: what was computed before, None to keep nothing.
    """
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": cache is not None}
    if mask is not None:
        options["attention_mask"] = mask
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    return model(input_ids=ids, **options).logits[:, -1].float()


def keep_rows(cache: Cache, rows: Sequence[int], device: torch.device) -> None:
    """Make a batched cache one of these rows, in place; a row may come again."""
    cache.batch_select_indices(torch.tensor(rows, device=device))


def streamer_of_caller(depth: int = 2) -> Any:
    """The `streamer=` that a user gave to `model.generate`: transformers 5 passes none to a `custom_generate` callable.

    It is read from the frame of `generate`, which is the caller of the callable, which is the caller of this.
    """
    frame = sys._getframe(depth)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" else None


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The model's logits [N, V] in float32 for hidden states [N, D] after the final norm."""
    head = lm_head(model)
    values = (hidden @ head.weight.T).float() * head.logit_scale
    if head.bias is not None:
        values = values + head.bias.float()
    return values if head.softcap is None else head.softcap * torch.tanh(values / head.softcap)


def packs(rows: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """(first, past the last) of consecutive runs whose rows stay within the budget; a larger one goes alone."""
    found, start, used = [], 0, 0
    for index, count in enumerate(rows):
        if index > start and used + count > budget:
            found.append((start, index))
            start, used = index, 0
        used += count
    return [*found, (start, len(rows))] if rows else []
