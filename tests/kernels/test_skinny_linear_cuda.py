"""The compiled `skinny_linear`, emulated, against float64 and against plain PyTorch in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.skinny_linear import cuda as kernels
from fb_kernels.skinny_linear.naive import skinny_linear as naive
from fb_kernels.testing import assert_close_to_reference, poison_, poisoned_memory

pytestmark = [
    pytest.mark.usefixtures("cuda_kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="emulated on the CPU; on a GPU see tests/gpu"),
]

EPS = 1e-6
NAN, INF = float("nan"), float("inf")
COLUMNS = (1, 8, 24, 31, 32, 33, 64, 72, 264, 520, 1032, 2048, 2056, 2600)
given_here = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass
class Call:
    """What one call takes; y = x weight^T."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    norm: Tensor | None = None
    residual: Tensor | None = None
    swiglu: bool = False

    def run(self) -> Tensor:
        with poisoned_memory():  # what is not written is NaN
            return kernels.skinny_linear(self.x, self.weight, self.bias, self.norm, EPS, self.residual, self.swiglu)

    def plain(self) -> Tensor:
        """The same in plain PyTorch."""
        x = self.x if self.norm is None else F.rms_norm(self.x, self.x.shape[-1:], self.norm, EPS)
        y = F.linear(x, self.weight, self.bias)
        if self.swiglu:
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up
        return y if self.residual is None else y + self.residual

    def exact(self) -> Tensor:
        """The definition in float64."""
        values = (self.x, self.weight, self.bias, self.norm, self.residual)
        x, weight, bias, norm, residual = (v if v is None else v.double() for v in values)
        return naive(x, weight, bias, norm_weight=norm, eps=EPS, residual=residual, swiglu=self.swiglu)

    def row(self, index: int) -> Call:
        """The same for one row alone."""
        residual = None if self.residual is None else self.residual[index : index + 1]
        return Call(self.x[index : index + 1], self.weight, self.bias, self.norm, residual, self.swiglu)


def placed(values: Tensor, dtype: torch.dtype, offset: int = 0, padding: int = 0) -> Tensor:
    """The values in storage that is NaN before, between and behind their rows."""
    rows, columns = values.shape
    step = columns + padding
    storage = poison_(torch.empty(offset + rows * step + 64, dtype=dtype))
    view = storage.as_strided((rows, columns), (step, 1), offset)
    return view.copy_(values)


