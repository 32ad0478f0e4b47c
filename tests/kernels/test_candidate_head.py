from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels import backend, segments
from fb_kernels.candidate_head import candidate_head
from fb_kernels.candidate_head.naive import candidate_head as naive
from fb_kernels.testing import assert_close_to_reference, magnitude

EPS = 1e-6


def naive_score(
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Scores alone, computed in a dtype."""
    hidden, norm_weight, head_weight, head_bias = (
        None if x is None else x.to(dtype) for x in (hidden, norm_weight, head_weight, head_bias)
    )
    return naive(hidden, norm_weight, head_weight, offsets([]), eps=EPS, head_bias=head_bias)[0]


def compare(
    arguments: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    sizes: list[int],
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Scores against float64 at the size of what they sum, then the groups of these very scores."""
    score, prob, best = results
    truth, plain = naive_score(*arguments), naive_score(*arguments, dtype=score.dtype)
    terms = naive_score(*(None if x is None else magnitude(x) for x in arguments))
    assert_close_to_reference(score, truth, plain, scale=terms)
    (_, want, want_best), (_, plain, _) = (
        naive(x[:, None], None, x.new_ones(1), offsets(sizes), eps=EPS) for x in (score.double(), score)
    )
    assert_close_to_reference(prob, want, plain, scale=1.0)  # what a group's sum to
    assert torch.equal(best, want_best)


def offsets(sizes: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(dtype)


def make(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    norm_weight, head_weight = 1 + 0.1 * torch.randn(2, width, generator=generator)
    return tuple(t.to(dtype) for t in (hidden, norm_weight, head_weight, torch.randn(1, generator=generator)))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 6), max_size=6),
    tail=st.integers(0, 3),
    width=st.integers(1, 33),
    normed=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
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
    assert score.dtype == prob.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert score.shape == prob.shape == (rows,)
    assert best.dtype == torch.int64
    compare((*arguments, head), sizes, (score, prob, best))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    inputs = [t.requires_grad_() for t in make(26, 512, dtype)]
    upstream = torch.randn(26)

    def plain(hidden: Tensor, norm_weight: Tensor, head_weight: Tensor, head_bias: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(hidden, (512,), norm_weight, EPS)
        return torch.nn.functional.linear(normed, head_weight[None], head_bias)[:, 0]

    ours = candidate_head(*inputs[:3], offsets([13, 13]), eps=EPS, head_bias=inputs[3])[0]
    baseline = plain(*inputs)
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    exact = naive_score(*exact_inputs)
    assert_close_to_reference(ours, exact, baseline)
    got = torch.autograd.grad(ours, inputs, upstream)
    baseline_grads = torch.autograd.grad(baseline, inputs, upstream.to(dtype))
    for grad, other, want in zip(
        got, baseline_grads, torch.autograd.grad(exact, exact_inputs, upstream.double()), strict=True
    ):
        assert grad.dtype == dtype
        assert_close_to_reference(grad, want, other, scale=want.abs().amax())


def scored(values: list[float]) -> tuple[Tensor, None, Tensor]:
    """Inputs whose scores are exactly `values`."""
    return torch.tensor(values)[:, None], None, torch.ones(1)


def test_ties_and_negative_scores() -> None:
    _, prob, best = candidate_head(*scored([-5, -2, -2, -0.0, 0.0, -9, -9]), offsets([3, 2, 2]), eps=EPS)
    assert best.tolist() == [1, 0, 0]
    assert prob[3:].tolist() == [0.5] * 4


def test_non_finite_scores_stay_in_their_group() -> None:
    inf, nan = math.inf, math.nan
    values = [1.0, nan, 2.0, nan, nan, -inf, -inf, inf, 1.0, nan, -inf, -inf, 0.0, 3.0, 4.0, nan]
    score, prob, best = candidate_head(*scored(values), offsets([3, 2, 2, 2, 2, 2, 2]), eps=EPS)
    assert best.tolist() == [2, -1, 0, 0, 1, 1, 1]
    assert prob[:11].isnan().all()
    assert prob[11:13].tolist() == [0.0, 1.0]
    torch.testing.assert_close(prob[13:15], torch.softmax(torch.tensor([3.0, 4.0]), 0))
    assert prob[15] == 0
    assert score[15].isnan()


def test_rows_are_independent_and_groups_too() -> None:
    hidden, norm_weight, head_weight, _ = make(8, 64, torch.float32)
    alone = candidate_head(hidden[3:6].clone(), norm_weight, head_weight, offsets([3]), eps=EPS)
    hidden[:3] = math.nan
    hidden[6:] = math.inf
    score, prob, best = candidate_head(hidden, norm_weight, head_weight, offsets([3, 3]), eps=EPS)
    assert torch.equal(score[3:6], alone[0])
    assert torch.equal(prob[3:6], alone[1])
    assert best.tolist() == [-1, alone[2].item()]


def test_unused_nan_rows_give_no_gradient() -> None:
    hidden, norm_weight, head_weight, _ = make(5, 8, torch.float32)
    hidden[3] = math.nan
    hidden[4] = math.inf
    for norm in (norm_weight, None):
        leaves = [t.clone().requires_grad_() for t in (hidden, norm_weight, head_weight)]
        score, *_ = candidate_head(leaves[0], None if norm is None else leaves[1], leaves[2], offsets([5]), eps=EPS)
        score[:3].sum().backward()
        assert leaves[0].grad is not None
        assert leaves[2].grad is not None
        assert leaves[0].grad.isfinite().all()
        assert leaves[2].grad.isfinite().all()
        assert not leaves[0].grad[3:].any()


def test_prob_and_best_carry_no_gradient() -> None:
    hidden, norm_weight, head_weight, _ = make(4, 8, torch.float32)
    score, prob, best = candidate_head(hidden.requires_grad_(), norm_weight, head_weight, offsets([4]), eps=EPS)
    assert score.requires_grad
    assert not prob.requires_grad
    assert not best.requires_grad


def test_empty_sizes() -> None:
    _, norm_weight, head_weight, _ = make(0, 8, torch.float32)
    for rows, sizes, best in ((0, [], []), (0, [0, 0], [-1, -1]), (3, [], []), (3, [0], [-1]), (3, [0, 3, 0], None)):
        hidden = torch.randn(rows, 8, requires_grad=True)
        score, prob, got = candidate_head(hidden, norm_weight, head_weight, offsets(sizes), eps=EPS)
        assert score.shape == prob.shape == (rows,)
        assert got.tolist() == best if best is not None else (got[0] == got[2] == -1)
        score.sum().backward()
        assert hidden.grad is not None


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(normed: bool, bias: bool) -> None:
    hidden, norm_weight, head_weight, head_bias = (t.requires_grad_() for t in make(5, 4, torch.float64))
    cu = offsets([2, 0, 2])

    def score(hidden: Tensor, norm_weight: Tensor, head_weight: Tensor, head_bias: Tensor) -> Tensor:
        norm = None if normed else norm_weight
        return candidate_head(hidden, norm, head_weight, cu, eps=0.1, head_bias=head_bias if bias else None)[0]

    assert torch.autograd.gradcheck(score, (hidden, norm_weight, head_weight, head_bias))


def test_gradient_of_each_input_alone() -> None:
    inputs = make(6, 8, torch.float32)
    cu = offsets([6])

    def grads(wanted: set[int]) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
        candidate_head(*leaves[:3], cu, eps=EPS, head_bias=leaves[3])[0].square().sum().backward()
        return [leaf.grad for leaf in leaves]

    every = grads({0, 1, 2, 3})
    for i in range(4):
        alone = grads({i})
        assert torch.equal(alone[i], every[i])
        assert all(grad is None for j, grad in enumerate(alone) if j != i)


def test_bias_of_no_dimension_and_float32_master_head() -> None:
    hidden, norm_weight, head_weight, _ = make(4, 8, torch.bfloat16)
    master, bias = head_weight.float().requires_grad_(), torch.zeros((), requires_grad=True)
    candidate_head(hidden, norm_weight, master, offsets([4]), eps=EPS, head_bias=bias)[0].sum().backward()
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    assert bias.grad is not None
    assert bias.grad.shape == ()
    assert bias.grad == 4


def test_inputs_unchanged_and_repeats_equal() -> None:
    inputs = make(9, 16, torch.float32)
    before = [t.clone() for t in inputs]
    cu = offsets([4, 4])
    runs = [candidate_head(*inputs[:3], cu, eps=EPS, head_bias=inputs[3]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(cu, offsets([4, 4]))


@pytest.mark.parametrize("bad", [[0, 5, 2], [3, 1, 4], [0, 2, 99], [-7, 2, 4], [1, 2, 4], [2**40, -(2**40), 4]])
def test_bad_offsets_poison_where_the_host_does_not_read_them(bad: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "check_offsets", lambda *_: None)  # as on a device
    monkeypatch.setattr(backend, "_overrides", backend._parse("reference"))
    hidden, norm_weight, head_weight, _ = make(4, 8, torch.float32)
    score, prob, best = candidate_head(hidden, norm_weight, head_weight, torch.tensor(bad), eps=EPS)
    assert torch.equal(score, candidate_head(hidden, norm_weight, head_weight, offsets([4]), eps=EPS)[0])
    assert prob.isnan().all()
    assert best.tolist() == [-1, -1]


def _arguments(dtype: torch.dtype, grad: bool, normed: bool, bias: bool) -> tuple:
    hidden, norm_weight, head_weight, head_bias = (t.requires_grad_(grad) for t in make(7, 8, dtype))
    return hidden, None if normed else norm_weight, head_weight, head_bias if bias else None, offsets([3, 0, 3]), EPS


@pytest.mark.parametrize(
    "arguments",
    [
        _arguments(torch.float32, True, False, True),
        _arguments(torch.float32, True, True, False),
        _arguments(torch.bfloat16, False, False, True),
        (torch.randn(4, 6).mT, torch.ones(4), torch.ones(4), None, torch.tensor([0, 6]), EPS),
        (torch.randn(0, 4), None, torch.ones(4), None, torch.tensor([0, 0]), EPS),
    ],
)
def test_opcheck(arguments: tuple) -> None:
    torch.library.opcheck(torch.ops.fb.candidate_head.default, arguments)


@pytest.mark.parametrize("needs", [[True] * 4, [False, True, False, False], [True, False, True, True]])
def test_opcheck_backward(needs: list[bool]) -> None:
    hidden, norm_weight, head_weight, head_bias = make(7, 8, torch.bfloat16)
    arguments = torch.randn(7), hidden, norm_weight, head_weight.float(), head_bias, EPS, needs
    torch.library.opcheck(torch.ops.fb.candidate_head_backward.default, arguments)
    no_norm = torch.randn(7), hidden, None, head_weight, None, EPS, [needs[0], False, needs[2], False]
    torch.library.opcheck(torch.ops.fb.candidate_head_backward.default, no_norm)


def test_compiles_without_breaks() -> None:
    cu = offsets([3, 0, 4])

    def loss(*leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        score, prob, best = candidate_head(*leaves[:3], cu, eps=EPS, head_bias=leaves[3])
        return (score * prob).sum(), prob, best

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [t.requires_grad_() for t in make(8, 16, torch.float32)]
        value, prob, best = function(*leaves)
        results.append([value, prob, best, *torch.autograd.grad(value, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


H, W, CU = torch.randn(4, 3), torch.ones(3), torch.tensor([0, 2, 4])


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: candidate_head([1.0], W, W, CU, eps=EPS), TypeError, "hidden"),
        (lambda: candidate_head(H.long(), W, W, CU, eps=EPS), TypeError, "hidden"),
        (lambda: candidate_head(H[None], W, W, CU, eps=EPS), ValueError, "hidden"),
        (lambda: candidate_head(H, W.double(), W, CU, eps=EPS), TypeError, "norm_weight"),
        (lambda: candidate_head(H, W[:2], W, CU, eps=EPS), ValueError, "norm_weight"),
        (lambda: candidate_head(H, W, None, CU, eps=EPS), TypeError, "head_weight"),
        (lambda: candidate_head(H, W, W.double(), CU, eps=EPS), TypeError, "head_weight"),
        (lambda: candidate_head(H, W, W.bfloat16(), CU, eps=EPS), TypeError, "head_weight"),
        (lambda: candidate_head(H, W, W[None], CU, eps=EPS), ValueError, "head_weight"),
        (lambda: candidate_head(H, W, W.to("meta"), CU, eps=EPS), ValueError, "head_weight"),
        (lambda: candidate_head(H, W, W, CU, eps=EPS, head_bias=0.5), TypeError, "head_bias"),
        (lambda: candidate_head(H, W, W, CU, eps=EPS, head_bias=W), ValueError, "head_bias"),
        (lambda: candidate_head(H, W, W, [0, 4], eps=EPS), TypeError, "cu_group"),
        (lambda: candidate_head(H, W, W, CU.float(), eps=EPS), TypeError, "cu_group"),
        (lambda: candidate_head(H, W, W, CU[None], eps=EPS), ValueError, "cu_group"),
        (lambda: candidate_head(H, W, W, CU[:0], eps=EPS), ValueError, "cu_group"),
        (lambda: candidate_head(H, W, W, torch.tensor([0, 3, 2]), eps=EPS), ValueError, "cu_group"),
        (lambda: candidate_head(H, W, W, torch.tensor([1, 4]), eps=EPS), ValueError, "cu_group"),
        (lambda: candidate_head(H, W, W, torch.tensor([0, 5]), eps=EPS), ValueError, "cu_group"),
        (lambda: candidate_head(H, W, W, CU, eps=-1.0), ValueError, "eps"),
        (lambda: candidate_head(H, W, W, CU, eps=math.nan), ValueError, "eps"),
        (lambda: candidate_head(H, W, W, CU, eps=None), TypeError, "eps"),
    ],
)
def test_bad_arguments(call: Callable[[], object], kind: type[Exception], argument: str) -> None:
    with pytest.raises(kind, match=rf"^candidate_head: {argument}: expected .*, got .*; .+") as caught:
        call()
    assert type(caught.value) is kind
    compare((H, W, W, None), [2, 2], candidate_head(H, W, W, CU, eps=EPS))
