from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.linear_logprob import combine_logprob_partials, linear_logprob, linear_logprob_partials, reference
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, largest_tensor, poison_

IGNORE = -100
ALL = {"return_lse": True, "return_entropy": True}


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None


def inputs(
    rows: tuple[int, ...] = (5,),
    width: int = 6,
    vocab: int = 11,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bias: bool = True,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    offset = torch.randn(vocab, generator=generator, dtype=torch.float64)
    target = torch.randint(0, max(vocab, 1), rows, generator=generator)
    return Inputs(hidden.to(dtype), weight.to(dtype), target, offset.to(dtype) if bias else None)


def naive_logits(values: Inputs, scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0) -> Tensor:
    logits = torch.einsum("...d,vd->...v", values.hidden, values.weight) * scale
    if values.bias is not None:
        logits = logits + values.bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def naive(
    values: Inputs,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = IGNORE,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = naive_logits(values, logit_scale, softcap, temperature)[..., :valid_vocab]
    logprobs = torch.log_softmax(logits, -1)
    kept = values.target != ignore_index
    picked = logprobs.gather(-1, values.target.where(kept, 0).long()[..., None])[..., 0]
    outputs = picked, torch.logsumexp(logits, -1), -(logprobs.exp() * logprobs).sum(-1)
    return tuple(output.where(kept, 0.0) for output in outputs)


def double(values: Inputs) -> Inputs:
    return Inputs(*(v.double() if v is not None and v.is_floating_point() else v for v in values))


def leaves(values: Inputs) -> Inputs:
    return Inputs(*(None if v is None else v.detach().clone().requires_grad_(v.is_floating_point()) for v in values))


def relaid(x: Tensor, layout: str) -> Tensor:
    if layout == "strided":
        return torch.stack((x, x.new_full((), -7).expand_as(x)), -1)[..., 0]
    if layout == "offset":
        return torch.cat((x[..., :1], x), -1)[..., 1:]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks in both directions, none of them full at the end."""
    monkeypatch.setattr(reference, "ROW_BLOCK", 3)
    monkeypatch.setattr(reference, "LOGITS", 12)


options = st.fixed_dictionaries(
    {
        "logit_scale": st.sampled_from([1.0, 0.3, -2.0]),
        "softcap": st.sampled_from([None, 1.5, 30.0]),
        "temperature": st.sampled_from([1.0, 0.6, 2.0]),
    }
)


@given(
    rows=st.lists(st.integers(0, 4), max_size=2),
    width=st.integers(0, 5),
    vocab=st.integers(1, 9),
    bias=st.booleans(),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    index=st.sampled_from([torch.int32, torch.int64]),
    options=options,
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_matches_naive_float64(
    rows: list[int],
    width: int,
    vocab: int,
    bias: bool,
    layout: str,
    index: torch.dtype,
    options: dict,
    padding: int,
    seed: int,
) -> None:
    values = inputs(tuple(rows), width, vocab, torch.float64, seed, bias)
    ignored = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.3
    values = values._replace(target=values.target.masked_fill(ignored, IGNORE).to(index))
    expected = naive(values, **options)
    if padding:  # rows of the head past the vocabulary never count, whatever they hold
        values = values._replace(weight=torch.cat((values.weight, values.weight.new_full((padding, width), math.nan))))
        if bias:
            values = values._replace(bias=torch.cat((values.bias, values.bias.new_full((padding,), math.inf))))
    hidden, weight = relaid(values.hidden, layout), relaid(values.weight, layout)
    values = values._replace(hidden=hidden, weight=weight)
    before = [None if value is None else value.clone() for value in values]
    outputs = linear_logprob(*values, **options, valid_vocab=vocab if padding else None, **ALL)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    for value, copy in zip(values, before, strict=True):
        assert value is copy or torch.equal(value.nan_to_num(), copy.nan_to_num())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_join_without_a_seam(softcap: float | None) -> None:
    values = leaves(inputs((2, 5), 6, 11, torch.float64))
    wide = leaves(values)
    given = {"logit_scale": 0.7, "softcap": softcap, "temperature": 0.8, "valid_vocab": None}
    outputs, expected = linear_logprob(*values, **given, **ALL), naive(wide, **given)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    for logprob, lse, _ in (outputs, expected):
        (logprob.square().sum() + lse.sum()).backward()
    for mine, truth in zip(values, wide, strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine.grad, truth.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_lse", [False, True])
def test_low_precision(dtype: torch.dtype, with_lse: bool) -> None:
    values = inputs((48,), 64, 300, dtype)
    values = values._replace(target=values.target.masked_fill(torch.arange(48) % 5 == 0, IGNORE))
    given = {"logit_scale": 0.5, "temperature": 0.7}
    ours, wide, plain = leaves(values), leaves(double(values)), leaves(values)
    results = linear_logprob(*ours, **given, **ALL), naive(wide, **given), naive(plain, **given)
    for logprob, lse, _ in results:
        (logprob.mean() + (lse.mean() if with_lse else 0.0)).backward()
    magnitude = naive_logits(wide, 0.5, None, 0.7).abs().amax()
    for mine, truth, native in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        assert_close_to_reference(mine, truth, native, scale=magnitude)
    for mine, truth, native in zip(ours, wide, plain, strict=True):
        if mine.is_floating_point():
            assert mine.grad.dtype == dtype
            assert_close_to_reference(mine.grad, truth.grad, native.grad)


@pytest.mark.usefixtures("small_blocks")
def test_entropy_of_large_logits() -> None:
    """A common offset of all logits costs the entropy nothing."""
    bias = 4096 + torch.arange(50).roll(20) / 8  # exact in float32
    entropy = linear_logprob(torch.zeros(1, 8), torch.zeros(50, 8), torch.zeros(1, dtype=torch.int64), bias, **ALL)[2]
    expected = torch.distributions.Categorical(logits=bias.double()).entropy()
    torch.testing.assert_close(entropy[0].double(), expected, rtol=1e-6, atol=0)


def test_probabilities_sum_to_one_and_ties_share() -> None:
    values = inputs((1,), 6, 11, torch.float64)
    every = torch.arange(11)
    logprob = linear_logprob(values.hidden.expand(11, 6), values.weight, every, values.bias)
    torch.testing.assert_close(logprob.exp().sum(), torch.tensor(1.0, dtype=torch.float64))
    tied = linear_logprob(torch.zeros(11, 6), values.weight.float(), every)
    torch.testing.assert_close(tied, torch.full((11,), -math.log(11)))


@pytest.mark.usefixtures("small_blocks")
def test_hostile_rows_stay_alone() -> None:
    values = inputs((7,), 6, 11, bias=False)
    clean = linear_logprob(*values, **ALL)
    hidden = values.hidden.clone()
    hidden[1], hidden[2, 0], hidden[4] = math.nan, math.inf, -1e30
    for mine, expected in zip(linear_logprob(hidden, *values[1:], **ALL), clean, strict=True):
        assert torch.equal(mine[[0, 3, 5, 6]], expected[[0, 3, 5, 6]])
        assert mine[[1, 2]].isnan().all()
    all_negative = torch.full((11,), -1e4)
    outputs = linear_logprob(*values[:3], all_negative, **ALL)
    torch.testing.assert_close(outputs[0], clean[0], rtol=0, atol=1e-2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("banned", [slice(0, 4), slice(4, 8), slice(1, 10)])
def test_minus_infinity_means_probability_zero(banned: slice) -> None:
    values = inputs((3,), 6, 11, torch.float64)
    bias = values.bias.clone()
    bias[banned] = -math.inf
    allowed = torch.tensor([index for index in range(11) if bias[index] != -math.inf])
    values = values._replace(bias=bias, target=allowed[[0, 1, -1]])
    mine = linear_logprob(*values, **ALL)
    few = Inputs(values.hidden, values.weight[allowed], torch.tensor([0, 1, len(allowed) - 1]), bias[allowed])
    torch.testing.assert_close(mine, naive(few), rtol=1e-12, atol=1e-12)
    picked = linear_logprob(*values._replace(target=torch.full((3,), banned.start)))
    assert (picked == -math.inf).all()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_ignored_rows_give_zero_and_no_gradient_whatever_they_hold(softcap: float | None) -> None:
    values = inputs((5,), 6, 11, torch.float64)
    kept = torch.tensor([0, 2, 4])
    hidden, target = values.hidden.clone(), values.target.clone()
    hidden[1], hidden[3], target[[1, 3]] = math.nan, math.inf, IGNORE
    mine = leaves(values._replace(hidden=hidden, target=target))
    few = leaves(values._replace(hidden=values.hidden[kept], target=values.target[kept]))
    results = linear_logprob(*mine, softcap=softcap, **ALL), linear_logprob(*few, softcap=softcap, **ALL)
    for output, expected in zip(*results, strict=True):
        assert torch.equal(output[[1, 3]], torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(output[kept], expected)
    for logprob, lse, _ in results:
        (logprob.sum() + lse.square().sum()).backward()
    assert torch.equal(mine.hidden.grad[[1, 3]], torch.zeros(2, 6, dtype=torch.float64))
    torch.testing.assert_close(mine.hidden.grad[kept], few.hidden.grad)
    torch.testing.assert_close(mine.weight.grad, few.weight.grad)
    torch.testing.assert_close(mine.bias.grad, few.bias.grad)


def test_another_ignore_index() -> None:
    values = inputs((5,), 6, 11)
    values.target[[1, 3]] = 0
    out = linear_logprob(*values, ignore_index=0)
    assert torch.equal(out == 0, values.target == 0)


@pytest.mark.parametrize(("rows", "vocab"), [((0,), 11), ((2, 0), 11), ((3,), 0), ((), 11)])
def test_empty_sizes(rows: tuple[int, ...], vocab: int) -> None:
    values = leaves(inputs(rows, 6, vocab))
    if not vocab:
        values = values._replace(target=torch.full(rows, IGNORE))
    outputs = linear_logprob(*values, **ALL)
    assert all(output.shape == rows and not output.isnan().any() for output in outputs)
    (outputs[0].sum() + outputs[1].sum()).backward()
    for value in (values.hidden, values.weight, values.bias):
        assert value.grad.shape == value.shape
        assert not value.grad.isnan().any()


def test_a_padded_head_gets_no_gradient_there() -> None:
    values = leaves(inputs((5,), 6, 11)._replace(target=torch.tensor([0, 1, 2, 3, 4])))
    poison_(values.weight[8:])
    linear_logprob(*values, valid_vocab=8).sum().backward()
    assert torch.equal(values.weight.grad[8:], torch.zeros(3, 6))
    assert torch.equal(values.bias.grad[8:], torch.zeros(3))
    assert not values.hidden.grad.isnan().any()


def test_what_is_asked_for_is_what_comes() -> None:
    values = inputs()
    logprob, lse, entropy = linear_logprob(*values, **ALL)
    assert torch.equal(linear_logprob(*values), logprob)
    assert torch.equal(linear_logprob(*values, return_lse=True)[1], lse)
    assert torch.equal(linear_logprob(*values, return_entropy=True)[1], entropy)
    assert not linear_logprob(*leaves(values), **ALL)[2].requires_grad


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("output", [0, 1])
def test_gradcheck(softcap: float | None, output: int) -> None:
    values = leaves(inputs((4,), 3, 6, torch.float64))
    values.target[1] = IGNORE

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = {"logit_scale": 0.8, "softcap": softcap, "temperature": 0.7, "valid_vocab": 5}
        return linear_logprob(hidden, weight, values.target.clamp(max=4), bias, **given, return_lse=True)[output]

    assert torch.autograd.gradcheck(function, (values.hidden, values.weight, values.bias))


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_gradients_of_one_argument_alone(name: str) -> None:
    values, wide = inputs(dtype=torch.float64), inputs(dtype=torch.float64)
    for inner, outputs in ((values, linear_logprob), (wide, lambda *v: naive(Inputs(*v))[0])):
        getattr(inner, name).requires_grad_()
        outputs(*inner).square().sum().backward()
    torch.testing.assert_close(getattr(values, name).grad, getattr(wide, name).grad)


OPTIONS = (0.7, 2.0, 0.8, IGNORE, 9)


def test_opcheck() -> None:
    op = torch.ops.fb.linear_logprob.default
    for values in (inputs((2, 3)), inputs(dtype=torch.bfloat16, bias=False), inputs((0,))):
        values = leaves(values._replace(target=values.target.clamp(max=8)))
        torch.library.opcheck(op, (*values, *OPTIONS))
    values = inputs((4,))._replace(target=torch.tensor([0, IGNORE, 3, 8], dtype=torch.int32))
    torch.library.opcheck(
        op, (values.hidden.T.contiguous().T.requires_grad_(), *values[1:], 1.0, None, 1.0, IGNORE, None)
    )
    grads = torch.ones(2, 4)
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            torch.ops.fb.linear_logprob_backward.default, (*grads, *values, torch.ones(4), *OPTIONS, needs)
        )


def test_opcheck_partials() -> None:
    values = leaves(inputs((4,)))
    start, options = (2,), (0.7, 2.0, 0.8, IGNORE, 13)
    arguments = (*values[:3], *start, values.bias, *options)
    torch.library.opcheck(torch.ops.fb.linear_logprob_partials.default, arguments)
    grads, top = torch.ones(2, 4), torch.ones(4)
    arguments = (*grads, *inputs((4,)), top, *start, *options, [True, True, True])
    torch.library.opcheck(torch.ops.fb.linear_logprob_partials_backward.default, arguments)
    partials = [value.requires_grad_() for value in torch.rand(3, 2, 4)]
    torch.library.opcheck(torch.ops.fb.combine_logprob_partials.default, partials)


def sharded(values: Inputs, cuts: list[int], **given: object) -> tuple[Tensor, Tensor]:
    parts = []
    for start, end in zip([0, *cuts], [*cuts, values.weight.shape[0]], strict=True):
        bias = None if values.bias is None else values.bias[start:end]
        shard = values.weight[start:end]
        parts.append(
            linear_logprob_partials(values.hidden, shard, values.target, vocab_start=start, bias=bias, **given)
        )
    return combine_logprob_partials(*(torch.stack([part[i].flatten() for part in parts]) for i in range(3)))


@given(
    cuts=st.lists(st.integers(0, 11), max_size=4).map(sorted),
    options=options,
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_uneven_and_empty_shards_equal_the_whole(cuts: list[int], options: dict, padding: int, seed: int) -> None:
    values = inputs((2, 3), 6, 11, torch.float64, seed)
    given = {**options, "valid_vocab": 11 - padding if padding else None}
    target = (values.target % (11 - padding)).view(-1)
    target[1] = IGNORE
    if padding:
        poison_(values.weight[-padding:])
    values = leaves(values._replace(target=target.view(2, 3)))
    whole = leaves(values)
    mine = sharded(values, cuts, **given)
    expected = [output.flatten() for output in linear_logprob(*whole, **given, return_lse=True)]
    torch.testing.assert_close(mine, tuple(expected), rtol=1e-12, atol=1e-12)
    for logprob, lse in (mine, expected):
        (logprob.square().sum() + lse.sum()).backward()
    for one, other in ((v, w) for v, w in zip(values, whole, strict=True) if v.is_floating_point()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-11)


def rows_without_a_finite_logit(dtype: torch.dtype) -> Inputs:
    """Row 1 has nothing but -inf, 2 likewise and is ignored, 3 holds NaN; ids 3 to 5 are -inf in all."""
    values = inputs((4,), 6, 11, dtype)._replace(target=torch.tensor([2, 7, IGNORE, 4]))
    values.weight[:, 0] = values.weight[:, 0].abs() + 0.1
    values.hidden[1:3, 0] = -math.inf
    values.hidden[3, 1] = math.nan
    values.bias[3:6] = -math.inf
    return values


@pytest.mark.parametrize("cuts", [[], [3, 6], [0, 5, 5, 11], [1, 10]])
@pytest.mark.parametrize("asked", [(1.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 0.0)])
def test_shards_have_the_ops_rows_without_a_finite_logit(cuts: list[int], asked: tuple[float, ...]) -> None:
    whole = leaves(rows_without_a_finite_logit(torch.float64))
    shards = leaves(rows_without_a_finite_logit(torch.float64))
    weight = torch.tensor(asked, dtype=torch.float64)
    expected, mine = linear_logprob(*whole, return_lse=True), sharded(shards, cuts)
    assert expected[0].isnan().tolist() == [False, True, False, True]
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
    for logprob, lse in (mine, expected):
        torch.autograd.backward([logprob, lse], [weight, 2 * weight])
    for name in ("hidden", "weight", "bias"):
        one, other = (getattr(values, name).grad for values in (shards, whole))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_partials_of_one_shard() -> None:
    values = inputs((4,), 6, 11, torch.float64)._replace(target=torch.tensor([2, 7, IGNORE, 30]))
    top, sumexp, picked = linear_logprob_partials(*values[:3], vocab_start=2, bias=values.bias)
    logits = naive_logits(values)
    torch.testing.assert_close(top[:2], logits.amax(-1)[:2])
    torch.testing.assert_close(sumexp[:2], (logits - logits.amax(-1, keepdim=True)).exp().sum(-1)[:2])
    torch.testing.assert_close(picked[:2], torch.stack((logits[0, 0], logits[1, 5])))
    assert (top[2], sumexp[2], picked[2], picked[3]) == (-math.inf, 0, -math.inf, -math.inf)
    beyond = linear_logprob_partials(*values[:2], torch.full((4,), 2), vocab_start=2, bias=values.bias, valid_vocab=5)
    torch.testing.assert_close(beyond[0], logits[:, :3].amax(-1))


def test_gradcheck_partials_and_combine() -> None:
    values = leaves(inputs((3,), 3, 6, torch.float64))
    values.target[1] = IGNORE

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return sharded(Inputs(hidden, weight, values.target, bias), [1, 1, 4], softcap=2.0, temperature=0.7)

    assert torch.autograd.gradcheck(function, (values.hidden, values.weight, values.bias))


def test_combine_of_nothing() -> None:
    for shape in ((0, 3), (2, 0), (0, 0)):
        values = [torch.zeros(shape, requires_grad=True) for _ in range(3)]
        logprob, lse = combine_logprob_partials(*values)
        assert logprob.shape == lse.shape == shape[1:]
        (logprob + lse).sum().backward()
    ignored = torch.full((2, 3), -math.inf)
    for output in combine_logprob_partials(ignored, torch.zeros(2, 3), ignored):
        assert torch.equal(output, torch.zeros(3))


def test_compile() -> None:
    def loss(*values: Tensor) -> Tensor:
        logprob, lse, entropy = linear_logprob(*values, softcap=3.0, valid_vocab=10, **ALL)
        return (logprob * lse).sum() + entropy.sum()

    def split(*values: Tensor) -> Tensor:
        logprob, lse = sharded(Inputs(*values), [3, 4])
        return logprob.square().sum() + lse.sum()

    values = leaves(inputs((4,))._replace(target=torch.tensor([0, IGNORE, 3, 9])))
    given = [values.hidden, values.weight, values.bias]
    for function in (loss, split):
        eager, compiled = function(*values), torch.compile(function, fullgraph=True, backend="aot_eager")(*values)
        assert torch.equal(eager, compiled)
        for one, other in zip(*(torch.autograd.grad(out, given) for out in (eager, compiled)), strict=True):
            assert torch.equal(one, other)


def test_changing_integers_compile_once() -> None:
    values = inputs((4,))._replace(target=torch.tensor([0, 1, 1, 2]))

    def run(number: int, vocab: int) -> tuple[Tensor, ...]:
        parts = linear_logprob_partials(*values[:3], vocab_start=number, ignore_index=-number)
        return linear_logprob(*values[:3], valid_vocab=vocab), *parts

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number in range(2, 14):  # more than torch compiles one function
        vocab = 3 + number % 8
        assert all(torch.equal(a, b) for a, b in zip(compiled(number, vocab), run(number, vocab), strict=True))


def test_bad_ids_are_nan_where_the_host_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "check_targets", lambda *_: None)  # as on a device
    values = inputs((4,))._replace(target=torch.tensor([0, -1, 10, IGNORE]))
    whole = linear_logprob(*values, valid_vocab=10)
    combined, lse = sharded(values, [4, 7], valid_vocab=10)
    for logprob in (whole, combined):
        assert logprob.isnan().tolist() == [False, True, True, False]
    assert lse.isfinite().all()


def test_second_derivatives_are_refused() -> None:
    values = leaves(inputs((4,)))
    grad = torch.autograd.grad(linear_logprob(*values).square().sum(), values.hidden, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="linear_logprob: only first derivatives exist"):
        torch.autograd.grad(grad.sum(), values.weight)


def test_repeats_and_other_rows_change_no_bit() -> None:
    values = inputs((6,), 32, 64, torch.bfloat16)
    first, again = linear_logprob(*values, **ALL), linear_logprob(*values, **ALL)
    other = values.hidden.clone()
    other[1:] = 100.0
    changed = linear_logprob(other, *values[1:], **ALL)
    for one, two, three in zip(first, again, changed, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one[0], three[0])


def test_one_launch_and_no_sync() -> None:
    values = leaves(inputs())
    with count_launches() as launches, count_syncs() as syncs:
        out = linear_logprob(*values)
    assert (launches.total, syncs.total) == (1, 0)
    with count_syncs() as syncs:
        out.sum().backward()
        logprob, _ = sharded(values, [3, 4])
        logprob.sum().backward()
    assert not syncs.total


def test_logits_never_exist_as_a_whole() -> None:
    rows, width, vocab = 1100, 8, 9000
    values = leaves(inputs((rows,), width, vocab, bias=False))
    with largest_tensor() as largest:
        linear_logprob(*values).sum().backward()
    assert largest.numel <= reference.LOGITS < rows * vocab / 2
    few = inputs((4,), width, vocab, torch.bfloat16)
    with largest_tensor() as largest:
        linear_logprob(*few)
    assert largest.numel <= reference.VOCAB_BLOCK * width  # a block of the head in float32


GOOD = inputs()


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("hidden", {"hidden": None}, TypeError),
        ("hidden", {"hidden": torch.ones(5, 6, dtype=torch.int64)}, TypeError),
        ("hidden", {"hidden": torch.tensor(1.0)}, ValueError),
        ("hidden", {"hidden": torch.ones(5, 6).to_sparse()}, ValueError),
        ("weight", {"weight": torch.ones(11, 5)}, ValueError),
        ("weight", {"weight": torch.ones(11, 6).bfloat16()}, TypeError),
        ("weight", {"weight": torch.ones(11, 6, device="meta")}, ValueError),
        ("target", {"target": torch.ones(5)}, TypeError),
        ("target", {"target": torch.ones(4, dtype=torch.int64)}, ValueError),
        ("target", {"target": torch.tensor([0, 1, 2, 3, 11])}, ValueError),
        ("target", {"target": torch.tensor([0, 1, 2, 3, -1])}, ValueError),
        ("target", {"valid_vocab": 3, "target": torch.tensor([0, 1, 2, 3, 0])}, ValueError),
        ("bias", {"bias": torch.ones(10)}, ValueError),
        ("bias", {"bias": torch.ones(11).double()}, TypeError),
        ("softcap", {"softcap": 0.0}, ValueError),
        ("temperature", {"temperature": -1.0}, ValueError),
        ("temperature", {"temperature": None}, TypeError),
        ("logit_scale", {"logit_scale": math.nan}, ValueError),
        ("logit_scale", {"logit_scale": "1"}, TypeError),
        ("ignore_index", {"ignore_index": None}, TypeError),
        ("valid_vocab", {"valid_vocab": 1.5}, TypeError),
        ("valid_vocab", {"valid_vocab": 12}, ValueError),
        ("valid_vocab", {"valid_vocab": -1}, ValueError),
    ],
)
def test_bad_arguments(argument: str, change: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"linear_logprob: {argument}: expected .*, got .*; ") as raised:
        linear_logprob(**(GOOD._asdict() | change))
    assert raised.type is error
    linear_logprob(*GOOD)


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("hidden", {"hidden": 1}, TypeError),
        ("weight_shard", {"weight_shard": torch.ones(11, 5)}, ValueError),
        ("weight_shard", {"weight_shard": torch.ones(11, 6).half()}, TypeError),
        ("vocab_start", {"vocab_start": -1}, ValueError),
        ("vocab_start", {"vocab_start": 1.5}, TypeError),
        ("target", {"target": torch.tensor([0, 1, 2, 3, -1])}, ValueError),
        ("target", {"target": torch.tensor([0, 1, 2, 3, 20]), "valid_vocab": 20}, ValueError),
        ("valid_vocab", {"valid_vocab": -1}, ValueError),
        ("bias", {"bias": torch.ones(10)}, ValueError),
        ("temperature", {"temperature": math.inf}, ValueError),
    ],
)
def test_bad_arguments_of_partials(argument: str, change: dict, error: type[Exception]) -> None:
    good = {"hidden": GOOD.hidden, "weight_shard": GOOD.weight, "target": GOOD.target, "vocab_start": 0}
    with pytest.raises(error, match=f"linear_logprob_partials: {argument}: expected .*, got .*; ") as raised:
        linear_logprob_partials(**(good | change))
    assert raised.type is error
    linear_logprob_partials(**good)


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("max", {"max": torch.ones(2, 3, dtype=torch.int64)}, TypeError),
        ("max", {"max": torch.ones(3)}, ValueError),
        ("max", {"max": torch.ones(2, 3).bfloat16()}, TypeError),
        ("sumexp", {"sumexp": torch.ones(2, 4)}, ValueError),
        ("target_logit", {"target_logit": torch.ones(2, 3).double()}, TypeError),
        ("target_logit", {"target_logit": [1.0]}, TypeError),
    ],
)
def test_bad_arguments_of_combine(argument: str, change: dict, error: type[Exception]) -> None:
    good = {name: torch.ones(2, 3) for name in ("max", "sumexp", "target_logit")}
    with pytest.raises(error, match=f"combine_logprob_partials: {argument}: expected .*, got .*; ") as raised:
        combine_logprob_partials(**(good | change))
    assert raised.type is error
    combine_logprob_partials(**good)
