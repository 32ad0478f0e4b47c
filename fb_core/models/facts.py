"""Facts of a loaded model: configuration, vocabulary, end-of-sequence ids, LM head, weights."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from fb_core.models.forks import unforkable
from fb_core.models.native import NativeDecoder, hooked, unchanged

CausalLM: TypeAlias = PreTrainedModel
Trainable: TypeAlias = PreTrainedModel | PeftModel | DistributedDataParallel
Tokenizer: TypeAlias = PreTrainedTokenizerBase
Cache: TypeAlias = DynamicCache  # from `empty_cache`: with a config, sliding layers would keep only their window
SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
STATEFUL_LAYERS = ("linear_attention", "conv", "hybrid")
OTHER_LAYERS = ("mlp", "moe")  # they keep nothing


def causal_lm(model: Any) -> PreTrainedModel:
    """The causal LM inside a PEFT model, adapters active; any other model as it is.

    Raises:
        ValueError: an adapter that adds tokens to the prompt or acts from some of them on; the causal LM inside would
            ignore it.
    """
    if not isinstance(model, PeftModel):
        return model
    for config in (model.peft_config[name] for name in model.active_adapters):
        entries = [name for name in ("alora_invocation_tokens", "layer_replication") if getattr(config, name, None)]
        if entries or config.is_prompt_learning:
            acts = f"with {entries[0]}" if entries else "which adds to the prompt"
            raise ValueError(
                f"model: expected adapters inside the layers, on every token alike, got {config.peft_type.value}, "
                f"{acts}; train with plain LoRA or another adapter of the layers"
            )
    return model.get_base_model()


def empty_cache(model: PreTrainedModel) -> Cache:
    """A cache for a model: of keys and values that are all kept, or, where layers keep a state, of their kinds."""
    return DynamicCache(config=text_config(model)) if state_layers(model) else DynamicCache()


def state_layers(model: PreTrainedModel) -> int:
    """How many layers keep a state, by the configuration."""
    kinds = getattr(text_config(model), "layer_types", None) or ()
    return sum(kind in STATEFUL_LAYERS for kind in kinds)


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model itself."""
    return model.config.get_text_config(decoder=True)


@dataclass(frozen=True)
class Head:
    """A model's LM head in the terms of `linear_logprob`."""

    weight: Tensor  # [V, D]
    bias: Tensor | None
    logit_scale: float
    softcap: float | None


def lm_head(model: PreTrainedModel) -> Head:
    """The LM head of the model: weight, bias, scale (Cohere, Granite) and soft-cap (Gemma 2).

    Raises:
        ValueError: a head that is more than its weight and bias: an adapter, hooks, a parametrisation.
    """
    config, layer = text_config(model), model.get_output_embeddings()
    if not unchanged(layer, nn.Linear):
        got = f"{type(layer).__name__}{' with hooks' if type(layer) is nn.Linear else ''} in {type(model).__name__}"
        raise ValueError(f"model: expected a plain LM head, got {got}; keep adapters, hooks and device maps off it")
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, float(scale) / float(divisor), softcap)


def misfit(model: PreTrainedModel) -> str | None:
    """Why a token's logits depend on more than the tokens before it and their positions, or on a state unknown here.

    Caches, padded batches and packed forwards would give wrong results there. None if it is not so.
    """
    config = text_config(model)
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    kinds = getattr(config, "layer_types", None) or ()
    other = sorted({kind for kind in kinds if kind not in SUPPORTED_LAYERS + STATEFUL_LAYERS + OTHER_LAYERS})
    if other:
        return f"layers of type {', '.join(other)}"
    if getattr(model, "_is_stateful", False) and not getattr(config, "layer_types", None):
        return "a recurrent state"
    if (reason := _unforkable(model)) is not None:
        return reason
    for kind in sorted({kind for kind, _ in _scalings(model)}):
        if "dynamic" in kind:  # as transformers decides it
            return f"rotary scaling {kind}, which depends on the length"
    if getattr(config, "attn_temperature_tuning", False):
        return "attention scaled by the place in a batch"
    return "no LM head" if model.get_output_embeddings() is None else None


_FORKS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()  # what `unforkable` said of a model


def _unforkable(model: PreTrainedModel) -> str | None:
    count = state_layers(model)
    if not count or model.device.type == "meta":
        return None
    if model not in _FORKS:
        with checking("model", model), torch.autocast(model.device.type, enabled=False):
            _FORKS[model] = unforkable(model, count, text_config(model).hidden_size)
    return _FORKS[model]


