"""Tiny random causal LMs of six families, with distributions far from flat."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "phi3", "gemma2")
V, EOS = 50, 1

_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"num_hidden_layers": 3, "mlp_only_layers": [1], "experts_implementation": "eager"},
    ),
    "phi3": (Phi3Config, {}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 12.0,
            "attn_implementation": "eager",  # sdpa leaves the attention soft-cap out
        },
    ),
    "gpt_oss": (  # with attention sinks
        GptOssConfig,
        {
            "head_dim": 8,
            "sliding_window": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "attn_implementation": "eager",
            "experts_implementation": "eager",  # others take no float64
        },
    ),
}


def tiny(family: str = "qwen3", seed: int = 0, *, spread: float = 3.0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model on the CPU, in eval mode: 2 layers, hidden 32, 4 heads over 2, V = 50, EOS = 1.

    Args:
        family: one of FAMILIES, mixtral, qwen3_moe or gpt_oss.
        seed: of the weights; the global generator is left as it was.
        spread: the standard deviation of the logits over the vocabulary, about.
        overrides: configuration entries, e.g. sliding_window=5, tie_word_embeddings=False, vocab_size=64.
    """
    kind, own = _CONFIGS[family]
    settings: dict[str, Any] = {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.25,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": EOS,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**settings | own | overrides), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases: away from 1 and 0 too
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            probe = torch.arange(3, min(43, model.config.vocab_size))[None]
            head = model.get_output_embeddings().weight
            uncapped = model.base_model(probe).last_hidden_state @ head.T
            gain = spread / float(uncapped.std(-1).mean())
            if model.config.tie_word_embeddings:  # the head is the embedding: scale the final norm instead
                norm = model.base_model.norm.weight
                norm.copy_(norm * gain if family != "gemma2" else (1 + norm) * gain - 1)
            else:
                head.mul_(gain)
    return model.eval()


def prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (n,), generator=generator) for n in lengths]


def ending() -> tuple[PreTrainedModel, torch.Tensor, PreTrainedTokenizerFast, PreTrainedTokenizerFast, list[int]]:
    """(a model, a prompt, a tokenizer whose end token the model writes, one without, the tokens up to that)."""
    model, (prompt,) = tiny("qwen3", 6), prompts(7)
    model.generation_config.eos_token_id = []
    whole = model.generate(prompt[None], max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    last = next(place for place in range(3, 20) if whole.index(whole[place]) == place)
    made = Tokenizer(WordLevel({f"w{token}": token for token in range(V)}, unk_token="w0"))
    plain = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")
    ended = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token=f"w{whole[last]}")
    return model, prompt, ended, plain, whole[: last + 1]
