"""The Triton kernels of `candidate_head` against the float64 definition, interpreted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import count_kernels
from test_candidate_head import EPS, compare, make, naive_score, offsets, scored
from torch import Tensor

from fb_kernels import backend, tuning
from fb_kernels.candidate_head import candidate_head
from fb_kernels.candidate_head import triton as kernels
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, poison_

pytestmark = pytest.mark.usefixtures("triton_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of several tiles, rows of several blocks, offsets in several pieces."""
    launch = {"ROWS": 4, "BLOCK": 16, "num_warps": 1}
    monkeypatch.setattr(tuning, "candidate_head", lambda *_: launch | {"OFFSETS": 4})
    monkeypatch.setattr(tuning, "candidate_head_backward", lambda *_: launch)
    monkeypatch.setattr(kernels, "REST", 2)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 10), max_size=6),
    tail=st.integers(0, 11),
    width=st.integers(1, 40),
    normed=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
    master=st.booleans(),
    strided=st.booleans(),
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
    strided: bool,
    seed: int,
) -> None:
    rows = sum(sizes) + tail
    hidden, norm_weight, head_weight, head_bias = make(rows, width, dtype, seed)
    cu = offsets(sizes, index)
    if strided:
        hidden = torch.cat([hidden, hidden], 1).mT.contiguous().mT[:, width:]
        norm_weight, head_weight = norm_weight.repeat_interleave(2)[1::2], head_weight.repeat_interleave(2)[::2]
        cu = cu.repeat_interleave(3)[::3]
    if master:
        head_weight, head_bias = head_weight.float(), head_bias.float()
    arguments = hidden, None if normed else norm_weight, head_weight
    head = head_bias if bias else None
    score, prob, best = candidate_head(*arguments, cu, eps=EPS, head_bias=head)
    assert score.dtype == prob.dtype == torch.float32
    assert best.dtype == torch.int64
    compare((*arguments, head), sizes, (score, prob, best))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_within_twice_plain_pytorch(
    dtype: torch.dtype, normed: bool, small: bool, request: pytest.FixtureRequest
) -> None:
    if small:
        request.getfixturevalue("small_blocks")
    width = 45 if small else 700
    inputs = [t.requires_grad_() for t in make(27, width, dtype)]
    leaves = [inputs[0], *inputs[2:]] if normed else inputs
    upstream = torch.randn(27, generator=torch.Generator().manual_seed(5))
    upstream[3] = 0

    def plain(hidden: Tensor, *weights: Tensor) -> Tensor:
        norm = [] if normed else [weights[0]]
        x = torch.nn.functional.rms_norm(hidden, (width,), norm[0], EPS) if norm else hidden
        return torch.nn.functional.linear(x, weights[-2][None], weights[-1])[:, 0]

    norm = None if normed else inputs[1]
    ours = candidate_head(inputs[0], norm, inputs[2], offsets([13, 14]), eps=EPS, head_bias=inputs[3])[0]
    baseline = plain(*leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = naive_score(wide[0], None if normed else wide[1], *wide[-2:])
    assert_close_to_reference(ours, exact, baseline)
    got = torch.autograd.grad(ours, leaves, upstream)
    others = torch.autograd.grad(baseline, leaves, upstream.to(dtype))
    for grad, other, want in zip(got, others, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert grad.dtype == dtype
        assert_close_to_reference(grad, want, other, scale=want.abs().amax())


@pytest.mark.usefixtures("small_blocks")
def test_ties_and_negative_scores() -> None:
    _, prob, best = candidate_head(*scored([-5, -2, -2, -0.0, 0.0, *[-9] * 9]), offsets([3, 2, 9]), eps=EPS)
    assert best.tolist() == [1, 0, 0]
    assert prob[3:5].tolist() == [0.5] * 2


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("before", [0, 5])
def test_non_finite_scores_stay_in_their_group(before: int) -> None:
    """Also where what comes first fills a tile of -inf or of NaN."""
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


@pytest.mark.usefixtures("small_blocks")
def test_a_group_of_nan_in_its_first_tile() -> None:
    values = [math.nan] * 5 + [1.0, -math.inf] + [math.nan] * 9
    _, prob, best = candidate_head(*scored(values), offsets([7, 9]), eps=EPS)
    assert best.tolist() == [5, -1]
    assert prob.isnan().all()


@pytest.mark.usefixtures("small_blocks")
def test_rows_are_independent_and_groups_too() -> None:
    hidden, norm_weight, head_weight, _ = make(14, 64, torch.float32)
    alone = candidate_head(hidden[3:12].clone(), norm_weight, head_weight, offsets([9]), eps=EPS)
    hidden[:3], hidden[12:] = math.nan, math.inf
    score, prob, best = candidate_head(hidden, norm_weight, head_weight, offsets([3, 9]), eps=EPS)
    assert torch.equal(score[3:12], alone[0])
    assert torch.equal(prob[3:12], alone[1])
    assert best.tolist() == [-1, alone[2].item()]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("eps", [0.0, EPS])
def test_unused_nan_rows_give_no_gradient(normed: bool, eps: float) -> None:
    hidden, norm_weight, head_weight, _ = make(9, 40, torch.float32)
    hidden[3], hidden[8] = math.nan, math.inf
    leaves = [t.clone().requires_grad_() for t in (hidden, norm_weight, head_weight)]
    score, *_ = candidate_head(leaves[0], None if normed else leaves[1], leaves[2], offsets([9]), eps=eps)
    used = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    score[used].sum().backward()
    for leaf in leaves[:: 2 if normed else 1]:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert not leaves[0].grad[[3, 8]].any()
    assert leaves[0].grad[used].any(1).all()


@pytest.mark.usefixtures("small_blocks")
def test_empty_sizes() -> None:
    _, norm_weight, head_weight, _ = make(0, 8, torch.float32)
    for rows, sizes, best in ((0, [], []), (0, [0, 0], [-1, -1]), (9, [], []), (9, [0], [-1])):
        hidden = torch.randn(rows, 8, requires_grad=True)
        score, prob, got = candidate_head(hidden, norm_weight, head_weight, offsets(sizes), eps=EPS)
        assert got.tolist() == best
        assert not prob.any()
        compare((hidden.detach(), norm_weight, head_weight, None), sizes, (score, prob, got))
        score.sum().backward()
        assert hidden.grad is not None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4], [2**40, -(2**40), 4], [0, 1, 2, 3, 4, 5, 4]]
)
def test_bad_offsets_poison(bad: list[int]) -> None:
    hidden, norm_weight, head_weight, _ = make(13, 8, torch.float32)
    score, prob, best = candidate_head(hidden, norm_weight, head_weight, torch.tensor(bad), eps=EPS)
    assert torch.equal(score, candidate_head(hidden, norm_weight, head_weight, offsets([4]), eps=EPS)[0])
    assert prob.isnan().all()
    assert best.tolist() == [-1] * (len(bad) - 1)


