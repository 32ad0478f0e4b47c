"""GRPO's passes with TRL's own trainer and with shared prompts: `python -m benchmarks.grpo MODEL [PART ...]`.

MODEL is a directory (`examples/pretrained_model.py` makes one). Both ways are methods of one trainer on one float32
model in one process; their results are compared first, then they are timed in turn. TRL's own runs with its defaults: G
rows at once, a fused LM head, and gradient checkpointing if the shape says so. Memory is what a call adds to the peak
of a separate process, without the gradients of parameters. Results are added to `benchmarks/results/grpo/cpu.json` part
by part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
from trl import GRPOConfig, GRPOTrainer

from benchmarks import harness
from benchmarks.harness import OURS, Goal, Result
from fb_core.trl import SharedPrefixGRPOTrainer

RESULTS = Path(__file__).parent / "results" / "grpo" / "cpu.json"
THEIRS = "TRL"
KINDS = {OURS: SharedPrefixGRPOTrainer, THEIRS: GRPOTrainer}
GOALS = {"grpo_no_grad": 2.5, "grpo_gradient": 2.0}
MEMORY_GOAL = 0.5
SWEEP = [(g, p, r) for r in (32, 128) for p in (64, 256, 1024) for g in (2, 8)]
# Relative to a tensor's largest value. TRL's own float32 gradients differ from those in float64 by up to 4e-5.
TOLERANCE = 1e-4
STEPS = 50


def trainer(kind: type[GRPOTrainer], model: Any, tokenizer: Any, folder: str, **settings: Any) -> GRPOTrainer:
    """A trainer on the CPU in float32, with the prompts and the reward of `curves`."""
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    texts = [" ".join(f"w{3 + (7 * i + 5 * j) % 60}" for j in range(4 + i % 5)) for i in range(64)]
    return kind(
        model=model,
        reward_funcs=even_share,
        args=GRPOConfig(output_dir=folder, **plain | settings),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The toy reward: the share of tokens with even ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Passes:
    """A group's passes, either way."""

    def __init__(self, folder: str, g: int, checkpointing: bool) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.scratch = tempfile.TemporaryDirectory()
        self.trainer = trainer(
            SharedPrefixGRPOTrainer,
            model,
            AutoTokenizer.from_pretrained(folder),
            self.scratch.name,
            num_generations=g,
            per_device_train_batch_size=g,
            gradient_checkpointing=checkpointing,
        )
        self.model = self.trainer.model
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def given(self, g: int, p: int, r: int) -> tuple[Tensor, Tensor, int]:
        """(ids [G, P + R], mask, R), random and without padding."""
        generator = torch.Generator().manual_seed(0)
        size = self.model.config.vocab_size
        prompt, answers = (torch.randint(size, shape, generator=generator) for shape in ((1, p), (g, r)))
        ids = torch.cat([prompt.expand(g, p), answers], 1)
        return ids, torch.ones_like(ids), r

    @torch.no_grad()
    def no_grad(self, kind: str, given: tuple[Tensor, Tensor, int], rows: int) -> tuple[Tensor, ...]:
        """The pass of the old policy and of the reference, `rows` at once."""
        self.model.eval()
        method = KINDS[kind]._get_per_token_logps_and_entropies
        return (method(self.trainer, self.model, *given, batch_size=rows)[0],)

    def gradient(self, kind: str, given: tuple[Tensor, Tensor, int]) -> tuple[Tensor, ...]:
        """The policy's pass: log-probs and entropies, then the gradient of a weighted sum; gradients stay allocated."""
        self.model.train()
        self.model.zero_grad(set_to_none=False)
        method = KINDS[kind]._get_per_token_logps_and_entropies
        logprob, entropy, _ = method(self.trainer, self.model, *given, compute_entropy=True)
        (logprob * torch.linspace(-1, 1, logprob.numel()).view_as(logprob)).sum().backward()
        return logprob.detach(), entropy.detach(), *(p.grad for p in self.model.parameters())

    def run(self, op: str, kind: str, given: tuple[Tensor, Tensor, int], rows: int) -> tuple[Tensor, ...]:
        """One call of either pass."""
        return self.no_grad(kind, given, rows) if op == "grpo_no_grad" else self.gradient(kind, given)


def prepared(
    folder: str, op: str, kind: str, shape: tuple[int, int, int], rows: int, checkpointing: bool
) -> Callable[[], object]:
    """The call that a separate process makes once; weights and any gradients are allocated before it."""
    passes = Passes(folder, shape[0], checkpointing)
    for parameter in passes.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if op == "grpo_gradient" else None
    return partial(passes.run, op, kind, passes.given(*shape), rows)


