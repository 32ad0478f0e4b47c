"""What is peculiar to `compatibility_targets`: groups without spread, horizons, and what is not used."""

from __future__ import annotations

import math

import pytest
import torch
from cases.base import offsets
from cases.compatibility_targets import OP
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels import compatibility_targets
from fb_kernels._runtime import segments
from fb_kernels.compatibility_targets.naive import compatibility_targets as naive


def make(rows: int, length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = -torch.rand(rows, length + 1, generator=generator) * 5
    return values[:, :-1].contiguous().to(dtype), values[:, -1].to(dtype)


@settings(max_examples=40)
@given(data=st.data())
def test_float64(data: st.DataObject) -> None:
    """There is no wider truth."""
    case = OP.make(**data.draw(OP.sizes))
    torch.testing.assert_close(case.run(), list(naive(**case.arguments)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [-0.1, -1.3, 0.0, -1e4, -1e-30])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_no_spread_is_exactly_uniform(dtype: torch.dtype, value: float, eps: float) -> None:
    for size in (1, 2, 3, 7, 13):
        logprob = torch.full((size, 9), value, dtype=dtype)
        _, q = compatibility_targets(logprob, offsets([size]), horizons=[1, 7, 9], eps=eps)
        assert (q == torch.tensor(1 / size, dtype=q.dtype)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_tokens_in_another_order_have_no_spread(dtype: torch.dtype) -> None:
    row = make(1, 128, dtype)[0][0]
    logprob = torch.stack([row[torch.randperm(128, generator=torch.Generator().manual_seed(i))] for i in range(5)])
    _, q = compatibility_targets(logprob, offsets([5]), horizons=[128], eps=0.0)
    assert (q == torch.tensor(0.2, dtype=dtype)).all()


def test_a_small_real_spread_counts() -> None:
    logprob = torch.tensor([[-1.0], [-1.0001], [-1.0]])
    got = compatibility_targets(logprob, offsets([3]), horizons=[1])
    torch.testing.assert_close(got[1].double(), naive(logprob.double(), offsets([3]), horizons=[1])[1])
    assert got[1][1] < 0.1


def test_no_spread_of_the_future_leaves_the_local_part() -> None:
    _, local = make(4, 1)
    _, q = compatibility_targets(torch.full((4, 3), -2.0), offsets([4]), horizons=[3], local=local, alpha=0.4)
    z = (local - local.mean()) / (local.std(correction=0) + 1e-6)
    torch.testing.assert_close(q[:, 0], torch.softmax(0.6 * z / 0.5, 0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_in_their_group_and_horizon(value: float) -> None:
    logprob, _ = make(8, 5)
    clean_mean, clean_q = compatibility_targets(logprob, offsets([3, 3]), horizons=[2, 5])
    logprob[4, 3] = value
    logprob[6:] = value
    mean, q = compatibility_targets(logprob, offsets([3, 3]), horizons=[2, 5])
    assert torch.equal(q[:3], clean_q[:3])
    assert torch.equal(q[:6, 0], clean_q[:6, 0])
    assert q[3:6, 1].isnan().all()
    assert not q[6:].any()
    assert torch.equal(mean[[0, 1, 2, 3, 5]], clean_mean[[0, 1, 2, 3, 5]])
    assert not mean[4, 1].isfinite()


def test_what_is_not_used_does_not_leak() -> None:
    logprob, local = make(6, 5)
    nan = torch.full_like(local, math.nan)
    cu = offsets([3, 3])
    plain = compatibility_targets(logprob, cu, horizons=[2, 4])
    beyond = logprob.clone()
    beyond[:, 4] = math.nan
    for got in (
        compatibility_targets(beyond, cu, horizons=[2, 4]),
        compatibility_targets(logprob, cu, horizons=[2, 4], local=nan, alpha=1.0),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    all_nan = torch.full_like(logprob, math.nan)
    _, q = compatibility_targets(all_nan, cu, horizons=[2, 4], local=local, alpha=0.0)
    assert torch.equal(q, compatibility_targets(logprob, cu, horizons=[2, 4], local=local, alpha=0.0)[1])
    assert q.isfinite().all()


def test_rows_are_independent_and_horizons_too() -> None:
    logprob, _ = make(6, 9)
    every_mean, every_q = compatibility_targets(logprob, offsets([3, 3]), horizons=list(range(1, 10)))
    mean, q = compatibility_targets(logprob[3:].clone(), offsets([3]), horizons=(9,))
    torch.testing.assert_close(every_mean[3:, 8:], mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(every_q[3:, 8:], q, rtol=1e-6, atol=1e-7)
    changed = logprob.clone()
    changed[:3] *= 3
    again = compatibility_targets(changed, offsets([3, 3]), horizons=list(range(1, 10)))
    assert torch.equal(again[0][3:], every_mean[3:])
    assert torch.equal(again[1][3:], every_q[3:])


def test_repeated_and_unordered_horizons() -> None:
    logprob, _ = make(4, 6)
    mean, q = compatibility_targets(logprob, offsets([4]), horizons=[6, 2, 6])
    assert torch.equal(mean[:, 0], mean[:, 2])
    assert torch.equal(q[:, 0], q[:, 2])
    torch.testing.assert_close(mean[:, 1], logprob[:, :2].mean(1))


@pytest.mark.parametrize("bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4]])
def test_bad_offsets_poison_where_the_host_does_not_read_them(bad: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "check_offsets", lambda *_: None)  # as on a device
    mean, q = compatibility_targets(make(4, 3)[0], torch.tensor(bad), horizons=[1, 3])
    assert mean.isfinite().all()
    assert q.isnan().all()


def test_horizons_that_follow_the_future_compile_once() -> None:
    def run(logprob: Tensor) -> tuple[Tensor, Tensor]:
        return compatibility_targets(logprob, offsets([2, 2]), horizons=[1, logprob.shape[1]])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for horizon in range(2, 14):  # more than torch compiles one function
        logprob = -torch.rand(4, horizon)
        assert all(torch.equal(a, b) for a, b in zip(compiled(logprob), run(logprob), strict=True))


def test_a_horizon_past_the_future_says_so() -> None:
    with pytest.raises(ValueError, match="the future is shorter than asked"):
        compatibility_targets(make(4, 3)[0], offsets([2, 2]), horizons=[4])
