"""The Triton kernels of `linear_logprob` against the float64 definition, interpreted, in both forms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear_logprob import (
    ALL,
    IGNORE,
    OPTIONS,
    Inputs,
    double,
    inputs,
    leaves,
    options,
    relaid,
    rows_without_a_finite_logit,
    sharded,
)
from torch import Tensor

from fb_kernels import backend, tuning
from fb_kernels.linear_logprob import combine_logprob_partials, linear_logprob, linear_logprob_partials
from fb_kernels.linear_logprob.naive import combine_logprob_partials as naive_combination
from fb_kernels.linear_logprob.naive import linear_logprob as naive
from fb_kernels.linear_logprob.naive import linear_logprob_partials as naive_partials
from fb_kernels.testing import (
    assert_close_to_reference,
    count_launches,
    count_syncs,
    largest_tensor,
    magnitude,
    poison_,
)

pytestmark = pytest.mark.usefixtures("triton_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ["fused", "chunked"]
SMALL = {"BLOCK_M": 16, "BLOCK_V": 32, "BLOCK_K": 16}  # the vocabulary on the tensor cores' longer side
DEFAULTS: dict[str, Any] = {"logit_scale": 1.0, "softcap": None, "temperature": 1.0}
LARGE = {"BLOCK_M": 128, "BLOCK_V": 256, "BLOCK_K": 16}  # the rows there, and the tile in two halves


@contextmanager
def launched(form: str, tile: dict[str, int] = SMALL, columns: int = 64) -> Iterator[None]:
    """One form, in tiles that a few rows and columns cross."""
    choices = {
        "linear_logprob_form": form,
        "linear_logprob": tile,
        "linear_logprob_columns": columns,
        "linear_logprob_chunk": {"BLOCK_M": 16, "BLOCK_V": 32},
        "linear_logprob_merge": {"BLOCK_M": 4, "BLOCK_T": 4},
        "combine_logprob_partials": {"BLOCK": 4},
    }
    with mock.patch.multiple(tuning, **{name: mock.Mock(return_value=value) for name, value in choices.items()}):
        yield


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with launched(request.param):
        yield request.param


def compare(values: Inputs, given: dict) -> None:
    """Outputs and gradients, each row with its own, against float64 and plain PyTorch in the same dtype."""
    ours, wide, plain = (leaves(each) for each in (values, double(values), values))
    results = linear_logprob(*ours, **given, **ALL), naive(*wide, **given), naive(*plain, **given)
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(2, *values.target.shape, generator=generator, dtype=torch.float64)
    for logprob, lse, _ in results:
        if logprob.numel():
            torch.autograd.backward((logprob, lse), tuple(grads.to(logprob.dtype)))
    single = naive(*(x.float() if x is not None and x.is_floating_point() else x for x in values), **given)
    scales = magnitudes(values, results[1][2], **given)
    for mine, truth, native, scale in zip(results[0], results[1], single, scales, strict=True):
        assert mine.dtype == torch.float32  # whatever the input's dtype
        assert mine.shape == values.target.shape
        assert_close_to_reference(mine, truth, native, scale=scale)
    if not values.target.numel():
        return
    scale = gradient_scale(values, grads.abs().max(), scales[0])
    for mine, truth, native in zip(ours, wide, plain, strict=True):
        if mine is not None and mine.is_floating_point():
            assert mine.grad.dtype == mine.dtype
            assert_close_to_reference(mine.grad, truth.grad, native.grad, scale=scale)


def magnitudes(
    values: Inputs,
    entropy: Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of logprob, lse and entropy of each row, the scale of rounding.

    A logit is rounded at the sum of its |terms|, the log of a sum of exponentials from 1 on at 1, and an entropy moves
    by itself times a relative error of the probabilities.
    """
    sizes = Inputs(*(x if x is None or not x.is_floating_point() else magnitude(x) for x in values))
    given = {
        "bias": sizes.bias,
        "logit_scale": abs(logit_scale),
        "temperature": temperature,
        "valid_vocab": valid_vocab,
    }
    every = torch.zeros_like(sizes.target)
    largest = naive_partials(*sizes[:2], every, vocab_start=0, **given)[0]  # a soft cap only shrinks
    size = 1 + largest + math.log(len(sizes.weight[:valid_vocab]))
    return size, size, size * (1 + magnitude(entropy))


