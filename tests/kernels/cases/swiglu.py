"""How `swiglu` is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from cases.base import CONTIGUOUS, WIDTHS, Case, Op, Way, definition, normal, seeds, single


def make(rows: Sequence[int], half: int, seed: int = 0) -> Case:
    return Case("swiglu", {"gate_up": 3 * normal(seed, (*rows, 2 * half))[0]}, gradients=("gate_up",))


def sizes(least: int, widths: st.SearchStrategy[int]) -> st.SearchStrategy:
    rows = st.lists(st.integers(least, 4), max_size=2)
    return st.fixed_dictionaries({"rows": rows, "half": widths, "seed": seeds})


OP = Op(
    "swiglu",
    make,
    sizes(0, st.integers(0, 40)),
    definition,
    {
        "reference": Way((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        "triton": Way(also=[{"rows": (3,), "half": 2500}]),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes(1, WIDTHS),
            layouts=CONTIGUOUS,
            refused=[
                lambda: single(make((2,), 2)).with_(gate_up=torch.ones(2, 4).half()),
                lambda: single(make((2,), 2)).with_(gate_up=torch.ones(4, 2).T),
                lambda: single(make((2,), 0)),
            ],
        ),
    },
    typical={"rows": (6,), "half": 20},
    tiny=[{"rows": (3, 2), "half": 3}],
    rows={"gate_up": 0},
    alone=True,
    wrong=[
        ("gate_up", {"gate_up": torch.tensor(1.0)}, ValueError),
        ("gate_up", {"gate_up": torch.ones(2, 5)}, ValueError),
    ],
)
