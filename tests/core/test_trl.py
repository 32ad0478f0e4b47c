"""GRPO with shared prompts against TRL's own trainer: log-probs, entropies, losses, gradients, whole runs."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import zoo
from limits import HANG
from tiny import FAMILIES, V, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from warm import launched

import fb_core
from fb_core import shared_prefix_logprobs
from fb_core.models.packed import packed_forward
from fb_kernels.testing import assert_close_to_reference, largest_tensor

pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from fb_core.trl import SharedPrefixGRPOTrainer

PROMPTS = [[3, 17, 4, 4, 30, 9, 22, 8, 1, 40, 6], [5, 9], [12], [7, 7, 7, 31, 2, 0]]  # with the pad and the end inside
COMPLETIONS = [
    [[5, 9, 9, 30], [7], [5, 9, 2, 11, 48, 0]],
    [[8, 1], [8, 1]],
    [[4, 4, 4]],
    [[], [33, 1], [10, 3, 9, 9, 1]],
]


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
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    plain |= {"logging_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    plain |= {"learning_rate": 1e-3, "beta": 0.0, "temperature": 0.7, "lr_scheduler_type": "constant", "max_steps": 6}
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


def distinct(rows: Iterable[tuple[list[int], list[int]]]) -> int:
    """Tokens that a forward has of prompts and completions, each beginning once and no last token of a completion."""
    whole = [[*prompt, *completion[:-1]] for prompt, completion in rows]
    return len({tuple(tokens[:count]) for tokens in whole for count in range(1, len(tokens) + 1)})


SCATTERED = [4, 0, 7, 6, 2, 8, 3, 1, 5]


def scores(which: GRPOTrainer, *given: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    found = which._get_per_token_logps_and_entropies(which.model, *given, compute_entropy=True, **options)
    assert found[2] is None
    return found[:2]


def close(mine: Any, want: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(mine, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("family", "order"), [*((family, SCATTERED) for family in FAMILIES), ("qwen3", None)])
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
    found = ours._get_per_token_logps_and_entropies(ours.model, *given)  # without entropies
    assert found[1:] == (None, None)
    close(found[0], mine[0])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_chunks_hold_no_more_tokens_than_trls(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(tiny(), tmp_path)
    given = batch(SCATTERED)
    forward, seen = packed_forward, []

    def counted(model: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(ids))
        return forward(model, ids, *rest)

    monkeypatch.setattr("fb_core.score.shared_prefix.packed_forward", counted)
    with torch.no_grad():
        for mine, want in zip(scores(ours, *given, batch_size=size), scores(theirs, *given), strict=True):
            close(mine, want)
    assert max(seen) <= size * given[0].shape[1]
    once = distinct((prompt, one) for prompt, many in zip(PROMPTS, COMPLETIONS, strict=True) for one in many)
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


@pytest.mark.parametrize(
    "bonus", [{}, {"entropy_coef": 0.3}, {"entropy_coef": 0.3, "top_entropy_quantile": 0.5}], ids=str
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_a_steps_gradients_equal_trls_own(checkpointing: bool, bonus: dict[str, Any], tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": checkpointing, "beta": 0.1, "loss_type": "grpo", **bonus}
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


@pytest.mark.parametrize("root", [False, True], ids=["layers", "whole"])
def test_a_model_sharded_by_fsdp2_has_trls_own_gradients(root: bool, tmp_path: Path) -> None:
    """As accelerate shards it, which does so on accelerators alone."""
    ours, theirs = both(tiny(), tmp_path)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for part in (*ours.model.model.layers, *[ours.model][:root]):
            fully_shard(part)
        (mine, spread), (want, other) = (scores(one, *batch(SCATTERED)) for one in (ours, theirs))
        close(mine, want)
        close(spread, other)
        for value in (mine.sum() + spread.sum(), want.sum() + other.sum()):
            value.backward()
        for one, plain in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            torch.testing.assert_close(grad, plain.grad, rtol=1e-4, atol=1e-5 * float(plain.grad.abs().max()))
    finally:
        distributed.destroy_process_group()


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
    "truncated masked": {"mask_truncated_completions": True, "max_completion_length": 12, "temperature": 3.0},
    "an entropy bonus": {"entropy_coef": 0.2, "temperature": 0.8, "top_entropy_quantile": 0.7},
    "an adaptive entropy bonus": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0},
    "no checkpoints": {"gradient_checkpointing": False, "top_entropy_quantile": 0.5},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}


@pytest.mark.parametrize("masked", ["all", "all but one"])
def test_rows_without_a_completion_have_no_gradient_and_stop_nothing(masked: str, tmp_path: Path) -> None:
    ours, theirs = both(tiny(), tmp_path)
    ids, mask, keep = batch(SCATTERED)
    mask[masked != "all" :, -keep:] = 0
    grads = []
    for one in (ours, theirs):
        logprob, entropy = scores(one, ids, mask, keep)
        (logprob.sum() + 0 * entropy.sum()).backward()
        grads.append([parameter.grad for parameter in one.model.parameters() if parameter.grad is not None])
    mine, want = (sum(float(grad.abs().sum()) for grad in each) for each in grads)
    assert mine == pytest.approx(want, rel=1e-4)
    assert (mine == 0) == (masked == "all")


def test_what_is_more_than_text_goes_through_trls_own_method(tmp_path: Path) -> None:
    ours, theirs = both(tiny(), tmp_path)
    given = batch(SCATTERED)
    kinds = torch.zeros_like(given[0])
    with torch.no_grad():
        mine, want, packed = (
            scores(one, *given, token_type_ids=asked) for one, asked in ((ours, kinds), (theirs, kinds), (ours, None))
        )
    assert torch.equal(mine[0], want[0])
    assert not torch.equal(mine[0], packed[0])


def test_a_prompt_runs_once_in_an_optimiser_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that TRL shuffles over the micro-batches come together again, within a step and not beyond."""
    seen: list[int] = []
    forward = packed_forward

    def counted(model: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(ids))
        return forward(model, ids, *rest)

    steps = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 1, "seed": 5}
    for wide, whole in ((4, True), (8, False)):
        one = trainer(SharedPrefixGRPOTrainer, tiny(), tmp_path, steps_per_generation=wide, **steps)
        monkeypatch.setattr("fb_core.score.shared_prefix.packed_forward", counted)
        seen.clear()
        one.train()
        monkeypatch.undo()
        batches = one._buffered_inputs
        kinds = [{tuple(row.tolist()) for row in batch["prompt_ids"]} for batch in batches]
        assert all(len(kind) == 1 for kind in kinds) is whole
        first, last = (sorted(map(repr, set().union(*kinds[start : start + 4]))) for start in (0, wide - 4))
        assert len(first) == 4 if whole else first != [] and last != []
        inputs = batches[0]
        rows = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        prompts = [ids[mask.bool()].tolist() for ids, mask in rows]
        ends = zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
        assert seen[-4] == distinct(zip(prompts, (ids[mask.bool()].tolist() for ids, mask in ends), strict=True))


