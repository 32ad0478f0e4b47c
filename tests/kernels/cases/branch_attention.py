"""How `branch_attention` is called."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from layouts import LAYOUTS
from torch import Tensor
from torch.nn.functional import pad

from cases.base import INDICES, ROWS, Case, Op, Way, definition, generator, ids, launched, normal, seeds, single
from fb_kernels import BranchLayout, branch_attention
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.branch_attention import reference, triton_backward, triton_layout
from fb_kernels.branch_attention.naive import branch_attention as naive
from fb_kernels.testing import magnitude, poison_
from fb_kernels.triton import HAS_GLUON

Groups = Sequence[tuple[Sequence[int], int, int]]  # rows of each branch, first key of the slice, keys
OWN, SHARED = ("q", "k", "v"), ("prefix_k", "prefix_v")
TILE, SPLIT = 1 << 20, 1  # hints of the longest branch, which decide which kernel of Triton's runs

FEWEST = 4 if os.environ["TRITON_INTERPRET"] == "1" else 16  # keys of a block: a GPU's product is of 16 or more
LAUNCH = {"BLOCK_M": 2 * FEWEST, "BLOCK_N": FEWEST, "num_warps": 4, "num_stages": 1}
BACKWARD_LAUNCH = {"BLOCK_M": 16, "BLOCK_N": 16, "KEYS": 16, "KEY_ROWS": 16}
PREFIX_LAUNCH = {"KEYS": 16, "KEY_ROWS": 16}


def make(
    groups: Groups,
    heads: tuple[int, int] = (4, 2),
    width: int = 8,
    *,
    page: int | None = None,
    heads_first: bool = False,
    own: bool = True,
    spare: int = 2,
    index: torch.dtype = torch.int32,
    longest: int | None = None,
    longest_prefix: int | None = None,
    seed: int = 0,
    return_lse: bool = True,
    **options: Any,
) -> Case:
    """Over one buffer, or shuffled pages, with `spare` of both that no slice uses; what is not used is NaN."""
    branches = [rows for lengths, _, _ in groups for rows in lengths]
    rows, size = sum(branches), max((start + length for _, start, length in groups), default=0) + spare
    q, *both = normal(seed, (rows, heads[0], width), *[(rows, heads[1], width)] * 2, *[(size, heads[1], width)] * 2)
    used = torch.zeros(size, dtype=torch.bool)
    for _, start, length in groups:
        used[start : start + length] = True
    prefix, table = [x.masked_fill(~used[:, None, None], math.nan) for x in both[2:]], None
    if page is not None:
        prefix, table = paged(prefix, groups, page, spare, heads_first)
    layout = BranchLayout(
        torch.tensor([0, *branches], dtype=index).cumsum(0, dtype=index),
        torch.tensor([0, *(len(lengths) for lengths, _, _ in groups)], dtype=index).cumsum(0, dtype=index),
        torch.tensor([start for _, start, _ in groups], dtype=index),
        torch.tensor([length for _, _, length in groups], dtype=index),
        None if table is None else table.to(index),
        longest,
        longest_prefix,
    )
    given = (q, *(both[:2] if own else (None, None)), *prefix, layout)
    arguments = dict(zip((*OWN, *SHARED, "layout"), given, strict=True))
    gradients = (OWN if own else OWN[:1]) + (SHARED if page is None else ())
    arguments |= options | {"return_lse": return_lse}
    return Case("branch_attention", arguments, gradients=gradients, outputs=(0, 1)[: 1 + return_lse])


def paged(flat: list[Tensor], groups: Groups, page: int, spare: int, heads_first: bool) -> tuple[list[Tensor], Tensor]:
    """(prefixes, table) of the same slices, each in pages of its own."""
    counts = [-(-(start + length) // page) if length else 0 for _, start, length in groups]
    order = torch.randperm(sum(counts) + spare, generator=generator(0)).tolist()
    _, heads, width = flat[0].shape
    shape = (len(order), heads, page, width) if heads_first else (len(order), page, heads, width)
    prefix = [poison_(x.new_empty(shape)) for x in flat]
    prefix = [x.transpose(1, 2) for x in prefix] if heads_first else prefix
    table = torch.full((len(groups), max(counts, default=0) + (spare > 0)), -1)
    for group, (count, (_, start, length)) in enumerate(zip(counts, groups, strict=True)):
        for column in range(start // page, count):  # what lies before is never read
            table[group, column] = order.pop()
        at = torch.arange(start, start + length)
        for target, source in zip(prefix, flat, strict=True):
            target[table[group, at // page], at % page] = source[at]
    return prefix, table


def states(case: Case, **changes: Any) -> list[Tensor]:
    """[out, lse] of the definition."""
    given = case.changed(**changes)
    layout, _ = given.pop("layout"), given.pop("return_lse", False)
    return list(naive(**given, **{each: getattr(layout, each) for each in INDICES}))


def sizes_of(case: Case) -> dict[str, Tensor]:
    floats = {name: x for name, x in case.tensors.items() if x.is_floating_point()}
    return {name: magnitude(x) for name, x in floats.items()}


def rounding(case: Case) -> Tensor:
    """Of scores, [Hq, T]: at |q| |k| |scale|, of which the log of a sum is the largest or more."""
    size = sizes_of(case)
    keys = {name: size[name] for name in ("q", "k", "prefix_k") if name in size}
    return states(case, **keys, softcap=None)[1].clamp(min=0.0)


def moved(case: Case, dtype: torch.dtype) -> Tensor:
    """[T, Hq, 1]: what a probability weighs moves with its score, which is rounded in the wider dtype."""
    eps = torch.finfo(accumulation_dtype(dtype)).eps / torch.finfo(dtype).eps
    return 1 + eps * rounding(case).T[..., None]


def scales(case: Case, truth: Sequence[Tensor]) -> list[Tensor]:
    """The sums of |terms| of out, and the scores of lse: torch's flash attention is rough in 16 bits."""
    dtype, case = case.arguments["q"].dtype, OP.cast(case, torch.float64)
    size = sizes_of(case)
    values = {name: size[name] for name in ("v", "prefix_v") if name in size}
    out = states(case, **values)[0] * moved(case, dtype)
    lse = rounding(case) + (256 if dtype.itemsize == 2 else 1)  # 4 of these units are 1.2e-4
    return [out.amax(-1, keepdim=True), lse][: len(truth)]


