from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels import backend
from fb_kernels.skinny_linear import skinny_linear
from fb_kernels.skinny_linear.naive import skinny_linear as naive
from fb_kernels.testing import assert_close_to_reference, count_syncs

OPTIONS = ("bias", "norm_weight", "residual", "swiglu")


def arguments(
    rows: int = 3, width: int = 5, outputs: int = 8, given: tuple[str, ...] = (), dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows + 7 * width + 31 * outputs)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    built: dict[str, Any] = {"x": randn(rows, width), "weight": randn(outputs, width)}
    options = {"bias": randn(outputs), "norm_weight": randn(width), "residual": randn(rows, outputs), "swiglu": True}
    return built | {name: options[name] for name in given}


def allowed(names: tuple[str, ...]) -> bool:
    return not {"residual", "swiglu"} <= set(names)


given_names = st.lists(st.sampled_from(OPTIONS), unique=True).map(tuple).filter(allowed)


def relaid(x: Tensor) -> Tensor:
    """The same values with NaN between rows."""
    return torch.cat((x, torch.full_like(x[..., :2], torch.nan)), -1)[..., : x.shape[-1]]


@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 9),
    half=st.integers(0, 4),
    names=given_names,
    strided=st.booleans(),
)
def test_matches_naive_float64(rows: int, width: int, half: int, names: tuple[str, ...], strided: bool) -> None:
    built = arguments(rows, width, 2 * half, names)
    if strided:
        built = {name: relaid(value) if isinstance(value, Tensor) else value for name, value in built.items()}
    before = {name: value.clone() for name, value in built.items() if isinstance(value, Tensor)}
    out = skinny_linear(**built, eps=0.1)
    torch.testing.assert_close(out, naive(**built, eps=0.1), rtol=1e-12, atol=1e-12)
    assert out.is_contiguous()
    assert all(torch.equal(built[name], value) for name, value in before.items())


@pytest.mark.parametrize("names", [(), ("norm_weight", "bias"), ("residual",), ("norm_weight", "swiglu")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    built = arguments(6, 96, 64, names, dtype)
    wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in built.items()}
    out = skinny_linear(**built)
    assert out.dtype == dtype
    assert_close_to_reference(out, naive(**wide), naive(**built))


def test_a_residual_is_added_before_rounding() -> None:
    one = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)  # 1 + 2^-8 alone rounds to 1
    assert skinny_linear(one, weight, residual=-one[:, :1]).item() == 2.0**-8


def test_hostile_values_stay_in_their_row() -> None:
    built = arguments(5, 8, 6, ("norm_weight", "residual"))
    clean = skinny_linear(**built)
    built["x"][1], built["x"][2, 0], built["residual"][3, 4] = torch.nan, torch.inf, torch.nan
    out = skinny_linear(**built)
    assert torch.equal(out[[0, 4]], clean[[0, 4]])
    assert out[1].isnan().all()
    assert not out[2].isfinite().all()
    assert out[3].isnan().tolist() == [False] * 4 + [True] + [False]


@pytest.mark.parametrize("names", [(), ("bias", "norm_weight", "residual"), ("swiglu",)], ids=str)
def test_opcheck(names: tuple[str, ...]) -> None:
    built = {"bias": None, "norm_weight": None, "residual": None, "swiglu": False} | arguments(3, 5, 8, names)
    built["frozen"] = bool(names)
    order = ("x", "weight", "bias", "norm_weight", "eps", "residual", "swiglu", "frozen")
    values = tuple((built | {"eps": 1e-6})[name] for name in order)
    torch.library.opcheck(torch.ops.fb.skinny_linear.default, values)


def test_compile() -> None:
    built = arguments(3, 5, 8, ("norm_weight", "residual"))
    compiled = torch.compile(lambda **kw: skinny_linear(**kw), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**built), skinny_linear(**built))


def test_no_sync() -> None:
    built = arguments(3, 5, 8, ("norm_weight", "residual"))
    with count_syncs() as syncs:
        skinny_linear(**built)
    assert syncs.total == 0


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("names", [(), ("bias", "norm_weight"), ("residual",), ("norm_weight", "swiglu")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_from_triton_kernels(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    built = arguments(5, 24, 12, names, dtype)
    wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in built.items()}
    with backend.override("skinny_linear=triton"):
        out = skinny_linear(**built)
    assert_close_to_reference(out, naive(**wide), naive(**built))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"x": torch.zeros(2, 3, 5, dtype=torch.float64)}, ValueError, r"x: expected shape \[N, K\]"),
        ({"x": [1.0]}, TypeError, "x: expected a torch.Tensor, got list"),
        ({"weight": torch.zeros(8, 5)}, TypeError, "weight: expected dtype torch.float64"),
        ({"weight": torch.zeros(8, 4, dtype=torch.float64)}, ValueError, r"weight: expected shape \[M, K\]"),
        ({"bias": torch.zeros(7, dtype=torch.float64)}, ValueError, r"bias: expected shape \[M\]"),
        ({"norm_weight": torch.zeros(7, dtype=torch.float64)}, ValueError, r"norm_weight: expected shape \[K\]"),
        ({"residual": torch.zeros(3, 7, dtype=torch.float64)}, ValueError, r"residual: expected shape \[N, M\]"),
        ({"eps": 0.0}, ValueError, "eps: expected a finite number above 0"),
        ({"swiglu": True, "residual": torch.zeros(3, 8, dtype=torch.float64)}, ValueError, "None together with swiglu"),
        ({"swiglu": True, "weight": torch.zeros(7, 5, dtype=torch.float64)}, ValueError, "an even number of rows"),
        ({"weight": torch.zeros(8, 5, dtype=torch.float64, requires_grad=True)}, ValueError, "requires no grad"),
    ],
)
def test_bad_arguments(change: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        skinny_linear(**(arguments() | change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width", "outputs"), [(2, 0, 4), (0, 3, 4), (2, 3, 0), (20, 0, 4)])
def test_empty_sizes(rows: int, width: int, outputs: int, dtype: torch.dtype) -> None:
    built = arguments(rows, width, outputs, ("bias",), dtype)
    assert torch.equal(skinny_linear(**built), built["bias"].expand(rows, outputs) if not width else naive(**built))
