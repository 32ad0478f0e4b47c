"""The Triton kernel of `merge_attention_states` against a softmax over both states, interpreted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launches import count_kernels
from test_merge_attention_states import make
from torch import Tensor

from fb_kernels import backend, tuning
from fb_kernels.merge_attention_states import merge_attention_states
from fb_kernels.merge_attention_states import triton as kernels
from fb_kernels.merge_attention_states.naive import merge_attention_states as naive
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, magnitude, poison_

pytestmark = pytest.mark.usefixtures("triton_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@given(
    rows=st.integers(0, 9),
    heads=st.integers(0, 4),
    width=st.integers(0, 20),
    tile=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(DTYPES),
    shift=st.sampled_from([0.0, 1e4, -1e4]),
    strided=st.booleans(),
    seed=st.integers(0, 9),
)
def test_matches_one_softmax(
    rows: int, heads: int, width: int, tile: int, dtype: torch.dtype, shift: float, strided: bool, seed: int
) -> None:
    out_a, lse_a, out_b, lse_b = make(rows, heads, width, dtype, seed)
    lse_a, lse_b = lse_a + shift, lse_b + shift
    if strided:
        out_a = out_a.new_empty(heads, width, rows + 1)[..., 1:].permute(2, 0, 1).copy_(out_a)
        out_b = out_b.new_empty(heads, rows, width + 3)[..., 3:].transpose(0, 1).copy_(out_b)
        lse_a = lse_a.T.contiguous().T
    inputs = out_a, lse_a, out_b, lse_b
    launch = {"ROWS": tile, "WIDTH": tuning.next_power_of_2(width), "num_warps": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "merge_attention_states", lambda *_: launch)
        got = merge_attention_states(*inputs)
    exact, plain = naive(*(x.double() for x in inputs)), naive(*(x.to(dtype) for x in inputs))
    assert (got[0].dtype, got[1].dtype) == (dtype, torch.float32)
    assert all(x.is_contiguous() for x in got)
    for actual, expected, other, scale in zip(got, exact, plain, magnitudes(*inputs), strict=True):
        assert_close_to_reference(actual, expected, other, scale=scale)


def magnitudes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Of out and lse: the larger of the two states, whose sum may cancel, and 1, where the log of 1 + p is rounded."""
    return torch.maximum(magnitude(out_a), magnitude(out_b)), 1 + torch.maximum(magnitude(lse_a), magnitude(lse_b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_the_default_configuration(dtype: torch.dtype) -> None:
    inputs = make(20, 4, 40, dtype)
    upstream = torch.randn(20, 4, 40, generator=torch.Generator().manual_seed(1)).to(dtype), torch.ones(4, 20)
    results = []
    for change, function in ((Tensor.clone, merge_attention_states), (Tensor.double, naive), (Tensor.clone, naive)):
        leaves = [change(x).requires_grad_() for x in inputs]
        states = function(*leaves)
        torch.autograd.backward(states, [g.to(x.dtype) for g, x in zip(upstream, states, strict=True)])
        results.append([*states, *(leaf.grad for leaf in leaves)])
    size, lse_size = magnitudes(*inputs)
    pull = magnitude(upstream[0])
    grad_lse = 1 + (pull * 2 * size).sum(-1).T  # of w (g (a - b) + h)
    for mine, truth, native, scale in zip(*results, (size, lse_size, pull, grad_lse, pull, grad_lse), strict=True):
        assert_close_to_reference(mine, truth, native, scale=scale)


def test_an_empty_state_is_not_read() -> None:
    out_a, lse_a, out_b, lse_b = make(4, 2, 3, torch.float32)
    lse_a[:, :2] = -math.inf
    lse_b[:, 1:3] = -math.inf
    out_a[:2], out_b[1:3] = math.nan, math.inf
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(lse[:, 0], lse_b[:, 0])
    assert torch.equal(out[2], out_a[2])
    assert torch.equal(lse[:, 2], lse_a[:, 2])
    assert not out[1].any()
    assert (lse[:, 1] == -math.inf).all()
    assert out[3].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", [1, 3])
def test_hostile_values_stay_in_their_row_and_are_the_references(value: float, which: int) -> None:
    inputs = make(3, 2, 4, torch.float32)
    inputs[which][:, 0] = value
    inputs[4 - which][:, 1] = -math.inf  # with a NaN in the state that counts
    inputs[which][0, 1] = math.nan
    inputs[2][2, 0, 2] = math.nan
    got = merge_attention_states(*inputs)
    with backend.override("reference"):
        want = merge_attention_states(*inputs)
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected, equal_nan=True)
    assert got[0][2].isnan().nonzero().tolist() == [[0, 2]]


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(5, 3, 20, torch.float32)
    clean = merge_attention_states(*inputs)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poison_(new_empty(*args, **options)))
    assert all(map(torch.equal, merge_attention_states(*inputs), clean))


def test_repeats_are_bit_equal_with_one_kernel_and_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(5, 2, 4, torch.bfloat16)
    names = count_kernels(monkeypatch, kernels)
    with count_launches() as launches, count_syncs() as syncs:
        first = merge_attention_states(*inputs)
    assert (launches.total, syncs.total, names) == (1, 0, ["_merge_attention_states_kernel"])
    assert all(map(torch.equal, merge_attention_states(*inputs), first))


def test_opcheck() -> None:
    inputs = tuple(x.requires_grad_() for x in make(3, 2, 4, torch.bfloat16))
    torch.library.opcheck(torch.ops.fb.merge_attention_states.default, inputs)


def test_float64_is_the_references() -> None:
    with pytest.raises(ValueError, match="merge_attention_states: expected arguments that the triton kernel takes"):
        merge_attention_states(*make(2, 2, 4))
    with backend.override("triton,merge_attention_states=auto"):
        torch.testing.assert_close(merge_attention_states(*make(2, 2, 4)), naive(*make(2, 2, 4)))
