"""A tiny random model of every causal LM class of transformers whose configuration allows one."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
V = 96

# Entries by the names that configurations have for them; one that has no such entry goes without.
_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": None,
    "is_decoder": True,
    "sliding_window": 6,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "d_model": 32,
    "d_inner": 64,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "embedding_size": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "state_size": 8,
    "lru_width": 32,
    "rotary_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
}

_VISION = {
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 4,
}
_VISION |= {"out_hidden_size": 32, "hidden_dim": 32, "vision_output_dim": 32, "pixel_shuffle_ratio": 1.0}

_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": V,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V},
    "gpt_neo": {"num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": 16, "floor_scale": 4, "no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": {"num_layers": 2, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16)},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "xlnet": {"d_head": 8},
    "zamba2": {
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def build(kind: str, **overrides: Any) -> PreTrainedModel:
    """A float32 model in eval mode, with no end-of-sequence token and outputs far from flat.

    Args:
        kind: one of KINDS.
        overrides: configuration entries.

    Raises:
        Exception: the class needs entries that are not known here, or would not be tiny.
    """
    settings = _settings(CONFIG_MAPPING[kind])
    own = _OWN.get(kind, {}) | overrides
    if "text_config" in settings:
        settings["text_config"] |= _OWN.get(f"{kind}_text", {}) | own
        own = {}
    config = CONFIG_MAPPING[kind](**settings | own)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    if config.sub_configs.get("text_config") is model_class.config_class:
        config = config.text_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > 1 << 23:
        raise ValueError(f"{kind}: {size} parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()


def _settings(config_class: Any, **more: Any) -> dict[str, Any]:
    """Small sizes for the entries that a configuration has, and for those of its parts."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    if dataclasses.is_dataclass(config_class):
        known |= {field.name for field in dataclasses.fields(config_class)}
    settings = {name: value for name, value in (_SIZES | more).items() if name in known}
    if "kv_lora_rank" in known:  # these have as many keys as queries
        settings["num_key_value_heads"] = 4
    for name, part in config_class.sub_configs.items():
        if part is not transformers.AutoConfig:
            settings[name] = _settings(part, **({} if name == "text_config" else _VISION))
    return settings
