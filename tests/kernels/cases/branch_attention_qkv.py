"""How `branch_attention_qkv` is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases import branch_attention
from cases.base import CONTIGUOUS, LOW, Case, Op, Way, definition, generator, ids, normal, seeds, single
from fb_kernels import BranchLayout
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.qk_norm_rope.naive import qk_norm_rope
from fb_kernels.testing import magnitude

CACHES = ("k_cache", "v_cache")
TABLES = ("cos", "sin")
INPUTS = ("qkv", "q_weight", "k_weight", *TABLES, "positions", "num_heads", "num_kv_heads")
LENGTH = 12  # of the tables


def make(
    rows: int = 3,
    repeat: int = 2,
    kv_heads: int = 2,
    half: int = 4,
    held: int = 5,
    spare: int = 4,
    *,
    normed: tuple[bool, bool] = (True, True),
    keep: str = "all",
    heads_first: bool = False,
    unheld: float = math.nan,
    wide_tables: bool = False,
    index: torch.dtype = torch.int32,
    page: int | None = None,
    sequences: int = 1,
    seed: int = 0,
    **options: Any,
) -> Case:
    """All rows, some or none are kept; the caches hold what is never to be seen from `held` on.

    In pages each of the sequences has so many rows, and the first holds most; entries without a token that is seen are
    wild.
    """
    sequences = sequences if page is not None else 1
    each, rows = rows, rows * sequences
    width, source = 2 * half, generator(seed)
    shapes = [((repeat + 2) * kv_heads * width,), (held + spare, kv_heads, width), (held + spare, kv_heads, width)]
    qkv, *caches = normal(seed, (rows, *shapes[0]), *shapes[1:])
    q_weight, k_weight, *angles = normal(seed + 1, (width,), (width,), (LENGTH, width), (LENGTH, width))
    for cache in caches:
        cache[held:] = unheld
    if heads_first:
        caches[1] = caches[1].transpose(0, 1).contiguous().transpose(0, 1)
    slots = None
    if keep != "none":
        slots = (held + torch.cat([torch.randperm(spare, generator=source)[:each] for _ in range(sequences)])).to(index)
        slots[1 :: 2 if keep == "some" else rows + 1] = -1
    arguments = {
        "qkv": qkv,
        "q_weight": q_weight if normed[0] else None,
        "k_weight": k_weight if normed[1] else None,
        "cos": angles[0].cos(),
        "sin": angles[1].sin(),
        "positions": torch.randint(0, LENGTH, (rows,), generator=source).to(index),
        **dict(zip(CACHES, caches, strict=True)),
        "held": torch.tensor([held], dtype=index),
        "slots": slots,
        "block_table": None,
        "num_heads": repeat * kv_heads,
        "num_kv_heads": kv_heads,
    }
    if page is not None:
        first = max(0, held + 1 - (options.get("window") or held + 1))
        arguments |= in_pages(caches, slots, first, held, spare, page, sequences, unheld, index, source)
    least = dict.fromkeys(TABLES, torch.float32) if wide_tables else {}
    written = () if slots is None else CACHES
    return Case("branch_attention_qkv", arguments | options, written=written, least=least)


def in_pages(
    flat: Sequence[Tensor],
    slots: Tensor | None,
    first: int,
    held: int,
    spare: int,
    page: int,
    sequences: int,
    unheld: float,
    index: torch.dtype,
    source: torch.Generator,
) -> dict[str, Any]:
    """Sequences with keys and values of a flat cache, each others, in shuffled pages; they see as many from the end."""
    count = -(-(held + spare) // page)  # of a sequence
    order = torch.randperm(sequences * count + 2, generator=source)[: sequences * count].view(sequences, count)
    lengths = [held if g == 0 else int(torch.randint(held + 1, (), generator=source)) for g in range(sequences)]
    caches = [x.new_full((sequences * count + 2, page, *x.shape[1:]), unheld) for x in flat]
    table = torch.tensor([-1, 0, 1 << 20])[torch.randint(3, (sequences, count + 1), generator=source)]
    for g, length in enumerate(lengths):
        at = torch.arange(length)
        read = slice(max(0, first + length - held) // page, -(-length // page))
        table[g, read] = order[g, read]
        for cache, x in zip(caches, flat, strict=True):
            cache[order[g, at // page], at % page] = x[:length].roll(g, -1)
    if slots is not None:
        each = len(slots) // sequences
        token = slots - held + torch.tensor(lengths).repeat_interleave(each)
        place = order.repeat_interleave(each, 0).gather(1, (token.clamp(min=0) // page)[:, None])[:, 0] * page
        slots = (place + token % page).where(slots >= 0, slots).to(index)
    return {
        **dict(zip(CACHES, caches, strict=True)),
        "held": torch.tensor(lengths, dtype=index),
        "slots": slots,
        "block_table": table.to(index),
    }


def attention(case: Case) -> Case:
    """`branch_attention` of what is normed and rotated."""
    given = case.arguments
    q, k, v = qk_norm_rope(**{name: given[name] for name in INPUTS}, eps=given.get("eps", 1e-6))
    held, table, window = given["held"].tolist(), given["block_table"], given.get("window")
    first = [0 if window is None else max(0, n + 1 - window) for n in held]
    seen = [(start, n - start) for start, n in zip(first, held, strict=True)]
    layout = BranchLayout.of([[1] * (len(q) // len(held))] * len(held), seen, block_table=table)
    prefix = {"prefix_k": given["k_cache"], "prefix_v": given["v_cache"], "layout": layout}
    return Case("branch_attention", {"q": q, "k": k, "v": v, "scale": given.get("scale")} | prefix)


def scales(case: Case, _: Sequence[Tensor]) -> list[Tensor]:
    """The sums of |terms| of out; of what is kept of keys their rotation's, and the rest is exact."""
    dtype, case = case.arguments["qkv"].dtype, OP.cast(case, torch.float64)
    size = case.with_(**{name: magnitude(x) for name, x in case.tensors.items() if x.is_floating_point()})
    sine = size.arguments["sin"].clone()
    sine[:, : sine.shape[1] // 2] *= -1  # so that no rotation subtracts
    exact, rotated = attention(case), attention(size.with_(sin=sine))
    eps = torch.finfo(accumulation_dtype(dtype)).eps / torch.finfo(dtype).eps
    moved = 1 + eps * branch_attention.rounding(rotated).T[..., None]
    values = {name: magnitude(exact.arguments[name]) for name in ("v", "prefix_v")}
    out = branch_attention.states(exact, **values)[0] * moved
    kept = [torch.zeros(case.arguments[name].shape, dtype=torch.float64) for name in case.written]
    for row, slot in enumerate(case.tensors.get("slots", ids()).tolist()):
        if slot >= 0:
            kept[0].view(-1, *kept[0].shape[-2:])[slot] = rotated.arguments["k"][row].amax(-1, keepdim=True)
    return [out.amax(-1, keepdim=True), *kept]


def sizes(least: int, shapes: dict[str, st.SearchStrategy], **others: st.SearchStrategy) -> st.SearchStrategy:
    drawn = {
        "rows": st.integers(least, 5),
        "kv_heads": st.integers(1, 3),
        "spare": st.integers(5, 9),
        "normed": st.tuples(st.booleans(), st.booleans()),
        "keep": st.sampled_from(["none", "all", "some"]),
        "index": st.sampled_from([torch.int32, torch.int64]),
        "wide_tables": st.booleans(),
        "page": st.sampled_from([None, None, 1, 3, 16, 64]),
        "sequences": st.integers(1, 3),
        "window": st.none() | st.integers(1, 45),
        "scale": st.sampled_from([None, 0.3, -0.2]),
        "seed": seeds,
    }
    return st.fixed_dictionaries(drawn | shapes | others)


FEW = {"repeat": st.integers(1, 3), "half": st.integers(1, 4), "held": st.integers(0, 7)}
VECTORS = {
    "repeat": st.integers(1, 4),
    "half": st.sampled_from([1, 2, 3, 4, 8, 9, 16, 32, 40]),
    "held": st.integers(0, 40),
}
COMPILED = sizes(
    1,
    {"repeat": st.sampled_from([1, 2, 3, 7, 16]), "half": st.sampled_from([32, 32, 64])},
    rows=st.sampled_from([1, 2, 3, 5, 9, 13, 32]),
    held=st.sampled_from([0, 1, 63, 64, 65, 128, 200, 330]),
    spare=st.sampled_from([33, 90]),
    index=st.just(torch.int32),
    wide_tables=st.just(True),
    page=st.sampled_from([None, 64, 128]),
    window=st.sampled_from([None, None, 1, 2, 63, 64, 65, 129, 1000, 2**32 + 5]),
)


def in_16_bits(**sizes: Any) -> Case:
    """As the compiled kernel takes it."""
    return OP.cast(make(**{"half": 32, "wide_tables": True} | sizes), torch.bfloat16)


def relaid(change: str, **sizes: Any) -> Case:
    """The same with an argument of other strides."""
    case = in_16_bits(**sizes)
    x = case.arguments[change]
    return case.with_(**{change: x.transpose(0, -1).contiguous().transpose(0, -1)})


def retyped(*names: str, dtype: torch.dtype) -> Case:
    case = in_16_bits()
    return case.with_(**{name: case.arguments[name].to(dtype) for name in names})


def shifted() -> Case:
    """From an odd address on."""
    case = in_16_bits()
    qkv = case.arguments["qkv"]
    return case.with_(qkv=torch.cat([qkv.new_zeros(1), qkv.flatten()])[1:].view_as(qkv))


def wrong_pages(heads: int, width: int) -> list[tuple[str, dict[str, Any], type[Exception]]]:
    """Of pages in the place of a typical call's 13 slots, the first 5 of which are held."""
    caches = {name: torch.ones(13, 1, heads, width) for name in CACHES}
    pages = caches | {"block_table": ids(0, 1, 2, 3, 4, -1)[None]}
    return [
        ("held", {"held": ids(2, 3)}, ValueError),
        ("k_cache", caches, ValueError),
        ("k_cache", {"block_table": ids(0)[None]}, ValueError),
        ("k_cache", pages | {name: torch.ones(13, 0, heads, width) for name in CACHES}, ValueError),
        ("held", pages | {"held": ids(1, 1, 1, 1)}, ValueError),
        ("held", pages | {"held": ids()}, ValueError),
        ("held", pages | {"held": ids(7)}, ValueError),
        ("held", pages | {"held": ids(5, -1), "block_table": pages["block_table"].repeat(2, 1)}, ValueError),
        ("block_table", pages | {"block_table": ids(0, 1, 2, 3, 4)}, ValueError),
        ("block_table", pages | {"block_table": torch.ones(1, 5)}, TypeError),
        ("block_table", pages | {"held": ids(1, 1)}, ValueError),
        ("block_table", pages | {"block_table": ids(0, 1, 2, 3, 13)[None]}, ValueError),
        ("block_table", pages | {"held": ids(6)}, ValueError),
        *(("slots", pages | {"slots": ids(5, slot, 7, 8, 9, 10)}, ValueError) for slot in (4, 13, 5)),
    ]


EVERY = (torch.float64, *LOW)
HEADS, OTHER = torch.ones(6, 64), torch.arange(6)
TRITON = Way(
    sizes=sizes(0, FEW, rows=st.integers(0, 3), kv_heads=st.integers(1, 2)),
    kernels=0,  # of its own: they are those of its parts
    small=branch_attention.small,
    also=[{"held": 20, "half": 32, "window": window, "keep": "some"} for window in (None, 7)],
)
OP = Op(
    "branch_attention_qkv",
    make,
    sizes(0, FEW),
    definition,
    {
        "reference": Way(EVERY, also=[{"held": 40, "half": 16}, {"held": 40, "half": 16, "page": 16, "sequences": 5}]),
        "device": Way(EVERY),
        "triton": TRITON,
        "triton invariant": TRITON,
        "cuda": Way(
            (torch.bfloat16, torch.float16),
            COMPILED,
            layouts=("packed",),
            also=[
                {"rows": rows, "repeat": repeat, "kv_heads": 1, "half": half, "held": held, "spare": 40}
                | {"wide_tables": True}
                for rows, repeat, half, held in ((1, 1, 128, 2200), (17, 4, 128, 30), (32, 16, 32, 67))
            ]
            + [
                {"half": 32, "wide_tables": True} | each
                for each in (
                    {"held": 0, "spare": 0, "keep": "none"},
                    {"held": 0, "spare": 0, "keep": "none", "page": 64, "sequences": 2},
                    {"rows": 16, "held": 700, "spare": 20, "page": 64, "sequences": 4, "kv_heads": 1},
                    {"rows": 1, "held": 2200, "page": 192, "sequences": 9, "kv_heads": 1, "window": 1500},
                )
            ],
            refused=[
                lambda: retyped("qkv", *CACHES, "q_weight", "k_weight", dtype=torch.float32).with_(
                    **{name: torch.ones(LENGTH, 64).double() for name in TABLES}
                ),
                lambda: retyped(*TABLES, dtype=torch.float64),
                lambda: retyped("positions", "held", "slots", dtype=torch.int64),
                *((lambda name=name: relaid(name)) for name in ("qkv", "sin", "v_cache")),
                lambda: in_16_bits(unheld=0.0).with_(v_cache=torch.ones(9, 4, 64).bfloat16()[:, :2]),
                lambda: in_16_bits().with_(slots=torch.stack([ids(5, 6, 7)] * 2, 1)[:, 0]),
                shifted,
                lambda: in_16_bits(rows=33, spare=33),
                lambda: in_16_bits(rows=33, spare=33, page=64, sequences=2),
                lambda: in_16_bits(page=16, sequences=2),
                lambda: in_16_bits(page=64, sequences=2, index=torch.int64),
                lambda: relaid("block_table", held=70, page=64, sequences=2),
                lambda: relaid("k_cache", page=64, sequences=2),
                lambda: in_16_bits(half=48),
                lambda: in_16_bits(rows=1, repeat=17),
            ],
        ),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes(1, VECTORS, wide_tables=st.just(True)),
            layouts=CONTIGUOUS,
            apart=("qkv", *CACHES),
            also=[
                {"wide_tables": True} | case
                for case in (
                    {"rows": 1, "half": 32, "held": 3000},
                    {"rows": 2, "half": 8, "held": 30, "scale": 50.0},
                    {"heads_first": True},
                    {"rows": 16, "half": 32, "held": 300, "spare": 20},
                    {"rows": 2, "half": 32, "held": 500, "page": 64, "sequences": 5},
                )
            ],
            refused=[
                lambda: single(make(33, keep="none")),
                lambda: single(make(1)).with_(
                    v_cache=torch.ones(2, 9, 8).transpose(0, 1).mT.contiguous().mT,
                ),
            ],
        ),
    },
    typical={"rows": 6, "spare": 8, "keep": "some", "unheld": 0.5, "half": 32, "wide_tables": True},
    scales=scales,
    rows={"qkv": 0},
    hostile=(),  # of a row whose scores are all infinitely low nothing is promised
    which_strange=False,
    wrong=[
        ("qkv", {"qkv": torch.ones(6, 5)}, ValueError),
        ("qkv", {"qkv": torch.ones(6, 512, requires_grad=True)}, ValueError),
        ("cos", {"cos": torch.ones(3, 7), "sin": torch.ones(3, 7)}, ValueError),
        ("num_heads", {"num_heads": 3}, ValueError),
        ("num_heads", {"num_heads": 0, "qkv": torch.ones(6, 256)}, ValueError),
        ("q_weight", {"q_weight": torch.ones(7)}, ValueError),
        ("positions", {"positions": ids(0, 1)}, ValueError),
        *(("positions", {"positions": OTHER + shift}, ValueError) for shift in (7, -1)),
        ("k_cache", {"k_cache": torch.ones(13, 128)}, ValueError),
        ("v_cache", {"v_cache": torch.ones(12, 2, 64)}, ValueError),
        ("held", {"held": torch.tensor(5)}, ValueError),
        *(("held", {"held": ids(value)}, ValueError) for value in (14, -9)),
        ("slots", {"slots": ids(5, 6)}, ValueError),
        *(("slots", {"slots": ids(5, other, 7, 8, 9, 10)}, ValueError) for other in (4, 13, 5)),
        ("window", {"window": 0}, ValueError),
        ("eps", {"eps": 0.0}, ValueError),
        *wrong_pages(2, 64),
    ],
)


EXAMPLES = {
    "branch_attention_qkv": OP.example(rows=1, keep="none", unheld=0.5),
    "branch_attention_qkv, written": OP.example(rows=4, window=4, unheld=0.5),
    "branch_attention_qkv, in pages": OP.example(rows=2, held=7, page=3, sequences=2, seed=7),
}