def _scalings(model: PreTrainedModel) -> list[tuple[str, int | None]]:
    """(kind, original positions) of the model's rotary scalings; layers may each have their own."""
    config = text_config(model)
    waiting: list[Any] = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    found = []
    for settings in waiting:  # which grows
        if isinstance(settings, dict):
            found.append((settings.get("rope_type", settings.get("type")), settings))
        waiting += settings.values() if isinstance(settings, dict) else settings if isinstance(settings, list) else ()
    return [(kind, x.get("original_max_position_embeddings")) for kind, x in found if isinstance(kind, str)]


def unfit(name: str, model: PreTrainedModel, reason: str) -> ValueError:
    """The error for a model that would be computed wrongly."""
    return ValueError(
        f"{name}: expected a decoder with softmax attention and fixed positions, got {type(model).__name__} with "
        f"{reason}; use a model such as Qwen3, Qwen2, Llama, Mistral, Phi3 or Gemma2"
    )


def check_in_memory(name: str, model: PreTrainedModel) -> None:
    """ValueError for a model whose weights are offloaded between its forwards."""
    if model.device.type == "meta":
        raise ValueError(
            f"{name}: expected weights in memory, got an offloaded {type(model).__name__}; load it without offloading"
        )
    if hasattr(next(model.parameters(), None), "ds_id"):
        raise ValueError(
            f"{name}: expected whole weights, got a {type(model).__name__} sharded by DeepSpeed's stage 3; use stage 1 "
            "or 2"
        )


@contextmanager
def checking(name: str, model: PreTrainedModel) -> Iterator[None]:
    """What a model's own modules raise where they are called as the library calls them, as an error with its name."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as problem:
        first = str(problem).strip().partition("\n")[0]
        raise unfit(name, model, f"{type(problem).__name__} in its forward ({first:.120})") from problem


class Watch(TorchDispatchMode):
    """Sees the 16-bit matrix products of this thread; if it `flips`, their last bit, as another order of sums might.

    `drawn` is the most random numbers that one operation took.
    """

    drawn, narrow = 0, False

    def __init__(self, flips: bool = True) -> None:
        super().__init__()
        self.flips = flips

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation's result."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = max(self.drawn, result.numel() if isinstance(result, Tensor) else 2)
        if "mm" in func.__name__ and getattr(result, "dtype", None) in (torch.bfloat16, torch.float16):
            self.narrow = True
            return (result.view(torch.int16) ^ 1).view(result.dtype) if self.flips else result
        return result


def twice(plain: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """`plain()`, and what it is with the rounding of `Watch`; without a product that rounds so it runs once."""
    with Watch(flips=False) as seen:
        wanted = plain()
    if not seen.narrow:
        return wanted, wanted
    with Watch():
        return wanted, plain()


def agree(ours: Tensor, plain: Tensor, other: Tensor) -> bool:
    """Whether logits or log-probs [parts, n, ...] are `plain` up to the model's own rounding (`other`'s, by `Watch`).

    In 16 bits the median error of each part counts: rounding sends a few tokens to other experts.
    """
    least = 1e-3 * float(plain.abs().amax())
    if torch.equal(other, plain):
        return torch.allclose(ours, plain, rtol=1e-3, atol=least)
    error, rounding = (
        (x - plain).abs().reshape(*plain.shape[:2], -1).mean(-1).median(-1).values for x in (ours, other)
    )
    return bool((error <= 3 * rounding + least).all())


def quietly(model: PreTrainedModel) -> AbstractContextManager[None]:
    """What is drawn inside is not drawn from the user's generators."""
    kind = model.device.type
    return torch.random.fork_rng([] if kind == "cpu" else [model.device], device_type="cuda" if kind == "cpu" else kind)


def max_positions(model: PreTrainedModel) -> int | None:
    """The number of positions the model was made for, None where its configuration sets none.

    With longrope the original ones: a longer sequence would turn the keys of all that it is packed or batched with.
    """
    original = [count for kind, count in _scalings(model) if kind == "longrope"]
    counts = [getattr(text_config(model), "max_position_embeddings", None), *original]
    return min((count for count in counts if count is not None), default=None)


def vocabulary(model: PreTrainedModel) -> int:
    """The number of ids the model takes."""
    return int(model.get_input_embeddings().weight.shape[0])


def known_ids(tokenizer: Tokenizer) -> int:
    """The number of ids that a tokenizer knows, unused ids between them included."""
    return int(max(tokenizer.get_vocab().values())) + 1


