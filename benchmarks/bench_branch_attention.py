"""branch_attention against everything that attends from K branches to one prefix.

Peers get what they need for free where a user could keep it between calls (block masks, page tables, packed keys), and
pay for what every call needs (copies of the prefix, merges).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks import harness, peers, shapes
from benchmarks.harness import LATENCY, OURS, Implementation, Output, Timing
from benchmarks.shapes import Branches
from fb_kernels import branch_attention

CASES = [(*sizes, Timing.COLD) for sizes in shapes.BRANCHES] + [
    (*sizes, timing) for sizes in shapes.ONE_TOKEN_BRANCHES for timing in (LATENCY if shapes.ON_GPU else (Timing.COLD,))
]


@pytest.mark.parametrize(("groups", "length", "prefix", "timing"), CASES)
@torch.no_grad()
def test_branch_attention(compare: Callable, groups: int, length: int, prefix: int, timing: Timing) -> None:
    case = Branches.random(groups, length, prefix)
    layout = case.layout
    tensors = (case.q, case.k, case.v, case.prefix_k, case.prefix_v)
    runs: dict[str, Callable[[], Output]] = {OURS: partial(branch_attention, *tensors, **layout)}
    skipped: dict[str, str] = {}
    for name, prepare in peers.ATTENTION.items():
        try:
            runs[name] = prepare(case)
        except Exception as reason:  # absent package, unsupported device or size
            skipped[name] = f"{type(reason).__name__}: {reason}"
    expected = peers.shared_prefix_attention(case, torch.float64)
    tolerance = harness.allowed_error(peers.shared_prefix_attention(case, case.q.dtype), expected)
    compare(
        "branch_attention",
        str(case),
        {name: Implementation(run, expected) for name, run in runs.items()},
        rounds=50 if shapes.ON_GPU else 10,
        tolerance=tolerance,
        timing=timing,
        cost=case.cost,
        dtype=case.q.dtype,
        skipped=skipped,
    )
