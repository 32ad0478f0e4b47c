"""linear_logprob against logits and against the other ops without logits: time and memory.

On a CPU at the rows of one group and the vocabulary of Qwen3; on a GPU from the rows of one event to those of a packed
forward, with the bare matrix product, which computes less than any of them, as the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, peers, shapes
from benchmarks.harness import OURS, Cost, Implementation
from fb_kernels import linear_logprob

ROWS, HIDDEN, VOCABULARY = 1664, 2048 if shapes.ON_GPU else 512, 151_936
CHECKED = 64  # rows that are compared with float64


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden[N, D], weight[V, D], target[N]) with logits of standard deviation 2."""
    generator = torch.Generator(harness.DEVICE).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": harness.DEVICE}
    hidden = torch.randn(rows, HIDDEN, **options).to(shapes.DTYPE)
    weight = torch.empty(VOCABULARY, HIDDEN, device=harness.DEVICE).normal_(std=2 * HIDDEN**-0.5, generator=generator)
    return hidden, weight.to(shapes.DTYPE), torch.randint(VOCABULARY, (rows,), **options)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    OURS: linear_logprob,
    "logits, log_softmax": peers.log_softmax_logprob,
    "logits, logsumexp": peers.logsumexp_logprob,
}
OTHERS: dict[str, Callable[[], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "logits, cross_entropy": lambda: peers.cross_entropy_logprob,
    "logits, cross_entropy, compiled": lambda: torch.compile(peers.cross_entropy_logprob, dynamic=False),
    "low-precision logits, cross_entropy": lambda: peers.low_precision_cross_entropy_logprob,
    "torch linear_cross_entropy": peers.torch_linear_cross_entropy,
    "cut-cross-entropy": peers.cut_cross_entropy,
    "Liger-Kernel": peers.liger_cross_entropy,
    "TRL chunked log-prob": peers.trl_chunked_logprob,
}
PRODUCT = "the matrix product alone"


def prepare(name: str) -> Callable[[], Tensor]:
    """One implementation with inputs of its own."""
    return partial(FUNCTIONS[name], *inputs())


@pytest.mark.parametrize("rows", [13, 128, ROWS, 8192] if shapes.ON_GPU else [ROWS])
def test_linear_logprob(compare: Callable, rows: int) -> None:
    peaks, notes = {}, []
    if not shapes.ON_GPU:  # there the harness asks the allocator
        measured = {name: harness.peak_memory(prepare, name) for name in FUNCTIONS}
        peaks = {name: peak for name, peak in measured.items() if peak is not None}
        notes = [memory_note(peaks[OURS])] if OURS in peaks else ["memory not measured: no VmHWM on this system"]
    functions, skipped = dict(FUNCTIONS), {}
    for name, load in OTHERS.items():
        try:
            functions[name] = load()
        except Exception as reason:  # absent package, other version
            skipped[name] = f"{type(reason).__name__}: {reason}"
    hidden, weight, target = inputs(rows)
    checked = torch.linspace(0, rows - 1, min(CHECKED, rows), device=hidden.device).long()
    some, wide = hidden[checked], weight.double()
    expected = peers.log_softmax_logprob(some.double(), wide, target[checked])
    plain = peers.low_precision_cross_entropy_logprob(some, weight, target[checked])
    implementations = {
        name: Implementation(partial(function, hidden, weight, target), expected, checked)
        for name, function in functions.items()
    }
    ours = peers.cross_entropy_logprob(some, weight, target[checked])  # rounded less than the peers' results
    implementations[OURS] = replace(implementations[OURS], tolerance=max(harness.allowed_error(ours, expected), 1e-4))
    truth = some.double() @ wide.T
    implementations[PRODUCT] = Implementation(
        partial(F.linear, hidden, weight), truth, checked, harness.allowed_error(some @ weight.T, truth)
    )
    del wide
    reads = hidden.nbytes + weight.nbytes + 8 * rows
    compare(
        "linear_logprob",
        f"N={rows} D={HIDDEN} V={VOCABULARY}",
        implementations,
        rounds=30 if shapes.ON_GPU else 3,
        tolerance=max(harness.allowed_error(plain, expected), 1e-4),
        peaks=peaks,
        cost=Cost(2.0 * rows * HIDDEN * VOCABULARY, reads + 4 * rows),
        dtype=hidden.dtype,
        notes=notes,
        skipped=skipped,
    )


def memory_note(peak: int) -> str:
    share = peak / (4 * ROWS * VOCABULARY)
    return f"memory of fb against the float32 logits: {share:.1%}, goal below 10%: {'met' if share < 0.1 else 'MISSED'}"