@pytest.mark.usefixtures("small_blocks")
def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, norm_weight, head_weight, head_bias = make(30, 40, torch.float32)
    arguments = hidden, norm_weight, head_weight, head_bias
    cu, grad = offsets([3, 0, 9]), torch.randn(30)
    clean = torch.ops.fb.candidate_head(*arguments, cu, EPS)
    every = torch.ops.fb.candidate_head_backward(grad, *arguments, EPS, [True] * 4)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poison_(new_empty(*args, **options)))
    assert all(map(torch.equal, torch.ops.fb.candidate_head(*arguments, cu, EPS), clean))
    for wanted in ([True] * 4, *([i == index for i in range(4)] for index in range(4))):
        some = torch.ops.fb.candidate_head_backward(grad, *arguments, EPS, wanted)
        for need, mine, whole in zip(wanted, some, every, strict=True):
            assert torch.equal(mine, whole) if need else mine.shape == (0,)


def test_repeats_are_bit_equal_with_one_kernel_and_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, norm_weight, head_weight, head_bias = make(30, 40, torch.bfloat16)
    cu = offsets([13, 13])
    names = count_kernels(monkeypatch, kernels)
    with count_launches() as launches, count_syncs() as syncs:
        first = candidate_head(hidden, norm_weight, head_weight, cu, eps=EPS, head_bias=head_bias)
    again = candidate_head(hidden, norm_weight, head_weight, cu, eps=EPS, head_bias=head_bias)
    assert all(map(torch.equal, first, again))
    assert (launches.total, syncs.total, names) == (1, 0, ["_candidate_head_fwd_kernel"] * 2)


@pytest.mark.parametrize("normed", [False, True])
def test_opcheck(normed: bool) -> None:
    hidden, norm_weight, head_weight, head_bias = (t.requires_grad_() for t in make(7, 8, torch.bfloat16))
    arguments = hidden, None if normed else norm_weight, head_weight, None if normed else head_bias
    torch.library.opcheck(torch.ops.fb.candidate_head.default, (*arguments, offsets([3, 0, 3]), EPS))


def test_float64_and_no_width_are_the_references() -> None:
    for width, dtype in ((8, torch.float64), (0, torch.float32)):
        hidden, norm_weight, head_weight, _ = make(4, width, dtype)
        with pytest.raises(ValueError, match="candidate_head: expected arguments that the triton kernel takes"):
            candidate_head(hidden, norm_weight, head_weight, offsets([4]), eps=EPS)
        with backend.override("triton,candidate_head=auto"):
            assert candidate_head(hidden, norm_weight, head_weight, offsets([4]), eps=EPS)[2].shape == (1,)
