"""`python -m benchmarks.calls`: microseconds of a small call on the CPU, and of the same arithmetic in eager PyTorch.

At such sizes a call costs more than its work. Both take turns in one process; the fastest of several rounds counts.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch

from fb_core.apps.pipeline.page import markdown_table
from fb_kernels import calls

ROUNDS, SECONDS = 15, 0.02  # rounds of each way, seconds per round
STEP: tuple[tuple[str, dict[str, int]], ...] = (  # ops of a small decoder's step, with their sizes
    ("rms_norm", {"n": 4, "d": 64, "residual": False}),
    ("rms_norm", {"n": 4, "d": 64, "residual": True}),
    ("swiglu", {"n": 4, "f": 64}),
    ("merge_attention_states", {"n": 4, "hq": 4, "e": 16}),
    ("candidate_head", {"g": 1, "k": 13, "d": 64}),
    ("linear_logprob", {"n": 4, "d": 64, "v": 512}),
    ("qk_norm_rope", {"n": 4, "hq": 4, "hkv": 2, "e": 16}),
    ("skinny_linear", {"n": 4, "k": 64, "m": 512, "gated": False}),
    ("topk_entropy", {"n": 1, "v": 512, "k": 8}),
)


def microseconds(call: Callable[[], object]) -> float:
    """Microseconds per call, over many calls."""
    timer = timeit.Timer(call)
    number = max(1, int(SECONDS / max(timer.timeit(10) / 10, 1e-7)))
    return timer.timeit(number) / number * 1e6


def main() -> None:
    """Print one row per call."""
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for op, sizes in STEP:
            call = calls.by_name()[op][1].shaped(**sizes)
            arguments, (eager, *_) = call.arguments, call.plain.values()
            ways = [lambda call=call, given=arguments: call.function(**given)]
            ways.append(lambda eager=eager, given=arguments: eager(**given))
            ours, theirs = map(min, zip(*(map(microseconds, ways) for _ in range(ROUNDS)), strict=True))
            rows.append([op, call.shape, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}"])
    print(*markdown_table(["op", "size", "ours, us", "eager, us", "eager / ours"], rows), sep="\n")


if __name__ == "__main__":
    main()
