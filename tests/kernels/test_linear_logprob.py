"""What is peculiar to `linear_logprob`: ids, ignored rows, offsets of all logits, shards, and no logits in memory."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases.base import Case, ids
from cases.linear_logprob import (
    ALL,
    COMBINATION,
    FLOATS,
    FORMS,
    IGNORE,
    OP,
    PARTIALS,
    TYPICAL,
    gradient_scales,
    make,
    options,
    size,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import Seen, check, checked, evaluate
from torch import Tensor
from ways import names, running, running_small

from fb_kernels import combine_logprob_partials, linear_logprob, linear_logprob_partials
from fb_kernels._runtime import cpu, tuning
from fb_kernels.linear_logprob import reference
from fb_kernels.linear_logprob.naive import linear_logprob as naive
from fb_kernels.linear_logprob.naive import linear_logprob_partials as naive_partials
from fb_kernels.testing import assert_close_to_reference, largest_tensor

every_way = pytest.mark.parametrize("way", [name for name in names(OP) if torch.float32 in OP.way(name).dtypes])
every_way_of_shards = pytest.mark.parametrize(
    "way", [name for name in names(PARTIALS) if torch.float32 in PARTIALS.way(name).dtypes]
)
TRITON = [name for name in names(OP) if name.startswith("triton")]


def single(rows: int = 5, width: int = 16, vocabulary: int = 70, **changes: Any) -> Case:
    """In float32, no row ignored."""
    case = OP.cast(make((rows,), width, vocabulary), torch.float32)
    target = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    return case.with_(**({"target": target} | changes))


def gradients(case: Case, results: tuple[Tensor, ...]) -> list[Tensor]:
    """Of what depends on each log-prob and each lse."""
    logprob, lse = results[:2]
    return list(torch.autograd.grad(logprob.square().sum() + lse.sum(), [case.tensors[name] for name in FLOATS]))


def leaves(case: Case) -> Case:
    return case.with_(**{name: case.tensors[name].detach().clone().requires_grad_() for name in FLOATS})


def sharded(case: Case, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """(log-prob, lse), both flat, of a head that is cut there."""
    given = {name: x for name, x in case.arguments.items() if name not in ALL}
    hidden, weight, target, bias = (given.pop(name) for name in ("hidden", "weight", "target", "bias"))
    parts = [
        linear_logprob_partials(hidden, weight[start:end], target, vocab_start=start, bias=bias[start:end], **given)
        for start, end in pairwise([0, *cuts, len(weight)])
    ]
    return combine_logprob_partials(
        *(torch.stack([each.flatten() for each in part]) for part in zip(*parts, strict=True))
    )


@every_way
def test_an_offset_of_all_logits_costs_nothing(way: str) -> None:
    offset = single(bias=None)
    with running_small(OP, way):
        clean = offset.run()
        for distance in (-1e4, 1e4):
            shifted = offset.run(bias=torch.full((70,), distance))
            shifted[1] -= distance
            torch.testing.assert_close(shifted, clean, rtol=0, atol=1e-2)
        bias = 4096 + torch.arange(70).roll(20) / 8  # exact in float32
        zeros = {"hidden": torch.zeros(1, 16), "weight": torch.zeros(70, 16), "target": ids(0), "bias": bias}
        entropy = offset.run(**zeros)[2]
    expected = torch.distributions.Categorical(logits=bias.double()).entropy()
    torch.testing.assert_close(entropy[0].double(), expected, rtol=1e-6, atol=0)


@every_way
@pytest.mark.parametrize("banned", [slice(0, 33), slice(4, 8), slice(31, 69)], ids=str)
def test_minus_infinity_means_probability_zero(way: str, banned: slice) -> None:
    case = single(3)
    hidden, weight, _, bias = (case.arguments[name] for name in ("hidden", "weight", "target", "bias"))
    bias[banned] = -math.inf
    allowed = (bias != -math.inf).nonzero()[:, 0]
    with running_small(OP, way):
        mine = case.run(target=allowed[[0, 1, -1]])
        picked = case.run(target=torch.full((3,), banned.start))[0]
    few = naive(hidden, weight[allowed], ids(0, 1, len(allowed) - 1), bias[allowed])
    torch.testing.assert_close(mine, list(few))
    assert (picked == -math.inf).all()


@every_way
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_ignored_rows_give_zero_and_no_gradient_whatever_they_hold(way: str, softcap: float | None) -> None:
    case = single(6, softcap=softcap)
    kept, left = torch.tensor([0, 2, 4, 5]), torch.tensor([1, 3])
    hidden, target = case.tensors["hidden"].clone(), case.tensors["target"].clone()
    hidden[1], hidden[3], target[left] = math.nan, math.inf, IGNORE
    mine = leaves(case.with_(hidden=hidden, target=target))
    few = leaves(case.with_(hidden=case.tensors["hidden"][kept], target=case.tensors["target"][kept]))
    with running_small(OP, way):
        results = mine.run(), few.run()
        grads = gradients(mine, results[0]), gradients(few, results[1])
    for output, expected in zip(*results, strict=True):
        assert torch.equal(output[left], torch.zeros(2))
        torch.testing.assert_close(output[kept], expected)
    assert torch.equal(grads[0][0][left], torch.zeros(2, 16))
    torch.testing.assert_close([grads[0][0][kept], *grads[0][1:]], grads[1])


@every_way
def test_another_ignore_index(way: str) -> None:
    target = ids(3, 0, 4, 0, 5)
    with running_small(OP, way):
        assert torch.equal(single(ignore_index=0).run(target=target)[0] == 0, target == 0)


@every_way
def test_what_is_asked_for_is_what_comes(way: str) -> None:
    given = leaves(single()).arguments
    plain = {name: x for name, x in given.items() if name not in ALL}
    with running_small(OP, way):
        logprob, lse, entropy, largest = linear_logprob(**given)
        assert torch.equal(linear_logprob(**plain), logprob)
        assert torch.equal(linear_logprob(**plain, return_lse=True)[1], lse)
        assert torch.equal(linear_logprob(**plain, return_entropy=True)[1], entropy)
        assert torch.equal(linear_logprob(**plain, return_max=True)[1], largest)
        both = linear_logprob(**plain, return_lse=True, return_max=True)
        assert all(torch.equal(one, other) for one, other in zip(both, (logprob, lse, largest), strict=True))
    assert entropy.requires_grad
    assert not largest.requires_grad


@every_way
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "temperature": 0.7},
        {"logit_scale": -1.7, "temperature": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.sweep(22)
def test_a_log_prob_is_the_largest_exactly_where_it_is(way: str, rows: int, options: dict[str, Any]) -> None:
    """Every id is asked of every row, -100 last; columns 9 and 60 are twins, and win in rows 1 and 2, which are one."""
    valid = 70
    case = single(rows, 16, 73, valid_vocab=valid, **options)
    hidden, weight = ((case.tensors[name] * 4).round() / 4 for name in ("hidden", "weight"))  # of exact products
    bias = case.tensors["bias"].clone()
    hidden[2] = hidden[1]
    weight[[9, 60]], bias[[9, 60]] = hidden[1] * math.copysign(1.0, options.get("logit_scale", 1.0)), 1.0
    weight[valid:], bias[valid:] = math.nan, math.inf
    with running_small(OP, way):
        found = [
            case.run(hidden=hidden, weight=weight, bias=bias, target=torch.full((rows,), one))
            for one in (*range(valid), IGNORE)
        ]
    logprob, largest = (torch.stack([results[place] for results in found], 1) for place in (0, 3))  # [rows, valid + 1]
    assert not logprob[:, valid].any()
    assert not largest[:, valid].any()
    logprob, largest = logprob[:, :valid], largest[:, :valid]
    assert torch.equal(largest, logprob.amax(1, keepdim=True).expand_as(largest))
    assert (logprob == largest)[1:3].nonzero().tolist() == [[0, 9], [0, 60], [1, 9], [1, 60]]


@every_way
def test_the_largest_log_prob_of_strange_rows(way: str) -> None:
    """NaN and inf make NaN, also where every logit is -inf; ids of probability zero are no maximum."""
    case = single(4)
    hidden, weight, bias = (case.tensors[name].clone() for name in FLOATS)
    strange = hidden.clone()
    strange[1], strange[2, 3] = math.nan, math.inf
    bias[::2] = -math.inf
    with running_small(OP, way):
        largest = case.run(hidden=strange, target=ids(5, 5, 5, IGNORE))[3]
        nowhere = case.run(bias=torch.full((70,), -math.inf))[3]
        banned = case.run(bias=bias, target=ids(0, 2, 4, 68))
    assert largest.isnan().tolist() == [False, True, True, False]
    assert largest[3] == 0
    assert nowhere.isnan().all()
    assert (banned[0] == -math.inf).all()
    expected = torch.log_softmax(hidden @ weight[1::2].T + bias[1::2], 1).amax(1)
    torch.testing.assert_close(banned[3], expected)


@pytest.mark.parametrize("way", [name for name in names(OP) if name.startswith("cpu")])
def test_products_on_the_cpu_are_its_own(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A row's bits know neither the others nor the threads."""
    case = single(11, 37, 70, valid_vocab=67)
    hidden, target = case.tensors["hidden"], case.tensors["target"]
    with running_small(OP, way):
        alone = [case.run(hidden=hidden[i : i + 1], target=target[i : i + 1] % 67) for i in range(11)]
        monkeypatch.setattr(cpu, "SHARE", 1)
        for threads in (1, 3, 8):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            together = case.run(target=target % 67)
            for place, values in enumerate(together):
                assert torch.equal(values, torch.cat([one[place] for one in alone]))


