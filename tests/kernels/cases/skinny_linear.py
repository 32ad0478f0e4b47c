"""How `skinny_linear` is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import ROWS, WIDTHS, Case, Op, Sizes, Way, definition, launched, normal, seeds, single
from fb_kernels._runtime import cuda
from fb_kernels.rms_norm.naive import rms_norm
from fb_kernels.skinny_linear.cpu import ROWS as ROWS_ON_CPU
from fb_kernels.testing import magnitude


def make(
    rows: int,
    width: int,
    outputs: int,
    given: Sequence[str] = (),
    behind: str = "",
    size: float = 1.0,
    frozen: bool = False,
    seed: int = 0,
) -> Case:
    """Given are bias and norm_weight, behind is residual or swiglu; small rows have one of zeros before them."""
    weights = 2 * outputs if behind == "swiglu" else outputs
    x, weight, bias, norm_weight, residual = normal(
        seed, (rows, width), (weights, width), (weights,), (width,), (rows, outputs)
    )
    x = size * x
    if size < 1:
        x[:1] = 0
    options = {"bias": bias, "norm_weight": 1 + norm_weight / 8, "residual": residual, "swiglu": True}
    arguments = {"x": x, "weight": weight / max(width, 1) ** 0.5, "frozen": frozen}
    return Case("skinny_linear", arguments | {name: options[name] for name in (*given, behind) if name})


def scales(case: Case, truth: Sequence[Tensor]) -> list[Tensor | None]:
    """The largest sum of |terms| in a row, in half precision the largest length, for only the sum is rounded to it."""
    if not truth[0].numel():
        return [None]
    options = {name: magnitude(x) for name, x in case.tensors.items()}
    x, power = options["x"], 1 if case.arguments["x"].dtype.itemsize > 2 else 2
    if "norm_weight" in options:
        x = rms_norm(x, options["norm_weight"], 1e-6)[0]
    y = x.pow(power) @ options["weight"].T.pow(power)
    if "bias" in options:
        y = y + options["bias"].pow(power)
    y = y.pow(1 / power)
    if case.arguments.get("swiglu"):
        y = y[:, : y.shape[1] // 2] * y[:, y.shape[1] // 2 :]
    return [(y + options.get("residual", 0.0)).amax(-1, keepdim=True)]


def sizes(
    rows: st.SearchStrategy[int], widths: st.SearchStrategy[int], outputs: st.SearchStrategy[int]
) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "rows": rows,
            "width": widths,
            "outputs": outputs,
            "given": st.sampled_from([(), ("bias",), ("norm_weight",), ("bias", "norm_weight")]),
            "behind": st.sampled_from(["", "residual", "swiglu"]),
            "size": st.sampled_from([1.0, 1.0, 1e-3]),
            "frozen": st.booleans(),
            "seed": seeds,
        }
    )


def plain(rows: int = 2, width: int = 16, outputs: int = 6, **options: Any) -> Case:
    return make(rows, width, outputs, **options)


def staged(sizes: Sizes) -> bool:
    """Whether the rows, where there are many, fit the CUDA kernel's shared memory."""
    return sizes["rows"] <= 16 or sizes["rows"] * sizes["width"] <= 1 << 16


def half(case: Case) -> Case:
    return OP.cast(case, torch.bfloat16)


@contextmanager
def wide_chip() -> Iterator[None]:
    """So many multiprocessors that two blocks share the columns of up to 48 outputs; a GPU has what it has."""
    library = cuda.library()
    assert not isinstance(library, str)
    if not library.fb_is_emulation():
        yield
        return
    before = library.fb_emulate_multiprocessors(7)
    try:
        yield
    finally:
        library.fb_emulate_multiprocessors(before)


