"""How `qk_norm_rope` is called, and its form that also writes a key-value cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import (
    CONTIGUOUS,
    Case,
    Op,
    Sizes,
    Way,
    definition,
    generator,
    ids,
    launched,
    normal,
    seeds,
    single,
)
from fb_kernels.testing import magnitude

LENGTH = 12  # of the tables
TABLES = ("cos", "sin")
CACHES = ("kv_out.0", "kv_out.1")


def make(
    rows: int,
    half: int,
    heads: tuple[int, int] = (4, 2),
    normed: tuple[bool, bool] = (True, True),
    index: torch.dtype = torch.int64,
    values: bool = True,
    wide: bool = False,
    seed: int = 0,
) -> Case:
    """The halves of the tables, which stay in float32 where wide, differ; where no position is they are NaN."""
    width = 2 * half
    shapes = (
        (rows, (heads[0] + (1 + values) * heads[1]) * width),
        (width,),
        (width,),
        (LENGTH, width),
        (LENGTH, width),
    )
    qkv, q_weight, k_weight, cos, sin = normal(seed, *shapes)
    positions = torch.randint(0, LENGTH, (rows,), generator=generator(seed))
    unused = torch.ones(LENGTH, dtype=torch.bool).index_fill(0, positions, False)
    cos[unused], sin[unused] = math.nan, math.nan
    arguments = {
        "qkv": 2 * qkv,
        "q_weight": q_weight if normed[0] else None,
        "k_weight": k_weight if normed[1] else None,
        "cos": cos,
        "sin": sin,
        "positions": positions.to(index),
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "eps": 1e-3,
    }
    names = ("qkv", *(name for name, use in zip(("q_weight", "k_weight"), normed, strict=True) if use))
    least = dict.fromkeys(TABLES, torch.float32) if wide else {}
    return Case("qk_norm_rope", arguments, gradients=names, outputs=(0, 1, 2), least=least)


def make_written(size: int, slots: Sequence[int], **sizes: Any) -> Case:
    """The same with caches of `size` slots, for each row one; a slot below 0 is none."""
    case = make(rows=len(slots), **sizes)
    width, heads = case.arguments["cos"].shape[1], case.arguments["num_kv_heads"]
    caches = normal(1, *[(size, heads, width)] * 2)
    kv_out = (*caches, torch.tensor(slots, dtype=case.arguments["positions"].dtype))
    return Case("qk_norm_rope", case.arguments | {"kv_out": kv_out}, written=CACHES, least=case.least)


def scales(case: Case, _: Sequence[Tensor]) -> list[Tensor]:
    """Of what is rotated, as far as the tables reach."""
    straight = case.with_(cos=torch.ones_like(case.arguments["cos"]), sin=torch.zeros_like(case.arguments["sin"]))
    q, k, v, *caches = definition(straight)
    q, k = (magnitude(x).amax(-1, keepdim=True).expand(x.shape) * reach(case) if x.numel() else x for x in (q, k))
    slots = case.tensors.get("kv_out.2", ids()).tolist()
    for cache, written in zip(caches, (k, v), strict=False):
        cache.zero_()  # what is not written is exact
        for row, slot in enumerate(slots):
            if slot >= 0:
                cache[slot] = magnitude(written[row])
    return [q, k, magnitude(v), *caches]


def reach(case: Case) -> Tensor:
    return torch.cat([sum(magnitude(case.arguments[name]) for name in TABLES).flatten(), torch.zeros(1)]).max()


def gradient_scales(case: Case, _: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The sums of |terms|, which may cancel."""
    qkv, q_weight, k_weight, *_ = case.arguments.values()
    reaches = (reach(case), reach(case), 1.0)
    heads = magnitude(qkv).view(len(qkv), sum(g.shape[1] for g in upstream), case.arguments["cos"].shape[1])
    on_heads, on_weights = [], []
    for place, weight in enumerate((q_weight, k_weight, None)):
        first = sum(g.shape[1] for g in upstream[:place])
        x, g = heads[:, first : first + upstream[place].shape[1]], magnitude(upstream[place])
        pull = reaches[place] * (g.amax(-1, keepdim=True).expand(x.shape) if g.numel() else g)
        if weight is not None:
            root = (x.square().mean(-1, keepdim=True) + case.arguments["eps"]).rsqrt()
            x, size = x * root, magnitude(weight)
            on_weights.append((pull * x).sum((0, 1)))
            pull = root * pull * (size + x * (x * size).mean(-1, keepdim=True))
        on_heads.append(pull)
    return [torch.cat(on_heads, 1).reshape(qkv.shape), *on_weights]


def small() -> AbstractContextManager[None]:
    """Programs whose heads are of two kinds, and several rows a program."""
    launch = {"HEADS": 2, "HALF": 8, "num_warps": 1}
    return launched(qk_norm_rope=launch, qk_norm_rope_backward=launch | {"ROWS": 3})


def _sizes(halves: st.SearchStrategy[int]) -> dict[str, st.SearchStrategy]:
    return {
        "heads": st.tuples(st.integers(1, 3), st.integers(1, 2)),
        "half": halves,
        "normed": st.tuples(st.booleans(), st.booleans()),
        "index": st.sampled_from([torch.int32, torch.int64]),
        "wide": st.booleans(),
        "seed": seeds,
    }


def sizes(least: int, halves: st.SearchStrategy[int]) -> st.SearchStrategy:
    return st.fixed_dictionaries({"rows": st.integers(least, 4), "values": st.booleans(), **_sizes(halves)})