def gradient_scale(values: Inputs, upstream: Tensor, size: Tensor) -> Tensor:
    """What the gradients are sums of, which may cancel: exp of a logit computed again is off by that logit's ulps."""
    factors = torch.cat([magnitude(x).flatten() for x in (values.hidden, values.weight, torch.ones(1))])
    return upstream * factors.max() * size.max()


@settings(max_examples=15)
@given(
    rows=st.lists(st.integers(0, 5), max_size=2),
    width=st.sampled_from([0, 1, 5, 8, 16, 24, 40]),
    vocab=st.sampled_from([1, 9, 31, 32, 33, 65, 100]),
    bias=st.booleans(),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    index=st.sampled_from([torch.int32, torch.int64]),
    options=options,
    padding=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 99),
)
def test_matches_the_reference(
    rows: list[int],
    width: int,
    vocab: int,
    bias: bool,
    layout: str,
    index: torch.dtype,
    options: dict,
    padding: int,
    dtype: torch.dtype,
    form: str,
    seed: int,
) -> None:
    values = inputs(tuple(rows), width, vocab + padding, dtype, seed, bias)
    ignored = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.3
    values = values._replace(
        hidden=relaid(values.hidden, layout),
        weight=relaid(values.weight, layout),
        target=(values.target % vocab).masked_fill(ignored, IGNORE).to(index),
    )
    with launched(form):
        compare(values, options | {"valid_vocab": vocab if padding else None})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "rows", "tile"), [("fused", 37, SMALL), ("fused", 133, LARGE), ("chunked", 37, SMALL)]
)
def test_many_tiles(dtype: torch.dtype, form: str, rows: int, tile: dict[str, int]) -> None:
    values = inputs((rows,), 40, 301, dtype)
    values = values._replace(target=(values.target % 290).masked_fill(torch.arange(rows) % 5 == 0, IGNORE))
    with launched(form, tile, 128):
        compare(values, {"logit_scale": 0.4, "softcap": 5.0, "temperature": 0.7, "valid_vocab": 290})


@pytest.mark.parametrize("form", FORMS)
def test_defaults(form: str) -> None:
    """The launches of tuning.py; the small product of both forms is the same to a few ulps."""
    values = inputs((3,), 16, 300, torch.bfloat16)
    with mock.patch.object(tuning, "linear_logprob_form", return_value=form):
        compare(values, DEFAULTS)


def test_two_forms_agree_on_a_soft_cap_near_zero() -> None:
    """1 - exp(-2x) alone would lose the small logits."""
    values = inputs((9,), 16, 70, bias=False)._replace(weight=inputs(width=16, vocab=70).weight * 1e-3)
    truth = naive_partials(*double(values)[:3], vocab_start=0, softcap=30.0)[2]
    for form in FORMS:
        with launched(form):
            picked = linear_logprob_partials(*values[:3], vocab_start=0, softcap=30.0)[2]
        torch.testing.assert_close(picked.double(), truth, rtol=1e-5, atol=1e-9)


@pytest.mark.usefixtures("form")
def test_hostile_rows_stay_alone_and_are_the_references() -> None:
    values = inputs((7,), 16, 70, bias=False)
    clean = linear_logprob(*values, **ALL)
    hidden = values.hidden.clone()
    hidden[1], hidden[2, 0], hidden[4], hidden[5, 3:5] = math.nan, math.inf, -1e30, math.inf
    for mine, expected in zip(linear_logprob(hidden, *values[1:], **ALL), clean, strict=True):
        assert torch.equal(mine[[0, 3, 6]], expected[[0, 3, 6]])
        assert mine[[1, 2, 5]].isnan().all()
        assert not mine[4].isnan()
    for bias in (None, torch.full((70,), -math.inf), torch.where(torch.arange(70) < 50, -math.inf, 1.0)):
        whole = linear_logprob(hidden, *values[1:3], bias, **ALL)
        parts = linear_logprob_partials(hidden, *values[1:3], vocab_start=0, bias=bias)
        with backend.override("reference"):
            expected_whole = linear_logprob(hidden, *values[1:3], bias, **ALL)
            expected_parts = linear_logprob_partials(hidden, *values[1:3], vocab_start=0, bias=bias)
        for mine, expected in zip((*whole, *parts), (*expected_whole, *expected_parts), strict=True):
            torch.testing.assert_close(mine, expected, equal_nan=True)


