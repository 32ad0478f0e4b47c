"""How `merge_attention_states` is called."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import CONTIGUOUS, WIDTHS, Case, Op, Way, definition, launched, normal, seeds
from fb_kernels.merge_attention_states import cpu
from fb_kernels.testing import magnitude

NAMES = ("out_a", "lse_a", "out_b", "lse_b")


def make(
    rows: int, heads: int, width: int, shift: float = 0.0, empty: int = 0, mark: float = -math.inf, seed: int = 0
) -> Case:
    """The lses around `shift`; of the first rows, `empty` states in all, one or both are empty, of lse `mark`."""
    shapes = ((rows, heads, width), (heads, rows)) * 2
    arguments = dict(zip(NAMES, normal(seed, *shapes), strict=True))
    for place, name in enumerate(("lse_a", "lse_b")):
        arguments[name] = 3 * arguments[name] + shift
        arguments[name][:, place : place + empty] = mark
    return Case("merge_attention_states", arguments, gradients=NAMES, outputs=(0, 1))


def scales(case: Case, _: Sequence[Tensor]) -> list[Tensor]:
    """The larger of the two states, whose sum may cancel, and 1, where the log of 1 + p is rounded."""
    out_a, lse_a, out_b, lse_b = (magnitude(case.arguments[name]) for name in NAMES)
    return [torch.maximum(out_a, out_b), 1 + torch.maximum(lse_a, lse_b)]


def gradient_scales(case: Case, truth: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Of w g, and of w (g (a - b) + h); a weight is off by ulps of the difference of two lses."""
    size, lse_size = scales(case, truth)
    pull, pull_lse = (magnitude(g) for g in upstream)
    on_lse = (pull_lse + (pull * 2 * size).sum(-1).T) * lse_size
    on_out = pull * lse_size.T[..., None]
    return [on_out, on_lse, on_out, on_lse]


def sizes(least: int, widths: st.SearchStrategy[int]) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "rows": st.integers(least, 9),
            "heads": st.integers(least, 4),
            "width": widths,
            "shift": st.sampled_from([0.0, 1e4, -1e4]),
            "empty": st.sampled_from([0, 0, 2]),
            "mark": st.sampled_from([-math.inf, math.inf]),
            "seed": seeds,
        }
    )


def small() -> object:
    return launched(merge_attention_states={"ROWS": 4, "WIDTH": 32, "num_warps": 1})


def plain(rows: int = 2, heads: int = 3, width: int = 4, dtype: torch.dtype = torch.float32) -> Case:
    return OP.cast(make(rows, heads, width), dtype)


GOOD = {"out": torch.ones(6, 2, 9), "lse": torch.ones(2, 6)}
OP = Op(
    "merge_attention_states",
    make,
    sizes(0, st.integers(0, 20)),
    definition,
    {
        "reference": Way((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        "triton": Way(small=small),
        "cpu": Way(
            (torch.float32,),
            sizes(1, WIDTHS),
            layouts=CONTIGUOUS,
            refused=[
                lambda: plain(dtype=torch.bfloat16),
                lambda: plain().with_(lse_a=torch.ones(2, 3).T),
                lambda: plain(9, 9, cpu.SIZE // 80),
            ],
        ),
    },
    typical={"rows": 6, "heads": 2, "width": 9},
    tiny=[{"rows": 3, "heads": 2, "width": 4}],
    scales=scales,
    gradient_scales=gradient_scales,
    wide=("lse_a", "lse_b"),
    widened=(1,),
    rows={"out_a": 0, "lse_a": 1, "out_b": 0, "lse_b": 1},
    result_rows=(0, 1),
    which_strange=False,
    alone=True,
    wrong=[
        ("out_a", {"out_a": GOOD["out"][0]}, ValueError),
        ("out_b", {"out_b": GOOD["out"][1:]}, ValueError),
        ("lse_a", {"lse_a": GOOD["lse"].T}, ValueError),
        ("lse_b", {"lse_b": GOOD["lse"][:1]}, ValueError),
    ],
)
