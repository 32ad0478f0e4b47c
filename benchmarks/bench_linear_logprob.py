"""linear_logprob and its training step against logits and against the other ops without logits: time and memory.

On a CPU with the rows of one group and Qwen3's vocabulary; on a GPU from the rows of one event to those of a packed
forward. The bound is the bare matrix product, which computes less than any of them.
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

ROWS = shapes.LOGPROB_ROWS[0]
HIDDEN, VOCABULARY = shapes.LM_HEAD
CHECKED = 64  # rows compared with float64
TARGETS = 64  # ids a row, of distillation
CHUNK = 1024  # rows whose float64 logits exist at a time


def inputs(
    rows: int = ROWS, dtype: torch.dtype = shapes.DTYPE, sizes: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden[N, D], weight[V, D], target[N]) with logits of standard deviation 2."""
    width, vocabulary = sizes or (HIDDEN, VOCABULARY)
    generator = torch.Generator(harness.DEVICE).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": harness.DEVICE}
    hidden = torch.randn(rows, width, **options).to(dtype)
    weight = torch.empty(vocabulary, width, device=harness.DEVICE).normal_(std=2 * width**-0.5, generator=generator)
    return hidden, weight.to(dtype), torch.randint(vocabulary, (rows,), **options)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    OURS: linear_logprob,
    "logits, log_softmax": peers.log_softmax_logprob,
    "logits, logsumexp": peers.logsumexp_logprob,
}
OTHERS: dict[str, Callable[[], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "logits, cross_entropy": lambda: peers.cross_entropy_logprob,
    "logits, cross_entropy, compiled": lambda: torch.compile(peers.cross_entropy_logprob, dynamic=False),
    "low-precision logits, cross_entropy": lambda: peers.low_precision_cross_entropy_logprob,
    **{name: partial(peers.fused_logprob, load) for name, load in peers.FUSED.items()},
    "TRL chunked log-prob": peers.trl_chunked_logprob,
}
PRODUCT = "the matrix product alone"


def prepare(name: str) -> Callable[[], Tensor]:
    """One implementation with its own inputs."""
    return partial(FUNCTIONS[name], *inputs())


@pytest.mark.parametrize("dtype", shapes.DTYPES)
@pytest.mark.parametrize("rows", shapes.LOGPROB_ROWS)
def test_linear_logprob(compare: Callable, rows: int, dtype: torch.dtype) -> None:
    peaks, notes = {}, []
    if not shapes.ON_GPU and dtype == shapes.DTYPE:  # on a GPU the harness asks the allocator
        measured = {name: harness.peak_memory(prepare, name) for name in FUNCTIONS}
        peaks = {name: peak for name, peak in measured.items() if peak is not None}
        notes = [memory_note(peaks[OURS])] if OURS in peaks else ["memory not measured: no VmHWM on this system"]
    others, skipped = harness.available(OTHERS)
    functions = FUNCTIONS | others
    hidden, weight, target = inputs(rows, dtype)
    checked = torch.linspace(0, rows - 1, min(CHECKED, rows), device=hidden.device).long()
    some, wide = hidden[checked], weight.double()
    expected = peers.log_softmax_logprob(some.double(), wide, target[checked])
    plain = peers.low_precision_cross_entropy_logprob(some, weight, target[checked])
    implementations = {
        name: Implementation(partial(function, hidden, weight, target), expected, checked, compiled="compiled" in name)
        for name, function in functions.items()
    }
    ours = peers.cross_entropy_logprob(some, weight, target[checked])  # rounded less than the peers' results
    implementations[OURS] = replace(implementations[OURS], tolerance=max(harness.allowed_error(ours, expected), 1e-4))
    truth = some.double() @ wide.T
    implementations[PRODUCT] = Implementation(
        partial(F.linear, hidden, weight), truth, checked, harness.allowed_error(some @ weight.T, truth)
    )
    del wide
    compare(
        "linear_logprob",
        f"N={rows} D={HIDDEN} V={VOCABULARY}{shapes.IN[dtype]}",
        implementations,
        rounds=30 if shapes.ON_GPU else 3,
        tolerance=max(harness.allowed_error(plain, expected), 1e-4),
        peaks=peaks,
        cost=Cost(2.0 * rows * HIDDEN * VOCABULARY, hidden.nbytes + weight.nbytes + 12 * rows),
        dtype=hidden.dtype,
        notes=notes,
        skipped=skipped,
    )


@pytest.mark.parametrize("rows", shapes.TARGET_ROWS)
def test_many_targets_a_row(compare: Callable, rows: int) -> None:
    """Log-probs of K ids a row, of logits, and ours of one id: the statistics run once for all."""
    hidden, weight, _ = inputs(rows, sizes=shapes.SMALL_HEAD)
    ids = torch.randint(len(weight), (rows, TARGETS), generator=torch.Generator().manual_seed(1)).to(hidden.device)
    checked = torch.linspace(0, rows - 1, min(CHECKED, rows), device=hidden.device).long()

    def of_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(1, ids)

    expected = of_logits(hidden[checked].double(), weight.double(), ids[checked])
    compare(
        "linear_logprob_targets",
        f"N={rows} K={TARGETS} D={hidden.shape[1]} V={len(weight)}",
        {
            OURS: Implementation(partial(linear_logprob, hidden, weight, ids), expected, checked),
            f"{OURS}, one target": Implementation(
                partial(linear_logprob, hidden, weight, ids[:, :1].contiguous()), expected[:, :1], checked
            ),
            "logits, log_softmax": Implementation(partial(of_logits, hidden, weight, ids), expected, checked),
        },
        rounds=10 if shapes.ON_GPU else 3,
        tolerance=max(harness.allowed_error(of_logits(hidden[checked], weight, ids[checked]), expected), 1e-4),
        cost=Cost(2.0 * rows * weight.numel(), hidden.nbytes + weight.nbytes + 12 * ids.numel()),
        dtype=hidden.dtype,
    )


@pytest.mark.parametrize("dtype", shapes.DTYPES)
@pytest.mark.parametrize("rows", shapes.LOGPROB_TRAINED_ROWS)
@pytest.mark.parametrize("frozen", [False, True])
def test_linear_logprob_backward(compare: Callable, frozen: bool, rows: int, dtype: torch.dtype) -> None:
    """Gradients of the mean log-prob, forward included, because fused peers compute gradients in the forward."""
    hidden, weight, target = inputs(rows, dtype)
    shown = torch.linspace(0, rows - 1, CHECKED, device=hidden.device).long()
    columns = torch.cat([target[shown], torch.arange(CHECKED, device=hidden.device)])
    leaves = (hidden.requires_grad_(), weight.requires_grad_(not frozen))

    def gradients(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(loss(*leaves, target), leaves[: 2 - frozen])
        return tuple(x[some] for x, some in zip(found, (shown, columns), strict=False))

    theirs, skipped = harness.available(peers.LOSSES)
    losses: dict[str, Callable] = {OURS: lambda *given: -linear_logprob(*given).mean(), **theirs}
    expected = true_gradients(hidden.detach(), weight.detach(), target, shown, columns)[: 2 - frozen]
    tolerances = map(harness.allowed_error, gradients(peers.mean_cross_entropy), expected)
    compare(
        "linear_logprob_backward",
        f"N={rows} D={HIDDEN} V={VOCABULARY}{shapes.IN[dtype]}{', frozen head' * frozen}, forward included",
        {
            name: Implementation(partial(gradients, loss), expected, compiled="compiled" in name)
            for name, loss in losses.items()
        },
        rounds=10 if shapes.ON_GPU else 3,
        tolerance=tuple(tolerances),
        cost=Cost((6.0 - 2 * frozen) * rows * HIDDEN * VOCABULARY, 2.0 * (hidden.nbytes + weight.nbytes)),
        dtype=hidden.dtype,
        skipped=skipped,
    )


def true_gradients(
    hidden: Tensor, weight: Tensor, target: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the mean negative log-prob in float64, for these rows of hidden and of weight."""
    wide = weight.double()
    on_weight = wide.new_zeros(len(columns), wide.shape[1])
    for x, ids in zip(hidden.double().split(CHUNK), target.split(CHUNK), strict=True):
        logits = x @ wide.T
        p = (logits[:, columns] - logits.logsumexp(-1, keepdim=True)).exp()
        on_weight += (p - (ids[:, None] == columns).double()).T @ x
    p = (hidden[rows].double() @ wide.T).softmax(-1)
    return (p @ wide - wide[target[rows]]) / len(hidden), on_weight / len(hidden)


def memory_note(peak: int) -> str:
    share = peak / (4 * ROWS * VOCABULARY)
    return f"memory of fb against the float32 logits: {share:.1%}, goal below 10%: {'met' if share < 0.1 else 'MISSED'}"
