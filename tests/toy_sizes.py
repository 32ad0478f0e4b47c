"""A pytest plugin: every benchmark at sizes that take no time, once, in the branches of the device in $TOY_DEVICE."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks import harness, shapes

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
LAYER = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 300} | HEADS
MODEL = LAYER | {"num_hidden_layers": 2}
LLAMA = MODEL | {"hidden_size": 64, "max_position_embeddings": 512, "rope_theta": 10_000.0}

SIZES: dict[str, Any] = {"ON_GPU": os.environ["TOY_DEVICE"] == "cuda", "WIDE": torch.float64}
SIZES |= {"HIDDEN": 32, "WIDTH": 48, "VOCABULARY": 300, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}
SIZES |= {"SLM": MODEL, "LLM": MODEL, "SMALL": MODEL, "LLAMA": LLAMA, "LM_HEAD": (32, 300)}
SIZES |= {"ROWS": (2, 20), "PACKED_ROWS": (20,), "LOGPROB_ROWS": (70, 13), "LOGPROB_TRAINED_ROWS": (70,)}
SIZES |= {"OTHERS": MODEL, "STATES": (20, 4), "PROMPTS": (2,), "ASKED": (8, 4)}
SIZES |= {"STATEFUL": {"lfm2": {"layer_types": ["conv", "full_attention"]}}}
SIZES |= {"MIXTURE": {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}}
SIZES |= {"SMALL_HEAD": (32, 300), "TARGET_ROWS": (70,)}
SIZES |= {"SEQUENCES": (1, 3), "FIRST": (20,), "SERVED_GROUPS": [(2, 20, 4)], "SCORED": [(20, 4)]}
SIZES |= {"PACKED": [(3, 20, 4)], "TRAJECTORIES": [(3, 30, 4)], "SAMPLE": (2, 3, (10, 30), 4), "CACHED": (20,)}
SIZES |= {"CONTEXTS": (20,), "PROBLEMS": (16,), "RUNS": 2, "TRAINED_TRAJECTORIES": (2, 2, 20)}
SIZES |= {"BRANCHES": [(2, 4, 20)], "ONE_TOKEN_BRANCHES": [(1, 1, 20)], "CANDIDATE_COUNTS": (4,)}
SIZES |= {"TRAINED_BRANCHES": [(2, 1, 20)], "LONG_TRAINED_BRANCHES": [(2, 4, 20)]}
for name, size in SIZES.items():
    assert hasattr(shapes, name), name
    setattr(shapes, name, size)


def write_pretrained(folder: Path) -> None:
    from dialects import byte_tokenizer

    tokenizer = byte_tokenizer()
    config = LlamaConfig(**LLAMA | {"max_position_embeddings": 2048, "vocab_size": len(tokenizer)})
    shapes.random_model(config, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


shapes.write_pretrained = write_pretrained

from benchmarks import bench_decode, bench_engine  # noqa: E402  (they read the sizes above when they are imported)

bench_decode.NEW = bench_engine.NEW = 8
bench_engine.PROBLEMS, bench_engine.SERVED_NEW = 4, 8
compare = harness.compare
gc.freeze()  # the harness collects before every case, and all that was imported takes 0.4 s


def once(*arguments: Any, rounds: int, **options: Any) -> list[harness.Result]:
    return compare(*arguments, rounds=1, **options)


def peak(prepare: Callable[..., Callable[[], object]], *arguments: object) -> int:
    prepare(*arguments)()
    return 1 << 20


harness.compare, harness.peak_memory, harness.cores = once, peak, lambda: 1
