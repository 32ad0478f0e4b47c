"""LoRA adapters by peft: made, read, described, merged."""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from fb_core._util import check_count
from fb_core.models.checkpoints import is_hub_id
from fb_core.models.facts import share_weights
from fb_core.models.packed import attention_modules

LARGEST = torch.finfo(torch.float32).max

AdapterConfig: TypeAlias = LoraConfig

# Entries of an adapter_config.json that change nothing, or that follow from the names of the weights.
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


def add_adapter(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """LoRA on the projections of the decoder's attention, in a weight-sharing copy; only the adapter requires grad.

    Raises:
        ValueError: adapters in the model, or attention that multiplies by something other than linear layers.
    """
    if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
        raise ValueError(
            f"model: expected a plain base model, got {type(model).__name__} with adapters in it; "
            "merge_and_unload them first"
        )
    inside = {layer for attention in attention_modules(model) for layer in attention.modules()}
    mine = [(name, layer) for name, layer in model.named_modules() if layer in inside]
    for name, layer in mine:
        if not isinstance(layer, nn.Linear) and any(x.ndim > 1 for x in layer.parameters(recurse=False)):
            raise ValueError(
                f"model: expected linear layers alone to project in attention, got {type(layer).__name__} in {name} of "
                f"{type(model).__name__}; use a model such as Qwen3, Qwen2, Llama, Mistral, Phi3 or Gemma2"
            )
    config.target_modules = [name for name, layer in mine if isinstance(layer, nn.Linear)]
    config.task_type = config.modules_to_save = None
    with warnings.catch_warnings():  # peft reads a property that transformers has renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        try:
            return get_peft_model(share_weights(model), config)
        except ValueError as problem:  # it takes some names for parts of projections that are fused elsewhere
            raise ValueError(
                f"model: expected projections that peft adapts, got those of a {type(model).__name__} ({problem}); use "
                "a model such as Qwen3, Qwen2, Llama, Mistral, Phi3 or Gemma2"
            ) from problem


def adapter_tensors(adapted: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors under the names of a PEFT checkpoint; they share the parameters' storage."""
    return get_peft_model_state_dict(adapted)


def classifier_config(adapted: PeftModel) -> dict[str, Any]:
    """The adapter's configuration as PEFT writes it for a sequence classifier with one label, without paths."""
    config = adapted.peft_config[adapted.active_adapter].to_dict()
    if not is_hub_id(str(config["base_model_name_or_path"])):
        config["base_model_name_or_path"] = None
    config.update(task_type="SEQ_CLS", modules_to_save=["classifier", "score"], inference_mode=True)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}


def is_float32(value: object) -> bool:
    """Whether a value is a number that float32 has room for."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def lora_config(rank: Any, alpha: Any, dropout: Any) -> LoraConfig:
    """A plain LoRA configuration; ValueError for a number out of range, or none at all."""
    check_count("rank", rank, 1, "the published rank is 16")
    if not is_float32(alpha) or alpha <= 0:
        raise ValueError(
            f"alpha: expected a number above 0 that float32 holds, got {alpha!r:.80}; the published value is 32"
        )
    if not is_float32(dropout) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: expected 0 up to 1, got {dropout!r:.80}; the published value is 0.05")
    return LoraConfig(r=int(rank), lora_alpha=alpha, lora_dropout=dropout)  # type: ignore[arg-type]


def read_adapter_config(values: dict[str, Any]) -> LoraConfig:
    """The plain LoRA configuration in an adapter_config.json; only rank, alpha and dropout are taken from the file.

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
    """`layers.<i>.self_attn.<projection>` -> weight with the adapter merged, in the base weight's dtype."""
    merged = {}
    for name, layer in adapted.named_modules():
        if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer"):
            base = layer.base_layer.weight.detach()
            delta = layer.get_delta_weight(adapted.active_adapter).detach()
            merged[name[name.index("layers.") :]] = (base.to(delta.dtype) + delta).to(base.dtype)
    return merged


def adapter_scales(adapted: PeftModel) -> list[object]:
    """What a merge depends on besides parameters: which adapter is active, and its scale in each layer."""
    scales = [dict(layer.scaling) for layer in adapted.modules() if hasattr(layer, "get_delta_weight")]
    return [adapted.active_adapter, *scales]


def adapter_dropouts(adapted: PeftModel) -> list[nn.Module]:
    """The adapter's dropout layers."""
    return [layer for name, layer in adapted.named_modules() if ".lora_dropout." in name]
