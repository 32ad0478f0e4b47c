"""The compiled `candidate_head`, emulated, against the float64 definition: one block for all, and a block a group."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_candidate_head import EPS, compare, make, naive_score, offsets, scored
from torch import Tensor

from fb_kernels import backend
from fb_kernels.candidate_head import candidate_head
from fb_kernels.candidate_head import cuda as kernels
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, poisoned_memory

pytestmark = pytest.mark.usefixtures("cuda_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=40, suppress_health_check=FIXTURE)
@given(
    sizes=st.one_of(st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(0, 40), min_size=2, max_size=4)),
    tail=st.sampled_from([0, 1, 11, 35]),
    width=st.one_of(st.integers(1, 40), st.sampled_from([64, 256, 520, 1024, 2047, 2048])),
    normed=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
    master=st.booleans(),
    view=st.sampled_from(["whole", "strided", "transposed", "behind a boundary"]),
    seed=st.integers(0, 99),
)
def test_matches_naive(
    sizes: list[int],
    tail: int,
    width: int,
    normed: bool,
    bias: bool,
    dtype: torch.dtype,
    index: torch.dtype,
    master: bool,
    view: str,
    seed: int,
) -> None:
    rows = sum(sizes) + tail
    hidden, norm_weight, head_weight, head_bias = make(rows, width, dtype, seed)
    head_weight /= width**0.5
    cu = offsets(sizes, index)
    if view == "strided":
        hidden = torch.cat([hidden.new_full((rows, 8), math.nan), hidden], 1)[:, 8:]
        norm_weight, head_weight = norm_weight.repeat_interleave(2)[1::2], head_weight.repeat_interleave(2)[::2]
        cu = cu.repeat_interleave(3)[::3]
    elif view == "transposed":
        hidden = hidden.mT.contiguous().mT
    elif view == "behind a boundary":
        hidden = torch.cat([hidden.new_zeros(1), hidden.flatten()])[1:].view(rows, width)
    if master:
        head_weight, head_bias = head_weight.float(), head_bias.float()
    arguments = hidden, None if normed else norm_weight, head_weight
    head = head_bias if bias else None
    with poisoned_memory():
        score, prob, best = candidate_head(*arguments, cu, eps=EPS, head_bias=head)
    assert score.dtype == prob.dtype == torch.float32
    assert best.dtype == torch.int64
    compare((*arguments, head), sizes, (score, prob, best))


@pytest.mark.parametrize("width", [45, 2048])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_within_twice_plain_pytorch(dtype: torch.dtype, normed: bool, width: int) -> None:
    hidden, norm_weight, head_weight, head_bias = make(27, width, dtype)
    norm = None if normed else norm_weight
    ours = candidate_head(hidden, norm, head_weight, offsets([13, 14]), eps=EPS, head_bias=head_bias)[0]
    x = hidden if normed else torch.nn.functional.rms_norm(hidden, (width,), norm_weight, EPS)
    plain = torch.nn.functional.linear(x, head_weight[None], head_bias)[:, 0]
    assert_close_to_reference(ours, naive_score(hidden, norm, head_weight, head_bias), plain)


@pytest.mark.parametrize("tail", [0, 40])
def test_ties_and_negative_scores(tail: int) -> None:
    values = [-5, -2, -2, -0.0, 0.0, *[-9] * 9, *[1] * tail]
    _, prob, best = candidate_head(*scored(values), offsets([3, 2, 9]), eps=EPS)
    assert best.tolist() == [1, 0, 0]
    assert prob[3:5].tolist() == [0.5] * 2
    assert not prob[14:].any()


@pytest.mark.parametrize("tail", [0, 40])
def test_the_best_of_a_group_longer_than_a_warp(tail: int) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    values[[9, 33, 41]] = 7.0  # 9 and 41 are of one lane
    _, prob, best = candidate_head(*scored([*values.tolist(), *[0] * tail]), offsets([50]), eps=EPS)
    assert best.tolist() == [9]
    assert_close_to_reference(prob[:50], torch.softmax(values.double(), 0), torch.softmax(values, 0))
    values[9] = math.nan
    assert candidate_head(*scored(values.tolist()), offsets([50]), eps=EPS)[2].tolist() == [33]


@pytest.mark.parametrize("before", [0, 35])
def test_non_finite_scores_stay_in_their_group(before: int) -> None:
    """Also where what comes first is -inf for longer than a warp."""
    inf, nan = math.inf, math.nan
    groups = [[1.0, nan, 2.0], [nan, nan], [-inf, -inf], [inf, 1.0], [nan, -inf], [-inf, 0.0], [3.0, 4.0]]
    groups = [[-inf] * before + group for group in groups]
    values = [value for group in groups for value in group] + [nan]
    score, prob, best = candidate_head(*scored(values), offsets([len(group) for group in groups]), eps=EPS)
    first = -1 if not before else 0
    want = [2 + before, first, 0, before, 1 if not before else 0, 1 + before, 1 + before]
    assert best.tolist() == want
    parts = prob[:-1].split([len(group) for group in groups])
    assert all(part.isnan().all() for part in parts[:5])
    assert parts[5].tolist() == [0.0] * (before + 1) + [1.0]
    torch.testing.assert_close(parts[6][-2:], torch.softmax(torch.tensor([3.0, 4.0]), 0))
    assert prob[-1] == 0
    assert score[-1].isnan()


@pytest.mark.parametrize("after", [2, 40])
def test_rows_are_independent_and_groups_too(after: int) -> None:
    """Bit by bit also between one block for all and a block a group, aligned or not."""
    hidden, norm_weight, head_weight, _ = make(12 + after, 520, torch.bfloat16)
    alone = candidate_head(hidden[3:12].clone(), norm_weight, head_weight, offsets([9]), eps=EPS)
    hidden[:3], hidden[12:] = math.nan, math.inf
    moved = torch.cat([hidden.new_zeros(1), hidden.flatten()])[1:].view(hidden.shape)
    for x in (hidden, moved):
        score, prob, best = candidate_head(x, norm_weight, head_weight, offsets([3, 9]), eps=EPS)
        assert torch.equal(score[3:12], alone[0])
        assert torch.equal(prob[3:12], alone[1])
        assert best.tolist() == [-1, alone[2].item()]


def test_empty_sizes() -> None:
    _, norm_weight, head_weight, _ = make(0, 8, torch.float32)
    for rows, sizes, best in ((0, [], []), (0, [0, 0], [-1, -1]), (9, [], []), (9, [0], [-1]), (40, [0], [-1])):
        hidden = torch.randn(rows, 8)
        score, prob, got = candidate_head(hidden, norm_weight, head_weight, offsets(sizes), eps=EPS)
        assert got.tolist() == best
        assert not prob.any()
        compare((hidden, norm_weight, head_weight, None), sizes, (score, prob, got))


@pytest.mark.parametrize("rows", [13, 50])
@pytest.mark.parametrize(
    "bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4], [2**40, -(2**40), 4], [0, 1, 2, 3, 4, 5, 4]]
)
def test_bad_offsets_poison(bad: list[int], rows: int) -> None:
    hidden, norm_weight, head_weight, _ = make(rows, 8, torch.float32)
    score, prob, best = candidate_head(hidden, norm_weight, head_weight, torch.tensor(bad), eps=EPS)
    assert torch.equal(score, candidate_head(hidden, norm_weight, head_weight, offsets([4]), eps=EPS)[0])
    assert prob.isnan().all()
    assert best.tolist() == [-1] * (len(bad) - 1)


def test_many_groups() -> None:
    """More than a block has threads, some of them bad only at the end."""
    hidden, norm_weight, head_weight, _ = make(20, 8, torch.float32)
    sizes = [1] * 7 + [0] * 900 + [5]
    arguments = hidden, norm_weight, head_weight
    compare((*arguments, None), sizes, candidate_head(*arguments, offsets(sizes), eps=EPS))
    bad = offsets(sizes)
    bad[-2] = 13
    assert candidate_head(hidden, norm_weight, head_weight, bad, eps=EPS)[1].isnan().all()


@pytest.mark.parametrize("sizes", [[13], [13, 13, 20]])
def test_repeats_are_bit_equal_with_one_launch_and_no_sync(sizes: list[int]) -> None:
    hidden, norm_weight, head_weight, head_bias = make(sum(sizes) + 2, 2048, torch.bfloat16)

    def call() -> tuple[Tensor, ...]:
        return candidate_head(hidden, norm_weight, head_weight, offsets(sizes), eps=EPS, head_bias=head_bias)

    first = call()
    with count_launches() as launches, count_syncs() as syncs:
        again = call()
    assert all(map(torch.equal, first, again))
    assert (launches.by_op["fb::candidate_head"], syncs.total) == (1, 0)


@pytest.mark.parametrize("normed", [False, True])
def test_opcheck(normed: bool) -> None:
    hidden, norm_weight, head_weight, head_bias = make(7, 8, torch.bfloat16)
    arguments = hidden, None if normed else norm_weight, head_weight, None if normed else head_bias
    torch.library.opcheck(torch.ops.fb.candidate_head.default, (*arguments, offsets([3, 0, 3]), EPS))


def test_gradients_come_from_the_backward_of_others() -> None:
    leaves = [value.requires_grad_() for value in make(9, 40, torch.float32)]
    for name in ("cuda", "reference"):
        with backend.override(name):
            score = candidate_head(*leaves[:3], offsets([9]), eps=EPS, head_bias=leaves[3])[0]
            grads = torch.autograd.grad(score.square().sum(), leaves)
        if name == "cuda":
            first = grads
    for ours, want in zip(first, grads, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


def test_what_others_do_is_not_taken() -> None:
    for rows, width, sizes, dtype in (
        (4, 8, [4], torch.float64),
        (4, 0, [4], torch.float32),
        (1025, 8, [4], torch.float32),
        (4, 8, [0] * 1025, torch.float32),
    ):
        hidden, norm_weight, head_weight, head_bias = make(rows, width, dtype)
        arguments = hidden, norm_weight, head_weight, head_bias, offsets(sizes), EPS
        assert kernels.candidate_head(*arguments) is NotImplemented
        with backend.override("cuda,candidate_head=auto"):
            assert torch.ops.fb.candidate_head(*arguments)[2].shape == (len(sizes),)
