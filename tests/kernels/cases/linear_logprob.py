"""How `linear_logprob`, its partials of a vocabulary shard and their combination are called."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import (
    CONTIGUOUS,
    WIDTHS,
    Case,
    Op,
    Way,
    definition,
    generator,
    ids,
    launched,
    normal,
    seeds,
    single,
)
from fb_kernels.linear_logprob import reference
from fb_kernels.linear_logprob.triton import HAS_GLUON
from fb_kernels.testing import magnitude

IGNORE = -100
ALL = {"return_lse": True, "return_entropy": True, "return_max": True}
FLOATS = ("hidden", "weight", "bias")
TILE = {"BLOCK_M": 16, "BLOCK_V": 32, "BLOCK_K": 16}  # the vocabulary on the tensor cores' longer side
FORMS = ("fused", "chunked")
HALF = (torch.bfloat16, torch.float16)


def small() -> AbstractContextManager[None]:
    """Tiles that a few rows and columns cross."""
    return launched(
        linear_logprob=TILE,
        linear_logprob_chunk_size={"rows": 32, "columns": 64},
        linear_logprob_gluon={"TILES": 2, "GROUP": 2, "BLOCK_M": 4, "BLOCK_V": 8, "BLOCK_K": 16, "STAGES": 3},
        linear_logprob_chunk={"BLOCK_M": 16, "BLOCK_V": 32},
        linear_logprob_merge={"BLOCK_M": 4, "BLOCK_T": 2},
        combine_logprob_partials={"BLOCK": 4},
    )


def small_blocks() -> AbstractContextManager[Any]:
    """Of the reference: many in both directions, none of them full at the end."""
    return mock.patch.multiple(reference, ROW_BLOCK=3, LOGITS=12)


def make(
    rows: Sequence[int],
    width: int,
    vocabulary: int,
    bias: bool = True,
    padding: int = 0,
    options: dict[str, Any] | None = None,
    index: torch.dtype = torch.int64,
    several: int | None = None,
    seed: int = 0,
) -> Case:
    """Some ids are ignored, and so is what `padding` rows of the head hold; a row has one id or `several`."""
    hidden, weight, offset = normal(seed, (*rows, width), (vocabulary + padding, width), (vocabulary + padding,))
    weight[vocabulary:], offset[vocabulary:] = math.nan, math.inf
    shape = tuple(rows) if several is None else (*rows, several)
    target = torch.randint(0, max(vocabulary, 1), shape, generator=generator(seed))
    ignored = torch.rand(shape, generator=generator(seed)) < (0.3 if vocabulary else 1.0)
    arguments = {
        "hidden": hidden,
        "weight": weight,
        "target": target.masked_fill(ignored, IGNORE).to(index),
        "bias": offset if bias else None,
        "valid_vocab": vocabulary if padding else None,
    }
    names = FLOATS[: 2 + bias]
    return Case("linear_logprob", arguments | ALL | (options or {}), gradients=names, outputs=(0, 1, 2))


def make_partials(vocab_start: int, valid_vocab: int | None = None, **sizes: Any) -> Case:
    """The same with the head for a shard of a vocabulary, which may end before it or in it."""
    whole = make(**sizes)
    target = whole.arguments["target"]
    ahead = (vocab_start + 1) if valid_vocab is None else valid_vocab
    elsewhere = torch.arange(target.numel()).view(target.shape) % 3 == 0
    shifted = torch.where(elsewhere, target % max(ahead, 1), target + vocab_start)
    last = torch.iinfo(torch.int32).max if valid_vocab is None else max(valid_vocab - 1, 0)
    changes = {
        "weight_shard": whole.arguments["weight"],
        "target": shifted.clamp(max=last).where(target != IGNORE, IGNORE).to(target.dtype),
        "vocab_start": vocab_start,
        "valid_vocab": valid_vocab,
    }
    kept = {name: x for name, x in whole.arguments.items() if name not in (*ALL, "weight")}
    names = tuple("weight_shard" if name == "weight" else name for name in whole.gradients)
    return Case("linear_logprob_partials", kept | changes, gradients=names, outputs=(1, 2))


def make_combination(shards: int, rows: int, empty: bool = False, shift: float = 0.0, seed: int = 0) -> Case:
    """Each row's target lies in one shard; of the first two, `empty`, one is ignored and one has a shard of nothing."""
    top, sumexp, picked = normal(seed, *[(shards, rows)] * 3)
    top, sumexp = 3 * top + shift, 1 + sumexp.square()
    owner = torch.randint(0, shards, (rows,), generator=generator(seed))
    picked = picked.where(torch.arange(shards)[:, None] == owner, -math.inf)
    if empty:
        top[:, :1], sumexp[:, :1], picked[:, :1] = -math.inf, 0.0, -math.inf
        top[:1, 1:2], sumexp[:1, 1:2] = -math.inf, 0.0
    arguments = {"max": top, "sumexp": sumexp, "target_logit": picked}
    return Case("combine_logprob_partials", arguments, gradients=("sumexp", "target_logit"), outputs=(0, 1))


