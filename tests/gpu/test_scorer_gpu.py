"""The scorer on a GPU: a Qwen3-1.7B of random weights, made here, against full forwards of transformers' own model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from gpu_checks import DEVICE, needs_memory
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from fb_core import BranchGroup, CompatibilityScorer
from fb_kernels.testing import assert_close_to_reference, largest_tensor

pytestmark = pytest.mark.gpu
SIZES = {"small": (40, 3, 5), "token": (1024, 13, 1), "real": (1024, 13, 128)}  # prefix, candidates, future


def qwen3(**overrides: int) -> Qwen3Config:
    """Qwen3-1.7B, or with other sizes."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }
    return Qwen3Config(**sizes | overrides, tie_word_embeddings=True, rms_norm_eps=1e-6)


def random_model(config: Qwen3Config, dtype: torch.dtype, device: str = DEVICE) -> PreTrainedModel:
    """Weights of a seed, with logits of standard deviation about 3."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        model.base_model.norm.weight.mul_(3 / (config.initializer_range * config.hidden_size**0.5))
    return model.to(device)


def random_group(
    vocabulary: int, prefix: int, candidates: int, future: int, device: str = DEVICE
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(prefix + future)
    chosen = torch.randperm(vocabulary, generator=generator)[:candidates]
    tokens = torch.randint(vocabulary, (prefix + future,), generator=generator)
    return tokens[:prefix].to(device), chosen.to(device), tokens[prefix:].to(device)


@torch.no_grad()
def full_forwards(model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor) -> Tensor:
    """[K, H]: transformers' own forward of prefix, candidate and future, one candidate after the other."""
    rows = []
    for candidate in candidates:
        ids = torch.cat([prefix, candidate[None], future[:-1]])[None]
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(future)).logits[0]
        rows.append(logits.float().log_softmax(-1).gather(-1, future[:, None])[:, 0])
    return torch.stack(rows)


def matches_full_forwards(
    narrow: PreTrainedModel, wide: PreTrainedModel, size: tuple[int, int, int], device: str = DEVICE
) -> None:
    """The scorer of `narrow` by the error rule, the truth being full forwards of `wide`; without logits."""
    group = random_group(narrow.config.vocab_size, *size, device=device)
    native, truth = full_forwards(narrow, *group), full_forwards(wide, *group)
    scorer = CompatibilityScorer(narrow)
    with largest_tensor() as largest:
        got = scorer.score(*group)
    logits = size[1] * size[2] * narrow.config.vocab_size
    if logits > 1 << 26:  # fewer may be one chunk
        assert largest.numel <= logits // 2, largest
    assert_close_to_reference(got, truth.double(), native, scale=12.0)


def trajectory_matches_groups(model: PreTrainedModel, length: int, device: str = DEVICE) -> None:
    """Groups of one trajectory scored together, and two trajectories packed, against each group alone."""
    vocabulary = model.config.vocab_size
    tokens, candidates, future = random_group(vocabulary, length, 5, 7, device)
    groups = [BranchGroup(position, candidates, future) for position in (length // 3, length // 2, length)]
    scorer = CompatibilityScorer(model)
    together = scorer.score_trajectory(tokens, groups)
    packed = scorer.score_trajectories([(tokens, groups), (tokens.flip(0), groups[:1])])
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.25
    for group, one, other in zip(groups, together, packed[0], strict=True):
        alone = scorer.score(tokens[: group.position], group.candidates, group.future)
        torch.testing.assert_close(one, alone, rtol=0, atol=tolerance)
        torch.testing.assert_close(other, alone, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """(bfloat16, the same weights in float32)."""
    needs_memory(32)
    narrow = random_model(qwen3(), torch.bfloat16)
    yield narrow, copy.deepcopy(narrow).float()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_matches_full_forwards(models: tuple[PreTrainedModel, PreTrainedModel], size: str) -> None:
    matches_full_forwards(*models, SIZES[size])


def test_float32_matches_full_forwards(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, wide = models
    group = random_group(wide.config.vocab_size, 300, 4, 16)
    torch.testing.assert_close(CompatibilityScorer(wide).score(*group), full_forwards(wide, *group), rtol=0, atol=2e-3)


def test_trajectories(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    trajectory_matches_groups(models[0], 1500)
    trajectory_matches_groups(models[1], 700)


def test_repeats_are_bit_equal(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    group = random_group(151_936, 500, 13, 32)
    scorer = CompatibilityScorer(models[0])
    first = scorer.score(*group)
    assert all(torch.equal(first, scorer.score(*group)) for _ in range(20))
