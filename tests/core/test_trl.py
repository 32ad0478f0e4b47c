"""GRPO with shared prompts against TRL's own trainer: log-probs, entropies, losses, gradients, whole runs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny import FAMILIES, V, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from fb_core import hf
from fb_kernels.testing import assert_close_to_reference, largest_tensor

pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from fb_core.trl import SharedPrefixGRPOTrainer

PROMPTS = [[3, 17, 4, 4, 30, 9, 22, 8, 1, 40, 6], [5, 9], [12], [7, 7, 7, 31, 2, 0]]  # with the pad and the end inside
COMPLETIONS = [[[5, 9, 9, 30], [7], [5, 9, 2, 11, 48, 0]], [[8, 1], [8, 1]], [[4, 4, 4]], [[], [33, 1], [10, 3, 9, 9, 1]]]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{i}": i for i in range(3, V)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def trainer(kind: type[GRPOTrainer], model: Any, folder: Path, **settings: Any) -> GRPOTrainer:
    texts = [" ".join(f"w{3 + (7 * i + 5 * j) % 40}" for j in range(1 + (3 * i) % 8)) for i in range(12)]
    peft_config = settings.pop("peft_config", None)
    plain = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "beta": 0.0,
        "temperature": 0.7,
        "lr_scheduler_type": "constant",
        "max_steps": 6,
    }
    model.save_pretrained(folder / "model")
    model.config._name_or_path = str(folder / "model")  # where TRL reads the reference
    return kind(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **plain | settings),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def both(model: Any, folder: Path, **settings: Any) -> tuple[GRPOTrainer, GRPOTrainer]:
    """(ours, TRL's own) of equal models."""
    return (
        trainer(SharedPrefixGRPOTrainer, copy.deepcopy(model), folder, **settings),
        trainer(GRPOTrainer, copy.deepcopy(model), folder, **settings),
    )


def batch(order: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids [B, P + C], mask [B, P + C], C): every prompt with every of its completions, in some order."""
    rows = [(prompt, one) for prompt, many in zip(PROMPTS, COMPLETIONS, strict=True) for one in many]
    rows = [rows[i] for i in order or range(len(rows))]
    wide, keep = max(len(prompt) for prompt, _ in rows), max(len(one) for _, one in rows)
    ids, mask = torch.zeros(2, len(rows), wide + keep, dtype=torch.int64)
    for row, (prompt, one) in enumerate(rows):
        ids[row, wide - len(prompt) : wide] = torch.tensor(prompt)
        ids[row, wide : wide + len(one)] = torch.tensor(one, dtype=torch.int64)
        mask[row, wide - len(prompt) : wide + len(one)] = 1
    return ids, mask, keep


SCATTERED = [4, 0, 7, 6, 2, 8, 3, 1, 5]


def scores(which: GRPOTrainer, *given: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    found = which._get_per_token_logps_and_entropies(which.model, *given, compute_entropy=True, **options)
    assert found[2] is None
    return found[:2]


def close(mine: Any, want: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(mine, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", [None, SCATTERED], ids=["grouped", "scattered"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropies_equal_trls_own(family: str, order: list[int] | None, tmp_path: Path) -> None:
    ours, theirs = both(tiny(family), tmp_path)
    given = batch(order)
    for gradient in (False, True):
        with torch.set_grad_enabled(gradient):
            mine, want = scores(ours, *given), scores(theirs, *given)
        for one, other in zip(mine, want, strict=True):
            assert one.dtype is other.dtype
            close(one, other)
            assert not one[~given[1][:, -given[2] :].bool()].any()
        assert mine[0].requires_grad is gradient


def test_without_entropies_there_are_none(tmp_path: Path) -> None:
    ours, theirs = both(tiny(), tmp_path)
    found = ours._get_per_token_logps_and_entropies(ours.model, *batch())
    assert found[1:] == (None, None)
    close(found[0], theirs._get_per_token_logps_and_entropies(theirs.model, *batch())[0])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_chunks_hold_no_more_tokens_than_trls(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(tiny(), tmp_path)
    given = batch(SCATTERED)
    forward, seen = hf.packed_forward, []

    def counted(model: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(ids))
        return forward(model, ids, *rest)

    monkeypatch.setattr(hf, "packed_forward", counted)
    with torch.no_grad():
        for mine, want in zip(scores(ours, *given, batch_size=size), scores(theirs, *given), strict=True):
            close(mine, want)
    assert max(seen) <= size * given[0].shape[1]
    once = sum(map(len, PROMPTS)) + sum(max(0, len(one) - 1) for many in COMPLETIONS for one in many)
    assert sum(seen) == once if size > 1 else sum(seen) > once
    assert len(seen) == 1 or size < 5


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_low_precision_is_as_near_to_the_truth_as_trls_own(precision: str, tmp_path: Path) -> None:
    model = tiny(hidden_size=64, intermediate_size=96)
    _, truth = both(copy.deepcopy(model).double(), tmp_path)
    ours, theirs = both(model if precision == "autocast" else model.bfloat16(), tmp_path, bf16=precision == "autocast")
    if precision == "bfloat16":
        truth.model.load_state_dict(model.double().state_dict())
    given = batch(SCATTERED)
    found = [[*scores(one, *given)] for one in (ours, theirs, truth)]
    for one, parameters in zip(found, [list(each.model.parameters()) for each in (ours, theirs, truth)], strict=True):
        one += torch.autograd.grad(one[0].sum(), parameters)
    for mine, plain, want in zip(*found, strict=True):
        assert_close_to_reference(mine, plain, want)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_a_steps_gradients_equal_trls_own(checkpointing: bool, tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": checkpointing, "beta": 0.1, "loss_type": "grpo"}
    ours, theirs = both(tiny(), tmp_path, **settings)
    ids, mask, keep = batch(SCATTERED)
    wide = ids.shape[1] - keep
    torch.manual_seed(3)
    inputs = {
        "prompt_ids": ids[:, :wide],
        "prompt_mask": mask[:, :wide],
        "completion_ids": ids[:, wide:],
        "completion_mask": mask[:, wide:],
        "advantages": torch.randn(len(ids)),
        "old_per_token_logps": -torch.rand(len(ids), keep) * 4,
        "ref_per_token_logps": -torch.rand(len(ids), keep) * 4,
        "num_items_in_batch": mask[:, wide:].sum(),
    }
    losses = []
    for one in (ours, theirs):
        if checkpointing:
            one.model.gradient_checkpointing_enable()
        one.model.train()
        one.current_gradient_accumulation_steps = 1
        loss = one.compute_loss(one.model, inputs)
        loss.backward()
        losses.append(loss.detach())
    close(*losses)
    for mine, want in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        scale = float(want.grad.abs().max())
        assert scale > 0
        torch.testing.assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-5 * scale)


def adapter(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)


def test_adapters_count_and_the_reference_is_without_them(tmp_path: Path) -> None:
    ours, theirs = (
        trainer(kind, tiny(), tmp_path, peft_config=adapter()) for kind in (SharedPrefixGRPOTrainer, GRPOTrainer)
    )
    theirs.model.load_state_dict(ours.model.state_dict())
    given = batch(SCATTERED)
    mine, want = scores(ours, *given), scores(theirs, *given)
    with ours.model.disable_adapter(), theirs.model.disable_adapter(), torch.no_grad():
        off, want_off = scores(ours, *given), scores(theirs, *given)
    for one, other in zip((*mine, *off), (*want, *want_off), strict=True):
        close(one, other)
    assert (mine[0] - off[0]).abs().max() > 0.1
    trained = [[p for p in one.model.parameters() if p.requires_grad] for one in (ours, theirs)]
    got, expected = (torch.autograd.grad(x[0].sum(), each) for x, each in zip((mine, want), trained, strict=True))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


RUNS = {
    "one prompt's group in two micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "reference and old policy": {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "loss_type": "grpo"},
    "adapters with a reference": {"beta": 0.1, "peft_config": adapter()},
    "truncated completions masked": {"mask_truncated_completions": True, "max_completion_length": 3},
    "no checkpoints": {"gradient_checkpointing": False, "top_entropy_quantile": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_run_is_trls_own(settings: dict[str, Any], tmp_path: Path) -> None:
    logs, weights = [], []
    for kind in (SharedPrefixGRPOTrainer, GRPOTrainer):
        one = trainer(kind, tiny(), tmp_path, **settings)
        start = {name: value.clone() for name, value in one.model.state_dict().items()}
        one.train()
        logs.append([entry for entry in one.state.log_history if "loss" in entry])
        weights.append(one.model.state_dict())
        assert any(not torch.equal(value, start[name]) for name, value in weights[-1].items())
    assert len(logs[0]) == 6
    for mine, want in zip(*logs, strict=True):
        for name in ("loss", "reward", "entropy", "grad_norm", "completions/mean_length", "kl"):
            assert mine.get(name) == pytest.approx(want.get(name), rel=1e-3, abs=1e-4), name
    for name, value in weights[0].items():
        close(value, weights[1][name], 1e-3)