def size(case: Case) -> Tensor:
    """Of each row the scale of a logit's rounding: the sum of its |terms|, and 1 for a log of a sum from 1 on."""
    given = case.arguments
    hidden, weight, bias = (given["hidden"], given.get("weight", given.get("weight_shard")), given["bias"])
    terms = abs(given.get("logit_scale", 1.0)) * magnitude(hidden) @ magnitude(weight).T
    terms = (terms if bias is None else terms + magnitude(bias)) / given.get("temperature", 1.0)
    capped = (given.get("softcap") or 0.0) / given.get("temperature", 1.0)  # what an infinite logit becomes
    largest = torch.nn.functional.pad(terms, (1, 0)).amax(-1) + capped * ~hidden.isfinite().all(-1)
    return 1 + largest + math.log(max(len(weight), 1))


def scales(case: Case, truth: Sequence[Tensor]) -> list[Tensor]:
    """An entropy moves by itself times a relative error of the probabilities."""
    each = size(case)
    of_ids = each.view((*each.shape, *[1] * (truth[0].ndim - each.ndim)))
    return [of_ids, each, each * (1 + magnitude(truth[2])), each]


def scales_of_partials(case: Case, truth: Sequence[Tensor]) -> list[Tensor]:
    each = size(case)
    return [each, each * magnitude(truth[1]), each]


def scales_of_combination(case: Case, truth: Sequence[Tensor]) -> list[Tensor]:
    top, _, picked = (magnitude(x).amax(0) for x in case.arguments.values())
    each = 1 + top + magnitude(truth[1])
    return [each + picked, each]