@pytest.mark.usefixtures("form")
def test_offsets_that_only_a_running_maximum_survives() -> None:
    values = inputs((5,), 16, 70, bias=False)
    clean = linear_logprob(*values, **ALL)
    for offset in (-1e4, 1e4):
        shifted = linear_logprob(*values[:3], torch.full((70,), offset), **ALL)
        torch.testing.assert_close(shifted[0], clean[0], rtol=0, atol=1e-2)
        torch.testing.assert_close(shifted[1] - offset, clean[1], rtol=0, atol=1e-2)
        torch.testing.assert_close(shifted[2], clean[2], rtol=0, atol=1e-2)
    bias = 4096 + torch.arange(70).roll(20) / 8  # exact in float32
    entropy = linear_logprob(torch.zeros(1, 16), torch.zeros(70, 16), torch.zeros(1, dtype=torch.int64), bias, **ALL)[2]
    expected = torch.distributions.Categorical(logits=bias.double()).entropy()
    torch.testing.assert_close(entropy[0].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_ignored_rows_give_no_gradient_whatever_they_hold(softcap: float | None) -> None:
    values = inputs((6,), 16, 70)
    kept = torch.tensor([0, 2, 4, 5])
    hidden, target = values.hidden.clone(), values.target.clone()
    hidden[1], hidden[3], target[[1, 3]] = math.nan, math.inf, IGNORE
    mine = leaves(values._replace(hidden=hidden, target=target))
    few = leaves(values._replace(hidden=values.hidden[kept], target=values.target[kept]))
    results = [linear_logprob(*each, softcap=softcap, **ALL) for each in (mine, few)]
    for output, expected in zip(*results, strict=True):
        assert torch.equal(output[[1, 3]], torch.zeros(2))
        torch.testing.assert_close(output[kept], expected)
    for logprob, lse, _ in results:
        (logprob.sum() + lse.square().sum()).backward()
    assert torch.equal(mine.hidden.grad[[1, 3]], torch.zeros(2, 16))
    torch.testing.assert_close(mine.hidden.grad[kept], few.hidden.grad)
    torch.testing.assert_close(mine.weight.grad, few.weight.grad)
    torch.testing.assert_close(mine.bias.grad, few.bias.grad)


@pytest.mark.usefixtures("form")
def test_bad_ids_are_nan_and_read_nothing() -> None:
    bad = torch.tensor([0, -1, 60, 69, 70, 1 << 40, -(1 << 40), 2**63 - 1, -(2**63), IGNORE, 59])
    values = inputs((len(bad),), 16, 70)._replace(target=bad)
    expected = [*([False] + [True] * 8), False, False]
    whole, lse = linear_logprob(*values, valid_vocab=60, return_lse=True)
    assert whole.isnan().tolist() == expected
    assert lse.isfinite().all()
    combined, lse = sharded(values, [16, 47], valid_vocab=60)
    assert combined.isnan().tolist() == expected
    assert lse.isfinite().all()
    endless = linear_logprob_partials(*values[:3], vocab_start=8, bias=values.bias)[2]
    assert endless.isnan().tolist() == (bad < 0).logical_and(bad != IGNORE).tolist()
    assert (endless == -math.inf).tolist() == (((bad < 8) | (bad >= 78)) & ((bad >= 0) | (bad == IGNORE))).tolist()
    grads = linear_logprob(*(mine := leaves(values)), valid_vocab=60)
    grads[[0, 10]].sum().backward()
    assert mine.hidden.grad.isfinite().all()


@settings(max_examples=8)
@given(
    cuts=st.lists(st.integers(0, 90), max_size=3).map(sorted),
    options=options,
    padding=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 99),
)
def test_uneven_and_empty_shards_equal_the_whole(
    cuts: list[int], options: dict, padding: int, dtype: torch.dtype, form: str, seed: int
) -> None:
    values = inputs((2, 3), 16, 90, dtype, seed)
    given = {**options, "valid_vocab": 90 - padding if padding else None}
    target = (values.target % (90 - padding)).view(-1)
    target[1] = IGNORE
    if padding:
        poison_(values.weight[-padding:])
    mine, wide, plain = (leaves(each._replace(target=target.view(2, 3))) for each in (values, double(values), values))
    with launched(form):
        outputs = sharded(mine, cuts, **given)
        whole = linear_logprob(*mine, **given, return_lse=True)
        with backend.override("reference"):
            expected = linear_logprob(*wide, **given, return_lse=True)
            native = linear_logprob(*plain, **given, return_lse=True)
            for logprob, lse in (expected, native):
                (logprob.square().sum() + lse.sum()).backward()
        size = magnitudes(values, torch.zeros(()), **given)[0]
        for parts, one, truth, other in zip(outputs, whole, expected, native, strict=True):
            for output in (parts.view(2, 3), one):
                assert_close_to_reference(output, truth, other, scale=size)
        (outputs[0].square().sum() + outputs[1].sum()).backward()
    scale = gradient_scale(values, 1 + 2 * expected[0].detach().abs().max(), size)
    for one, truth, other in zip(mine, wide, plain, strict=True):
        if one.is_floating_point():
            assert_close_to_reference(one.grad, truth.grad, other.grad, scale=scale)