@every_way_of_shards
@settings(max_examples=5)
@given(
    cuts=st.lists(st.integers(0, 90), max_size=3).map(sorted),
    given=options,
    padding=st.integers(0, 40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_uneven_and_empty_shards_equal_the_whole(
    way: str, cuts: list[int], given: dict[str, Any], padding: int, dtype: torch.dtype, seed: int
) -> None:
    if way != "reference" and dtype == torch.float64:
        dtype = torch.float32
    made = OP.cast(make((2, 3), 16, 90 - padding, padding=padding, options=given, seed=seed), dtype)
    mine, wide, plain = leaves(made), leaves(OP.cast(made, torch.float64)), leaves(made)
    with running_small(OP, way):
        outputs = sharded(mine, cuts)
        grads = gradients(mine, outputs)
    truths = [naive(**{name: x for name, x in each.arguments.items() if name not in ALL}) for each in (wide, plain)]
    upstream = [1 + 2 * truths[0][0].detach(), torch.ones(1)]
    for output, truth, other in zip(outputs, *truths, strict=False):
        assert_close_to_reference(output.view(2, 3), truth, other, scale=size(wide))
    scales = gradient_scales(wide, truths[0], upstream)
    expected, native = (gradients(each, truth) for each, truth in zip((wide, plain), truths, strict=True))
    for one, truth, other, scale in zip(grads, expected, native, scales, strict=True):
        assert_close_to_reference(one, truth, other, scale=scale)


@every_way_of_shards
def test_the_first_id_of_the_next_shard_is_in_that(way: str) -> None:
    case = single(4, 6, 11, target=ids(3, 4, 7, 0))
    hidden, weight = case.tensors["hidden"], case.tensors["weight"]
    with running(way):
        picked = linear_logprob_partials(hidden, weight[4:7], case.tensors["target"], vocab_start=4)[2]
    assert picked.isfinite().tolist() == [False, True, False, False]


@every_way_of_shards
@pytest.mark.parametrize("cuts", [[], [3, 6], [0, 5, 5, 11], [1, 10]])
@pytest.mark.parametrize("asked", [(1.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 0.0)])
@pytest.mark.sweep(2)
def test_shards_have_the_ops_rows_without_a_finite_logit(way: str, cuts: list[int], asked: tuple[float, ...]) -> None:
    """Row 1 has nothing but -inf, 2 likewise and is ignored, 3 holds NaN; ids 3 to 5 are -inf in all."""
    case = single(4, 6, 11, target=ids(2, 7, IGNORE, 4))
    case.tensors["weight"][:, 0] = case.tensors["weight"][:, 0].abs() + 0.1
    case.tensors["hidden"][1:3, 0] = -math.inf
    case.tensors["hidden"][3, 1] = math.nan
    case.tensors["bias"][3:6] = -math.inf
    whole, parts = leaves(case), leaves(case)
    weight = torch.tensor(asked)
    with running_small(OP, way):
        expected, mine = whole.run()[:2], sharded(parts, cuts)
        for results in (mine, expected):
            torch.autograd.backward(results, [weight, 2 * weight])
    assert expected[0].isnan().tolist() == [False, True, False, True]
    torch.testing.assert_close(list(mine), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    for name in FLOATS:
        one, other = (each.tensors[name].grad for each in (parts, whole))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_gradcheck_of_partials_that_are_combined() -> None:
    case = leaves(make((3,), 3, 6, options={"softcap": 2.0, "temperature": 0.7}))

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return sharded(case.with_(**dict(zip(FLOATS, values, strict=True))), [1, 1, 4])

    assert torch.autograd.gradcheck(function, [case.tensors[name] for name in FLOATS])


@pytest.mark.parametrize("way", names(COMBINATION))
def test_combine_of_nothing(way: str) -> None:
    for shape in ((0, 3), (2, 0), (0, 0)):
        values = [torch.zeros(shape), *(torch.zeros(shape, requires_grad=True) for _ in range(2))]
        with running_small(COMBINATION, way):
            logprob, lse = combine_logprob_partials(*values)
            assert torch.equal(logprob, torch.zeros(shape[1:]))
            assert torch.equal(lse, torch.zeros(shape[1:]))
            (logprob + lse).sum().backward()


def test_changing_integers_compile_once() -> None:
    values = [single(4, 6, 11).tensors[name] for name in ("hidden", "weight")]
    target = ids(0, 1, 1, 2)

    def run(number: int, vocab: int) -> tuple[Tensor, ...]:
        parts = linear_logprob_partials(*values, target, vocab_start=number, ignore_index=-number)
        return linear_logprob(*values, target, valid_vocab=vocab), *parts

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number in range(2, 14):  # more than torch compiles one function
        vocab = 3 + number % 8
        assert all(torch.equal(a, b) for a, b in zip(compiled(number, vocab), run(number, vocab), strict=True))


@every_way_of_shards
def test_bad_ids_are_nan_where_the_host_does_not_read(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "check_targets", lambda *_: None)  # as on a device
    bad = torch.tensor([0, -1, 60, 69, 70, 1 << 40, -(1 << 40), 2**63 - 1, -(2**63), IGNORE, 59])
    case = single(len(bad), target=bad, valid_vocab=60)
    expected = [*([False] + [True] * 8), False, False]
    with running_small(OP, way):
        mine = leaves(case)
        logprob = mine.run()[0]
        for results in (case.run(), sharded(case, [16, 47])):
            assert results[0].isnan().tolist() == expected
            assert results[1].isfinite().all()
        logprob[[0, 10]].sum().backward()
        assert mine.tensors["hidden"].grad.isfinite().all()
        endless = linear_logprob_partials(case.tensors["hidden"], case.tensors["weight"], bad, vocab_start=8)[2]
    assert endless.isnan().tolist() == (bad < 0).logical_and(bad != IGNORE).tolist()
    assert (endless == -math.inf).tolist() == (((bad < 8) | (bad >= 78)) & ((bad >= 0) | (bad == IGNORE))).tolist()


def test_logits_never_exist_as_a_whole() -> None:
    rows, width, vocab = 1100, 8, 9000
    with largest_tensor() as largest:
        leaves(single(rows, width, vocab)).run()[0].sum().backward()
    assert largest.numel <= reference.LOGITS < rows * vocab / 2
    few = OP.cast(single(4, width, vocab), torch.bfloat16)
    with largest_tensor() as largest:
        few.run()
    assert largest.numel <= reference.VOCAB_BLOCK * width  # a block of the head in float32


@pytest.mark.parametrize("way", TRITON)
def test_logits_of_a_kernel_never_exist_as_a_whole(way: str) -> None:
    rows, vocab = 17, 400
    with running_small(OP, way), largest_tensor() as largest:
        leaves(single(rows, 8, vocab)).run()[0].sum().backward()
    assert largest.numel < rows * vocab / 2


@pytest.mark.parametrize("way", TRITON)
def test_a_frozen_weight_costs_no_gradient(way: str) -> None:
    case = single(4, 24, 700, bias=None)
    case.tensors["hidden"].requires_grad_()
    with running_small(OP, way), largest_tensor() as largest:
        case.run()[0].sum().backward()
    assert largest.numel < 700 * 24 / 4


@every_way_of_shards
def test_a_soft_cap_near_zero(way: str) -> None:
    """1 - exp(-2x) alone would lose the small logits."""
    case = single(9, bias=None)
    given = {"hidden": case.tensors["hidden"], "weight_shard": case.tensors["weight"] * 1e-3}
    rest = {"target": case.tensors["target"], "vocab_start": 0, "softcap": 30.0}
    with running_small(OP, way):
        picked = linear_logprob_partials(**given, **rest)[2]
    truth = naive_partials(**{name: x.double() for name, x in given.items()}, **rest)[2]
    torch.testing.assert_close(picked.double(), truth, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 13, 128, 129, 1664, 8192, 200_000])
def test_launches_fit_together(rows: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert tuning.linear_logprob_form(dtype, rows, 151_936, 2048) in FORMS
        size, launch = tuning.linear_logprob_chunk_size(dtype, rows), tuning.linear_logprob_chunk(dtype)
        assert size["rows"] % launch["BLOCK_M"] == size["columns"] % launch["BLOCK_V"] == 0
        tile = tuning.linear_logprob(dtype, rows, 151_936, 2048, biased=False)
        assert dtype == torch.float32 or rows > 128 or tile["BLOCK_M"] >= rows  # the weight is read once


@pytest.mark.parametrize("way", names(PARTIALS))
def test_a_vocabulary_of_nothing_has_no_partials(way: str) -> None:
    case = single(3, target=ids(IGNORE, IGNORE, IGNORE))
    hidden, weight, target = (case.arguments[name] for name in ("hidden", "weight", "target"))
    with running_small(PARTIALS, way):
        top, total, picked = linear_logprob_partials(hidden, weight, target, vocab_start=0, valid_vocab=0)
    assert (top == -math.inf).all()
    assert not total.any()
    assert (picked == -math.inf).all()


FROZEN = [
    (way, dtype, sizes)
    for way in ("reference", "cpu 256", "cpu 512", "cpu dots", "cpu tiles", "triton linear_logprob_form=chunked")
    for dtype in (each for each in OP.way(way).dtypes if each is not torch.float16)
    for sizes in (
        {},
        {"bias": False, "several": 3},
        {"rows": (2, 9), "options": {"logit_scale": -1.7, "softcap": 2.0, "temperature": 0.6}},
        {"rows": (3,), "width": 5, "vocabulary": 290, "padding": 0, "options": {}},
        {"rows": (70,), "width": 35, "vocabulary": 700},
    )
]


@pytest.mark.parametrize(("way", "dtype", "sizes"), FROZEN, ids=str)
@pytest.mark.sweep(4)
def test_a_frozen_head_has_its_gradient_from_the_forward(
    way: str, dtype: torch.dtype, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the results are those of a head that is trained; with an entropy in the loss too, and past -inf logits."""
    case = OP.cast(make(**TYPICAL | sizes), dtype)
    if case.tensors.get("bias") is not None:
        case.tensors["bias"][3] = -math.inf
    module = importlib.import_module("fb_kernels.linear_logprob")
    monkeypatch.setattr(module, "_keeps", lambda hidden, weight, _: hidden.requires_grad > weight.requires_grad)
    used: list[str] = []
    for outputs in ((0, 1, 2), (0,), (1,), (2,)):
        frozen = replace(case, gradients=("hidden",), outputs=outputs)
        with running_small(OP, way), Seen() as seen:
            results, grads = evaluate(frozen)
            trained, _ = evaluate(case)
        used += [operator._schema.name for operator, _ in seen.calls]
        check(OP, frozen, results, grads)
        if way == "reference" or way[:3] == "cpu":
            assert all(
                torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(results, trained, strict=True)
            )
    assert used.count("fb::linear_logprob_frozen") == 4
    if dtype is torch.float32 and not sizes:
        with running_small(OP, way):
            checked(replace(case, gradients=("hidden",)), way)


def test_the_forward_keeps_a_gradient_where_it_is_large_and_hidden_alone_is_trained() -> None:
    case, used = single(8, 4, 9000), list[bool]()
    for dtype, trained in ((torch.float32, FLOATS[:1]), (torch.bfloat16, FLOATS[:1]), (torch.float32, FLOATS[:2])):
        with Seen() as seen:
            evaluate(replace(OP.cast(case, dtype), gradients=trained))
        used.append("fb::linear_logprob_frozen" in {operator._schema.name for operator, _ in seen.calls})
    assert used == [True, True, False]


@pytest.mark.parametrize(("way", "dtype", "sizes"), FROZEN, ids=str)
@pytest.mark.sweep(8)
def test_the_most_probable_ids(
    way: str, dtype: torch.dtype, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their log-probs are what the op gives for these ids; with few rows at a time, and some rows ignored.

    By the CPU's kernel an id has the same bits among any others.
    """
    monkeypatch.setattr(reference, "KEPT", 250)
    case = OP.cast(make(**TYPICAL | sizes), dtype)
    trained = case.with_(hidden=case.tensors["hidden"].clone().requires_grad_())
    with running_small(OP, way), Seen() as seen:
        logprob, lse, *_, values, most = linear_logprob(**trained.arguments | {"top_k": 7})
        again = linear_logprob(**case.arguments | {"target": most})[0]
        fewer = linear_logprob(**case.arguments | {"target": most[..., 2:5].contiguous()})[0]
    assert logprob.requires_grad > values.requires_grad
    valid = case.arguments["valid_vocab"] or len(case.tensors["weight"])
    wide = OP.cast(case, torch.float64).with_(target=torch.arange(valid).expand(*lse.shape, valid))
    exact = naive(**{name: x for name, x in wide.arguments.items() if name not in ALL})[0]
    counted = case.tensors["target"] != IGNORE
    counted = counted.any(-1) if counted.ndim > lse.ndim else counted
    near = {"rtol": 0, "atol": 1e-12 if dtype is torch.float64 else 2e-5}
    torch.testing.assert_close(values.double()[counted], exact.topk(7).values[counted], **near)
    torch.testing.assert_close(values.double()[counted], exact.gather(-1, most.clamp(min=0))[counted], **near)
    torch.testing.assert_close(again, values, **near)
    assert (most[~counted] == IGNORE).all()
    assert way[:3] != "cpu" or torch.equal(fewer, again[..., 2:5])
    assert not values[~counted].any()
    for operator, arguments in seen.calls:
        if operator._schema.name == "fb::linear_top_k" and dtype is torch.float32:
            torch.library.opcheck(operator, arguments)