def valid_ids(valid_vocab: Any, model: PreTrainedModel, tokenizer: Tokenizer | None = None) -> int:
    """The number of ids that count: `valid_vocab`, or for None those that the tokenizer knows, or all of the model's.

    TypeError if it is not an int, ValueError for none, or more than the model takes.
    """
    size = vocabulary(model)
    if valid_vocab is None:
        return size if tokenizer is None else min(known_ids(tokenizer), size)
    if not isinstance(valid_vocab, int) or isinstance(valid_vocab, bool):
        raise TypeError(f"valid_vocab: expected an int, got {type(valid_vocab).__name__}; pass the tokenizer's size")
    if not 1 <= valid_vocab <= size:
        raise ValueError(f"valid_vocab: expected 1 to {size}, got {valid_vocab}; pass the tokenizer's size or None")
    return valid_vocab


def free_memory(device: torch.device, whole: bool = False) -> int:
    """Bytes that are free on a device, or the whole of its memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[whole]
    try:
        return os.sysconf("SC_PHYS_PAGES" if whole else "SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 1 << 40 if whole else 4 << 30


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers, where each layer has attention."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * heads * width * dtype.itemsize


def eos_ids(model: PreTrainedModel, *tokenizers: Tokenizer | None) -> frozenset[int]:
    """The ids that end a generation: those of the model's generation settings and the tokenizers' end tokens."""
    return ending(getattr(model, "generation_config", None), text_config(model), *tokenizers)


def ending(generation: Any, config: Any, *tokenizers: Tokenizer | None) -> frozenset[int]:
    """The ids that end a generation, from generation settings (or, without them, the model's) and tokenizers."""
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = getattr(config, "eos_token_id", None)
    named = [] if value is None else [value] if isinstance(value, int) else value
    own = [getattr(tokenizer, "eos_token_id", None) for tokenizer in tokenizers]
    return frozenset(int(end) for end in [*named, *own] if end is not None)


def structure(model: PreTrainedModel) -> list[object]:
    """What a copy of the module tree does not follow: the modules inside, their classes and hooks, their parameters."""
    inside = [(module, type(module), hooked(module)) for module in model.modules() if module is not model]
    return [*inside, *map(id, model.parameters())]


class Reading:
    """The parameters of some models as they are now: their addresses, versions and middle rows (vectors whole).

    A write through `data` changes no version: it is seen if it changes one of the middle rows.
    """

    @torch.no_grad()
    def __init__(self, *models: nn.Module) -> None:
        modules: list[nn.Module] = list(models)
        for module in modules:  # the list grows; `modules()` takes twice as long
            modules += [child for child in module._modules.values() if child is not None]
        parameters = [x for module in modules for x in module._parameters.values() if x is not None]
        self.addresses = [x.data_ptr() for x in parameters]
        self.versions = [None if x.is_inference() else x._version for x in parameters]
        self.words = list[bytes]()  # of rows on the host: copying bytes is faster than making and joining views
        rows: dict[object, list[Tensor]] = {}
        for address, x in dict(zip(self.addresses, parameters, strict=True)).items():
            if type(x) is not nn.Parameter or not (count := x.numel()) or x.is_meta:
                continue
            if x.is_cpu and x.is_contiguous():
                row_len = x.shape[-1] if x.ndim else 1
                size, before = row_len * x.itemsize, count // row_len // 2
                self.words.append(ctypes.string_at(address + before * size, size))
                continue
            row: Tensor = x if x.ndim else x[None]
            while row.ndim > 1:
                row = row[len(row) // 2]
            rows.setdefault((x.dtype, x.device), []).append(row)
        self.rows = {kind: torch.cat(each).view(torch.uint8) for kind, each in rows.items()}  # a NaN equals itself

    def same(self, earlier: Reading | None) -> bool:
        """Whether nothing was replaced, moved or, as far as can be seen, written since an earlier reading."""
        if earlier is None or self.addresses != earlier.addresses or self.versions != earlier.versions:
            return False
        rows = ((row, earlier.rows.get(kind)) for kind, row in self.rows.items())
        return self.words == earlier.words and all(other is not None and torch.equal(row, other) for row, other in rows)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module tree over the same storage: adapters added to it do not change the model."""
    NativeDecoder.of(model)  # packs now: packing later would move the model's weights away from the copy's
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


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The model's logits [N, V] in float32 for hidden states [N, D] after the final norm."""
    head = lm_head(model)
    values = (hidden @ head.weight.T).float() * head.logit_scale
    if head.bias is not None:
        values = values + head.bias.float()
    return values if head.softcap is None else head.softcap * torch.tanh(values / head.softcap)
