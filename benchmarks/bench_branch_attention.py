"""branch_attention and its backward against everything that attends from K branches to one prefix.

Not timed for peers is what a user could keep between calls (block masks, page tables, packed keys); timed is what every
call needs (copies of the prefix, merges). For a backward, the forward runs beforehand, with its copies of the prefix.
No prefix requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._functorch import config

from benchmarks import harness, peers, shapes
from benchmarks.harness import LATENCY, OURS, Implementation, Output
from benchmarks.shapes import Branches
from fb_kernels import branch_attention
from fb_kernels._runtime.timing import Timing

# (candidates, groups, branch length, prefix length, timing)
CASES = [(shapes.CANDIDATES, *sizes, Timing.COLD) for sizes in shapes.BRANCHES]
CASES += [(candidates, *shapes.BRANCHES[-1], Timing.COLD) for candidates in shapes.CANDIDATE_COUNTS]
CASES += [
    (shapes.CANDIDATES, *sizes, timing)
    for sizes in shapes.ONE_TOKEN_BRANCHES
    for timing in (LATENCY if shapes.ON_GPU else (Timing.COLD,))
]
# Autograd runs a backward where its forward ran, so a graph of the backward alone cannot be captured.
BACKWARD_CASES = [
    (*sizes, timing)
    for sizes in shapes.TRAINED_BRANCHES
    for timing in ((Timing.COLD, Timing.EAGER) if shapes.ON_GPU else (Timing.COLD,))
] + [(*sizes, Timing.COLD) for sizes in shapes.LONG_TRAINED_BRANCHES]


@pytest.mark.parametrize("dtype", shapes.DTYPES)
@pytest.mark.parametrize(("candidates", "groups", "length", "prefix", "timing"), CASES)
@torch.no_grad()
def test_branch_attention(
    compare: Callable, candidates: int, groups: int, length: int, prefix: int, timing: Timing, dtype: torch.dtype
) -> None:
    case = Branches.random(groups, length, prefix, candidates=candidates, dtype=dtype)
    layout = case.layout
    tensors = (case.q, case.k, case.v, case.prefix_k, case.prefix_v)
    theirs, skipped = harness.available({name: partial(make, case) for name, make in peers.ATTENTION.items()})
    runs: dict[str, Callable[[], Output]] = {OURS: partial(branch_attention, *tensors, layout), **theirs}
    expected = peers.shared_prefix_attention(case, torch.float64)
    tolerance = harness.allowed_error(peers.shared_prefix_attention(case, case.q.dtype), expected)
    compare(
        "branch_attention",
        f"{case}{shapes.IN[dtype]}",
        {name: Implementation(run, expected, compiled=name in peers.COMPILED) for name, run in runs.items()},
        rounds=50 if shapes.ON_GPU else 10,
        tolerance=tolerance,
        timing=timing,
        cost=case.cost,
        dtype=case.q.dtype,
        skipped=skipped,
    )


@pytest.mark.parametrize("dtype", shapes.DTYPES)
@pytest.mark.parametrize(("groups", "length", "prefix", "timing"), BACKWARD_CASES)
def test_branch_attention_backward(
    compare: Callable, groups: int, length: int, prefix: int, timing: Timing, dtype: torch.dtype
) -> None:
    case = Branches.random(groups, length, prefix, dtype=dtype)
    upstream = torch.randn(case.q.shape, generator=torch.Generator(case.q.device).manual_seed(1), device=case.q.device)
    upstream = upstream.to(case.q.dtype)

    def ours(case: Branches) -> Callable[[], Tensor]:
        tensors, layout = (case.q, case.k, case.v, case.prefix_k, case.prefix_v), case.layout
        return lambda: branch_attention(*tensors, layout)

    def plain(case: Branches) -> Callable[[], Tensor]:
        return lambda: peers.shared_prefix_attention(case, case.q.dtype)

    makers = {name: partial(backward, peers.ATTENTION[name], case, upstream) for name in peers.DIFFERENTIABLE}
    theirs, skipped = harness.available(makers)
    runs = {OURS: backward(ours, case, upstream), **theirs}
    expected = backward(plain, widened(case), upstream.double())()
    tolerances = map(harness.allowed_error, backward(plain, case, upstream)(), expected)  # their sizes differ
    compare(
        "branch_attention_backward",
        f"{case}{shapes.IN[dtype]}",
        {name: Implementation(run, expected, compiled=name in peers.COMPILED) for name, run in runs.items()},
        rounds=50 if shapes.ON_GPU else 10,
        tolerance=tuple(tolerances),
        timing=timing,
        cost=case.backward_cost,
        dtype=case.q.dtype,
        skipped=skipped,
    )


def widened(case: Branches) -> Branches:
    """The same values in float64."""
    names = ("q", "k", "v", "prefix_k", "prefix_v")
    return replace(case, **{name: getattr(case, name).double() for name in names})


def backward(
    prepare: Callable[[Branches], Callable[[], Tensor]], case: Branches, upstream: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """A function that gives (dq, dk, dv) of the attention that `prepare` makes; the forward runs here."""
    leaves: Sequence[Tensor] = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]
    case = replace(case, q=leaves[0], k=leaves[1], v=leaves[2])
    with config.patch(donated_buffer=False):  # otherwise compiled code runs backward only once
        out = prepare(case)()
        run = partial(torch.autograd.grad, out, leaves, upstream, retain_graph=True)
        run()
    return run
