"""Shapes of `branch_attention`: scoring and reranking with Qwen3-1.7B, other head sizes, and every option once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

import fb_kernels
from benchmarks.gpu.aot.compiler import Case, Cost, Tile
from fb_kernels import BranchLayout
from fb_kernels._runtime import precision, tuning
from fb_kernels.branch_attention.arguments import BranchAttention
from fb_kernels.branch_attention.triton import branch_attention
from fb_kernels.triton import HAS_GLUON

TILE, SPLIT, COMBINE, GLUON = (f"_branch_attention_{name}_kernel" for name in ("tile", "split", "combine", "gluon"))
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def case(
    groups: list[tuple[list[int], int]],
    shape: str,
    heads: tuple[int, int] = (16, 8),
    width: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    page: int | None = None,
    pad: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    form: str = "tile",
    invariant: bool = False,
) -> Case:
    """Groups are (branch lengths, prefix length). Only the costs depend on them: the layout's values are never read."""
    lengths = [length for branches, _ in groups for length in branches]
    rows, longest, prefix = sum(lengths), max(lengths), max(p for _, p in groups)
    keys = sum(p for _, p in groups)

    def empty(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=of, device="meta")

    q, own = empty(rows, heads[0], width), empty(rows, heads[1], width)
    cache = empty(*((keys,) if page is None else (keys // page, page)), heads[1], width + pad)[..., :width]
    sizes = len(lengths) + 1, len(groups) + 1, len(groups), len(groups)
    cu_branch, cu_group, start, count = (empty(n, of=torch.int32) for n in sizes)
    table = None if page is None else empty(len(groups), prefix // page, of=torch.int32)
    tensors = q, own, own, cache, cache, cu_branch, cu_group, start, count, table
    given = BranchAttention(*tensors, longest, prefix, window, width**-0.5, softcap)

    on_prefix = sum(sum(branches) * p for branches, p in groups)
    on_own = sum(length * (length + 1) // 2 for length in lengths)
    size = dtype.itemsize
    rows_bytes = (2 * q.numel() + 2 * own.numel()) * size
    prefix_bytes, flops = 2 * keys * heads[1] * width * size, 4 * heads[0] * width
    pieces = sum(sum(branches) * -(-p // 128) for branches, p in groups)  # (row, chunk of its prefix) pairs
    partial_bytes = pieces * heads[0] * width * 4
    costs = {
        TILE: Cost(rows_bytes + prefix_bytes, flops * (on_prefix + on_own)),
        GLUON: Cost(rows_bytes + prefix_bytes, flops * (on_prefix + on_own)),
        SPLIT: Cost(q.numel() * size + prefix_bytes + partial_bytes, flops * on_prefix),
        COMBINE: Cost(rows_bytes + partial_bytes, flops * on_own),
    }
    shape = (
        f"{shape} {heads[0]}/{heads[1]}x{width} {NAMES[dtype]}"
        + " gluon" * (form == "gluon")
        + " invariant" * invariant
    )
    wide = width > 128  # the split, and windowed tiles, then take 32 rows at a time: too few for HGMMA
    products = () if wide and window else (TILE,) if wide else (TILE, SPLIT)
    products = (GLUON,) if form == "gluon" else () if dtype == torch.float32 or pad else products
    exact = (TILE, SPLIT) if dtype == torch.float32 else ()

    length = min(longest, 128)
    seen = (length + 1) / 2  # keys of its own branch, by a row

    def tile(launch: Mapping[str, Any]) -> Tile:
        flops = 4 * launch["BLOCK_M"] * launch["BLOCK_N"] * launch["BLOCK_E"]
        plain = longest == 128 and width == 128 and window is softcap is page is None and not pad
        target, turns = 0.52 if plain and prefix >= 2048 else None, prefix / launch["BLOCK_N"]
        return Tile(turns, flops, prefix, False, target, seen / launch["BLOCK_N"], partial(small, launch))

    def pipelined(launch: Mapping[str, Any]) -> Tile:
        keys, step = max(prefix, longest // 2), launch["BLOCK_N"]
        flops, target = 4 * launch["BLOCK_M"] * step * launch["HEAD_DIM"], 0.7 if prefix >= 2048 else None
        return Tile(keys / step, flops, keys, True, target, seen / step, partial(small, launch))

    def small(launch: Mapping[str, Any], turns: int) -> int:
        repeat, count = heads[0] // heads[1], turns * launch["BLOCK_N"]
        shapes = (length, repeat, width), (length, 1, width), (count, 1, width)
        q, k, cache = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        layout = BranchLayout.of(branches=[[length]], prefixes=[(0, count)])
        with chosen():
            fb_kernels.branch_attention(q, k, k, cache, cache, layout)
        return length * repeat // launch["BLOCK_M"]

    @contextmanager
    def chosen() -> Iterator[None]:
        mode = mock.patch.object(precision, "INVARIANT", invariant)
        with mode, mock.patch.object(tuning, "branch_attention_form", return_value=form):
            yield

    def call() -> None:
        with chosen():
            branch_attention(given)

    return Case(*("branch_attention", shape, call, costs, products, exact), {TILE: tile, SPLIT: tile, GLUON: pipelined})


def cases() -> Iterator[Case]:
    for count in (1, 4):
        for prefix in (1024, 2048, 4096):
            yield case([([128] * 13, prefix)] * count, f"{count} x K=13 L=128 P={prefix}")
    trajectory = [([2048], 0), *(([128] * 13, p) for p in (512, 1024, 1536, 2048))]
    yield case(trajectory, "trajectory 2048 + 4 x K=13 L=128")
    yield case([([128] * 13, 2048)] * 4, "4 x K=13 L=128 P=2048", invariant=True)
    yield case([([1], 2048)], "L=1 P=2048 pages of 16", page=16, invariant=True)
    if HAS_GLUON:  # on other architectures "tile" runs instead
        for prefix in (1024, 2048):
            yield case([([128] * 13, prefix)] * 4, f"4 x K=13 L=128 P={prefix}", form="gluon")
        yield case(trajectory, "trajectory 2048 + 4 x K=13 L=128", form="gluon")
        for heads, width in (((8, 8), 128), ((16, 8), 64), ((16, 2), 64)):
            yield case([([128] * 13, 1024)], "K=13 L=128 P=1024", heads, width, torch.float16, form="gluon")
    for prefix in (1024, 4096):
        yield case([([1] * 13, prefix)], f"K=13 L=1 P={prefix}")
    for length in (128, 1):
        groups, where = [([length] * 13, 1024)], f"K=13 L={length} P=1024"
        for width in (64, 80, 96, 256):
            yield case(groups, where, width=width)
        for width in (128, 256):
            yield case(groups, f"{where} softcap", width=width, softcap=50.0)
            yield case(groups, f"{where} window softcap", width=width, window=512, softcap=50.0)
        yield case(groups, f"{where} window", window=512)
        yield case(groups, f"{where} pages of 16", page=16)
        yield case(groups, f"{where} pages of 16", width=256, page=16, window=512)
        yield case(groups, f"{where} unaligned", pad=1)
        yield case(groups, f"{where} unaligned window pages of 16", width=256, pad=1, window=512, page=16)
        yield case(groups, where, (32, 2), dtype=torch.float16)
        yield case(groups, where, dtype=torch.float32)
