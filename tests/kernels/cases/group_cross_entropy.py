"""How `group_cross_entropy` is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import Case, Op, Way, generator, ids, offsets, seeds
from fb_kernels.group_cross_entropy.naive import group_cross_entropy as naive
from fb_kernels.testing import magnitude


def make(
    sizes: Sequence[int],
    tail: int = 0,
    reduction: str = "mean",
    spread: float = 1.0,
    index: torch.dtype = torch.int32,
    seed: int = 0,
) -> Case:
    """Groups of these sizes, and `tail` rows of none."""
    rows, source = sum(sizes) + tail, generator(seed)
    score = spread * torch.randn(rows, generator=source, dtype=torch.float64)
    target = torch.rand(rows, generator=source, dtype=torch.float64)
    arguments = {"score": score, "target": target, "cu_group": offsets(sizes, index), "reduction": reduction}
    return Case("group_cross_entropy", arguments, gradients=("score",))


def truth(case: Case, results: Sequence[Tensor]) -> list[Tensor]:
    """Rounded once."""
    score, target, cu_group, reduction = case.arguments.values()
    return [naive(score.double(), target.double(), cu_group, reduction=reduction).to(results[0].dtype)]


def gradient_scales(case: Case, _: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Of the terms of softmax(score) * sum q - q."""
    _, target, cu_group, reduction = case.arguments.values()
    sizes = cu_group.diff()
    count = (sizes > 0).sum().clamp(min=1) if reduction == "mean" else 1
    weight = (magnitude(upstream[0]) / count).expand(len(sizes))
    parts = target.split([*sizes.tolist(), len(target) - int(cu_group[-1])])
    return [torch.cat([each * (q.sum() + q) for each, q in zip([*weight, 0.0], parts, strict=True)])]


GOOD = make([3, 0, 1, 3], 1).tensors
OP = Op(
    "group_cross_entropy",
    make,
    st.fixed_dictionaries(
        {
            "sizes": st.lists(st.integers(0, 6), max_size=6),
            "tail": st.integers(0, 3),
            "reduction": st.sampled_from(["mean", "sum", "none"]),
            "spread": st.sampled_from([0.0, 1.0, 100.0]),
            "index": st.sampled_from([torch.int32, torch.int64]),
            "seed": seeds,
        }
    ),
    truth,
    {
        "reference": Way(
            (torch.float64, torch.float32, torch.bfloat16, torch.float16),
            also=[{"sizes": [13] * 20, "reduction": "none", "spread": 3.0}],
        )
    },
    typical={"sizes": [3, 0, 1, 3], "tail": 1},
    tiny=[{"sizes": [3, 0, 1, 3], "tail": 1, "reduction": reduction} for reduction in ("mean", "sum", "none")],
    scales=lambda _, truth: [1 + magnitude(truth[0])],  # no term is negative; the log of 1 + x is rounded at 1
    gradient_scales=gradient_scales,
    widened=(0,),
    hostile=("score",),
    wrong=[
        ("score", {"score": GOOD["score"].float()[None]}, ValueError),
        ("target", {"target": GOOD["target"].float()[:3]}, ValueError),
        ("cu_group", {"cu_group": ids()}, ValueError),
        ("cu_group", {"cu_group": ids(0, 3, 2)}, ValueError),
        ("cu_group", {"cu_group": ids(1, 4)}, ValueError),
        ("cu_group", {"cu_group": ids(0, 9)}, ValueError),
        *(("reduction", {"reduction": value}, ValueError) for value in ("average", None)),
    ],
)
