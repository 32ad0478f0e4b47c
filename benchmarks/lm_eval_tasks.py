"""`python -m benchmarks.lm_eval_tasks MODEL`: examples/lm_eval's tasks with lm-eval's `hf` and with `futurebridge`.

MODEL is a folder, such as `examples/pretrained_model.py` writes; both use one loaded model. `hf` runs a task once at
each batch size, and its answers must agree with ours. Then the fastest batch size and ours are timed in turn, from
texts to answers; so is ours asked for one document at a time, which shares nothing among documents.
"""

from __future__ import annotations

import argparse
import itertools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import harness
from benchmarks.harness import OURS, Result
from fb_core.lm_eval import FutureBridgeLM

TASKS = ("fb_long_context", "fb_short_context", "fb_one_token", "fb_few_shot", "fb_perplexity")
BATCH_SIZES = (1, 4, 8)
RELATIVE = 1e-4
APART = "fb, one document at a time"
Answers = list[tuple[float, bool]] | list[float]


def requests(name: str, documents: int, model: HFLM) -> list[Instance]:
    """The requests of a task's first documents."""
    manager = TaskManager(include_path=str(harness.ROOT / "examples" / "lm_eval"), include_defaults=False)
    task = manager.load([name])["tasks"][name]
    task.build_all_requests(limit=documents, tokenizer_name=model.tokenizer_name)
    return task.instances


def differences(ours: Answers, theirs: Answers) -> tuple[float, bool]:
    """(largest difference of log-likelihoods, whether they are equal up to rounding and all greedy flags agree)."""
    mine, others = (
        [(each, True) if isinstance(each, float) else each for each in answers] for answers in (ours, theirs)
    )
    pairs = list(zip(mine, others, strict=True))
    equal = all(a[1] == b[1] and math.isclose(a[0], b[0], rel_tol=RELATIVE) for a, b in pairs)
    return max(abs(a[0] - b[0]) for a, b in pairs), equal


def measured(name: str, documents: int, rounds: int, ours: FutureBridgeLM, theirs: Sequence[HFLM]) -> list[Result]:
    """A row for ours, one per batch size of `hf`, one for ours apart; only the fastest batch size is timed again."""
    asked = requests(name, documents, ours)
    kind = asked[0].request_type
    alone = [[*own] for _, own in itertools.groupby(asked, lambda request: request.doc_id)]
    runs: dict[str, Callable[[], Any]] = {OURS: lambda: getattr(ours, kind)(asked, disable_tqdm=True)}
    for lm in theirs:
        runs[f"hf, batch {lm.batch_size}"] = partial(getattr(lm, kind), asked, disable_tqdm=True)
    runs[APART] = lambda: [answer for own in alone for answer in getattr(ours, kind)(own, disable_tqdm=True)]
    our_answers, times, checks = runs[OURS](), dict[str, list[float]](), {OURS: (0.0, True)}
    for impl, run in runs.items():
        if impl != OURS:
            start = time.perf_counter()
            answers = run()
            times[impl] = [time.perf_counter() - start]
            checks[impl] = differences(our_answers, answers)
    quickest = min({*times} - {APART}, key=lambda impl: times[impl][0])
    checks[OURS] = max(check[0] for check in checks.values()), all(check[1] for check in checks.values())
    times[OURS] = []
    if checks[OURS][1]:
        times |= harness.in_turn({impl: runs[impl] for impl in (quickest, OURS, APART)}, rounds)
    shape = f"{name.removeprefix('fb_').replace('_', ' ')}, {len(alone)} documents, {len(asked)} requests"
    return [
        Result("lm_eval", shape, impl, "float32", *harness.quantiles_us(times[impl]), checks[impl][0], checks[impl][1])
        for impl in runs
    ]


def main() -> None:
    """Print one row per task; write them if asked to."""
    parser = argparse.ArgumentParser(description="lm-eval's tasks by hf and by futurebridge")
    parser.add_argument("model", help="a folder with a model and its tokenizer")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--documents", type=int, default=16, help="of each task at most (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="of hf and ours in turn (default: 3)")
    parser.add_argument("--write-results", metavar="DIR", type=Path, help="write <device>/lm_eval.json to DIR")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(harness.cores())
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(options.model)
    theirs = [HFLM(model, tokenizer=words, batch_size=size) for size in BATCH_SIZES]
    ours = FutureBridgeLM(model, tokenizer=words)
    rows: list[Result] = []
    print("| task | ours, s | hf, s | hf / ours | one document at a time |\n|---|---|---|---|---|")
    for name in options.tasks:
        mine, *others, apart = measured(name, options.documents, options.rounds, ours, theirs)
        rows += [mine, *others, apart]
        if mine.median_us is None:
            raise SystemExit(f"{name}: log-likelihoods differ from those of hf by {mine.max_error:.1e}")
        best, impl = min((row.median_us, row.impl) for row in others if row.median_us is not None)
        print(
            f"| {mine.shape} | {mine.median_us / 1e6:.2f} | {best / 1e6:.2f} ({impl}) | {best / mine.median_us:.2f}x | "
            f"{(apart.median_us or math.nan) / mine.median_us:.2f}x |",
            flush=True,
        )
    if options.write_results:
        print(*harness.write_results(options.write_results, {"lm_eval": rows}))


if __name__ == "__main__":
    main()