@contextmanager
def small() -> Iterator[None]:
    """Tiles that a few rows and outputs cross, and pieces of two steps."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}
    with launched(skinny_linear=tile), mock.patch("fb_kernels.skinny_linear.triton.PIECE", 32):
        yield


COLUMNS = (0, 1, 8, 24, 31, 32, 33, 64, 72, 264, 520, 1032, 2048, 2056, 2600)
BOTH = ("bias", "norm_weight")
VARIANTS: list[Sizes] = [{}, {"given": BOTH, "behind": "residual"}, {"given": BOTH, "behind": "swiglu"}]
OP = Op(
    "skinny_linear",
    make,
    sizes(st.integers(0, 5) | st.just(20), st.integers(0, 40), st.integers(0, 9)),
    definition,
    {
        "reference": Way(
            (torch.float64, torch.float32, torch.bfloat16, torch.float16),
            also=[{"rows": 6, "width": 96, "outputs": 64} | options for options in VARIANTS],
        ),
        "triton": Way(kernels=0),  # but those of its parts
        "triton invariant": Way(
            small=small,
            kernels=2,
            also=[
                {"rows": rows, "width": 300, "outputs": 67} | each
                for rows, each in zip((7, 150, 3), VARIANTS, strict=True)
            ],
        ),
        "cuda": Way(
            (torch.bfloat16, torch.float16),
            sizes(st.integers(0, 32), st.sampled_from(COLUMNS), st.integers(0, 70)).filter(staged),
            layouts=ROWS,
            small=wide_chip,
            also=[  # 16-byte loads with a tail, without one, element by element
                {"rows": rows, "width": width, "outputs": 20} | VARIANTS[(turn + place) % 3]
                for turn, rows in enumerate((1, 8, 9, 16, 17, 26, 32))
                for place, width in enumerate((264, 2048, 33))
            ],
            refused=[
                lambda: single(plain(20)),
                lambda: half(plain(33)),
                lambda: half(plain(17, 3856)),
                lambda: half(plain()).with_(x=torch.ones(2, 32).bfloat16()[:, ::2]),
                lambda: half(plain()).with_(weight=torch.ones(16, 6).bfloat16().T),
            ],
        ),
        "cpu": Way(
            (torch.float32, torch.bfloat16),
            sizes(st.integers(0, 40), WIDTHS, st.integers(0, 40)),
            layouts=ROWS,
            also=[
                *(
                    {"rows": rows, "width": width, "outputs": outputs, "given": BOTH}
                    for rows, width, outputs in ((1, 512, 3072), (16, 300, 1000), (3, 4096, 10), (2, 2048, 7))
                ),
                *(  # rows in lanes, of a weight that lies as a cache's sets do too
                    {"rows": rows, "width": width, "outputs": outputs, "given": BOTH, "behind": behind}
                    for rows, width, outputs, behind in (
                        (17, 301, 90, "residual"),
                        (49, 2048, 70, "residual"),
                        (96, 64, 66, "swiglu"),
                        (33, 7, 3, ""),
                    )
                ),
                {"rows": 1, "width": 32, "outputs": 1, "behind": "swiglu"},  # its sums cancel
            ],
            refused=[
                lambda: OP.cast(plain(), torch.float16),
                lambda: single(plain(ROWS_ON_CPU + 1)),
                lambda: single(plain(width=0)),
                lambda: single(plain()).with_(x=torch.ones(16, 2).T),
                lambda: single(plain()).with_(weight=torch.ones(16, 6).T),
                lambda: single(plain()).with_(residual=torch.ones(6, 2).T),
                lambda: single(plain()).with_(bias=torch.ones(12)[::2]),
                lambda: single(plain()).with_(norm_weight=torch.ones(32)[::2]),
            ],
        ),
    },
    typical={"rows": 6, "width": 40, "outputs": 10, "given": BOTH, "behind": "residual"},
    scales=scales,
    rows={"x": 0, "residual": 0},
    which_strange=False,
    wrong=[
        ("x", {"x": torch.zeros(2, 3, 40)}, ValueError),
        ("weight", {"weight": torch.zeros(10, 39)}, ValueError),
        ("weight", {"weight": torch.zeros(9, 40), "bias": None, "residual": None, "swiglu": True}, ValueError),
        ("weight", {"weight": torch.zeros(10, 40, requires_grad=True)}, ValueError),
        ("bias", {"bias": torch.zeros(7)}, ValueError),
        ("norm_weight", {"norm_weight": torch.zeros(7)}, ValueError),
        ("residual", {"residual": torch.zeros(6, 7)}, ValueError),
        ("residual", {"swiglu": True}, ValueError),
        ("eps", {"eps": 0.0}, ValueError),
    ],
)


FEW = {"width": 16, "outputs": 12}
EXAMPLES = {
    "skinny_linear": OP.example(rows=3, **FEW, given=BOTH),
    "skinny_linear, one row": OP.example(rows=1, **FEW, behind="residual"),
    "skinny_linear, residual": OP.example(rows=3, **FEW, given=("bias",), behind="residual"),
    "skinny_linear, gated": OP.example(rows=3, width=16, outputs=6, given=("bias",), behind="swiglu"),
    "skinny_linear, many rows": OP.example(rows=20, **FEW, given=BOTH, behind="residual"),
}