def test_partials_of_one_shard(form: str) -> None:
    values = inputs((4,), 16, 70)._replace(target=torch.tensor([2, 7, IGNORE, 90]))
    partials = linear_logprob_partials(*values[:3], vocab_start=2, bias=values.bias)
    torch.testing.assert_close(partials, naive_partials(*values[:3], vocab_start=2, bias=values.bias))
    top, sumexp, picked = partials
    assert (top[2], sumexp[2], picked[2], picked[3]) == (-math.inf, 0, -math.inf, -math.inf)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("cuts", [[0, 11], [0, 3, 6, 6, 11]])
def test_shards_have_the_ops_rows_without_a_finite_logit(cuts: list[int]) -> None:
    hidden, weight, target, bias = rows_without_a_finite_logit(torch.float32)
    expected = linear_logprob(hidden, weight, target, bias, return_lse=True)
    parts = [
        linear_logprob_partials(hidden, weight[start:end], target, vocab_start=start, bias=bias[start:end])
        for start, end in pairwise(cuts)
    ]
    mine = combine_logprob_partials(*map(torch.stack, zip(*parts, strict=True)))
    assert mine[0].isnan().tolist() == [False, True, False, True]
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_combine_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    top, picked = torch.randn(2, 5, 11, generator=generator)
    sumexp = torch.rand(5, 11, generator=generator) + 1
    top[:, 1], sumexp[:, 1], picked[:, 1] = -math.inf, 0.0, -math.inf  # ignored
    top[1, 2], sumexp[1, 2] = -math.inf, 0.0  # an empty shard
    top[:, 9], picked[:, 9] = -math.inf, -math.inf  # logits, all of them -inf
    top[2, 3], top[3, 4], sumexp[4, 5], picked[0, 6] = math.nan, math.inf, math.nan, math.nan
    picked[:, 7] = -math.inf
    top[:, 8] = -3e38
    for parts in ((top, sumexp, picked), tuple(each.T.contiguous().T for each in (top, sumexp, picked))):
        with launched("fused"):
            mine = combine_logprob_partials(*parts)
        for one, expected in zip(mine, naive_combination(*parts), strict=True):
            torch.testing.assert_close(one, expected, equal_nan=True)
    for shape in ((0, 3), (2, 0), (0, 0)):
        for output in combine_logprob_partials(*(torch.zeros(shape) for _ in range(3))):
            assert torch.equal(output, torch.zeros(shape[1]))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("rows", "vocab"), [((0,), 70), ((2, 0), 70), ((3,), 0), ((), 70)])
def test_empty_sizes(rows: tuple[int, ...], vocab: int) -> None:
    values = leaves(inputs(rows, 16, vocab))
    if not vocab:
        values = values._replace(target=torch.full(rows, IGNORE))
    outputs = linear_logprob(*values, **ALL)
    assert all(output.shape == rows and not output.isnan().any() for output in outputs)
    (outputs[0].sum() + outputs[1].sum()).backward()
    for value in (values.hidden, values.weight, values.bias):
        assert value.grad.shape == value.shape
        assert not value.grad.isnan().any()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("valid", [0, 33, 70])
