"""linear_logprob against logits: time and memory at the rows of one group and the vocabulary of Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import harness, peers
from benchmarks.harness import OURS, Implementation
from fb_kernels import linear_logprob

ROWS, HIDDEN, VOCABULARY = 1664, 512, 151_936
CHECKED = 64  # rows that are compared with float64


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """(hidden[N, D], weight[V, D], target[N]) with logits of standard deviation 2."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.empty(VOCABULARY, HIDDEN).normal_(std=2 * HIDDEN**-0.5, generator=generator)
    return hidden, weight, torch.randint(VOCABULARY, (ROWS,), generator=generator)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    OURS: linear_logprob,
    "logits, log_softmax": peers.log_softmax_logprob,
    "logits, logsumexp": peers.logsumexp_logprob,
}


def prepare(name: str) -> Callable[[], Tensor]:
    """One implementation with inputs of its own."""
    return partial(FUNCTIONS[name], *inputs())


def test_linear_logprob(compare: Callable) -> None:
    measured = {name: harness.peak_memory(prepare, name) for name in FUNCTIONS}
    peaks = {name: peak for name, peak in measured.items() if peak is not None}
    hidden, weight, target = inputs()
    expected = peers.log_softmax_logprob(hidden[:CHECKED].double(), weight.double(), target[:CHECKED])
    runs = {name: partial(function, hidden, weight, target) for name, function in FUNCTIONS.items()}
    compare(
        "linear_logprob",
        f"N={ROWS} D={HIDDEN} V={VOCABULARY}",
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=3,
        peaks=peaks,
        notes=[memory_note(peaks[OURS])] if OURS in peaks else ["memory not measured: no VmHWM on this system"],
    )


def memory_note(peak: int) -> str:
    share = peak / (4 * ROWS * VOCABULARY)
    return f"memory of fb against the float32 logits: {share:.1%}, goal below 10%: {'met' if share < 0.1 else 'MISSED'}"