def mixture() -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=2, output_router_logits=True, eos_token_id=1,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (tiny, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        (mixture, {}, "router_aux_loss_coef"),
        (tiny, {"peft_config": adapter(lora_dropout=0.1)}, "lora_dropout"),
        (lambda: zoo.build("starcoder2", vocab_size=V, residual_dropout=0.2), {"disable_dropout": True}, "residual_"),
        (lambda: tiny(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), {}, "dynamic"),
    ],
    ids=["float32 head", "router", "dropout", "function", "model"],
)
def test_refused_by_name(model: Any, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(SharedPrefixGRPOTrainer, model(), tmp_path, **settings)


def test_a_mixture_of_experts_without_the_routers_loss(tmp_path: Path) -> None:
    ours, theirs = both(mixture(), tmp_path, router_aux_loss_coef=0.0)
    for mine, want in zip(scores(ours, *batch()), scores(theirs, *batch()), strict=True):
        close(mine, want)


def test_dropout_is_no_obstacle_once_disabled(tmp_path: Path) -> None:
    settings = {"peft_config": adapter(lora_dropout=0.1), "disable_dropout": True, "max_steps": 1}
    trainer(SharedPrefixGRPOTrainer, tiny(), tmp_path, **settings).train()


def test_the_model_still_generates_and_answers_as_before(tmp_path: Path) -> None:
    model = tiny()
    ids, mask, _ = batch()
    plain = model(input_ids=ids, attention_mask=mask).logits
    one = trainer(SharedPrefixGRPOTrainer, model, tmp_path)
    assert torch.equal(one.model(input_ids=ids, attention_mask=mask).logits, plain)
    assert one.model.generate(ids[:1], max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_no_tensor_is_as_large_as_the_logits(tmp_path: Path) -> None:
    one = trainer(SharedPrefixGRPOTrainer, tiny(vocab_size=9001), tmp_path)
    with largest_tensor() as largest:
        scores(one, *batch())
    assert largest.numel <= 9001 * 40  # the head's gradient, or a block of logits


@pytest.mark.slow
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
@pytest.mark.sweep(4)
def test_a_run_is_trls_own(settings: dict[str, Any], tmp_path: Path) -> None:
    logs, weights = [], []
    for kind, own in ((SharedPrefixGRPOTrainer, settings), (GRPOTrainer, settings | {"torch_compile": False})):
        one = trainer(kind, tiny(), tmp_path, **own)
        start = {name: value.clone() for name, value in one.model.state_dict().items()}
        one.train()
        logs.append([entry for entry in one.state.log_history if "loss" in entry])
        weights.append(one.model.state_dict())
        assert any(not torch.equal(value, start[name]) for name, value in weights[-1].items())
    assert len(logs[0]) == 6
    for mine, want in zip(*logs, strict=True):
        assert mine.keys() == want.keys()
        for name in {"loss", "reward", "entropy", "grad_norm", "completions/mean_length", "kl"} & mine.keys():
            assert mine[name] == pytest.approx(want[name], rel=1e-3, abs=1e-4), name
    for name, value in weights[0].items():
        close(value, weights[1][name], 1e-3)


def deepspeed(stage: int) -> dict[str, Any]:
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    shards = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {"deepspeed": {**dict.fromkeys(auto, "auto"), **shards, "zero_force_ds_cpu_optimizer": False}}


LAUNCHED = {"ddp": {}, **{f"deepspeed {stage}": deepspeed(stage) for stage in (1, 2, 3)}}


def rank(environment: dict[str, str], folder: Path, how: str) -> None:
    os.environ.update(environment | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"})
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "loss_type": "grpo", **LAUNCHED[how]}
    if how == "deepspeed 3":
        model, theirs = tiny(), trainer(GRPOTrainer, tiny(), folder, **settings)
        with pytest.raises(ValueError, match=r"deepspeed: .* stage 1 or 2"):
            trainer(SharedPrefixGRPOTrainer, model, folder, **settings)
        theirs.train()
        with pytest.raises(ValueError, match="sharded by DeepSpeed's stage 3"):
            shared_prefix_logprobs(theirs.model_wrapped, [1, 2], [[3]])
        return
    weights = []
    for kind in (SharedPrefixGRPOTrainer, GRPOTrainer):
        one = trainer(kind, tiny(), folder, **settings)
        assert one.accelerator.num_processes == 2
        one.train()
        assert type(one.model_wrapped).__name__ == ("DistributedDataParallel" if how == "ddp" else "DeepSpeedEngine")
        weights.append(one.model.state_dict())
    for name, value in weights[0].items():
        close(value, weights[1][name], 1e-3)
        other = value.clone()
        torch.distributed.broadcast(other, 0)
        assert torch.equal(other, value), name


@pytest.mark.slow
@pytest.mark.parametrize("how", LAUNCHED)
def test_two_processes_train_as_trls_own_do(how: str, tmp_path: Path) -> None:
    """Forked, since importing TRL takes most of the time."""
    forks = get_context("fork")
    ranks = [forks.Process(target=rank, args=(own, tmp_path / own["RANK"], how)) for own in launched(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(HANG)
        assert each.exitcode == 0


def test_the_missing_extra_is_named_and_nothing_else_imports_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "fb_core.trl")
    with pytest.raises(ImportError, match=r"\[trl\]"):
        import_module("fb_core.trl")
    sources = Path(fb_core.__file__).parent.rglob("*.py")
    assert [path.stem for path in sources if re.search(r"(?m)^\s*(import|from) trl\b", path.read_text())] == ["trl"]
