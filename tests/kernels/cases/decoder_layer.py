"""How `decoder_layer` is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import CONTIGUOUS, LOW, Case, Op, Way, definition, generator, ids, normal, seeds, single
from cases.branch_attention_qkv import in_pages, wrong_pages
from fb_kernels import LayerWeights
from fb_kernels.rms_norm.naive import rms_norm
from fb_kernels.testing import magnitude

CACHES = ("k_cache", "v_cache")
TABLES = ("cos", "sin")
LENGTH = 12  # of the tables


def make(
    rows: int = 3,
    model: int = 12,
    inner: int = 10,
    repeat: int = 2,
    kv_heads: int = 2,
    half: int = 4,
    held: int = 5,
    spare: int = 4,
    *,
    normed: bool = True,
    biased: bool = True,
    keep: str = "all",
    wide_tables: bool = False,
    index: torch.dtype = torch.int32,
    page: int | None = None,
    sequences: int = 1,
    seed: int = 0,
    **options: Any,
) -> Case:
    """All rows, some or none are kept; the caches hold NaN from `held` on; sequences as in `branch_attention_qkv`."""
    sequences = sequences if page is not None else 1
    each, rows = rows, rows * sequences
    width, source = 2 * half, generator(seed)
    attention, kv = repeat * kv_heads * width, (held + spare, kv_heads, width)
    weights = [(attention + 2 * kv_heads * width, model), (model, attention), (2 * inner, model), (model, inner)]
    qkv, o, gate_up, down = (x / max(x.shape[1], 1) ** 0.5 for x in normal(seed, *weights))
    biases = [x / 4 if biased else None for x in normal(seed + 1, *((len(x),) for x in (qkv, o, gate_up, down)))]
    input_norm, post_norm, q_norm, k_norm = (1 + x / 8 for x in normal(seed + 2, *[(model,)] * 2, *[(width,)] * 2))
    hidden, *caches = normal(seed + 3, (rows, model), kv, kv)
    angles = normal(seed + 4, (LENGTH, width), (LENGTH, width))
    for cache in caches:
        cache[held:] = math.nan
    slots = None
    if keep != "none":
        slots = (held + torch.cat([torch.randperm(spare, generator=source)[:each] for _ in range(sequences)])).to(index)
        slots[1 :: 2 if keep == "some" else rows + 1] = -1
    norms = (q_norm, k_norm) if normed else (None, None)
    arguments = {
        "hidden": hidden,
        "weights": LayerWeights(
            *(input_norm, qkv, biases[0], *norms, o, biases[1]),
            *(post_norm, gate_up, biases[2], down, biases[3]),
        ),
        "cos": angles[0].cos(),
        "sin": angles[1].sin(),
        "positions": torch.randint(0, LENGTH, (rows,), generator=source).to(index),
        **dict(zip(CACHES, caches, strict=True)),
        "held": torch.tensor([held], dtype=index),
        "slots": slots,
        "block_table": None,
    }
    if page is not None:
        first = max(0, held + 1 - (options.get("window") or held + 1))
        arguments |= in_pages(caches, slots, first, held, spare, page, sequences, math.nan, index, source)
    least = dict.fromkeys(TABLES, torch.float32) if wide_tables else {}
    return Case("decoder_layer", arguments | options, written=() if slots is None else CACHES, least=least)


def scales(case: Case, truth: Sequence[Tensor]) -> list[Tensor | None]:
    """Of out the stream and the sum of |terms| that are added to it; of what is kept what was projected."""
    given = OP.cast(case, torch.float64).arguments
    hidden, weights = given["hidden"], given["weights"]
    if not hidden.numel():
        return [None] * len(truth)
    w = LayerWeights(*(None if x is None else magnitude(x) for x in weights))

    def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return (x @ weight.T + (0 if bias is None else bias)).nan_to_num(0)

    qkv = project(magnitude(rms_norm(hidden, weights.input_norm, 1e-6)[0]), w.qkv, w.qkv_bias)
    kept = qkv.amax() * (1 if w.k_norm is None else w.k_norm.amax())
    value = max(float(qkv.amax()), *given["v_cache"].nan_to_num(0).abs().flatten().tolist())
    stream = magnitude(hidden) + project(torch.full((len(hidden), w.o.shape[1]), float(value)).double(), w.o, w.o_bias)
    gate, up = project(magnitude(rms_norm(stream, w.post_norm, 1e-6)[0]), w.gate_up, w.gate_up_bias).chunk(2, -1)
    out = stream + project(gate * up, w.down, w.down_bias)
    return [out.amax(-1, keepdim=True), *([kept] * len(case.written))]


def sizes(least: int, shapes: dict[str, st.SearchStrategy], **others: st.SearchStrategy) -> st.SearchStrategy:
    drawn = {
        "rows": st.integers(least, 5),
        "kv_heads": st.integers(1, 3),
        "repeat": st.integers(1, 3),
        "spare": st.integers(5, 9),
        "normed": st.booleans(),
        "biased": st.booleans(),
        "keep": st.sampled_from(["none", "all", "some"]),
        "index": st.sampled_from([torch.int32, torch.int64]),
        "wide_tables": st.booleans(),
        "page": st.sampled_from([None, None, 1, 3, 16, 64]),
        "sequences": st.integers(1, 3),
        "window": st.none() | st.integers(1, 45),
        "scale": st.sampled_from([None, 0.3]),
        "seed": seeds,
    }
    return st.fixed_dictionaries(drawn | shapes | others)


FEW = {
    "model": st.integers(1, 7),
    "inner": st.integers(1, 7),
    "half": st.integers(1, 4),
    "held": st.integers(0, 7),
}
VECTORS = {
    "model": st.sampled_from([1, 3, 15, 16, 17, 31, 32, 33, 64, 100]),
    "inner": st.sampled_from([1, 2, 5, 16, 31, 33, 70]),
    "half": st.sampled_from([1, 3, 4, 8, 9, 16, 32]),
    "held": st.integers(0, 40),
}


def shrunk(name: str, **sizes: Any) -> Case:
    """With a weight whose columns lie apart."""
    case = single(make(wide_tables=True, **sizes))
    weight = getattr(case.arguments["weights"], name)
    return case.with_(**{f"weights.{name}": torch.stack([weight, weight], -1)[..., 0]})


EVERY = (torch.float64, *LOW)
TYPICAL = make(rows=6, spare=8)
OP = Op(
    "decoder_layer",
    make,
    sizes(0, FEW),
    definition,
    {
        "reference": Way(
            EVERY,
            also=[
                {"held": 40, "half": 16, "model": 70, "inner": 90} | pages
                for pages in ({}, {"page": 16, "sequences": 4})
            ],
        ),
        "device": Way(EVERY),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes(1, VECTORS, wide_tables=st.just(True)),
            layouts=CONTIGUOUS,
            apart=("hidden", *CACHES),
            also=[
                {"wide_tables": True} | case
                for case in (
                    {"rows": 1, "model": 576, "inner": 1536, "half": 32, "kv_heads": 3, "repeat": 3, "held": 300},
                    {"rows": 13, "spare": 20, "model": 130, "inner": 300, "half": 16},
                    {"rows": 16, "spare": 20, "held": 1200},
                    {"rows": 8, "spare": 20, "held": 200, "page": 16, "sequences": 8},
                )
            ],
            refused=[
                lambda: single(make(65, spare=65, wide_tables=True)),
                *((lambda name=name: shrunk(name)) for name in ("down", "o_bias", "post_norm")),
            ],
        ),
    },
    typical={"rows": 6, "spare": 8, "keep": "some", "wide_tables": True},
    scales=scales,
    rows={"hidden": 0},
    hostile=(),  # of a row whose scores are all infinitely low nothing is promised
    which_strange=False,
    wrong=[
        ("hidden", {"hidden": torch.ones(6, 12, 1)}, ValueError),
        ("hidden", {"hidden": torch.ones(6, 12, requires_grad=True)}, ValueError),
        ("weights", {"weights": tuple(TYPICAL.arguments["weights"])}, TypeError),
        ("weights.qkv", {"weights.qkv": torch.ones(63, 12)}, ValueError),
        ("weights.qkv", {"weights.qkv": torch.ones(64, 12).double()}, TypeError),
        ("weights.qkv_bias", {"weights.qkv_bias": torch.ones(63)}, ValueError),
        ("weights.q_norm", {"weights.q_norm": torch.ones(7)}, ValueError),
        ("weights.o", {"weights.o": torch.ones(12, 30)}, ValueError),
        ("weights.o", {"weights.o": None}, TypeError),
        ("weights.gate_up", {"weights.gate_up": torch.ones(19, 12)}, ValueError),
        ("weights.down", {"weights.down": torch.ones(11, 10)}, ValueError),
        ("down_bias", {"weights.down_bias": torch.ones(12, requires_grad=True)}, ValueError),
        ("cos", {"cos": torch.ones(3, 0), "sin": torch.ones(3, 0)}, ValueError),
        ("positions", {"positions": ids(0, 1)}, ValueError),
        ("positions", {"positions": torch.arange(6) + 7}, ValueError),
        ("k_cache", {"k_cache": torch.ones(13, 16)}, ValueError),
        ("k_cache", {"k_cache": torch.ones(13, 0, 8), "v_cache": torch.ones(13, 0, 8)}, ValueError),
        ("v_cache", {"v_cache": torch.ones(12, 2, 8)}, ValueError),
        ("held", {"held": ids(14)}, ValueError),
        *(("slots", {"slots": ids(5, other, 7, 8, 9, 10)}, ValueError) for other in (4, 13, 5)),
        ("window", {"window": 0}, ValueError),
        ("eps", {"eps": 0.0}, ValueError),
        *wrong_pages(2, 8),
    ],
)


EXAMPLES = {
    "decoder_layer": OP.example(rows=1, keep="none", seed=7),
    "decoder_layer, written": OP.example(rows=4, window=4, normed=False, biased=False, seed=7),
    "decoder_layer, in pages": OP.example(rows=2, held=7, page=3, sequences=2, seed=7),
}
