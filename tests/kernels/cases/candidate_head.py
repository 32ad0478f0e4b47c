"""How `candidate_head` is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import ROWS, WIDTHS, Case, Op, Way, ids, launched, normal, seeds, single
from fb_kernels.candidate_head import cpu, cuda
from fb_kernels.candidate_head.naive import candidate_head as naive
from fb_kernels.testing import magnitude

EPS = 1e-6
HEAD = ("head_weight", "head_bias")


def offsets(groups: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *groups]).cumsum(0).to(dtype)


def make(
    groups: Sequence[int],
    tail: int,
    width: int,
    normed: bool = False,
    bias: Sequence[int] | None = (1,),
    master: bool = False,
    index: torch.dtype = torch.int32,
    eps: float = EPS,
    seed: int = 0,
) -> Case:
    """Groups of so many rows, then `tail` of none; bias is its shape, master a head that stays in float32."""
    shapes = (sum(groups) + tail, width), (width,), (width,), () if bias is None else bias
    hidden, norm_weight, head_weight, head_bias = normal(seed, *shapes)
    arguments = {
        "hidden": hidden,
        "norm_weight": None if normed else 1 + 0.1 * norm_weight,
        "head_weight": head_weight / max(width, 1) ** 0.5,
        "cu_group": offsets(groups, index),
        "eps": eps,
        "head_bias": None if bias is None else head_bias,
    }
    leaves = tuple(name for name in ("hidden", "norm_weight", *HEAD) if arguments[name] is not None)
    least = dict.fromkeys(HEAD, torch.float32) if master else {}
    return Case("candidate_head", arguments, gradients=leaves, least=least)


def truth(case: Case, results: Sequence[Tensor]) -> list[Tensor]:
    """The scores, then what is said of the very scores that came."""
    score = naive(**case.arguments)[0]
    came = results[0].to(score.dtype)[:, None]
    return [score, *naive(came, None, came.new_ones(1), case.arguments["cu_group"], eps=EPS)[1:]]


def scales(case: Case, _: Sequence[Tensor]) -> list[Tensor | float | None]:
    """Of what a score sums, and of what the probabilities of a group sum to."""
    floats = {name: magnitude(x) for name, x in case.tensors.items() if x.is_floating_point()}
    return [naive(**case.changed(**floats))[0], 1.0, None]


def gradient_scales(case: Case, _: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The sums of |terms|, which may cancel."""
    x, head, pull = (magnitude(each) for each in (case.arguments["hidden"], case.arguments["head_weight"], upstream[0]))
    pull = pull[:, None]
    terms = {"head_bias": pull.sum()}
    if case.arguments["norm_weight"] is None:
        terms |= {"hidden": pull * head, "head_weight": (pull * x).sum(0)}
    else:
        norm = magnitude(case.arguments["norm_weight"])
        root = (x.square().mean(1, keepdim=True) + case.arguments["eps"]).rsqrt()
        x, pulled = x * root, pull * norm * head
        column = (pull * x).sum(0)
        terms |= {"norm_weight": column * head, "head_weight": column * norm}
        terms["hidden"] = root * (pulled + x * (pulled * x).mean(1, keepdim=True))
    return [terms[name] for name in case.gradients]


@contextmanager
def small() -> Iterator[None]:
    """Groups of several tiles, rows of several blocks, offsets in several pieces."""
    launch = {"ROWS": 4, "BLOCK": 16, "num_warps": 1}
    choices = launched(candidate_head=launch | {"OFFSETS": 4}, candidate_head_backward=launch)
    with choices, mock.patch("fb_kernels.candidate_head.triton.REST", 2):
        yield


def sizes(widths: st.SearchStrategy[int], most: int = 9) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "groups": st.lists(st.integers(0, most), max_size=5),
            "tail": st.sampled_from([0, 1, 3, most]),
            "width": widths,
            "normed": st.booleans(),
            "bias": st.sampled_from([None, (), (1,)]),
            "master": st.booleans(),
            "index": st.sampled_from([torch.int32, torch.int64]),
            "seed": seeds,
        }
    )


def plain(rows: int = 2, width: int = 3, groups: Sequence[int] = (2,)) -> Case:
    return single(make(groups, rows - sum(groups), width))


W, CU = torch.ones(21), ids(0, 2, 9)
SIZES = [{"groups": (13, 14), "tail": 0, "width": 2048, "normed": normed} for normed in (False, True)]
MANY = {"groups": (1,) * 7 + (0,) * 900 + (5,), "tail": 8, "width": 8}  # more than a block has threads
OP = Op(
    "candidate_head",
    make,
    sizes(st.integers(0, 33)),
    truth,
    {
        "reference": Way((torch.float64, torch.float32, torch.bfloat16, torch.float16), also=SIZES),
        "triton": Way(
            sizes=sizes(st.integers(1, 40)),
            small=small,
            also=[one | {"width": 700} for one in SIZES],
            refused=[lambda: plain(width=0)],
        ),
        "cuda": Way(
            sizes=sizes(st.integers(1, 40) | st.sampled_from([64, 256, 520, 1024, 2047, 2048]), 40),
            also=[*SIZES, MANY],
            refused=[
                lambda: plain(width=0),
                lambda: plain(cuda.ROWS + 1),
                lambda: plain(groups=(0,) * (cuda.GROUPS + 1)),
            ],
        ),
        "cpu": Way(
            (torch.float32,),
            sizes(WIDTHS),
            layouts=ROWS,
            also=[*SIZES, MANY],
            refused=[
                lambda: OP.cast(make((2,), 0, 3, master=True), torch.float16),
                lambda: plain().with_(hidden=torch.ones(3, 2).T),
                lambda: plain().with_(norm_weight=torch.ones(6)[::2]),
                lambda: plain().with_(head_weight=torch.ones(6)[::2]),
                lambda: plain(width=0),
                lambda: plain(width=cpu.SIZE),
            ],
        ),
    },
    typical={"groups": (3, 0, 4), "tail": 2, "width": 21, "master": True},
    tiny=[
        {"groups": (2, 0, 2), "tail": 1, "width": 4, "normed": normed, "bias": bias, "eps": 0.1}
        for normed in (False, True)
        for bias in (None, (1,))
    ],
    widened=(0, 1),
    scales=scales,
    gradient_scales=gradient_scales,
    rows={"hidden": 0},
    wrong=[
        ("hidden", {"hidden": torch.ones(1, 9, 21)}, ValueError),
        ("norm_weight", {"norm_weight": W[:2]}, ValueError),
        ("head_weight", {"head_weight": W[None]}, ValueError),
        ("head_bias", {"head_bias": W}, ValueError),
        ("cu_group", {"cu_group": CU[None]}, ValueError),
        ("cu_group", {"cu_group": CU[:0]}, ValueError),
        ("cu_group", {"cu_group": ids(0, 3, 2)}, ValueError),
        ("cu_group", {"cu_group": ids(1, 4)}, ValueError),
        ("cu_group", {"cu_group": ids(0, 10)}, ValueError),
        ("eps", {"eps": -1.0}, ValueError),
    ],
)
EXAMPLES = {"candidate_head": OP.example(groups=(3, 0, 3), tail=1, width=16)}
