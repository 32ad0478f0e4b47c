"""How `group_cross_entropy` is called."""

from __future__ import annotations

import torch

from fb_kernels.calls import RAGGED, Call, Calls, by_definition, offsets, randn
from fb_kernels.group_cross_entropy import naive


def group_cross_entropy(g: int = 2, k: int = 13) -> Call:
    """A call on G groups of K."""
    tensors = {"score": randn(g * k), "target": randn(g * k, seed=1).softmax(0), "cu_group": offsets(g, k)}
    return Call(
        "group_cross_entropy",
        tensors,
        gradients=("score",),
        least=dict.fromkeys(("score", "target"), torch.float32),
        shape=f"G={g} K={k}",
        scales=(8.0,),
        bytes=8.0 * g * k,
    )


OPS = (
    Calls(
        "group_cross_entropy",
        group_cross_entropy,
        by_definition(naive.group_cross_entropy),
        checked=lambda _: [group_cross_entropy(2, 7).with_(cu_group=torch.tensor(RAGGED, dtype=torch.int32))],
        takes="score[N], target[N], cu_group[G + 1]",
        gives="loss, or [G] with reduction none, fp32",
    ),
)
