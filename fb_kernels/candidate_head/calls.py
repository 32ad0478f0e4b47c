"""How `candidate_head` is called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import EPS, Call, Calls, by_definition, offsets, randn, widen
from fb_kernels.candidate_head import naive


def score_groups(
    hidden: Tensor, norm_weight: Tensor, head_weight: Tensor, cu_group: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch, for groups of one size."""
    normed = F.rms_norm(hidden, hidden.shape[-1:], norm_weight, eps)
    score = F.linear(widen(normed), widen(head_weight)[None]).view(len(cu_group) - 1, -1)
    return score.flatten(), score.softmax(-1).flatten(), score.argmax(-1)


def candidate_head(g: int = 8, k: int = 13, d: int = 2048, *, normed: bool = False, master: bool = False) -> Call:
    """A call on G groups of K candidates: `normed` ones need no norm, a `master` head is float32 and has a bias."""
    arguments = {
        "hidden": randn(g * k, d),
        "norm_weight": None if normed else 1 + randn(d) / 8,
        "head_weight": randn(d, seed=1) / d**0.5,
    }
    if master:
        arguments["head_bias"] = randn(1)
    return Call(
        "candidate_head",
        arguments | {"cu_group": offsets(g, k), "eps": EPS},
        gradients=tuple(name for name, x in arguments.items() if x is not None),
        least=dict.fromkeys(("head_weight", "head_bias"), torch.float32) if master else {},
        shape=f"G={g} K={k} D={d}{', normed' if normed else ''}",
        scales=(4.0, 1.0, None),
        bytes=2.0 * g * k * d,
        plain={"torch eager": score_groups},
        launches={"_candidate_head_fwd_kernel": 2 * g * k * d, "_candidate_head_bwd_kernel": 4 * g * k * d},
    )


def compiled() -> Iterator[Call]:
    """One state's candidates, and a training batch of states."""
    for groups in (1, 1024):
        for normed in (False, True):
            yield candidate_head(groups, normed=normed, master=True).cast(torch.bfloat16)


OPS = (
    Calls(
        "candidate_head",
        candidate_head,
        by_definition(naive.candidate_head),
        sizes={"small": (3, 13, 40), "checked": (3, 13, 1000)},
        compiled=compiled,
        takes="hidden[N, D], (norm_weight[D]), head_weight[D], cu_group[G + 1], (head_bias[1])",
        gives="score[N], prob[N], fp32; best[G] int64",
        cpu="fp32",
        cuda="fp32, bf16, fp16",
        optional=("head_bias",),
    ),
)
