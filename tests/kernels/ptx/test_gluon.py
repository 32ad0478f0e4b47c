"""Hopper's kernels as Gluon compiles them, executed without a GPU: right in any order, and nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from cases import linear_logprob
from cases.branch_attention import OP, TILE, Groups, make
from test_contract import check

from fb_kernels._runtime import tuning
from ptx.launches import executed
from ptx.machine import Executed

TABLES: dict[str, tuple[Groups, tuple[int, int], int, bool]] = {  # groups, heads, width, own keys
    "a short prefix, four branches": ([([3, 1, 14, 10], 0, 20)], (2, 1), 128, True),
    "a prefix of three blocks, whole branches": ([([70, 80, 10], 0, 300)], (2, 1), 128, True),
    "no prefix": ([([5, 130], 0, 0)], (1, 1), 64, True),
    "groups of all kinds": ([([3, 1, 14], 0, 6), ([], 0, 2), ([6], 6, 0), ([1, 0, 1, 9], 5, 13)], (4, 2), 128, True),
    "prefix alone": ([([9, 20], 0, 260), ([1], 3, 7)], (2, 2), 64, False),
    "past the ring": ([([1, 140], 0, 700)], (1, 1), 64, True),
    "a branch of exactly a block": ([([128], 0, 128)], (1, 1), 128, True),
    "more tiles than processors": ([([200, 70], 0, 40)], (4, 4), 64, True),
    "one row": ([([1], 0, 0)], (8, 1), 128, True),
    "branches without rows": ([([0, 0, 3, 0], 0, 5), ([0], 5, 3)], (2, 1), 64, True),
    "many short branches": ([([2] * 30, 0, 130)], (2, 1), 64, True),
    "a block past the slice": ([([17], 1, 129), ([2], 130, 127)], (2, 1), 64, True),
}
QUICK = list(TABLES)[:2]
STAGES = 3
SHAPES = {"one tile": (13, 40, 200), "several rows and splits": (150, 136, 2300), "past the ring": (5, 640, 300)}


@contextmanager
def gluon(op: str, seed: int, processors: int = 3, changed: Callable[[str], str] = str) -> Iterator[list[Executed]]:
    """The kernel, and no other."""
    with executed(seed, processors, changed) as done, mock.patch.object(tuning, f"{op}_form", return_value="gluon"):
        yield done
    assert any("gluon" in each.kernel for each in done)


def attention(table: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    groups, heads, width, own = TABLES[table]
    return OP.cast(make(groups, heads, width, own=own, longest=TILE), dtype)


def tables() -> Iterator[Any]:
    for table in TABLES:
        for seed in range(10):
            slow = [pytest.mark.slow] * (seed > 0 or table not in QUICK)
            yield pytest.param(table, seed, id=f"{table}, order {seed}", marks=slow)


@pytest.mark.parametrize(("table", "seed"), tables())
def test_attention_is_the_definition(table: str, seed: int, executed_kernels: Callable) -> None:
    case = attention(table)
    with gluon("branch_attention", seed, processors=1 + seed % 3) as done:
        results = case.run()
    check(OP, case, results, [])
    executed_kernels(done)
    for phases in done[-1].phases:
        assert balanced(list(phases.values()))


def balanced(phases: list[int]) -> bool:
    """In the order in which the kernel makes its barriers: whatever was filled was emptied, and turns were taken."""
    stages = [phases[at : at + 5] for at in range(2, 2 + 5 * STAGES, 5)]  # keys ready, empty; values, checked, empty
    rings = all(keys == keys_empty and values == values_empty for keys, keys_empty, values, _, values_empty in stages)
    return rings and phases[0] == phases[1] and phases[-2] == phases[-1]


@pytest.mark.slow
def test_attention_in_float16() -> None:
    case = attention("groups of all kinds", torch.float16)
    with gluon("branch_attention", 0):
        results = case.run()
    check(OP, case, results, [])


def log_probs(shape: str) -> Any:
    (rows, width, vocabulary), op = SHAPES[shape], linear_logprob.OP
    call = op.make(rows=(rows,), width=width, vocabulary=vocabulary, padding=3, options={"softcap": 5.0})
    return op.cast(call, torch.bfloat16)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
@pytest.mark.parametrize("shape", [pytest.param(x, marks=pytest.mark.sweep) if "splits" in x else x for x in SHAPES])
def test_log_probs_are_the_definition(shape: str, seed: int, executed_kernels: Callable) -> None:
    case = log_probs(shape)
    with gluon("linear_logprob", seed) as done:
        results = case.run()
    check(linear_logprob.OP, case, results, [])
    executed_kernels(done)
    for phases in done[0].phases:
        ready, *empty = (list(phases.values())[place::3] for place in range(3))
        assert all(ready == half for half in empty)