def make(
    rows: int,
    columns: int,
    outputs: int,
    options: str = "",
    dtype: torch.dtype = torch.bfloat16,
    *,
    offset: int = 0,
    padding: int = 0,
    seed: int = 0,
) -> Call:
    """Random contents; the options are those named: bias, norm, residual, swiglu."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return placed(torch.randn(*shape, generator=generator), dtype, offset, padding)

    swiglu = "swiglu" in options
    weight_rows = 2 * outputs if swiglu else outputs
    return Call(
        draw(rows, columns),
        draw(weight_rows, columns).div_(columns**0.5),
        draw(1, weight_rows)[0] if "bias" in options else None,
        draw(1, columns)[0].div_(8).add_(1) if "norm" in options else None,
        draw(rows, outputs) if "residual" in options else None,
        swiglu,
    )


@given_here
@given(
    rows=st.integers(1, 32),
    columns=st.sampled_from(COLUMNS),
    outputs=st.integers(1, 70),
    options=st.sets(st.sampled_from(["bias", "norm"])),
    behind=st.sampled_from(["", "residual", "swiglu"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    offset=st.sampled_from([0, 8, 1, 5]),
    padding=st.sampled_from([0, 8, 16, 1, 3]),
    seed=st.integers(0, 99),
)
def test_error_rule(
    rows: int,
    columns: int,
    outputs: int,
    options: set[str],
    behind: str,
    dtype: torch.dtype,
    offset: int,
    padding: int,
    seed: int,
) -> None:
    wanted = " ".join([*options, behind])
    call = make(rows, columns, outputs, wanted, dtype, offset=offset, padding=padding, seed=seed)
    got = call.run()
    assert got.shape == (rows, outputs)
    assert got.dtype == dtype
    assert_close_to_reference(got, call.exact(), call.plain())
    assert torch.equal(got, call.run())
    alone = seed % rows
    assert torch.equal(got[alone], call.row(alone).run()[0])  # whatever the other rows are, and how many


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [264, 2048, 33])  # 16-byte loads with a tail, without one, element by element
@pytest.mark.parametrize("options", ["", "bias norm residual", "bias norm swiglu"])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 26, 32])
def test_every_variant(rows: int, columns: int, options: str, dtype: torch.dtype) -> None:
    call = make(rows, columns, 20, options, dtype)
    assert_close_to_reference(call.run(), call.exact(), call.plain())


@given_here
@given(
    rows=st.integers(2, 32),
    columns=st.sampled_from([8, 33, 264]),
    outputs=st.integers(1, 40),
    options=st.sampled_from(["", "bias norm residual", "norm swiglu"]),
    strange=st.sampled_from([NAN, INF, -INF]),
    data=st.data(),
)
def test_a_strange_row_stays_alone(
    rows: int, columns: int, outputs: int, options: str, strange: float, data: st.DataObject
) -> None:
    call = make(rows, columns, outputs, options)
    before = call.run()
    row = data.draw(st.integers(0, rows - 1))
    call.x[row, data.draw(st.integers(0, columns - 1))] = strange
    after, expected = call.run(), call.exact()
    others = [index for index in range(rows) if index != row]
    assert torch.equal(after[others], before[others])
    if "swiglu" not in options:  # there the sign of a zero decides between NaN and infinity
        assert torch.equal(after[row].isfinite(), expected[row].isfinite())


@pytest.mark.parametrize("options", ["", "swiglu"])
@pytest.mark.parametrize("columns", [264, 33])
def test_a_strange_weight_reaches_its_output_alone(columns: int, options: str) -> None:
    call = make(3, columns, 19, options)
    before = call.run()
    for weight_row in (0, 7, 8, 15, 16, 18):
        kept = call.weight[weight_row].clone()
        call.weight[weight_row] = NAN
        after = call.run()
        call.weight[weight_row] = kept
        assert after[:, weight_row].isnan().all()
        others = [index for index in range(19) if index != weight_row]
        assert torch.equal(after[:, others], before[:, others])


def test_small_rows_are_normed_with_eps() -> None:
    call = make(3, 264, 20, "norm")
    call.x.mul_(1e-3)  # its mean square is eps
    call.x[1] = 0
    got = call.run()
    assert_close_to_reference(got, call.exact(), call.plain())
    assert not got[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_far_from_zero(dtype: torch.dtype) -> None:
    values = torch.tensor([-6e4, -300.0, -90.0, -20.0, -0.0, 20.0, 90.0, 6e4], dtype=dtype)
    call = Call(torch.ones(1, 1, dtype=dtype), torch.cat([values, torch.ones(8, dtype=dtype)])[:, None], swiglu=True)
    assert_close_to_reference(call.run().T, call.exact().T, call.plain().T)


def test_stacked_weights_and_rows_of_a_larger_tensor() -> None:
    whole = make(9, 528, 64, "norm")
    x, weight = whole.x[1::2, 264:], whole.weight[::3, :264]
    call = Call(x, weight, norm=whole.norm[:264])
    assert_close_to_reference(call.run(), call.exact(), call.plain())
    repeated = Call(x[:1].expand(5, -1), weight, norm=whole.norm[:264])
    assert torch.equal(repeated.run(), call.run()[:1].expand(5, -1))


@pytest.mark.parametrize(("rows", "columns", "outputs"), [(0, 8, 3), (2, 8, 0), (0, 0, 0)])
def test_nothing_to_do(rows: int, columns: int, outputs: int) -> None:
    call = Call(torch.zeros(rows, columns).bfloat16(), torch.zeros(outputs, columns).bfloat16())
    assert call.run().shape == (rows, outputs)


def test_no_columns() -> None:
    call = make(3, 1, 20, "bias residual")
    call.x, call.weight = call.x[:, :0], call.weight[:, :0]
    assert_close_to_reference(call.run(), call.exact(), call.plain())


def test_what_is_for_others() -> None:
    half = make(2, 16, 6, "norm residual")
    both = Call(half.x, half.weight, residual=half.residual[:, :3], swiglu=True)
    strided = Call(half.x[:, ::2], half.weight[:, :8])
    turned = Call(half.x[:, :2], half.weight[:2, :].T[:2])
    mixed = Call(half.x, half.weight, norm=half.norm.half())
    many = make(33, 8, 4)
    single, double = (Call(half.x.to(dtype), half.weight.to(dtype)) for dtype in (torch.float32, torch.float64))
    for call in (both, strided, turned, mixed, many, single, double):
        assert call.run() is NotImplemented
