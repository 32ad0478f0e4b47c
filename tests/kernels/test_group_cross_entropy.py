from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels import segments
from fb_kernels.group_cross_entropy import group_cross_entropy
from fb_kernels.group_cross_entropy.naive import group_cross_entropy as naive
from fb_kernels.testing import assert_close_to_reference


def offsets(sizes: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(dtype)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 6), max_size=6),
    tail=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    index=st.sampled_from([torch.int32, torch.int64]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    strided=st.booleans(),
    scale=st.sampled_from([0.0, 1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_matches_naive_forward_and_backward(
    sizes: list[int],
    tail: int,
    dtype: torch.dtype,
    index: torch.dtype,
    reduction: str,
    strided: bool,
    scale: float,
    seed: int,
) -> None:
    rows, generator = sum(sizes) + tail, torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, 3, generator=generator) * scale).to(dtype)
    targets = torch.rand(rows, 2, generator=generator).to(dtype)
    score = (values[:, 1] if strided else values[:, 1].clone()).requires_grad_()
    target = targets[:, 1] if strided else targets[:, 1].clone()
    cu = offsets(sizes, index).repeat_interleave(2)[::2] if strided else offsets(sizes, index)
    loss = group_cross_entropy(score, target, cu, reduction=reduction)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    upstream = torch.randn(loss.shape, generator=generator).to(loss.dtype)
    exact, plain = score.detach().double().requires_grad_(), score.detach().requires_grad_()
    want = naive(exact, target.double(), cu, reduction=reduction)
    native = naive(plain.to(loss.dtype), target.to(loss.dtype), cu, reduction=reduction)
    # No term is negative; the log of a sum of exponentials from 1 on is rounded at 1.
    assert_close_to_reference(loss, want, native, scale=1 + want.detach().abs())
    (grad,) = torch.autograd.grad(loss, score, upstream)
    assert grad.dtype == dtype
    if not sizes:
        assert not grad.any()
        return
    (want_grad,) = torch.autograd.grad(want, exact, upstream.double())
    (plain_grad,) = torch.autograd.grad(native, plain, upstream)
    count = max(1, sum(size > 0 for size in sizes)) if reduction == "mean" else 1
    weight = [*(upstream.double().abs() / count).expand(len(sizes)), torch.zeros(())]
    parts = zip(weight, target.double().split([*sizes, tail]), strict=True)
    terms = torch.cat([each * (q.sum() + q) for each, q in parts])  # of softmax(score) * sum q - q
    assert_close_to_reference(grad, want_grad, plain_grad, scale=terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    score = (torch.randn(20, 13, generator=generator) * 3).to(dtype).requires_grad_()
    target = torch.rand(20, 13, generator=generator).softmax(1).to(dtype)
    exact = score.detach().double().requires_grad_()
    want = naive(exact.flatten(), target.flatten().double(), offsets([13] * 20), reduction="none")
    plain = -(target * torch.log_softmax(score, 1)).sum(1)
    ours = group_cross_entropy(score.flatten(), target.flatten(), offsets([13] * 20), reduction="none")
    pairs = [(ours, plain, want, torch.float32)]
    grads = [
        torch.autograd.grad(value.sum(), leaf)[0] for value, leaf in ((ours, score), (plain, score), (want, exact))
    ]
    for a, b, reference, kind in [*pairs, (*grads, dtype)]:
        assert a.dtype == kind
        assert_close_to_reference(a, reference, b, scale=reference.abs().amax())


def test_agrees_with_cross_entropy_of_one_class() -> None:
    logits = torch.randn(5, 7)
    target = torch.nn.functional.one_hot(torch.arange(5), 7).float()
    want = torch.nn.functional.cross_entropy(logits, torch.arange(5))
    torch.testing.assert_close(group_cross_entropy(logits.flatten(), target.flatten(), offsets([7] * 5)), want)


def test_zero_targets_silence_infinite_scores() -> None:
    inf, nan = math.inf, math.nan
    score = torch.tensor([-inf, 1.0, 2.0, -inf, 3.0, nan, 1.0, 5.0, -inf, nan], requires_grad=True)
    target = torch.tensor([0.0, 0.5, 0.5, 1.0, 0.0, 0.5, 0.5, 1.0, 0.0, nan])
    loss = group_cross_entropy(score, target, offsets([3, 2, 2, 2]), reduction="none")
    torch.testing.assert_close(loss[0], -0.5 * torch.log_softmax(torch.tensor([1.0, 2.0]), 0).sum())
    assert loss[1] == inf
    assert loss[2].isnan()
    assert loss[3] == 0
    (grad,) = torch.autograd.grad(loss, score, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    soft = torch.softmax(torch.tensor([1.0, 2.0]), 0)
    torch.testing.assert_close(grad[:5], torch.tensor([0.0, soft[0] - 0.5, soft[1] - 0.5, -1.0, 1.0]))
    assert not grad[5:].any()


def test_targets_of_zero_silence_a_whole_group() -> None:
    score = torch.tensor([math.nan, 1.0, -math.inf, -math.inf], requires_grad=True)
    loss = group_cross_entropy(score, torch.zeros(4), offsets([2, 2]))
    loss.backward()
    assert loss == 0
    assert score.grad is not None
    assert not score.grad.any()


def test_groups_are_independent() -> None:
    score, target = torch.randn(9), torch.rand(9)
    alone = group_cross_entropy(score[3:6].clone(), target[3:6].clone(), offsets([3]), reduction="none")
    score[:3], score[6:] = math.nan, math.inf
    assert torch.equal(group_cross_entropy(score, target, offsets([3, 3]), reduction="none")[1:], alone)


def test_target_gets_no_gradient() -> None:
    score, target = torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True)
    group_cross_entropy(score, target, offsets([4])).backward()
    assert score.grad is not None
    assert target.grad is None
    assert group_cross_entropy(score.detach(), target.detach(), offsets([4])).requires_grad is False


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_sizes(reduction: str) -> None:
    for rows, sizes in ((0, []), (0, [0, 0]), (3, []), (3, [0])):
        score = torch.randn(rows, requires_grad=True)
        loss = group_cross_entropy(score, torch.rand(rows), offsets(sizes), reduction=reduction)
        assert loss.shape == ((len(sizes),) if reduction == "none" else ())
        assert not loss.any()
        loss.sum().backward()
        assert score.grad is not None
        assert not score.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction: str) -> None:
    score = torch.randn(8, dtype=torch.float64, requires_grad=True)
    target, cu = torch.rand(8, dtype=torch.float64), offsets([3, 0, 1, 3])
    assert torch.autograd.gradcheck(lambda s: group_cross_entropy(s, target, cu, reduction=reduction), (score,))


def test_inputs_unchanged_and_repeats_equal() -> None:
    score, target, cu = torch.randn(9), torch.rand(9), offsets([4, 4])
    before = score.clone(), target.clone(), cu.clone()
    first, second = (group_cross_entropy(score, target, cu, reduction="none") for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((score, target, cu), before, strict=True))


@pytest.mark.parametrize("bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4]])
def test_bad_offsets_poison_where_the_host_does_not_read_them(bad: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "check_offsets", lambda *_: None)  # as on a device
    score = torch.randn(4, requires_grad=True)
    loss = group_cross_entropy(score, torch.rand(4), torch.tensor(bad))
    assert loss.isnan()
    assert torch.autograd.grad(loss, score)[0].isnan().all()


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.randn(7, requires_grad=True), torch.rand(7), offsets([3, 0, 3])),
        (torch.randn(7, 2).bfloat16()[:, 1], torch.rand(7).bfloat16(), torch.tensor([0, 7])),
        (torch.randn(4).double().requires_grad_(), torch.rand(4).double().requires_grad_(), torch.tensor([0, 4])),
        (torch.empty(0), torch.empty(0), torch.tensor([0])),
    ],
)
def test_opcheck(arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    torch.library.opcheck(torch.ops.fb.group_cross_entropy.default, arguments)
    backward = torch.ones(arguments[2].shape[0] - 1), *(t.detach() for t in arguments)
    torch.library.opcheck(torch.ops.fb.group_cross_entropy_backward.default, backward)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_without_breaks(reduction: str) -> None:
    target, cu, start = torch.rand(8), offsets([3, 0, 4]), torch.randn(8)

    def loss(score: Tensor) -> Tensor:
        return group_cross_entropy(score, target, cu, reduction=reduction)

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        score = start.clone().requires_grad_()
        value = function(score)
        results.append((value, *torch.autograd.grad(value.sum(), score)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


S, Q, CU = torch.randn(4), torch.rand(4), torch.tensor([0, 2, 4])


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: group_cross_entropy([1.0], Q, CU), TypeError, "score"),
        (lambda: group_cross_entropy(S.long(), Q, CU), TypeError, "score"),
        (lambda: group_cross_entropy(S[None], Q, CU), ValueError, "score"),
        (lambda: group_cross_entropy(S, None, CU), TypeError, "target"),
        (lambda: group_cross_entropy(S, Q.double(), CU), TypeError, "target"),
        (lambda: group_cross_entropy(S, Q[:3], CU), ValueError, "target"),
        (lambda: group_cross_entropy(S, Q.to("meta"), CU), ValueError, "target"),
        (lambda: group_cross_entropy(S, Q, CU.float()), TypeError, "cu_group"),
        (lambda: group_cross_entropy(S, Q, CU[:0]), ValueError, "cu_group"),
        (lambda: group_cross_entropy(S, Q, torch.tensor([0, 3, 2])), ValueError, "cu_group"),
        (lambda: group_cross_entropy(S, Q, torch.tensor([1, 4])), ValueError, "cu_group"),
        (lambda: group_cross_entropy(S, Q, torch.tensor([0, 5])), ValueError, "cu_group"),
        (lambda: group_cross_entropy(S, Q, CU, reduction="average"), ValueError, "reduction"),
    ],
)
def test_bad_arguments(call: Callable[[], object], kind: type[Exception], argument: str) -> None:
    with pytest.raises(kind, match=rf"^group_cross_entropy: {argument}: expected .*, got .*; .+") as caught:
        call()
    assert type(caught.value) is kind
    want = naive(S.double(), Q.double(), CU)
    assert_close_to_reference(group_cross_entropy(S, Q, CU), want, want.float())
