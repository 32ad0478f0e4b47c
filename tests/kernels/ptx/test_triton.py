"""Every Triton kernel as it is compiled for sm_90, executed without a GPU, is its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from cases import OPS
from cases.base import Case, normal
from cases.branch_attention import keys_anywhere
from test_contract import check, evaluate

from benchmarks.gpu.aot import linear_logprob as heads
from benchmarks.gpu.aot.compiler import ARCHITECTURES, launches
from benchmarks.gpu.aot.executed import executed as executed_instructions
from fb_kernels import linear_logprob, skinny_linear
from fb_kernels._runtime import precision, tuning
from fb_kernels.branch_attention import triton_backward
from ptx.launches import executed
from ptx.machine import Executed
from ptx.test_aot import OPS as COMPILED
from ptx.test_aot import kernels_in, sources_of

PAIRS = [
    (name, way) for name, op in OPS.items() for way in op.ways if way.startswith("triton") and not way.endswith("gluon")
]
TYPICAL = -1
HOPPER = ARCHITECTURES[1]


def calls() -> Iterator[Any]:
    """Typical sizes in usual launches and in small ones, and those past a block."""
    for name, way in PAIRS:
        for dtype in OPS[name].way(way).dtypes:
            for place in range(TYPICAL, len(OPS[name].way(way).also)):
                for small in (False, True) if place == TYPICAL else (False,):
                    words = [
                        way.partition(" ")[2].rpartition("=")[2],
                        str(dtype)[6:],
                        "small" * small,
                        str(place) * (place >= 0),
                    ]
                    if dtype == torch.bfloat16:
                        slow = not (small or place == 0)
                    else:
                        slow = dtype == torch.float16 or small or place >= 0
                    marks = [pytest.mark.slow] * slow
                    yield pytest.param(
                        name, way, dtype, place, small, id=" ".join([name, *filter(None, words)]), marks=marks
                    )


@cache
def run(name: str, way: str, dtype: torch.dtype, place: int, small: bool) -> tuple[Case, Any, list[Executed]]:
    """(the call, its results and gradients, what was executed)."""
    op, taken = OPS[name], OPS[name].way(way)
    case = op.cast(op.make(**(op.typical if place == TYPICAL else taken.also[place])), dtype)
    form, _, choice = way.partition(" ")[2].partition("=")
    chosen = mock.patch.object(tuning, form, return_value=choice) if choice else nullcontext()
    if form == "invariant":
        chosen = mock.patch.object(precision, "INVARIANT", True)
    with executed() as done, taken.small() if small else nullcontext(), chosen:
        return case, evaluate(case), done


@pytest.mark.parametrize(("name", "way", "dtype", "place", "small"), calls())
@pytest.mark.sweep(7)
def test_it_is_the_definition(
    name: str, way: str, dtype: torch.dtype, place: int, small: bool, executed_kernels: Callable
) -> None:
    case, (results, grads), done = run(name, way, dtype, place, small)
    executed_kernels(done)
    check(OPS[name], case, results, grads)


@cache
def pieces() -> list[Executed]:
    """The backward of attention over a prefix in several pieces."""
    op = OPS["branch_attention"]
    case = op.cast(op.make(groups=[([2, 3], 0, 40)], width=16, longest_prefix=40), torch.bfloat16)
    with executed() as done, mock.patch.object(triton_backward, "PIECE", 16):
        results, grads = evaluate(case)
    check(op, case, results, grads)
    return done


def test_a_prefix_in_pieces(executed_kernels: Callable) -> None:
    executed_kernels(pieces())


@pytest.mark.parametrize("options", [{}, {"window": 40}], ids=str)
@pytest.mark.sweep(2)
def test_in_batch_invariant_mode_bits_do_not_depend_on_company(
    options: dict[str, Any], executed_kernels: Callable
) -> None:
    """By the tensor cores' instructions, in usual launches: attention over several blocks, a linear layer, the head."""
    x, weight, residual = (x.bfloat16() for x in normal(0, (130, 304), (40, 304), (130, 40)))
    ids = torch.arange(130) % 40
    with executed() as done, mock.patch.object(precision, "INVARIANT", True):
        keys_anywhere(torch.bfloat16, 150, (64, 149), **options)
        together, scored = skinny_linear(x, weight, residual=residual), linear_logprob(x, weight, ids)
        for rows in slice(1), slice(100, 130):
            assert torch.equal(skinny_linear(x[rows], weight, residual=residual[rows]), together[rows])
            assert torch.equal(linear_logprob(x[rows], weight, ids[rows]), scored[rows])
    executed_kernels(done)


def test_executed_instructions_predict_a_rate() -> None:
    case = next(iter(heads.cases()))
    launch = next(each for each in launches(case, HOPPER) if each.tile)
    assert launch.tile
    assert launch.tile.run
    counts = executed_instructions(launch.name, 1000, launch.tile.run)
    assert min(counts.turn["tensor"], counts.turn["memory"]) > counts.beside["tensor"] == 0
    assert counts.beside["exponential"] > counts.turn["exponential"] == 0
    assert counts.beside["other"] > counts.turn["other"]
    assert replace(counts, ratio=2 * counts.ratio).cycles(launch.tile) > counts.cycles(launch.tile)
    assert counts.cycles(replace(launch.tile, overlaps=False)) > counts.cycles(launch.tile)


@pytest.mark.sweep
def test_every_kernel_was_executed() -> None:
    """But for Gluon's, see test_gluon.py."""
    quick = [each.values for each in calls() if not each.marks]
    reached = {each.kernel for call in quick for each in run(*call)[2]} | {each.kernel for each in pieces()}
    every = {kernel for op in COMPILED for source in sources_of(op) for kernel in kernels_in(source)}
    assert {kernel for kernel in every if "gluon" not in kernel} == reached
