"""How `joint_pool` is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from cases.base import Case, Op, Way, definition, generator, seeds


def make(
    batch: Sequence[int], slm: int, llm: int, top: int = 12, index: torch.dtype = torch.int64, seed: int = 0
) -> Case:
    """Ids below `top`, some of them padding."""
    source = generator(seed)
    lists = [torch.randint(-2, top, (*batch, size), generator=source).to(index) for size in (slm, llm)]
    return Case("joint_pool", dict(zip(("slm_ids", "llm_ids"), lists, strict=True)))


IDS = torch.zeros(6, 3, dtype=torch.int64)
OP = Op(
    "joint_pool",
    make,
    st.fixed_dictionaries(
        {
            "batch": st.sampled_from([(), (0,), (1,), (4,), (2, 3), (2, 0)]),
            "slm": st.integers(0, 9),
            "llm": st.integers(0, 9),
            "top": st.sampled_from([1, 5, 30, 2**31]),
            "index": st.sampled_from([torch.int32, torch.int64]),
            "seed": seeds,
        }
    ),
    definition,
    {"reference": Way((torch.float32,))},
    typical={"batch": (6,), "slm": 3, "llm": 8},
    rows={"slm_ids": 0, "llm_ids": 0},
    result_rows=(0, 0, 0),
    alone=True,
    wrong=[
        ("llm_ids", {"llm_ids": IDS.int()}, TypeError),
        ("slm_ids", {"slm_ids": torch.tensor(1)}, ValueError),
        ("llm_ids", {"llm_ids": torch.tensor(1)}, ValueError),
        ("llm_ids", {"llm_ids": IDS[:1]}, ValueError),
        ("llm_ids", {"llm_ids": IDS[0]}, ValueError),
    ],
)