def test_every_element_is_written(valid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty, empty_like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: poison_(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison_(empty_like(*args, **kwargs)))
    for rows in (5, 0):
        values = leaves(inputs((rows,), 16, 70))
        values = values._replace(target=values.target % max(valid, 1) if valid else torch.full((rows,), IGNORE))
        outputs = linear_logprob(*values, valid_vocab=valid, **ALL)
        (outputs[0].sum() + outputs[1].sum()).backward()
        combined = sharded(values, [20], valid_vocab=valid)
        for each in (*outputs, *combined, values.hidden.grad, values.weight.grad, values.bias.grad):
            assert not each.isnan().any()
        assert torch.equal(values.weight.grad[valid:], torch.zeros(70 - valid, 16))
        assert torch.equal(values.bias.grad[valid:], torch.zeros(70 - valid))


@pytest.mark.usefixtures("form")
def test_gradients_of_one_argument_alone() -> None:
    for name in ("hidden", "weight", "bias"):
        grads, values = [], inputs(width=16, vocab=70)
        for each, outputs in ((values, linear_logprob), (double(values), naive), (values, naive)):
            inner = Inputs(*(x.clone() for x in each))
            leaf = getattr(inner, name).requires_grad_()
            logprob = outputs(*inner) if outputs is linear_logprob else outputs(*inner)[0]
            logprob.square().sum().backward()
            grads.append(leaf.grad)
        size = magnitudes(values, torch.zeros(()), **DEFAULTS)[0]
        assert_close_to_reference(*grads, scale=gradient_scale(values, 2 * logprob.detach().abs().max(), size))


@pytest.mark.usefixtures("form")
def test_repeats_and_other_rows_change_no_bit() -> None:
    values = inputs((18,), 32, 70, torch.bfloat16)
    first, again = linear_logprob(*values, **ALL), linear_logprob(*values, **ALL)
    other = values.hidden.clone()
    other[1:] = 100.0
    changed = linear_logprob(other, *values[1:], **ALL)
    for one, two, three in zip(first, again, changed, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one[0], three[0])
    grads = []
    for _ in range(2):
        mine = leaves(values)
        linear_logprob(*mine).sum().backward()
        grads.append((mine.hidden.grad, mine.weight.grad, mine.bias.grad))
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.usefixtures("form")
def test_inputs_stay_and_logits_never_exist_as_a_whole() -> None:
    rows, width, vocab = 17, 8, 400
    values = leaves(inputs((rows,), width, vocab))
    before = [value.detach().clone() for value in values]
    with largest_tensor() as largest:
        linear_logprob(*values).sum().backward()
    assert largest.numel < rows * vocab / 2
    assert all(torch.equal(value, copy) for value, copy in zip(values, before, strict=True))


@pytest.mark.usefixtures("form")
def test_a_frozen_weight_costs_no_gradient() -> None:
    values = inputs((4,), 24, 700, bias=False)
    values.hidden.requires_grad_()
    with largest_tensor() as largest:
        linear_logprob(*values).sum().backward()
    assert largest.numel < 700 * 24 / 4


@pytest.mark.usefixtures("form")
def test_one_launch_and_no_sync() -> None:
    values = leaves(inputs((5,), 16, 70))
    with count_launches() as launches, count_syncs() as syncs:
        out = linear_logprob(*values)
        out.sum()
    assert (launches.by_op["fb::linear_logprob"], syncs.total) == (1, 0)
    with count_syncs() as syncs:
        linear_logprob(*values).sum().backward()
        sharded(values, [30])[0].sum().backward()
    assert not syncs.total


@pytest.mark.usefixtures("form")
def test_opcheck() -> None:
    values = leaves(inputs((2, 3), 8, 40)._replace(target=torch.arange(6).view(2, 3)))
    torch.library.opcheck(torch.ops.fb.linear_logprob.default, (*values, *OPTIONS))
    torch.library.opcheck(torch.ops.fb.linear_logprob_partials.default, (*values[:3], 2, values.bias, *OPTIONS))
    partials = [value.requires_grad_() for value in torch.rand(3, 2, 4)]
    torch.library.opcheck(torch.ops.fb.combine_logprob_partials.default, partials)


def test_float64_is_the_references() -> None:
    values = inputs(dtype=torch.float64)
    with pytest.raises(ValueError, match="linear_logprob: expected arguments that the triton kernel takes"):
        linear_logprob(*values)
    with backend.override("triton,linear_logprob=auto"):
        torch.testing.assert_close(linear_logprob(*values), naive(*values)[0])


@pytest.mark.parametrize("rows", [1, 13, 128, 129, 1664, 8192, 200_000])
def test_launches_fit_together(rows: int) -> None:
    for dtype in DTYPES:
        assert tuning.linear_logprob_form(dtype, rows, 151_936, 2048) in FORMS
        assert tuning.linear_logprob_columns(dtype, rows) % tuning.linear_logprob_chunk(dtype)["BLOCK_V"] == 0
        tile = tuning.linear_logprob(dtype, rows, 151_936, 2048)
        assert dtype == torch.float32 or rows > 128 or tile["BLOCK_M"] >= rows  # the weight is read once
