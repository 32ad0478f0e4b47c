from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels import segments
from fb_kernels.compatibility_targets import compatibility_targets
from fb_kernels.compatibility_targets.naive import compatibility_targets as definition
from fb_kernels.testing import assert_close_to_reference


def offsets(sizes: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(dtype)


def naive(logprob: Tensor, cu: Tensor, local: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """In float64."""
    return definition(logprob.double(), cu, local=None if local is None else local.double(), **options)


def compare(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Means and targets, which are rounded once, from float64."""
    for ours, truth in zip(got, want, strict=True):
        if ours.dtype == torch.float64:  # there is no wider truth
            torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)
        else:
            assert_close_to_reference(ours, truth, truth.to(ours.dtype), scale=truth.abs())


def make(rows: int, length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = -torch.rand(rows, length + 1, generator=generator) * 5
    return values[:, :-1].contiguous().to(dtype), values[:, -1].to(dtype)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 6), max_size=5),
    tail=st.integers(0, 3),
    length=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    index=st.sampled_from([torch.int32, torch.int64]),
    alpha=st.sampled_from([None, 0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.05, 0.5, 2.0]),
    strided=st.booleans(),
    data=st.data(),
)
def test_matches_naive(
    sizes: list[int],
    tail: int,
    length: int,
    dtype: torch.dtype,
    index: torch.dtype,
    alpha: float | None,
    temperature: float,
    strided: bool,
    data: st.DataObject,
) -> None:
    rows = sum(sizes) + tail
    horizons = data.draw(st.lists(st.integers(1, length), min_size=1, max_size=4))
    logprob, local = make(rows, length, torch.float64, data.draw(st.integers(0, 99)))
    logprob, local = logprob.to(dtype), local.to(dtype)
    cu = offsets(sizes, index)
    if strided:
        logprob, local = torch.cat([logprob, logprob], 1).mT.contiguous().mT[:, length:], local.repeat(2, 1).mT[:, 1]
        cu = cu.repeat_interleave(2)[::2]
    options: dict[str, Any] = {"temperature": temperature}
    if alpha is not None:
        options |= {"local": local, "alpha": alpha}
    mean, q = compatibility_targets(logprob, cu, horizons=horizons, **options)
    assert mean.dtype == q.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert mean.is_contiguous()
    assert q.is_contiguous()
    compare((mean, q), naive(logprob, cu, horizons=horizons, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    logprob, _ = make(20 * 13, 128, dtype)
    horizons = [1, 32, 128]
    mean, q = compatibility_targets(logprob, offsets([13] * 20), horizons=horizons)
    want_mean, want_q = naive(logprob, offsets([13] * 20), horizons=horizons)
    plain_mean = torch.stack([logprob[:, :h].mean(1) for h in horizons], 1)
    grouped = plain_mean.view(20, 13, 3)
    z = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, correction=0, keepdim=True) + 1e-6)
    plain_q = torch.softmax(z / 0.5, 1).view(-1, 3)
    for ours, plain, want in ((mean, plain_mean, want_mean), (q, plain_q, want_q)):
        assert_close_to_reference(ours, want, plain, scale=want.abs().amax())


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
    compare(got, naive(logprob, offsets([3]), horizons=[1]))
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


def test_empty_sizes() -> None:
    for rows, sizes in ((0, []), (0, [0, 0]), (3, []), (3, [0, 0])):
        mean, q = compatibility_targets(make(rows, 4)[0], offsets(sizes), horizons=[1, 4])
        assert mean.shape == q.shape == (rows, 2)
        assert not q.any()


def test_no_gradient_inputs_unchanged_repeats_equal() -> None:
    logprob, local = (t.requires_grad_() for t in make(6, 5))
    before = logprob.detach().clone(), local.detach().clone()
    runs = [compatibility_targets(logprob, offsets([3, 3]), horizons=[1, 5], local=local, alpha=0.5) for _ in range(2)]
    assert not any(out.requires_grad for out in runs[0])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert torch.equal(logprob, before[0])
    assert torch.equal(local, before[1])


@pytest.mark.parametrize("bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4]])
def test_bad_offsets_poison_where_the_host_does_not_read_them(bad: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "check_offsets", lambda *_: None)  # as on a device
    mean, q = compatibility_targets(make(4, 3)[0], torch.tensor(bad), horizons=[1, 3])
    assert mean.isfinite().all()
    assert q.isnan().all()


@pytest.mark.parametrize(
    "arguments",
    [
        (make(7, 5)[0], offsets([3, 0, 3]), None, [5, 1], 0.5, 1e-6, 1.0),
        (make(5, 7, torch.bfloat16)[0].mT, offsets([7]), make(7, 1, torch.bfloat16)[1], [2, 3], 0.5, 1e-6, 0.0),
        (make(4, 3, torch.float64)[0], offsets([4]).long(), make(4, 1, torch.float64)[1], [3], 1.0, 0.0, 0.3),
        (make(0, 3)[0], offsets([]), None, [3], 0.5, 1e-6, 1.0),
    ],
)
def test_opcheck(arguments: tuple) -> None:
    torch.library.opcheck(torch.ops.fb.compatibility_targets.default, arguments)


def test_compiles_without_breaks() -> None:
    logprob, local = make(7, 6)
    cu = offsets([3, 4])

    def targets(logprob: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        return compatibility_targets(logprob, cu, horizons=[2, 6], local=local, alpha=0.5)

    compiled = torch.compile(targets, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(logprob.requires_grad_(), local), targets(logprob, local), strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad


L, P, CU = torch.randn(4, 3), torch.randn(4), torch.tensor([0, 2, 4])


def call(logprob: object = L, cu: object = CU, horizons: object = (1, 3), **options: object) -> Callable[[], object]:
    return lambda: compatibility_targets(logprob, cu, horizons=horizons, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "kind", "argument"),
    [
        (call([1.0]), TypeError, "logprob"),
        (call(L.long()), TypeError, "logprob"),
        (call(P), ValueError, "logprob"),
        (call(cu=CU.float()), TypeError, "cu_group"),
        (call(cu=CU[:0]), ValueError, "cu_group"),
        (call(cu=CU.to("meta")), ValueError, "cu_group"),
        (call(cu=torch.tensor([0, 3, 2])), ValueError, "cu_group"),
        (call(cu=torch.tensor([1, 4])), ValueError, "cu_group"),
        (call(cu=torch.tensor([0, 5])), ValueError, "cu_group"),
        (call(horizons=3), TypeError, "horizons"),
        (call(horizons=[1.0]), TypeError, "horizons"),
        (call(horizons=torch.tensor([1])), TypeError, "horizons"),
        (call(horizons=[]), ValueError, "horizons"),
        (call(horizons=[0]), ValueError, "horizons"),
        (call(horizons=[1, 4]), ValueError, "horizons"),
        (call(temperature=0.0), ValueError, "temperature"),
        (call(temperature=math.nan), ValueError, "temperature"),
        (call(eps=-1.0), ValueError, "eps"),
        (call(eps=None), TypeError, "eps"),
        (call(temperature="1"), TypeError, "temperature"),
        (call(alpha="1", local=P), TypeError, "alpha"),
        (call(alpha=math.nan, local=P), ValueError, "alpha"),
        (call(alpha=1.5, local=P), ValueError, "alpha"),
        (call(alpha=0.5), ValueError, "local"),
        (call(alpha=0.5, local=P.double()), TypeError, "local"),
        (call(alpha=0.5, local=P[:3]), ValueError, "local"),
        (call(alpha=0.5, local=[1.0]), TypeError, "local"),
    ],
)
def test_bad_arguments(run: Callable[[], object], kind: type[Exception], argument: str) -> None:
    with pytest.raises(kind, match=rf"^compatibility_targets: {argument}: expected .*, got .*; .+") as caught:
        run()
    assert type(caught.value) is kind
    compare(compatibility_targets(L, CU, horizons=[3]), naive(L, CU, horizons=[3]))


def test_horizons_that_follow_the_future_compile_once() -> None:
    def run(logprob: Tensor) -> tuple[Tensor, Tensor]:
        return compatibility_targets(logprob, CU, horizons=[1, logprob.shape[1]])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for horizon in range(2, 14):  # more than torch compiles one function
        logprob = -torch.rand(4, horizon)
        assert all(torch.equal(a, b) for a, b in zip(compiled(logprob), run(logprob), strict=True))


def test_a_horizon_past_the_future_says_so() -> None:
    with pytest.raises(ValueError, match="the future is shorter than asked"):
        compatibility_targets(L, CU, horizons=[4])
