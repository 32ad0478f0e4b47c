"""How `commit_` is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import ROWS, Case, Op, Way, definition, generator, seeds
from fb_kernels import DecodeState

WRITTEN = ("state.tokens", "state.length", "state.halt")


def make(
    rows: int,
    slots: int,
    ends: int,
    each: bool = True,
    wide: bool = True,
    index: torch.dtype = torch.int64,
    limit: torch.dtype = torch.int32,
    told: bool = True,
    seed: int = 0,
) -> Case:
    """Limits of each row or one for all; wide is a threshold that stays in float64; told asks for the outcome."""
    source = generator(seed)

    def draw(low: int, high: int, dtype: torch.dtype = torch.int32, shape: Sequence[int] = (rows,)) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=source).to(dtype)

    own = (rows,) if each else ()
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, math.inf], dtype=torch.float64)
    arguments = {
        "state": DecodeState(
            1000 + torch.arange(rows * slots).view(rows, slots),
            draw(0, slots + 2),
            draw(0, 5) * draw(0, 2),
            draw(-1, 3),
        ),
        "token": draw(0, 6, index),
        "entropy": levels[draw(0, 5, torch.int64)],
        "threshold": levels[draw(0, 5, torch.int64, own)],
        "eos_ids": draw(0, 6, index, (ends,)),
        "max_length": draw(0, slots + 3, limit, own),
    }
    if told:
        arguments["outcome"] = torch.full((rows, 3), -1.0)
    least = ({"threshold": torch.float64} if wide else {}) | ({"outcome": torch.float32} if told else {})
    return Case("commit_", arguments, written=WRITTEN + (("outcome",) if told else ()), least=least)


def sizes(**fixed: Any) -> st.SearchStrategy:
    options = {
        "rows": st.integers(0, 9) | st.just(70),
        "slots": st.integers(0, 9),
        "ends": st.integers(0, 3),
        "each": st.booleans(),
        "wide": st.booleans(),
        "index": st.sampled_from([torch.int32, torch.int64]),
        "limit": st.sampled_from([torch.int32, torch.int64]),
        "told": st.booleans(),
        "seed": seeds,
    }
    return st.fixed_dictionaries(options | {name: st.just(value) for name, value in fixed.items()})


def plain(**options: Any) -> Case:
    return OP.cast(make(3, 4, 2, **options), torch.float32)


ONE = torch.ones(7, dtype=torch.int64)
OP = Op(
    "commit_",
    make,
    sizes(),
    definition,
    {
        "reference": Way((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        "device": Way((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        "cuda": Way(
            (torch.float32,),
            sizes(wide=True, index=torch.int64, limit=torch.int32),
            layouts=ROWS,
            refused=[
                lambda: plain(wide=False),
                lambda: plain(index=torch.int32),
                lambda: plain(limit=torch.int64),
                lambda: plain().with_(**{"state.tokens": torch.ones(4, 3, dtype=torch.int64).T}),
                lambda: plain().with_(entropy=torch.ones(6)[::2]),
                lambda: plain().with_(outcome=torch.ones(3, 3).T),
            ],
        ),
    },
    typical={"rows": 7, "slots": 6, "ends": 2},
    rows={"entropy": 0},
    widened=(3,),
    result_rows=(0, 0, 0, 0),
    wrong=[
        ("state", {"state": tuple(make(7, 6, 2).arguments["state"])}, TypeError),
        ("state.tokens", {"state.tokens": torch.ones(7, 6)}, TypeError),
        ("state.tokens", {"state.tokens": ONE}, ValueError),
        ("state.tokens", {"state.tokens": ONE[:, None].expand(7, 6)}, ValueError),
        ("state.length", {"state.length": ONE}, TypeError),
        ("state.length", {"state.length": -ONE.int()}, ValueError),
        ("state.halt", {"state.halt": ONE.int()[1:]}, ValueError),
        ("state.budget", {"state.budget": 3}, TypeError),
        ("state.budget", {"state.budget": ONE.int().to("meta")}, ValueError),
        ("token", {"token": torch.tensor(1)}, ValueError),
        ("entropy", {"entropy": torch.ones(2)}, ValueError),
        ("threshold", {"threshold": torch.ones(2)}, ValueError),
        *(("threshold", {"threshold": torch.full(shape, math.nan)}, ValueError) for shape in ((), (7,))),
        ("eos_ids", {"eos_ids": torch.tensor(7)}, ValueError),
        ("max_length", {"max_length": ONE[:, None]}, ValueError),
        ("outcome", {"outcome": torch.ones(7, 3).half()}, TypeError),
        ("outcome", {"outcome": torch.ones(7, 2)}, ValueError),
        ("outcome", {"outcome": [0.0]}, TypeError),
    ],
)
EXAMPLES = {"commit_": OP.example(rows=4, slots=7, ends=3, told=False)}