def gradient_scales(case: Case, _: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Likewise; dout . v - dout . out + dlse may cancel; the first two are at most twice the largest dout . v."""
    size, pull, width = sizes_of(case), magnitude(upstream[0]), case.arguments["q"].shape[-1]
    own, shift = "k" in size, moved(case, upstream[0].dtype)
    as_values = {"prefix_v": size["prefix_k"]} | ({"v": size["k"]} if own else {})
    as_keys = {"q": pull, "prefix_k": size["prefix_v"]} | ({"k": size["v"]} if own else {})
    reach = states(case, **as_keys, scale=1.0, softcap=None)[1].clamp(min=0.0).T[..., None]
    reach = 2 * reach + sum(magnitude(x).T[..., None] for x in upstream[1:])
    ds = reach * shift * (case.arguments.get("scale") or width**-0.5)
    terms = {"q": ds * states(case, **as_values)[0]}
    leaves = {
        name: size[name].requires_grad_() for name in ("v", "prefix_v") if name in size
    }  # p weighs what is pulled
    out = states(case, q=case.arguments["q"].detach().requires_grad_(), **leaves)[0]
    for letter, pulled in (("k", ds * size["q"]), ("v", pull * shift)):
        found = torch.autograd.grad(out, list(leaves.values()), pulled, retain_graph=True, materialize_grads=True)
        terms |= {name[:-1] + letter: x for name, x in zip(leaves, found, strict=True)}
    return [terms[name].abs().amax(-1, keepdim=True) for name in case.gradients]


def groups(rows: st.SearchStrategy[list[int]], keys: int, least: int = 0, most: int = 3) -> st.SearchStrategy[Groups]:
    return st.lists(st.tuples(rows, st.integers(0, 6), st.integers(0, keys)), min_size=least, max_size=most)


def sizes(
    most: int, longest: int, keys: int, heads: Sequence[tuple[int, int]], widths: Sequence[int]
) -> st.SearchStrategy:
    branches = st.lists(st.integers(0, longest), max_size=most) | st.lists(st.integers(0, 1), max_size=most)
    return st.fixed_dictionaries(
        {
            "groups": groups(branches, keys, most=most),
            "heads": st.sampled_from(heads),
            "width": st.sampled_from(widths),
            "page": st.sampled_from([None, None, 1, 3, 16]),
            "heads_first": st.booleans(),
            "own": st.sampled_from([True, True, False]),
            "spare": st.sampled_from([0, 2]),
            "index": st.sampled_from([torch.int32, torch.int64]),
            "longest": st.sampled_from([None, None, 0, SPLIT, TILE]),
            "longest_prefix": st.sampled_from([None, 0, 9, 1 << 40]),
            "window": st.sampled_from([None, None, 1, 2, 5, 12, 1 << 40]),
            "softcap": st.sampled_from([None, None, 1.5]),
            "scale": st.sampled_from([None, 0.9]),
            "return_lse": st.booleans(),
            "seed": seeds,
        }
    )


COMPILED = st.fixed_dictionaries(
    {
        "groups": groups(st.integers(0, 20).map(lambda rows: [1] * rows), 330, 1),
        "longest": st.sampled_from([None, 0, SPLIT]),
    }
) | st.fixed_dictionaries(  # the hint is wrong
    {"groups": groups(st.lists(st.integers(0, 5), max_size=4), 330), "longest": st.just(SPLIT)}
)
COMPILED_OPTIONS = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (16, 1), (9, 1)]),
        "width": st.sampled_from([64, 64, 128, 256]),
        "page": st.sampled_from([None, None, 1, 3, 16, 64]),
        "heads_first": st.booleans(),
        "own": st.sampled_from([True, True, False]),
        "spare": st.sampled_from([0, 2]),
        "index": st.sampled_from([torch.int32, torch.int64]),
        "longest_prefix": st.sampled_from([None, None, 0, 70, 1 << 40]),
        "scale": st.sampled_from([None, 0.9]),
        "return_lse": st.booleans(),
        "seed": seeds,
    }
)


@contextmanager
def small_blocks() -> Iterator[None]:
    """Of the reference."""
    with mock.patch.multiple(reference, SCORES=64, ROW_BLOCK=4):
        yield


@contextmanager
def small() -> Iterator[None]:
    """Blocks so small that a few keys, rows and offsets span several, and pieces of one block."""
    given = launched(
        branch_attention=LAUNCH,
        branch_attention_gluon={"BLOCK_M": 16, "BLOCK_N": 4, "STAGES": 2},
        branch_attention_split=LAUNCH | {"CHUNK": 2 * FEWEST},
        branch_attention_backward=BACKWARD_LAUNCH,
        branch_attention_backward_prefix=PREFIX_LAUNCH,
    )
    with given, mock.patch.object(triton_backward, "PIECE", 16), mock.patch.object(triton_layout, "OFFSETS", 4):
        yield


def keys_anywhere(dtype: torch.dtype, rows: int, places: Sequence[int], **options: Any) -> None:
    """Check that rows have the same bits wherever their keys lie: own, in a slice, in pages, beside another branch."""
    q, k, v = (x.to(dtype) for x in normal(0, (rows, 2, 16), (rows, 1, 16), (rows, 1, 16)))
    whole = branch_attention(q, k, v, k, v, BranchLayout.of([[rows]], [(0, 0)]), return_lse=True, **options)
    for at in places:
        beside = min(rows - at, 3)
        mine = [torch.cat([x[at:], x[at : at + beside]]) for x in (q, k, v)]
        layout = BranchLayout.of([[rows - at, beside]], [(0, at)])
        out, lse = branch_attention(*mine, k, v, layout, return_lse=True, **options)
        assert torch.equal(out, torch.cat([whole[0][at:], whole[0][at : at + beside]]))
        assert torch.equal(lse[:, : rows - at], whole[1][:, at:])
        order = torch.randperm(rows // 4 + 1, generator=generator(at))
        pages = [pad(x, (0, 0, 0, 0, 0, 4 - rows % 4)).view(-1, 4, 1, 16) for x in (k, v)]
        pages = [torch.empty_like(x).index_copy_(0, order, x) for x in pages]
        layout = BranchLayout.of([[1]], [(0, at)], block_table=[order.tolist()])
        row = [x[at : at + 1] for x in (q, k, v)]
        out, lse = branch_attention(*row, *pages, layout, return_lse=True, **options)
        assert torch.equal(out[0], whole[0][at])
        assert torch.equal(lse[:, 0], whole[1][:, at])


def one_row(*rows_and_slices: tuple[int, int, int], **options: Any) -> Case:
    """Float32 groups of so many branches of one row each."""
    return single(make([([1] * rows, start, length) for rows, start, length in rows_and_slices], **options))


def in_16_bits(groups: Groups = (([1, 1], 1, 5), ([1], 0, 9)), **options: Any) -> Case:
    """As the compiled kernel takes it."""
    return OP.cast(make(groups, **{"width": 64} | options), torch.bfloat16)


def relaid(name: str, layout: str = "steps of 2") -> Case:
    """The same with a tensor of other strides."""
    case = in_16_bits(page=4)
    return case.with_(**{name: LAYOUTS[layout](case.tensors[name])})


def spread(name: str) -> Case:
    """Float32, one tensor with gaps between its elements."""
    case = single(make(**TYPICAL))
    return case.with_(**{name: LAYOUTS["steps of 2"](case.tensors[name])})


MIXED: Groups = [([3, 1], 0, 6), ([1, 1], 6, 3)]  # branches of one row in a group of their own, for the CPU's kernel
LONG: Groups = [([20], 3, 0), ([17, 1, 1, 9], 5, 40)]
SPANNING = [{"groups": LONG, "heads": (2, 1)} | options for options in ({}, {"window": 25})]
EVERY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FEW = [(1, 1), (2, 1), (2, 2), (3, 1), (0, 1)]

TYPICAL = {"groups": MIXED, "spare": 0, "width": 16}
GOOD = {name: x.float() for name, x in make(**TYPICAL).tensors.items() if x.is_floating_point()}
K, V, PREFIX = GOOD["k"], GOOD["v"], GOOD["prefix_k"]
PAGES = PREFIX[:8].view(2, 4, 2, 16)
TABLE = ids(0, 1, -1, 0, 1, 2).view(2, 3)
IN_PAGES = {"prefix_k": PAGES, "prefix_v": PAGES}
FROZEN = IN_PAGES | {"layout.block_table": TABLE}
TRITON = Way(
    sizes=sizes(2, 4, 20, FEW, (1, 8, 16, 20)),
    small=small,
    also=[
        {"groups": [([1], 0, 18)], "heads": (16, 1), "width": 20},
        {"groups": [([2, 1], 1, 20)], "heads": (10, 2), "width": 80},
        {"groups": [([2], 0, 9)], "heads": (1, 1), "width": 256},
        {"groups": [([19], 0, 0), ([3, 7, 1], 2, 35)], "heads": (2, 1), "width": 64},
    ],
    refused=[lambda: single(make([([2], 0, 3)], width=257))],
)
GLUON = {}
if HAS_GLUON and os.environ["TRITON_INTERPRET"] == "1":  # on a GPU it has a process of its own, in tests/gpu
    taken = sizes(2, 7, 20, [(1, 1), (2, 1), (4, 2)], (16,))
    GLUON["triton branch_attention_form=gluon"] = Way(
        (torch.bfloat16, torch.float16),
        taken.map(lambda size: size | {"page": None, "longest": TILE, "window": None, "softcap": None}),
        layouts=("packed", "aligned"),
        kernels=0,  # of triton.py
        small=small,
        also=[{"groups": [([130], 3, 0), ([67, 1, 1], 5, 150)], "heads": (1, 1), "width": 32, "return_lse": False}],
    )
OP = Op(
    "branch_attention",
    make,
    sizes(3, 5, 9, [*FEW, (4, 2)], (1, 4, 8, 15)),
    definition,
    {
        "reference": Way(EVERY, small=small_blocks, also=SPANNING),
        "device": Way(EVERY, small=small_blocks),
        "triton": TRITON,
        "triton invariant": TRITON,
        **GLUON,
        "cuda": Way(
            (torch.bfloat16, torch.float16),
            st.tuples(COMPILED, COMPILED_OPTIONS).map(lambda both: both[0] | both[1]),
            {"groups": [([1] * 4, 1, 6), ([1, 1], 3, 70)], "width": 64, "spare": 0},
            layouts=("packed",),
            also=[
                {"groups": [([1] * 13, 0, 2100)], "heads": (2, 1), "width": 128},
                {"groups": [([1] * 3, 7, 1000), ([1], 0, 1)], "heads": (1, 1), "width": 64, "longest_prefix": 190},
                {"groups": [([1] * 3, 7, 1500)], "heads": (1, 1), "width": 256, "page": 9, "longest_prefix": 300},
                {"groups": [([1] * 2, 5 * group, 3) for group in range(70)], "heads": (1, 1), "width": 64},
                {"groups": [([40, 1], 0, 90)], "heads": (2, 1), "width": 64, "longest": SPLIT},
            ],
            refused=[
                lambda: single(in_16_bits()),
                lambda: in_16_bits(width=48),
                lambda: in_16_bits(window=2),
                lambda: in_16_bits(softcap=9.0),
                lambda: in_16_bits([([1, 2], 0, 3)]),
                lambda: in_16_bits(longest=TILE),
                *((lambda name=name: relaid(name)) for name in ("q", "k", "prefix_v", "layout.cu_branch")),
                lambda: relaid("layout.block_table"),
                lambda: relaid("q", "offset"),
                lambda: in_16_bits().with_(**{"layout.cu_group": ids(0, 2, 3, dtype=torch.int64)}),
            ],
        ),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            layouts=ROWS,
            also=[
                *SPANNING,
                {"groups": [([33, 5], 0, 250), ([], 0, 3), ([1] * 33, 4, 260)], "heads": (2, 1)},
                {"groups": [([2], 0, 3)], "heads": (200, 1)},
            ],
            refused=[
                lambda: OP.cast(make(**TYPICAL), torch.float16),
                *((lambda name=name: spread(name)) for name in ("q", "k", "prefix_v")),
            ],
        ),
    },
    typical=TYPICAL,
    tiny=[
        {"groups": [([2, 1], 1, 3), ([0, 3], 2, 2)], "heads": (2, 1), "width": 3, "own": own, "return_lse": False}
        | options
        for own in (True, False)
        for options in ({}, {"window": 3, "softcap": 1.5, "scale": 0.7, "page": 2})
    ],
    widened=(1,),
    scales=scales,
    gradient_scales=gradient_scales,
    wrong=[
        ("q", {"q": GOOD["q"][0]}, ValueError),
        ("q", {"q": GOOD["q"][..., :0]}, ValueError),
        ("k", {"k": K[:3]}, ValueError),
        ("k", {"k": K[:, :1]}, ValueError),
        ("k", {"k": None}, ValueError),
        ("v", {"v": None}, ValueError),
        ("v", {"v": V[..., :4]}, ValueError),
        ("prefix_k", {"prefix_k": PREFIX[..., :4]}, ValueError),
        ("prefix_k", {"prefix_k": PREFIX[:, :0]}, ValueError),
        ("prefix_k", {"prefix_k": PREFIX.repeat(1, 2, 1)[:, :3]}, ValueError),
        ("prefix_k", {"prefix_k": PAGES}, ValueError),
        ("prefix_k", {"layout.block_table": TABLE}, ValueError),
        ("prefix_v", {"prefix_v": PREFIX[1:]}, ValueError),
        *((name, FROZEN | {name: PAGES.clone().requires_grad_()}, ValueError) for name in SHARED),
        *(("layout", {"layout": value}, TypeError) for value in (None, {})),
        ("layout.cu_branch", {"layout.cu_branch": torch.tensor([[0, 6]])}, ValueError),
        ("layout.cu_group", {"layout.cu_group": ids()}, ValueError),
        ("layout.prefix_start", {"layout.prefix_start": ids(0)}, ValueError),
        ("layout.prefix_len", {"layout.prefix_len": torch.tensor(0)}, ValueError),
        ("layout.block_table", {"layout.block_table": TABLE[:1]} | IN_PAGES, ValueError),
        ("layout.block_table", {"layout.block_table": TABLE.float()} | IN_PAGES, TypeError),
        ("layout.max_branch_len", {"layout.max_branch_len": -1}, ValueError),
        *(("window", {"window": value}, TypeError if value else ValueError) for value in (0, 2.5, True)),
        *(("scale", {"scale": value}, ValueError) for value in (0.0, math.nan)),
        ("softcap", {"softcap": -1.0}, ValueError),
    ],
)


GROUPS: Groups = [([2, 3], 0, 5), ([1, 3], 2, 6)]
SINGLE: Groups = [([1] * 3, 0, 5), ([1] * 3, 2, 6)]
EXAMPLES = {
    "branch_attention": OP.example(groups=GROUPS, spare=0),
    "branch_attention, one row each": OP.example(groups=SINGLE, spare=0),
    "branch_attention, one page each": OP.example(groups=[([1] * 3, 0, 3), ([1] * 3, 0, 4)], spare=0, page=4),
    "branch_attention, paged": OP.example(
        groups=GROUPS, spare=0, page=4, window=3, softcap=2.0, scale=None, return_lse=False
    ),
    "branch_attention, prefix only": OP.example(groups=GROUPS, spare=0, own=False, return_lse=False),
}