@st.composite
def sizes_written(draw: st.DrawFn, least: int, halves: st.SearchStrategy[int]) -> Sizes:
    size = draw(st.integers(0, 9))
    some = draw(st.permutations([*range(size), -1, -1, -1, -2, -3]))
    slots = some[: draw(st.integers(least, 6))]
    return {"size": size, "slots": slots} | {name: draw(each) for name, each in _sizes(halves).items()}


EVERY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FEW, VECTORS = st.integers(0, 5), st.sampled_from([1, 2, 3, 4, 8, 9, 16, 33])
MANY = [{"rows": 20, "half": 32}]
TYPICAL = {"rows": 6, "half": 4}
GOOD = single(make(**TYPICAL)).tensors


def caches(size: int = 7, heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, heads, width, dtype=dtype), torch.zeros(size, heads, width, dtype=dtype)


SIX = torch.arange(6)
OP = Op(
    "qk_norm_rope",
    make,
    sizes(0, FEW),
    definition,
    {
        "reference": Way(EVERY, also=MANY),
        "device": Way(EVERY),
        "triton": Way(small=small, also=MANY),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes(1, VECTORS),
            layouts=CONTIGUOUS,
            apart=("qkv",),
            refused=[
                lambda: OP.cast(make(2, 1), torch.float16),
                lambda: single(make(2, 1)).with_(cos=torch.ones(LENGTH, 2).half(), sin=torch.ones(LENGTH, 2).half()),
                lambda: single(make(16, 1)).with_(qkv=torch.ones(16, 16).T),
                lambda: single(make(2, 1)).with_(sin=torch.ones(2, LENGTH).T),
                lambda: single(make(0, 1)),
            ],
        ),
    },
    typical=TYPICAL,
    tiny=[{"rows": 2, "half": 1, "normed": (q, k)} for q in (True, False) for k in (True, False)]
    + [{"rows": 2, "half": 1, "values": False}],
    scales=scales,
    gradient_scales=gradient_scales,
    rows={"qkv": 0, "positions": 0},
    result_rows=(0, 0, 0),
    alone=True,
    wrong=[
        ("qkv", {"qkv": torch.ones(6, 63)}, ValueError),
        ("qkv", {"qkv": torch.ones(1, 6, 64)}, ValueError),
        ("q_weight", {"q_weight": torch.ones(7)}, ValueError),
        ("k_weight", {"k_weight": torch.ones(1, 8)}, ValueError),
        ("cos", {"cos": torch.ones(1, 12, 8)}, ValueError),
        ("cos", {"cos": torch.ones(12, 7), "sin": torch.ones(12, 7)}, ValueError),
        ("cos", {"cos": torch.ones(0, 8), "sin": torch.ones(0, 8)}, ValueError),
        ("sin", {"sin": torch.ones(11, 8)}, ValueError),
        ("positions", {"positions": torch.arange(4)}, ValueError),
        ("positions", {"positions": SIX + 7}, ValueError),
        ("positions", {"positions": SIX - 1}, ValueError),
        ("num_heads", {"num_heads": 0}, ValueError),
        ("num_heads", {"num_heads": 0, "qkv": torch.ones(6, 32)}, ValueError),
        ("num_kv_heads", {"num_kv_heads": -1}, ValueError),
        ("eps", {"eps": -1.0}, ValueError),
        *(("kv_out", {"kv_out": value}, TypeError) for value in (caches(), 3)),
        ("kv_out", {"kv_out": (caches()[0], caches(6)[0], SIX)}, ValueError),
        ("kv_out", {"kv_out": (*caches(width=4), SIX)}, ValueError),
        ("kv_out", {"kv_out": (*caches(dtype=torch.float16), SIX)}, TypeError),
        ("kv_out", {"kv_out": (*caches(), SIX[:4])}, ValueError),
        ("kv_out", {"kv_out": (*caches(), SIX.float())}, TypeError),
        ("kv_out", {"kv_out": (*caches(), SIX + 2)}, ValueError),
        ("kv_out", {"kv_out": (*caches(), SIX // 2)}, ValueError),
        ("kv_out", {"kv_out": (*caches(), (SIX - 1).clamp(min=0))}, ValueError),
        ("kv_out", {"kv_out": (caches()[0][:1].expand(8, -1, -1), caches(8)[1], SIX)}, ValueError),
    ],
)
WRITTEN = Op(
    "qk_norm_rope_out",
    make_written,
    sizes_written(0, FEW),
    definition,
    {
        "reference": Way(EVERY),
        "device": Way(EVERY),
        "triton": Way(small=small),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes_written(1, VECTORS),
            layouts=CONTIGUOUS,
            apart=("qkv", *CACHES),
            refused=[
                lambda: written().with_(**{"kv_out.0": torch.zeros(3, 2, 4)[..., ::2]}),
                lambda: written().with_(**{"kv_out.2": torch.tensor([0, 7, 1])[::2]}),
            ],
        ),
    },
    typical={"size": 8, "slots": [6, -1, 7, 0, 3, -2], "half": 4},
    scales=scales,
    rows={"qkv": 0, "positions": 0, "kv_out.2": 0},
    result_rows=(0, 0, 0),
)


def written() -> Case:
    return single(make_written(3, [0, 1], half=1))


EXAMPLES = {
    "qk_norm_rope": OP.example(rows=6, half=4),
    "qk_norm_rope, one row": OP.example(rows=1, half=4),
    "qk_norm_rope, written": WRITTEN.example(size=9, slots=[6, -1, 8, 7], half=4),
}
