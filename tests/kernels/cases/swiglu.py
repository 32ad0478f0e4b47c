"""How `swiglu` is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from cases.base import CONTIGUOUS, WIDTHS, Case, Op, Way, definition, normal, seeds, single


def make(rows: Sequence[int], half: int, apart: bool = False, seed: int = 0) -> Case:
    gate, up = (3 * x for x in normal(seed, *[(*rows, half)] * 2))
    arguments = {"gate_up": gate, "up": up} if apart else {"gate_up": torch.cat((gate, up), -1)}
    return Case("swiglu", arguments, gradients=tuple(arguments))


def sizes(least: int, widths: st.SearchStrategy[int]) -> st.SearchStrategy:
    rows = st.lists(st.integers(least, 4), max_size=2)
    return st.fixed_dictionaries({"rows": rows, "half": widths, "apart": st.booleans(), "seed": seeds})


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
                lambda: single(make((2,), 3, apart=True)).with_(up=torch.ones(3, 2).T),
            ],
        ),
    },
    typical={"rows": (6,), "half": 20},
    tiny=[{"rows": (3, 2), "half": 3, "apart": apart} for apart in (False, True)],
    rows={"gate_up": 0},
    alone=True,
    wrong=[
        ("gate_up", {"gate_up": torch.tensor(1.0)}, ValueError),
        ("gate_up", {"gate_up": torch.ones(2, 5)}, ValueError),
        ("up", {"up": torch.ones(6, 20)}, ValueError),
        ("up", {"up": torch.ones(6, 40).half()}, TypeError),
    ],
)
EXAMPLES = {
    "swiglu": OP.example(rows=(6,), half=20),
    "swiglu, two tensors": OP.example(rows=(6,), half=20, apart=True),
}
