"""`python -m benchmarks.grpo MODEL`: per-token log-probs of a GRPO group by TRL's own method and by ours.

MODEL is a folder, such as `examples/pretrained_model.py` writes. One group of G completions behind one prompt; both
methods are those of one trainer (float32, TRL's defaults, the group in one batch) and take turns in one process, after
their log-probs and a step's gradients agreed. Peak memory is that of a fresh process with one call. Then a sweep over
prompt, completion and group sizes without gradients, and a training run by either trainer on a toy reward.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from benchmarks import harness
from benchmarks.harness import OURS, Result
from fb_core.trl import SharedPrefixGRPOTrainer

GROUP, PROMPT, COMPLETION = 8, 512, 128  # completions, tokens, tokens
SWEEP = tuple(itertools.product((2, 4, 8), (64, 256, 1024), (32, 128)))
TRAINERS: dict[str, type[GRPOTrainer]] = {OURS: SharedPrefixGRPOTrainer, "trl": GRPOTrainer}
TOLERANCE = 1e-3  # of log-probs; relative, of a gradient's norm


def digits(completions: list[str], **_: Any) -> list[float]:
    """The toy reward: the share of digits in a completion."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


def trainer(kind: type[GRPOTrainer], model: Any, words: Any, size: int, folder: str, **settings: Any) -> GRPOTrainer:
    """A trainer at TRL's defaults, but for float32."""
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    prompts = [f"Write {n} as a number:" for n in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
    return kind(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=folder,
            num_generations=size,
            per_device_train_batch_size=size,
            gradient_checkpointing=False,
            **plain | settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=words,
    )


def group(size: int, prompt: int, completion: int, vocabulary: int) -> Tensor:
    """int64 [size, prompt + completion]: random ids, the prompt shared."""
    source = torch.Generator().manual_seed(0)
    shared = torch.randint(vocabulary, (1, prompt), generator=source).expand(size, -1)
    return torch.cat([shared, torch.randint(vocabulary, (size, completion), generator=source)], 1)


def call(made: GRPOTrainer, impl: str, ids: Tensor, completion: int, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """(log-probs, the gradient of one weight of their sum or None) by one of the two methods of the trainer."""
    method = partial(TRAINERS[impl]._get_per_token_logps_and_entropies, made, made.model)
    if not gradient:
        with torch.no_grad():
            return method(ids, torch.ones_like(ids), completion, batch_size=len(ids))[0], None
    made.model.zero_grad()
    logps = method(ids, torch.ones_like(ids), completion)[0]
    logps.sum().backward()
    return logps.detach(), made.model.model.layers[0].self_attn.q_proj.weight.grad


def compared(
    made: GRPOTrainer, sizes: tuple[int, int, int], gradient: bool, rounds: int, peaks: dict[str, int | None]
) -> list[Result]:
    """Both methods at one size; those that disagree are not timed."""
    size, prompt, completion = sizes
    ids = group(size, prompt, completion, made.model.config.vocab_size)
    runs = {impl: partial(call, made, impl, ids, completion, gradient) for impl in TRAINERS}
    (ours, mine), (theirs, want) = (tuple(None if x is None else x.clone() for x in runs[i]()) for i in (OURS, "trl"))
    error = float((ours - theirs).abs().max())
    ok = error < TOLERANCE
    if mine is not None and want is not None:
        ok = ok and float((mine - want).norm() / want.norm()) < TOLERANCE
    times: dict[str, list[float]] = {impl: [] for impl in runs}
    for _ in range(rounds if ok else 0):
        for impl, run in runs.items():
            start = time.perf_counter()
            run()
            times[impl].append(time.perf_counter() - start)
    made.model.zero_grad()
    op = "grpo_gradients" if gradient else "grpo_logprobs"
    shape = f"G={size}, P={prompt}, R={completion}"
    return [
        Result(op, shape, impl, "float32", *harness.quantiles_us(times[impl]), error, ok, peaks.get(impl))
        for impl in runs
    ]


def prepared(folder: str, impl: str, sizes: tuple[int, int, int], gradient: bool) -> Callable[[], object]:
    """One call of one method, in a process of its own."""
    model, words = loaded(folder)
    made = trainer(SharedPrefixGRPOTrainer, model, words, sizes[0], tempfile.mkdtemp())
    ids = group(*sizes, model.config.vocab_size)
    call(made, impl, ids[:2, -4:], 2, gradient)  # what a first call sets up stays out
    return partial(call, made, impl, ids, sizes[2], gradient)


def loaded(folder: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def curves(folder: str, steps: int) -> list[Result]:
    """Losses and rewards of a run by either trainer, step by step, from equal weights and seeds."""
    model, words = loaded(folder)
    settings = {
        "max_steps": steps,
        "max_completion_length": 16,
        "logging_steps": 1,
        "learning_rate": 1e-5,
        "beta": 0.04,
    }
    rows, logged = [], {}
    for impl, kind in TRAINERS.items():
        with tempfile.TemporaryDirectory() as temporary:
            made = trainer(kind, copy.deepcopy(model), words, 4, temporary, **settings)
            start = time.perf_counter()
            made.train()
            taken = time.perf_counter() - start
        logged[impl] = [entry for entry in made.state.log_history if "loss" in entry]
        assert len(logged[impl]) == steps
        details = {
            f"{what} {at + 1}": entry[what] for what in ("loss", "reward") for at, entry in enumerate(logged[impl])
        }
        rows.append(
            Result(
                "grpo_run",
                f"{steps} steps",
                impl,
                "float32",
                *harness.quantiles_us([taken]),
                0.0,
                True,
                details=details,
            )
        )
    apart = [max(abs(a[what] - b[what]) for a, b in zip(*logged.values(), strict=True)) for what in ("loss", "reward")]
    print(f"{steps} steps: losses differ by at most {apart[0]:.1e}, rewards by {apart[1]:.1e}", flush=True)
    return rows


def shown(rows: Sequence[Result]) -> str:
    """One line: ours, TRL's, how many times as fast, and memory."""
    ours, theirs = rows
    if ours.median_us is None or theirs.median_us is None:
        raise SystemExit(
            f"{ours.op}, {ours.shape}: expected log-probs and gradients of TRL's own, got others by {ours.max_error}"
        )
    line = f"{ours.op}, {ours.shape}: {ours.median_us / 1e6:.2f} s, trl {theirs.median_us / 1e6:.2f} s"
    line += f", {theirs.median_us / ours.median_us:.2f}x"
    if ours.peak_bytes and theirs.peak_bytes:
        line += f"; peak {ours.peak_bytes / 2**20:,.0f} of {theirs.peak_bytes / 2**20:,.0f} MiB"
    return line


def main() -> None:
    """Print a line a case; write them where asked."""
    parser = argparse.ArgumentParser(description="per-token log-probs of a GRPO group by TRL and by ours")
    parser.add_argument("model", help="a folder with a model and its tokenizer")
    parser.add_argument("--rounds", type=int, default=3, help="of both in turn (default: 3)")
    parser.add_argument("--steps", type=int, default=50, help="of the training runs (default: 50)")
    parser.add_argument("--write-results", metavar="DIR", type=Path, help="write grpo.json to DIR")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(harness.cores())
    model, words = loaded(options.model)
    made = trainer(SharedPrefixGRPOTrainer, model, words, GROUP, tempfile.mkdtemp())
    rows: list[Result] = []
    for gradient in (False, True):
        sizes = (GROUP, PROMPT, COMPLETION)
        peaks = {impl: harness.peak_memory(prepared, options.model, impl, sizes, gradient) for impl in TRAINERS}
        rows += (found := compared(made, sizes, gradient, options.rounds, peaks))
        print(shown(found), flush=True)
    for sizes in SWEEP:
        rows += (found := compared(made, sizes, False, 1, {}))
        print(shown(found), flush=True)
    rows += curves(options.model, options.steps)
    if options.write_results:
        print(*harness.write_results(options.write_results, {"grpo": rows}))


if __name__ == "__main__":
    main()
