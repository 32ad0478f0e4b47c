"""Shapes of `linear_logprob`: the head of Qwen3-1.7B for one row per candidate and packed branches, in every form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.aot.compiler import Case, Cost, Tile
from fb_kernels import linear_logprob
from fb_kernels._runtime import tuning
from fb_kernels.linear_logprob import triton as kernels

GLUON = ("gluon",) if kernels.HAS_GLUON else ()  # on other architectures "fused" runs instead

VOCABULARY, WIDTH = 151_936, 2048


def cases() -> Iterator[Case]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for rows in (13, 32, 64, 128, 1664, 8192):
        yield case(rows, VOCABULARY, WIDTH, bf16, "fused")
    for rows in (13, 128, 1664, 8192):
        yield case(rows, VOCABULARY, WIDTH, bf16, "chunked")
    for form in GLUON:
        yield case(1664, VOCABULARY, WIDTH, bf16, form)
        yield case(8192, VOCABULARY, WIDTH, bf16, form, bias=True)
    for form in ("fused", "chunked", *GLUON):
        if form != "gluon":
            yield case(1664, VOCABULARY, WIDTH, fp32, form)
        yield case(1664, VOCABULARY, WIDTH, fp16, form, softcap=30.0, bias=True)
    yield case(13, VOCABULARY, WIDTH + 8, bf16, "fused", softcap=30.0, bias=True)  # a width that no block size divides
    yield case(1664, VOCABULARY, WIDTH + 8, bf16, "fused", softcap=30.0, bias=True)
    partials = torch.empty(3, 8, 1664, device="meta")
    yield Case(
        "linear_logprob",
        "S=8 N=1664",
        lambda: kernels.combine_logprob_partials(*partials),
        {"_combine_logprob_partials_kernel": Cost(4 * (4 * 8 + 2) * 1664)},  # the maxima are read twice
    )


def case(
    rows: int, vocab: int, width: int, dtype: torch.dtype, form: str, softcap: float | None = None, bias: bool = False
) -> Case:
    """Forward and, in the chunked case, backward."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    arguments = (meta(rows, width), meta(vocab, width), meta(rows, dtype=torch.int64))
    offset = meta(vocab) if bias else None
    chunk = tuning.linear_logprob_chunk_size(dtype, rows)
    columns = chunk["columns"]
    valid = columns if form == "chunked" else None  # one chunk: all chunks launch the same code
    options = (1.0, softcap, 1.0, -100, valid)
    statistic = meta(rows, dtype=torch.float32)

    def call() -> None:
        with mock.patch.object(tuning, "linear_logprob_form", return_value=form):
            kernels.linear_logprob(*arguments, offset, *options)
            if form == "chunked":
                kernels.linear_logprob_backward(
                    statistic, statistic, None, *arguments, offset, statistic, statistic, *options, [True, True, bias]
                )

    def small(launch: Mapping[str, Any], turns: int) -> int:
        count, columns = launch["BLOCK_M"], launch["BLOCK_V"]
        hidden, head = (torch.zeros(size, turns * launch["BLOCK_K"], dtype=dtype) for size in (count, columns))
        chosen = tuning.linear_logprob(dtype, rows, vocab, width, bias)
        with (
            mock.patch.object(tuning, "linear_logprob_form", return_value=form),
            mock.patch.object(tuning, "linear_logprob", return_value=chosen),
        ):
            linear_logprob(hidden, head, torch.zeros(count, dtype=torch.int64))
        return 1

    size = dtype.itemsize
    columns_of = {
        "fused": lambda: tuning.linear_logprob(dtype, rows, vocab, width, bias)["BLOCK_V"],
        "chunked": lambda: tuning.linear_logprob_chunk(dtype)["BLOCK_V"],
        "gluon": lambda: math.prod(
            tuning.linear_logprob_gluon(dtype, vocab, width)[name] for name in ("TILES", "BLOCK_V")
        ),
    }
    at_once = min(rows, chunk["rows"])
    statistics = 3 * 4 * rows * -(-(valid or vocab) // columns_of[form]())
    whole = Cost(size * (vocab + rows) * width + statistics, 2 * rows * vocab * width)
    fused = {"fused": ("_linear_logprob_fwd_kernel",), "gluon": ("_linear_logprob_gluon_kernel",)}.get(form, ())
    name = str(dtype).removeprefix("torch.")
    extras = (" softcap" if softcap else "") + (" bias" if bias else "")
    return Case(
        "linear_logprob",
        f"N={rows} V={vocab} D={width} {name} {form}{extras}",
        call,
        {
            "_linear_logprob_fwd_kernel": whole,
            "_linear_logprob_gluon_kernel": whole,
            "_chunk_statistics_kernel": Cost(4 * at_once * columns),
            "_merge_statistics_kernel": Cost(statistics),
            "_dlogits_kernel": Cost((4 + size) * at_once * columns),
        },
        matmul=fused if dtype != torch.float32 else (),
        exact=fused,
        tiles={
            "_linear_logprob_fwd_kernel": lambda launch: Tile(
                width / launch["BLOCK_K"],
                2 * launch["BLOCK_M"] * launch["BLOCK_V"] * launch["BLOCK_K"],
                launch["BLOCK_M"] * launch["BLOCK_V"] / 32 / launch["num_warps"],
                overlaps=True,
                target=0.72 if rows >= 1664 and not softcap else None,
                run=partial(small, launch),
            )
        },
    )