def measured(
    passes: Passes,
    folder: str,
    op: str,
    shape: tuple[int, int, int],
    *,
    rounds: int,
    memory: bool,
    chunks: Sequence[int],
) -> list[Result]:
    """One shape: the ways are compared, then timed in turn; TRL's also in chunks of fewer rows."""
    given = passes.given(*shape)
    g, p, r = shape
    checkpointing = passes.trainer.args.gradient_checkpointing
    ways = {OURS: (OURS, g), THEIRS: (THEIRS, g), **{f"{THEIRS}, {n} rows at once": (THEIRS, n) for n in chunks}}
    truth = [value.clone() for value in passes.run(op, THEIRS, given, g)]
    errors = {}
    for name, (kind, rows) in ways.items():
        outputs = truth if (kind, rows) == (THEIRS, g) else passes.run(op, kind, given, rows)
        errors[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(outputs, truth, strict=True))
        del outputs
    if max(errors.values()) > TOLERANCE:
        raise ValueError(
            f"{op} {shape}: expected all ways to agree, got relative differences {errors}; do not time them"
        )
    del truth
    calls = {name: partial(passes.run, op, kind, given, rows) for name, (kind, rows) in ways.items()}
    seconds = harness.in_turn(calls, rounds)
    results = []
    label = f"G={g} P={p} R={r}" + (" checkpointing" if checkpointing and op == "grpo_gradient" else "")
    for name, (kind, rows) in ways.items():
        peak = harness.peak_memory(prepared, folder, op, kind, shape, rows, checkpointing) if memory else None
        times = harness.quantiles_us(seconds[name])
        results.append(Result(op, label, name, "float32", *times, errors[name], True, peak))
    print(harness.table(results, [Goal(THEIRS, GOALS[op])] if memory else ()), flush=True)
    if memory and (ours := results[0].peak_bytes) and (theirs := results[1].peak_bytes):
        verdict = "met" if ours <= MEMORY_GOAL * theirs else "MISSED"
        print(f"memory: {ours / theirs:.2f} of TRL's, goal {MEMORY_GOAL:g}: {verdict}", flush=True)
    return results


def goal(folder: str, rounds: int) -> None:
    """The shape of the goals, without gradient checkpointing and with it, TRL's default."""
    for checkpointing in (False, True):
        passes = Passes(folder, 8, checkpointing)
        for op in ("grpo_gradient",) if checkpointing else tuple(GOALS):
            chunks = (1, 2) if op == "grpo_no_grad" else ()
            write(measured(passes, folder, op, (8, 512, 128), rounds=rounds, memory=True, chunks=chunks))


def sweep(folder: str, rounds: int) -> None:
    """The pass without gradients for other sizes of prompts, completions and groups."""
    passes = Passes(folder, 8, False)
    for shape in SWEEP:
        write(measured(passes, folder, "grpo_no_grad", shape, rounds=min(rounds, 2), memory=False, chunks=()))


def curves(folder: str, rounds: int) -> None:
    """STEPS steps of a tiny random model with both trainers and the toy reward: rewards and losses of every step."""
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{i}": i for i in range(3, 64)}}
    histories = {}
    for name, kind in KINDS.items():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            model = AutoModelForCausalLM.from_config(config)
            model.save_pretrained(scratch)
            model.config._name_or_path = scratch  # TRL loads the reference from here
            grpo_trainer = trainer(
                kind, model, word_tokenizer(words), scratch,
                num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=STEPS,
                max_completion_length=16, learning_rate=2e-3, beta=0.02, logging_steps=1, lr_scheduler_type="constant",
            )  # fmt: skip
            grpo_trainer.train()
        logs = [entry for entry in grpo_trainer.state.log_history if "loss" in entry]
        histories[name] = {key: [entry[key] for entry in logs] for key in ("reward", "loss", "kl", "entropy")}
    ours, theirs = histories[OURS], histories[THEIRS]
    apart = {key: max(abs(a - b) for a, b in zip(ours[key], theirs[key], strict=True)) for key in ours}
    print(f"reward {ours['reward'][0]:.3f} to {ours['reward'][-1]:.3f}; largest differences {apart}")
    write([], {"curves": {"steps": STEPS, "largest_difference": apart, **histories}})


def word_tokenizer(words: dict[str, int]) -> PreTrainedTokenizerFast:
    """One token per word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def write(results: Sequence[Result], others: dict[str, Any] | None = None) -> None:
    """Add cases to the file, replacing the same cases in it; each case keeps the device that it ran on."""
    held, machine = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"cases": []}, harness.machine()
    device = {"device": machine["device"]}
    fresh = [device | {key: value for key, value in asdict(row).items() if value is not None} for row in results]
    done = {(row["op"], row["shape"], row["impl"]) for row in fresh}
    kept = [row for row in held.pop("cases") if (row["op"], row["shape"], row["impl"]) not in done]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**held, **machine, **(others or {}), "cases": [*kept, *fresh]}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


PARTS: dict[str, Callable[[str, int], None]] = {"goal": goal, "sweep": sweep, "curves": curves}


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description="GRPO's passes with shared prompts against TRL's own")
    parser.add_argument("model", help="a directory with a causal LM")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(harness.cores())
    for part in options.parts or PARTS:
        PARTS[part](options.model, options.rounds)


if __name__ == "__main__":
    main()
