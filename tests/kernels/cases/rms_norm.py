"""How `rms_norm` is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import CONTIGUOUS, WIDTHS, Case, Op, Way, definition, launched, normal, seeds, single
from fb_kernels.testing import magnitude

EPS = 1e-6


def make(
    rows: Sequence[int], width: int, residual: bool = True, weight: bool = True, offset: float = 0.0, seed: int = 0
) -> Case:
    """With an offset and no sum, which is rounded, the weight is of a dtype of its own: float32."""
    x, added, factor = normal(seed, (*rows, width), (*rows, width), (width,))
    arguments = {"x": 3 * x, "weight": factor if weight else None, "eps": EPS}
    arguments |= {"residual": 3 * added if residual else None, "offset": offset}
    names = ("x", *["weight"] * weight, *["residual"] * residual)
    least = {"weight": torch.float32} if offset and not residual else {}
    return Case("rms_norm", arguments, gradients=names, outputs=(0, 1), least=least)


def gradient_scales(case: Case, truth: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The sums of |terms|, which may cancel."""
    weight = case.arguments["weight"]
    x, g, on_total = (magnitude(value) for value in (truth[1], *upstream))
    factor = torch.ones(x.shape[-1]) if weight is None else magnitude(weight) + case.arguments["offset"]
    root = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    x, pulled = x * root, factor * g
    terms = root * (pulled + x * (pulled * x).mean(-1, keepdim=True)) + on_total
    scales = {"x": terms, "weight": (g * x).sum_to_size(factor.shape), "residual": terms}
    return [scales[name] for name in case.gradients]


def small() -> object:
    """Rows of several blocks, and several rows a program."""
    return launched(rms_norm={"BLOCK": 8, "num_warps": 1}, rms_norm_backward={"BLOCK": 8, "ROWS": 3, "num_warps": 1})


def sizes(least: int, widths: st.SearchStrategy[int]) -> st.SearchStrategy:
    rows = st.lists(st.integers(least, 4), min_size=min(least, 1), max_size=2)
    options = {"residual": st.booleans(), "weight": st.booleans(), "offset": st.sampled_from([0.0, 1.0])}
    return st.fixed_dictionaries({"rows": rows, "width": widths, **options, "seed": seeds})


BAD_EPS = [("eps", {"eps": value}, ValueError) for value in (0.0, float("nan"))]
OP = Op(
    "rms_norm",
    make,
    sizes(0, st.integers(0, 40)),
    definition,
    {
        "reference": Way((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        "triton": Way(small=small, also=[{"rows": (2,), "width": 8200}]),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes(1, WIDTHS),
            also=[{"rows": (3,), "width": 1030}],
            layouts=CONTIGUOUS,
            refused=[
                lambda: single(make((3,), 2)).with_(x=torch.ones(2, 3).T),
                lambda: single(make((2,), 3)).with_(weight=torch.ones(6)[::2]),
                lambda: single(make((2,), 3)).with_(residual=torch.ones(3, 2).T),
                lambda: single(make((0,), 3)),
            ],
        ),
    },
    typical={"rows": (7,), "width": 29},
    tiny=[
        {"rows": (2, 2), "width": 5, "residual": residual, "weight": weight, "offset": offset}
        for residual, weight, offset in ((False, True, 0.0), (True, True, 1.0), (True, False, 0.0))
    ],
    gradient_scales=gradient_scales,
    rows={"x": 0, "residual": 0},
    result_rows=(0, 0),
    alone=True,
    wrong=[
        ("x", {"x": torch.tensor(1.0)}, ValueError),
        ("weight", {"weight": torch.ones(28)}, ValueError),
        ("weight", {"weight": torch.ones(29, dtype=torch.int64)}, TypeError),
        ("residual", {"residual": torch.ones(29)}, ValueError),
        ("offset", {"offset": None}, TypeError),
        ("offset", {"offset": float("inf")}, ValueError),
        *BAD_EPS,
    ],
)
EXAMPLES = {
    "rms_norm": OP.example(rows=(3, 4), width=16),
    "rms_norm, no residual": OP.example(rows=(5,), width=16, residual=False),
}
