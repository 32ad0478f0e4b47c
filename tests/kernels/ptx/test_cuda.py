"""Every kernel of csrc/ as nvcc compiles it for Hopper, executed without a GPU, is its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import OPS
from cases.base import Case
from test_contract import check, evaluate

from ptx.compiled import executed

NAMES = [name for name, op in OPS.items() if "cuda" in op.ways]
QUICK = {
    "skinny_linear": (0, 4, 12),
    "topk_entropy": (1, 12),
    "branch_attention_qkv": (1, 4),
    "branch_attention": (1, 2),
}
TYPICAL = -1
EARLY = ("weight", "norm_weight")  # what a kernel may read before the one before it has ended


def calls() -> Iterator[Any]:
    for name in NAMES:
        way = OPS[name].way("cuda")
        for dtype in way.dtypes:
            for place in range(TYPICAL, len(way.also)):
                quick = place == TYPICAL or place in QUICK.get(name, (0,))
                marks = [pytest.mark.slow] * (not quick or dtype == torch.float16)
                label = f"{name} {str(dtype)[6:]} {'typical' if place == TYPICAL else place}"
                yield pytest.param(name, dtype, place, id=label, marks=marks)


@pytest.mark.parametrize(("name", "dtype", "place"), calls())
@pytest.mark.sweep(5)
def test_it_is_the_definition(name: str, dtype: torch.dtype, place: int, executed_kernels: Callable) -> None:
    op, way = OPS[name], OPS[name].way("cuda")
    sizes = way.also[place] if place != TYPICAL else op.typical if way.typical is None else way.typical
    case = op.cast(op.make(**sizes), dtype)
    with executed(seed=place + 1) as done:
        results, grads = evaluate(case.fresh())
    check(op, case, results, grads)
    executed_kernels(done)
    weights = {case.tensors[each].untyped_storage().data_ptr() for each in EARLY if each in case.tensors}
    assert not {start for each in done for start in each.early} - weights


def shared_columns(dtype: torch.dtype) -> Case:
    """Few outputs of many columns, which the two blocks of a cluster share on 7 processors."""
    op = OPS["skinny_linear"]
    return op.cast(op.make(rows=2, width=2056, outputs=20, given=("bias", "norm_weight")), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_blocks_of_a_cluster_share_columns(dtype: torch.dtype, executed_kernels: Callable) -> None:
    case = shared_columns(dtype)
    with executed(processors=7) as done:
        results = case.run()
    check(OPS["skinny_linear"], case, results, [])
    executed_kernels(done)