def gradient_scales(case: Case, truth: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Of what is summed up, which may cancel: exp of a logit computed again is off by that logit's ulps."""
    factors = torch.cat([magnitude(case.tensors[name]).flatten() for name in case.gradients] + [torch.ones(1)])
    pulled = torch.cat([magnitude(g).flatten() for g in upstream] + [torch.zeros(1)])
    return [pulled.max() * factors.max() * torch.cat((size(case).flatten(), torch.ones(1))).max()] * len(case.gradients)


def gradient_scales_of_combination(case: Case, truth: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Of g exp(max - lse), whose exponent is off by ulps of either."""
    top, lse = case.arguments["max"], truth[1]
    on_logprob, on_lse = (magnitude(g) for g in upstream)
    share = magnitude((top - lse).exp()) * (1 + magnitude(top) + magnitude(lse))
    return [(on_logprob + on_lse) * share, on_logprob]


options = st.fixed_dictionaries(
    {
        "logit_scale": st.sampled_from([1.0, 0.3, -2.0]),
        "softcap": st.sampled_from([None, 1.5, 30.0]),
        "temperature": st.sampled_from([1.0, 0.6, 2.0]),
    }
)


def sizes(
    rows: st.SearchStrategy, widths: st.SearchStrategy[int], vocabularies: Sequence[int], **more: st.SearchStrategy
) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "rows": rows,
            "width": widths,
            "vocabulary": st.sampled_from(vocabularies),
            "bias": st.booleans(),
            "padding": st.integers(0, 3),
            "options": options,
            "index": st.sampled_from([torch.int32, torch.int64]),
            "seed": seeds,
            **more,
        }
    )


ROWS = st.lists(st.integers(0, 5), max_size=2) | st.just([18])
ANY_WIDTH = st.sampled_from([0, 1, 5, 8, 16, 24, 40])
SEVERAL = st.sampled_from([None, None, 0, 1, 4])
VOCABULARIES = (0, 1, 9, 31, 32, 33, 65, 100)
MANY = {
    "width": 40,
    "vocabulary": 290,
    "padding": 11,
    "options": {"logit_scale": 0.4, "softcap": 5.0, "temperature": 0.7},
}
TYPICAL = {
    "rows": (6,),
    "width": 16,
    "vocabulary": 100,
    "padding": 2,
    "options": {"logit_scale": 0.7, "softcap": 30.0, "temperature": 0.8},
    "seed": 2,  # of half the rows the largest logit lies in later tiles
}
TINY = [
    {"rows": (4,), "width": 3, "vocabulary": 5, "padding": 1, "bias": bias, "options": options, **more}
    for bias, options, more in [
        (False, {"temperature": 0.7}, {}),
        (True, {"softcap": 2.0, "logit_scale": 0.8}, {}),
        (True, {"softcap": 2.0, "temperature": 0.7}, {"several": 3}),
    ]
]
EVERY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRITON = {
    f"triton linear_logprob_form={form}": Way(kernels=2, small=small, also=[{"rows": (133,), **MANY}]) for form in FORMS
}
if HAS_GLUON and os.environ["TRITON_INTERPRET"] == "1":  # on a GPU it has a process of its own, in tests/gpu
    TRITON["triton linear_logprob_form=gluon"] = replace(
        TRITON["triton linear_logprob_form=fused"],
        dtypes=HALF,
        kernels=1,  # of triton.py
    )
REFERENCE = Way(EVERY, small=small_blocks)
plain = partial(make, padding=0, bias=False)
GOOD = single(make(**TYPICAL)).tensors
NUMBERS = [
    ("softcap", {"softcap": 0.0}, ValueError),
    ("temperature", {"temperature": -1.0}, ValueError),
    ("valid_vocab", {"valid_vocab": -1}, ValueError),
]


def wrong_tensors(weight: str, bad_ids: Sequence[int]) -> list[tuple[str, dict[str, Any], type[Exception]]]:
    return [
        ("hidden", {"hidden": torch.tensor(1.0)}, ValueError),
        (weight, {weight: torch.ones(102, 15)}, ValueError),
        ("target", {"target": ids(0, 1, 2)}, ValueError),
        ("target", {"target": ids(0, 1, 2)[:, None]}, ValueError),
        *[("target", {"target": ids(0, 1, 2, 3, 4, bad)}, ValueError) for bad in bad_ids],
        ("bias", {"bias": torch.ones(101)}, ValueError),
        *NUMBERS,
    ]


OP = Op(
    "linear_logprob",
    make,
    sizes(ROWS, ANY_WIDTH, VOCABULARIES, several=SEVERAL),
    definition,
    {
        "reference": replace(REFERENCE, also=[{"rows": (48,), "width": 64, "vocabulary": 300}]),
        **TRITON,
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes(
                st.lists(st.integers(1, 5), max_size=2),
                WIDTHS,
                (1, 2, 3, 4, 5, 15, 16, 17, 64, 67, 130),
                several=SEVERAL,
            ),
            layouts=CONTIGUOUS,
            apart=("weight",),
            also=[
                {"rows": (3,), "width": 0, "vocabulary": 5},
                {"rows": (500,), "width": 33, "vocabulary": 600},
                *(
                    {
                        "rows": (9,),
                        "width": 7,
                        "vocabulary": 3001,
                        "options": {"logit_scale": 3.0, "softcap": softcap, "temperature": 0.5},
                    }
                    for softcap in (None, 30.0)
                ),
            ],
            refused=[
                lambda: single(make((2,), 3, 5)).with_(bias=torch.ones(10)[::2]),
                lambda: single(plain((2,), 3, 5, options={"softcap": 1e-60})),
                lambda: single(plain((0,), 3, 5)),
            ],
        ),
    },
    typical=TYPICAL,
    tiny=TINY,
    scales=scales,
    gradient_scales=gradient_scales,
    widened=(0, 1, 2, 3),
    rows={"hidden": 0, "target": 0},
    hostile=("hidden", "bias"),
    result_rows=(0, 0, 0, 0),
    wrong=[
        *wrong_tensors("weight", [100, -1]),
        ("valid_vocab", {"valid_vocab": 103}, ValueError),
        *(("top_k", {"top_k": k}, ValueError) for k in (0, 101)),
    ],
)
PARTIALS = Op(
    "linear_logprob_partials",
    make_partials,
    sizes(
        ROWS,
        ANY_WIDTH,
        VOCABULARIES,
        padding=st.just(0),
        vocab_start=st.sampled_from([0, 2, 40]),
        valid_vocab=st.sampled_from([None, 1, 20, 60, 150]),
    ),
    definition,
    {"reference": REFERENCE, **{name: replace(way, also=()) for name, way in TRITON.items()}},
    typical=TYPICAL | {"padding": 0, "vocab_start": 2},
    scales=scales_of_partials,
    gradient_scales=gradient_scales,
    widened=(0, 1, 2),
    rows={"hidden": 0, "target": 0},
    hostile=("hidden", "bias"),
    result_rows=(0, 0, 0),
    wrong=[
        *wrong_tensors("weight_shard", [-1]),
        ("target", {"target": ids(0, 1, 2, 3, 4, 20), "valid_vocab": 20}, ValueError),
        ("vocab_start", {"vocab_start": -1}, ValueError),
    ],
)
PARTS = {name: torch.ones(3, 6) for name in ("max", "sumexp", "target_logit")}
COMBINATION = Op(
    "combine_logprob_partials",
    make_combination,
    st.fixed_dictionaries(
        {
            "shards": st.integers(1, 5),
            "rows": st.integers(0, 11),
            "empty": st.booleans(),
            "shift": st.sampled_from([0.0, 1e4, -3e38]),
            "seed": seeds,
        }
    ),
    definition,
    {
        "reference": Way((torch.float64, torch.float32)),
        "triton": Way((torch.float32,), small=small),
    },
    typical={"shards": 3, "rows": 6},
    tiny=[{"shards": 3, "rows": 4}],
    scales=scales_of_combination,
    gradient_scales=gradient_scales_of_combination,
    rows=dict.fromkeys(PARTS, 1),
    hostile=("target_logit",),
    wrong=[
        ("max", {"max": PARTS["max"][0]}, ValueError),
        ("sumexp", {"sumexp": torch.ones(3, 7)}, ValueError),
    ],
    result_rows=(0, 0),
)


EXAMPLES = {
    "linear_logprob": OP.example(rows=(6,), width=8, vocabulary=11),
    "linear_logprob, three dimensions": OP.example(rows=(2, 3), width=8, vocabulary=11, bias=False, index=torch.int32),
    "linear_logprob, several ids a row": OP.example(rows=(6,), width=8, vocabulary=11, several=3),
    "linear_logprob, most probable ids": OP.example(rows=(6,), width=8, vocabulary=11, options={"top_k": 3}),
    "linear_logprob, frozen head": lambda: replace(
        OP.example(rows=(8,), width=4, vocabulary=9000)(), gradients=("hidden",)
    ),
    "linear_logprob_partials": PARTIALS.example(rows=(6,), width=8, vocabulary=11, vocab_start=2),
    "combine_logprob_partials": COMBINATION.example(shards=3, rows=5),
}
