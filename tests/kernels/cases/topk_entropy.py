"""How `topk_entropy` is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import ROWS, Case, Op, Sizes, Way, definition, normal, seeds, single
from fb_kernels._runtime import tuning
from fb_kernels.topk_entropy import cpu, cuda

SPREAD = ("rising", "falling", "together", "apart 4", "apart 16", "apart 128", "late ties", "masked")
EQUAL = ("1.5", "nan", "inf", "-inf")
ORDERS = (*SPREAD, *EQUAL)


def make(batch: Sequence[int], width: int, k: int, order: str = "", step: float = 0.0, seed: int = 0) -> Case:
    """Random logits, rounded to steps, or all rows in an order."""
    logits = 3 * normal(seed, (*batch, width))[0]
    if order:
        logits = arranged(logits, order).expand(logits.shape).clone()
    if step:
        logits = (logits / step).round() * step
    return Case("topk_entropy", {"logits": logits, "k": k})


def arranged(logits: Tensor, order: str) -> Tensor:
    """Where later ones beat all before, where the largest are neighbours, or of as many groups as can be."""
    if order in EQUAL:
        return torch.full_like(logits, float(order))
    width = logits.shape[-1]
    column = torch.arange(width)
    rising = column.double() / 7
    if order.startswith("apart"):
        return torch.where(column % int(order.split()[1]) < 2, rising, rising - 1e4)
    if order == "together":
        return torch.where(column // 128 == width // 256, rising, rising - 1e4)
    if order == "late ties":
        return torch.where(column > width * 3 // 4, 2.0, torch.where(column % 999 == 5, 3.0, 1.0)).double()
    if order == "masked":
        return logits.masked_fill(column < width - 9, -math.inf)
    return rising if order == "rising" else rising.flip(0)


def scales(case: Case, truth: Sequence[Tensor]) -> list[Tensor | float | None]:
    """Of -sum p log p: p is off by ulps of log p, and log of a sum from 1 on by ulps of 1; values are exact."""
    logp = truth[1].log_softmax(-1)
    size = torch.where(logp.exp() > 0, -logp, 0.0)
    return [1 + (logp.exp() * size * (1 + size)).sum(-1).nan_to_num(), 0.0, None]


def small() -> object:
    """Rows of many blocks, and as few groups as can be, so that groups hold several of the largest."""

    def launch(dtype: torch.dtype, width: int, k: int) -> dict[str, int]:
        return {"BLOCK": 2 * k, "GROUP": 2, "STEPS": 2, "num_warps": 1}

    return mock.patch.object(tuning, "topk_entropy", launch)


def sizes(batches: Sequence[Sequence[int]], widths: st.SearchStrategy[int], most: int) -> st.SearchStrategy:
    def of_width(width: int) -> st.SearchStrategy:
        return st.fixed_dictionaries(
            {
                "batch": st.sampled_from(batches),
                "width": st.just(width),
                "k": st.integers(1, min(width, most)) | st.just(min(width, most)),
                "order": st.sampled_from([*[""] * len(ORDERS), *ORDERS]),
                "step": st.sampled_from([0.0, 0.1, 1.0, 9.0]),
                "seed": seeds,
            }
        )

    return widths.flatmap(of_width)


def plain(rows: int, width: int, k: int) -> Case:
    return single(make((rows,), width, k))


def orders(width: int, *each: int, of: Sequence[str] = ORDERS) -> list[Sizes]:
    """With each k in turn."""
    return [
        {"batch": (1,), "width": width, "k": each[place % len(each)], "order": order} for place, order in enumerate(of)
    ]


BATCHES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3,), (2, 0), (2, 2))
AROUND = st.sampled_from([1, 2, 7, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1100])
VOCABULARY: Sizes = {"batch": (2,), "width": 5003, "k": 64}
OP = Op(
    "topk_entropy",
    make,
    sizes(BATCHES, st.integers(1, 40), 40),
    definition,
    {
        "reference": Way((torch.float64, torch.float32, torch.bfloat16, torch.float16), also=[VOCABULARY]),
        "triton": Way(
            sizes=sizes(((), (0,), (2,), (2, 0)), st.integers(1, 60), 8),
            small=small,
            also=[{"batch": (1,), "width": width, "k": k} for width, k in ((5003, 64), (1300, 2), (130, 128))],
            refused=[lambda: plain(2, 200, 129)],
        ),
        "cuda": Way(
            sizes=sizes(BATCHES, AROUND | st.just(2600), cuda.K),
            also=[
                *orders(5003, 1, 5),
                *orders(40_001, 64, of=ORDERS[2:6]),  # 64 groups hold more than the buffer
                {"batch": (1,), "width": 2048 * 128 + 5, "k": 64},  # more groups than chunks of 128
            ],
            refused=[lambda: plain(2, 200, cuda.K + 1), lambda: plain(cuda.ROWS + 1, 9, 3)],
        ),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes([batch for batch in BATCHES if 0 not in batch], AROUND, cpu.K),
            layouts=ROWS,
            also=[*orders(5003, 1, 2, 63, 64), {"batch": (13,), "width": 20_000, "k": 8}],
            refused=[
                lambda: plain(2, 99, cpu.K + 1),
                lambda: plain(0, 9, 3),
                lambda: plain(2, 9, 3).with_(logits=torch.ones(9, 2).T),
            ],
        ),
    },
    typical={"batch": (6,), "width": 40, "k": 2},
    widened=(0, 1),
    scales=scales,
    rows={"logits": 0},
    result_rows=(0, 0, 0),
    alone=True,
    wrong=[
        ("logits", {"logits": torch.tensor(1.0), "k": 1}, ValueError),
        ("k", {"k": 41}, ValueError),
        ("k", {"k": 0}, ValueError),
        ("k", {"logits": torch.zeros(4, 0), "k": 1}, ValueError),
    ],
)
EXAMPLES = {
    "topk_entropy": OP.example(batch=(2, 3), width=40, k=5),
    "topk_entropy, many rows": OP.example(batch=(12,), width=40, k=5),
}
