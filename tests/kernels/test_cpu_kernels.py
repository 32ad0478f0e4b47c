"""The compiled kernels for CPU tensors, for every width of vectors, against float64 and against plain PyTorch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_branch_attention as branches
import test_branch_attention_qkv as attention
import test_candidate_head as heads
import test_skinny_linear as linear
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_topk_entropy import HOSTILE, assert_matches
from torch import Tensor
from ways import BITS, running

from fb_kernels import backend, cpu, segments
from fb_kernels import layout as layouts
from fb_kernels.branch_attention import branch_attention
from fb_kernels.branch_attention import cpu as branch_kernels
from fb_kernels.branch_attention_qkv import branch_attention_qkv
from fb_kernels.branch_attention_qkv import reference as attention_reference
from fb_kernels.candidate_head import candidate_head
from fb_kernels.candidate_head import cpu as head_kernels
from fb_kernels.layout import BranchLayout
from fb_kernels.linear_logprob import linear_logprob
from fb_kernels.linear_logprob import reference as logprob_reference
from fb_kernels.merge_attention_states import merge_attention_states
from fb_kernels.merge_attention_states import reference as state_reference
from fb_kernels.qk_norm_rope import qk_norm_rope
from fb_kernels.qk_norm_rope import reference as rotation_reference
from fb_kernels.rms_norm import rms_norm
from fb_kernels.skinny_linear import cpu as linear_kernels
from fb_kernels.skinny_linear import reference as linear_reference
from fb_kernels.skinny_linear import skinny_linear
from fb_kernels.swiglu import swiglu
from fb_kernels.testing import assert_close_to_reference, magnitude, poisoned_memory
from fb_kernels.topk_entropy import topk_entropy

NAN, INF = float("nan"), float("inf")
WIDTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 129)
given_here = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(autouse=True, params=[f"cpu {bits}" for bits in BITS])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every op runs its compiled CPU kernel, and refuses arguments that it was not made for."""
    with running(request.param):
        yield


def wide(arguments: dict[str, Any]) -> dict[str, Any]:
    return attention.changed(arguments, Tensor.double)


def check_linear(out: Tensor, arguments: dict[str, Any]) -> None:
    """At the scale of the arguments without signs, of which nothing cancels."""
    scale = linear.naive(**attention.changed(arguments, magnitude)).amax(-1, keepdim=True) if out.numel() else None
    assert_close_to_reference(out, linear.naive(**wide(arguments)), linear.naive(**arguments), scale=scale)


def apart(x: Tensor, offset: int) -> Tensor:
    """The same values in rows that lie apart, from an odd address on, with NaN around."""
    whole = torch.full((*x.shape[:-1], x.shape[-1] + offset + 3), NAN)
    whole[..., offset : offset + x.shape[-1]] = x
    return whole[..., offset : offset + x.shape[-1]]


@given_here
@given(
    rows=st.integers(0, 9),
    width=st.sampled_from(WIDTHS),
    half=st.integers(0, 9),
    names=linear.given_names,
    offset=st.none() | st.integers(0, 5),
)
@example(rows=1, width=32, half=1, names=("swiglu",), offset=None)  # its sums cancel
def test_linear_matches_float64(rows: int, width: int, half: int, names: tuple[str, ...], offset: int | None) -> None:
    arguments = linear.arguments(rows, width, 2 * half, names, torch.float32)
    if offset is not None:
        arguments |= {name: apart(arguments[name], offset) for name in ("x", "weight")}
        if "residual" in names:
            arguments["residual"] = apart(arguments["residual"], offset + 1)
    with poisoned_memory():  # what is not written is NaN
        out = skinny_linear(**arguments)
        assert torch.equal(out, skinny_linear(**arguments))
    assert out.is_contiguous()
    check_linear(out, arguments)
    for row in range(rows):
        alone = {name: arguments[name][row : row + 1] for name in ("x", "residual") if name in arguments}
        assert torch.equal(skinny_linear(**(arguments | alone)), out[row : row + 1])


@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 512, 3072), (16, 300, 1000), (3, 4096, 10), (2, 2048, 7)])
def test_linear_of_a_model(rows: int, width: int, outputs: int) -> None:
    arguments = linear.arguments(rows, width, outputs, ("norm_weight", "bias"), torch.float32)
    out = skinny_linear(**arguments)
    check_linear(out, arguments)
    assert torch.equal(skinny_linear(**(arguments | {"x": arguments["x"][-1:]})), out[-1:])


@pytest.mark.parametrize(
    "names", [("bias", "residual"), ("norm_weight", "residual"), ("norm_weight", "swiglu")], ids=str
)
def test_linear_hostile_values_stay_in_their_row(names: tuple[str, ...]) -> None:
    arguments = linear.arguments(6, 37, 10, names, torch.float32)
    clean = skinny_linear(**arguments)
    arguments["x"][1], arguments["x"][2, 35], arguments["x"][4, 0] = NAN, INF, -INF
    out = skinny_linear(**arguments)
    assert torch.equal(out[[0, 3, 5]], clean[[0, 3, 5]])
    assert out[1].isnan().all()
    check_linear(out, arguments)


def test_gating_of_every_size() -> None:
    """silu from where its exponential overflows to where it vanishes."""
    gate = torch.cat((torch.linspace(-130, 130, 4001), torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1e-40, -3e38, 3e38])))
    weight = torch.cat((gate, torch.ones_like(gate)))[:, None]
    out = skinny_linear(torch.ones(1, 1), weight, swiglu=True)[0]
    expected = torch.nn.functional.silu(gate.double())
    whole = (gate > -88) & (gate.abs() > 1e-37)  # below, the exponential is inf, as in PyTorch
    torch.testing.assert_close(out[whole], expected[whole].float(), rtol=6e-7, atol=0)
    torch.testing.assert_close(out[~whole], expected[~whole].float(), rtol=0, atol=6e-37, equal_nan=True)


@given_here
@given(
    rows=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    repeat=st.integers(1, 4),
    half=st.sampled_from([1, 2, 3, 4, 8, 9, 16, 32, 40]),
    held=st.integers(0, 40),
    weights=st.sampled_from(["qk", "q", "k", ""]),
    window=st.none() | st.integers(1, 45),
    keep=st.sampled_from(["none", "all", "some"]),
    wide_indices=st.booleans(),
    relaid=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_matches_float64(
    rows: int,
    kv_heads: int,
    repeat: int,
    half: int,
    held: int,
    weights: str,
    window: int | None,
    keep: str,
    wide_indices: bool,
    relaid: bool,
    seed: int,
) -> None:
    slots = None
    if keep != "none":
        slots = [held + row if keep == "all" or row % 2 else -1 - row for row in range(rows)]
    arguments = attention.case(
        rows, kv_heads, repeat, 2 * half, held, 46, slots=slots, seed=seed, window=window, dtype=torch.float32
    )
    for name in ("q", "k"):
        if name not in weights:
            arguments[f"{name}_weight"] = None
    if wide_indices:
        for name in ("positions", "held", "slots"):
            arguments[name] = None if arguments[name] is None else arguments[name].long()
    if relaid:
        arguments |= {name: apart(arguments[name], 1) for name in ("qkv", "k_cache")}
        arguments["v_cache"] = arguments["v_cache"].transpose(0, 1).contiguous().transpose(0, 1)
    expected, k, _ = attention.naive(wide(arguments))
    plain, plain_k, v = attention.naive(arguments)
    out_scale, k_scale = attention.magnitudes(arguments)
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    with poisoned_memory():
        out = branch_attention_qkv(**arguments)
    assert_close_to_reference(out, expected, plain, scale=out_scale)
    kept = [row for row, slot in enumerate(slots or []) if slot >= 0]
    at = [held + row for row in kept]
    assert_close_to_reference(arguments["k_cache"][at], k[kept], plain_k[kept], scale=k_scale[kept])
    caches["k_cache"][at], caches["v_cache"][at] = arguments["k_cache"][at], v[kept]
    for name, whole in caches.items():
        torch.testing.assert_close(arguments[name], whole, rtol=0, atol=0, equal_nan=True)
    for row in range(rows):
        names = ("qkv", "positions", "slots")
        alone = {name: None if arguments[name] is None else arguments[name][row : row + 1] for name in names}
        assert torch.equal(branch_attention_qkv(**(arguments | alone)), out[row : row + 1])


def test_attention_over_a_long_context() -> None:
    arguments = attention.case(1, 2, 2, 64, 3000, 3001, slots=[3000], dtype=torch.float32)
    check_attention(branch_attention_qkv(**arguments), arguments)


def check_attention(out: Tensor, arguments: dict[str, Any]) -> None:
    expected, plain = attention.naive(wide(arguments))[0], attention.naive(arguments)[0]
    assert_close_to_reference(out, expected, plain, scale=attention.magnitudes(arguments)[0])


def test_attention_hostile_values() -> None:
    """What a row holds stays in it, what is seen shows, and what lies behind the held keys does not."""
    arguments = attention.case(4, head_dim=32, held=19, size=40, dtype=torch.float32)
    clean = branch_attention_qkv(**arguments)
    assert clean.isfinite().all()
    for value in (NAN, INF):
        poisoned = arguments | {"qkv": arguments["qkv"].clone()}
        poisoned["qkv"][1] = value
        out = branch_attention_qkv(**poisoned)
        assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])
        assert out[1].isnan().all()
        for name in ("k_cache", "v_cache"):
            seen = arguments | {name: arguments[name].clone()}
            seen[name][7, 1, 3] = value
            out = branch_attention_qkv(**seen)
            check_attention(out, seen)
            assert torch.equal(out[:, :2], clean[:, :2])
            assert not out[:, 2:].isfinite().all()


def test_attention_to_large_scores() -> None:
    arguments = attention.case(2, head_dim=16, held=30, size=31, dtype=torch.float32, scale=50.0)
    check_attention(branch_attention_qkv(**arguments), arguments)


@pytest.mark.parametrize(
    "change", [{"held": [41]}, {"held": [-1]}, {"slots": [5]}, {"slots": [40]}, {"positions": [41]}]
)
def test_attention_out_of_range_writes_nothing(change: dict[str, list[int]]) -> None:
    arguments = attention.case(1, held=19, size=40, slots=[19], dtype=torch.float32)
    arguments |= {name: torch.tensor(values, dtype=torch.int32) for name, values in change.items()}
    before = arguments["k_cache"].clone()
    with pytest.raises(ValueError, match=f"{next(iter(change))}|kv_out"):
        branch_attention_qkv(**arguments)
    torch.testing.assert_close(arguments["k_cache"], before, rtol=0, atol=0, equal_nan=True)


def one_row_each(
    groups: list[tuple[int, int, int]], heads: tuple[int, int] = (4, 2), width: int = 16, seed: int = 0
) -> branches.Case:
    """Groups of (branches, first key, keys), each branch one row; q, k and v take gradients."""
    case = branches.make(
        [[1] * rows for rows, _, _ in groups], [(start, length) for _, start, length in groups], heads, width,
        dtype=torch.float32, seed=seed,
    )  # fmt: skip
    for leaf in case.leaves:
        leaf.requires_grad_()
    return case


def with_gradients(case: branches.Case, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv."""
    out, lse = case.run(**options)
    return out.detach(), lse, *torch.autograd.grad(out, case.leaves, grad)


def row_by_row(case: branches.Case, grad: Tensor, dtype: torch.dtype, **options: Any) -> tuple[Tensor, ...]:
    """The same by the definition, in a dtype."""
    leaves, out, lse = case.naive(dtype, **options)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, grad.to(dtype))


@given_here
@given(
    groups=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 21)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    repeat=st.integers(1, 5),
    width=st.sampled_from(WIDTHS),
    wide_indices=st.booleans(),
    relaid=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 99),
)
@example(groups=[(67, 0, 9)], kv_heads=1, repeat=2, width=8, wide_indices=False, relaid=False, scale=None, seed=0)
def test_branches_of_one_row_match_float64(
    groups: list[tuple[int, int, int]],
    kv_heads: int,
    repeat: int,
    width: int,
    wide_indices: bool,
    relaid: bool,
    scale: float | None,
    seed: int,
) -> None:
    case = one_row_each(groups, (kv_heads * repeat, kv_heads), width, seed)
    rows = case.q.shape[0]
    if not rows:
        return
    case.index = torch.int64 if wide_indices else torch.int32
    grad = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(seed))
    if relaid:  # heads apart, rows apart, an odd address, NaN around
        case.q, grad = (apart(x.detach().transpose(0, 1), 1).transpose(0, 1) for x in (case.q, grad))
        case.k, case.prefix_v = apart(case.k.detach(), 3), apart(case.prefix_v, 2)
        for leaf in (case.q, case.k):
            leaf.requires_grad_()
    with poisoned_memory():
        got = with_gradients(case, grad, scale=scale)
    truth, plain = (row_by_row(case, grad, dtype, scale=scale) for dtype in (torch.float64, torch.float32))
    for actual, expected, native, size in zip(got, truth, plain, case.magnitudes(grad, scale=scale), strict=True):
        assert_close_to_reference(actual, expected, native, scale=size)
    row = 0
    for taken, start, length in groups:  # the same bits alone
        part = slice(row, row + taken)
        row += taken
        if taken:
            leaves = [x.detach()[part].requires_grad_() for x in case.leaves]
            alone = replace(
                case, **dict(zip("qkv", leaves, strict=True)), groups=[[1] * taken], slices=[(start, length)]
            )
            for name, whole, own in zip("olqkv", got, with_gradients(alone, grad[part], scale=scale), strict=True):
                assert torch.equal(whole[:, part] if name == "l" else whole[part], own), name


@pytest.mark.parametrize("name", ["q", "k", "v", "prefix_k", "prefix_v", "grad"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_branches_of_one_row_with_hostile_values(name: str, value: float) -> None:
    """What is not finite is left to the reference, in gradients too."""
    case, grad = one_row_each([(3, 0, 7), (2, 7, 5)]), torch.ones(5, 4, 16)
    with torch.no_grad():
        (grad if name == "grad" else getattr(case, name))[1, 1, 3] = value
    with backend.override("auto"):
        got = with_gradients(case, grad)
    with backend.override("reference"):
        expected = with_gradients(case, grad)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"cu_branch": [1, 2, 3, 4, 5]},
        {"cu_group": [0, 3, 2, 4]},
        {"cu_group": [0, 2, 2, 3]},
        {"cu_group": [-1, 2, 2, 4]},
        {"prefix_start": [0, 0, -1]},
        {"prefix_start": [0, 0, 2**31 - 1]},
        {"prefix_len": [5, -1, 5]},
        {"prefix_len": [5, 0, 6]},
    ],
    ids=str,
)
def test_layouts_of_one_row_that_do_not_fit(change: dict[str, list[int]]) -> None:
    case = one_row_each([(2, 0, 5), (0, 0, 0), (2, 2, 3)])
    layout = case.layout | {name: torch.tensor(values, dtype=torch.int32) for name, values in change.items()}
    assert len(case.prefix_k) == 7
    with backend.override("auto"), pytest.raises(ValueError, match=f"BranchLayout: {next(iter(change))}|expected"):
        branch_attention(*case.tensors, BranchLayout(**layout))


@pytest.mark.parametrize("others", [[[1, 2]], [[0, 1]], [[0]], [[3], [1, 0, 1]]], ids=str)
def test_branches_of_one_row_beside_others(others: list[list[int]]) -> None:
    """The same bits beside groups of other branches, beside long prefixes and beside what is not finite."""
    alone = one_row_each([(2, 0, 5)])
    grad = torch.randn(9, 4, 16, generator=torch.Generator().manual_seed(1))
    expected = with_gradients(alone, grad[:2])
    beside = branches.make(
        [[1, 1], *others, [1], [1]], [(0, 5), *[(1, 3)] * len(others), (2, 2200), (6, 2)], (4, 2), 16,
        dtype=torch.float32,
    )  # fmt: skip
    for x, own in zip((beside.q, beside.k, beside.v), alone.leaves, strict=True):
        x[:2] = own.detach()
        x.requires_grad_()
    for x, own in ((beside.prefix_k, alone.prefix_k), (beside.prefix_v, alone.prefix_v)):
        x[:5] = own[:5]
        x[7] = INF  # of the last two groups
    rows = len(beside.q)
    with backend.override("auto"):
        got = with_gradients(beside, grad[:rows])
    with backend.override("reference"):
        plain = with_gradients(beside, grad[:rows])
    for name, actual, wanted, reference in zip("olqkv", got, expected, plain, strict=True):
        assert torch.equal(actual[:, :2] if name == "l" else actual[:2], wanted), name
        torch.testing.assert_close(actual, reference, equal_nan=True, rtol=1e-5, atol=1e-5)


def one_page_each(case: branches.Case, heads_first: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(prefixes, layout) in shuffled pages of one size, as a cache [pages, Hkv, slots, E] where heads come first."""
    groups, page = len(case.slices), 9
    order = torch.randperm(groups + 1, generator=torch.Generator().manual_seed(0))[:groups]
    paged = []
    for flat in (case.prefix_k, case.prefix_v):
        _, heads, width = flat.shape
        pages = torch.full((groups + 1, heads, page, width), NAN).transpose(1, 2)
        pages = pages if heads_first else pages.contiguous()
        for place, (start, length) in zip(order.tolist(), case.slices, strict=True):
            pages[place, 2 : 2 + length] = flat[start : start + length]
        paged.append(pages)
    starts = torch.full((groups,), 2, dtype=torch.int32)
    return paged, case.layout | {"prefix_start": starts, "block_table": order[:, None].int()}


@pytest.mark.parametrize("heads_first", [True, False])
def test_branches_of_one_row_over_one_page_each(heads_first: bool) -> None:
    case = one_row_each([(2, 0, 5), (3, 5, 7), (1, 0, 0), (2, 1, 4)])
    grad = torch.ones_like(case.q)
    expected = with_gradients(case, grad)
    prefix, layout = one_page_each(case, heads_first)
    out = branch_attention(case.q, case.k, case.v, *prefix, BranchLayout(**layout))
    assert torch.equal(out, expected[0])
    for got, wanted in zip(torch.autograd.grad(out, case.leaves, grad), expected[2:], strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"block_table": [[0], [2]]},
        {"block_table": [[0], [-1]]},
        {"prefix_start": [2, -1]},
        {"prefix_start": [2, 5]},
        {"prefix_start": [2, 2**31 - 1]},
        {"prefix_len": [5, -1]},
        {"prefix_len": [5, 2**31 - 1]},
    ],
    ids=str,
)
def test_pages_that_do_not_fit(change: dict[str, list]) -> None:
    case = one_row_each([(2, 0, 5), (3, 5, 5)])
    prefix, layout = one_page_each(case, True)
    layout["block_table"] = torch.tensor([[0], [1]], dtype=torch.int32)
    layout |= {name: torch.tensor(values, dtype=torch.int32) for name, values in change.items()}
    with backend.override("auto"), pytest.raises(ValueError, match=f"BranchLayout: {next(iter(change))}|expected"):
        branch_attention(case.q, case.k, case.v, *(x[:2] for x in prefix), BranchLayout(**layout))


@given_here
@given(data=st.data())
def test_topk_matches_on_hostile_rows(data: st.DataObject) -> None:
    batch = data.draw(st.sampled_from([(), (1,), (3,), (2, 4)]))
    width = data.draw(st.sampled_from([1, 2, 7, 63, 64, 65, 127, 129, 511, 513, 1100]))
    k = data.draw(st.one_of(st.just(min(width, 64)), st.integers(1, min(width, 64))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(*batch, width, generator=generator)
    pool = torch.tensor(data.draw(st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4)))
    picks = torch.randint(0, len(pool), logits.shape, generator=generator)
    hostile = torch.rand(logits.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    logits = torch.where(hostile, pool[picks], logits.round(decimals=1))
    with poisoned_memory():
        assert_matches(apart(logits, data.draw(st.integers(0, 5))), k)


@pytest.mark.parametrize("k", [1, 2, 63, 64])
@pytest.mark.parametrize("order", ["rising", "falling", "equal", "masked"])
def test_topk_wherever_the_largest_lie(order: str, k: int) -> None:
    row = torch.linspace(-5, 5, 5003)
    row = {"rising": row, "falling": row.flip(0), "equal": row * 0, "masked": row.masked_fill(row < 4.99, -INF)}[order]
    assert_matches(row[None], k)


def beside_poison(x: Tensor, offset: int = 3) -> Tensor:
    """The same values, contiguous from an odd address on, with NaN around."""
    whole = torch.full((x.numel() + 2 * offset + 1,), NAN)
    return whole[offset : offset + x.numel()].view(x.shape).copy_(x)


def results(call: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    """What is returned, where all is written, contiguous, the same when repeated, and no argument is changed."""
    before = [x.clone() for x in arguments if isinstance(x, Tensor)]
    with poisoned_memory():
        out, again = call(*arguments), call(*arguments)
    out, again = ((x,) if isinstance(x, Tensor) else x for x in (out, again))
    torch.testing.assert_close(out, again, rtol=0, atol=0, equal_nan=True)
    after = [x for x in arguments if isinstance(x, Tensor)]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert all(x.is_contiguous() for x in out)
    return out


def hostile(x: Tensor, share: float, seed: int, values: tuple[float, ...] = (NAN, INF, -INF, 0.0)) -> Tensor:
    """x with other values in some places."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(values), x.shape, generator=generator)
    return torch.where(torch.rand(x.shape, generator=generator) < share, torch.tensor(values)[picks], x)


given_share = st.sampled_from([0.0, 0.0, 0.02, 0.2])


@given_here
@given(
    sizes=st.lists(st.integers(0, 9), max_size=5),
    tail=st.integers(0, 3),
    width=st.sampled_from((*WIDTHS, 1030)),
    normed=st.booleans(),
    bias=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    share=given_share,
    offset=st.none() | st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_head_matches_float64(
    sizes: list[int],
    tail: int,
    width: int,
    normed: bool,
    bias: bool,
    index: torch.dtype,
    share: float,
    offset: int | None,
    seed: int,
) -> None:
    hidden, norm_weight, head_weight, head_bias = heads.make(sum(sizes) + tail, width, torch.float32, seed)
    hidden = hostile(hidden, share / width, seed)
    hidden = hidden if offset is None else apart(hidden, offset)
    given = hidden, None if normed else norm_weight, head_weight
    call = partial(candidate_head, eps=heads.EPS, head_bias=head_bias if bias else None)
    out = results(call, *given, heads.offsets(sizes, index))
    heads.compare((*given, head_bias if bias else None), sizes, out)
    alone = call(hidden[-1:], *given[1:], heads.offsets([]))[0]
    torch.testing.assert_close(alone, out[0][-1:], rtol=0, atol=0, equal_nan=True)


def test_soft_caps_of_every_size() -> None:
    """Logits from where tanh is its argument to where it is 1."""
    bias = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([1e-30, -1e-9, 0.0, INF, -INF, 200.0, -1e30])))
    for x in bias.split(1):  # its own log-prob is 0, its lse the logit
        lse = linear_logprob(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), x,
                             softcap=2.0, return_lse=True)[1]  # fmt: skip
        torch.testing.assert_close(lse, (2 * torch.tanh(x.double() / 2)).float(), rtol=4e-7, atol=0)


WRONG: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "candidate_head": (
        lambda cu: candidate_head(torch.ones(4, 3), None, torch.ones(3), torch.tensor(cu), eps=0.1),
        [[1, 4], [0, 5], [0, 3, 2], [0, -1, 4], [0, 2, 2**40, 4], [0, 1, 2, 3, 4, 3, 4, 4, 4, 4]],
    ),
    "linear_logprob": (
        lambda ids, **rest: linear_logprob(torch.ones(2, 3), torch.ones(5, 3), torch.tensor(ids), **rest),
        [[0, 5], [-1, 9], [-100, 5], [2**40, 0]],
    ),
    "qk_norm_rope": (
        lambda positions: qk_norm_rope(
            torch.ones(2, 6), None, None, torch.ones(4, 2), torch.ones(4, 2), torch.tensor(positions),
            num_heads=1, num_kv_heads=1,
        ),
        [[0, 4], [-1, 0], [2**40, 1]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("op", "value"), [(op, value) for op, (_, values) in WRONG.items() for value in values])
def test_errors_are_those_of_the_reference(op: str, value: list[int]) -> None:
    said = []
    for which in ("cpu", "reference"):
        with backend.override(which), pytest.raises(ValueError, match=f"^{op}: .*expected") as raised:
            WRONG[op][0](value)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "kernel" not in said[0]


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


def rotated(rows: int = 2, **changes: Any) -> Any:
    given = {"qkv": ones(rows, 6), "cos": ones(4, 2), "sin": ones(4, 2)} | changes
    return qk_norm_rope(
        **given, q_weight=None, k_weight=None, positions=torch.zeros(rows, dtype=torch.int32), num_heads=1,
        num_kv_heads=1,
    )  # fmt: skip


def headed(hidden: Tensor, **changes: Any) -> Any:
    given = {"norm_weight": None, "head_weight": hidden.new_ones(hidden.shape[1])} | changes
    return candidate_head(hidden, **given, cu_group=torch.tensor([0, len(hidden)]), eps=0.1)


def logged(hidden: Tensor, weight: Tensor, **options: Any) -> Any:
    return linear_logprob(hidden, weight, torch.zeros(hidden.shape[:-1], dtype=torch.int64), **options)


NOT_TAKEN: list[tuple[str, Callable[[], object]]] = [
    ("candidate_head", lambda: headed(ones(2, 3).double())),
    ("candidate_head", lambda: headed(ones(2, 3).half(), head_weight=ones(3))),
    ("candidate_head", lambda: headed(ones(3, 2).t())),
    ("candidate_head", lambda: headed(ones(2, 3), norm_weight=ones(6)[::2])),
    ("candidate_head", lambda: headed(ones(2, 3), head_weight=ones(6)[::2])),
    ("candidate_head", lambda: headed(ones(2, 0))),
    ("candidate_head", lambda: headed(ones(2, head_kernels.SIZE))),
]


@pytest.mark.parametrize("index", range(len(NOT_TAKEN)))
def test_what_the_small_kernels_leave_to_others(index: int) -> None:
    not_taken(*NOT_TAKEN[index])


def calls() -> list[tuple[str, Callable[[], object]]]:
    """Arguments that are not taken."""
    one = attention.case(1, held=5, dtype=torch.float32)
    many = attention.case(33, dtype=torch.float32)
    longer = one | {"v_cache": one["v_cache"].transpose(1, 2).contiguous().transpose(1, 2)}
    return [
        ("skinny_linear", lambda: skinny_linear(**linear.arguments())),
        ("skinny_linear", lambda: skinny_linear(**linear.arguments(17, dtype=torch.float32))),
        ("skinny_linear", lambda: skinny_linear(torch.ones(3, 4).t(), torch.ones(5, 3))),
        ("skinny_linear", lambda: skinny_linear(torch.ones(1, 3), torch.ones(3, 5).t())),
        ("branch_attention_qkv", lambda: branch_attention_qkv(**attention.case())),
        ("branch_attention_qkv", lambda: branch_attention_qkv(**many)),
        ("branch_attention_qkv", lambda: branch_attention_qkv(**longer)),
        ("branch_attention", lambda: branches.make([[1, 1]], [(0, 3)]).run()),
        ("branch_attention", lambda: branches.make([[1, 2]], [(0, 3)], dtype=torch.float32).run()),
        ("branch_attention", lambda: branches.make([[1, 1]], [(0, 3)], dtype=torch.float32, own=False).run()),
        ("branch_attention", lambda: one_row_each([(2, 0, 3)]).run(window=2)),
        ("branch_attention", lambda: one_row_each([(2, 0, 3)]).run(softcap=9.0)),
        ("branch_attention", lambda: branches.as_pages(one_row_each([(2, 0, 3)]), 2).run()),
        ("branch_attention", lambda: one_row_each([(1, 0, branch_kernels.PREFIX + 1)]).run()),
        ("topk_entropy", lambda: topk_entropy(torch.ones(2, 9, dtype=torch.float64), 3)),
        ("topk_entropy", lambda: topk_entropy(torch.ones(9, 9), 3)),
        ("topk_entropy", lambda: topk_entropy(torch.ones(2, 99), 65)),
    ]


@pytest.mark.parametrize("index", range(17))
def test_what_others_do_is_not_taken(index: int) -> None:
    not_taken(*calls()[index])


def not_taken(op: str, call: Callable[[], object]) -> None:
    """Refused where it is asked for, and elsewhere what the reference says."""
    with pytest.raises(ValueError, match=f"{op}: expected arguments that the cpu kernel takes"):
        call()
    with backend.override("reference"):
        expected = call()
    with backend.override("auto"):
        got = call()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "width", "half"), [(1, 40, 1), (1, 512, 130), (5, 33, 9), (16, 300, 501)])
@pytest.mark.parametrize("names", [("norm_weight", "bias", "residual"), ("norm_weight", "swiglu")], ids=str)
def test_any_number_of_threads_gives_the_bits_of_one(
    monkeypatch: pytest.MonkeyPatch, rows: int, width: int, half: int, names: tuple[str, ...]
) -> None:
    arguments = linear.arguments(rows, width, 2 * half, names, torch.float32)
    alone = skinny_linear(**arguments)
    monkeypatch.setattr(linear_kernels, "SHARE", 1)
    for threads in (2, 3, 8):  # of the last some have nothing to do
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with poisoned_memory():
            assert torch.equal(skinny_linear(**arguments), alone)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_threads_are_those_of_torch() -> None:
    """A second thread begins with the first call, which plain operations use too, in the one runtime of the process."""
    code = """
import os, torch
from pathlib import Path
from fb_kernels import cpu, skinny_linear
x, weight = torch.ones(1, 512), torch.ones(1024, 512)
if cpu.why_not():
    raise SystemExit(77)
torch.set_num_threads(2)
counts = [len(os.listdir("/proc/self/task"))]
for run in (lambda: skinny_linear(x, weight), lambda: torch.ones(1 << 20).exp_()):
    run()
    counts.append(len(os.listdir("/proc/self/task")))
paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
print(counts[1] - counts[0], counts[2] - counts[1], len(paths))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("the library is not built")
    assert done.stdout.split() == ["1", "0", "1"], done.stderr


def test_it_runs_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(linear_reference, "linear", refuse)
    monkeypatch.setattr(attention_reference, "_on_host", refuse)
    monkeypatch.setattr(layouts, "plan", refuse)
    for module, name in (
        (torch.nn.functional, "rms_norm"),
        (torch.nn.functional, "silu"),
        (state_reference, "merge_weights"),
        (segments, "segments"),
        (logprob_reference, "_statistics"),
        (rotation_reference, "qk_norm_rope"),
    ):
        monkeypatch.setattr(module, name, refuse)
    with backend.override("auto"):
        case = one_row_each([(2, 0, 3)])
        with_gradients(case, torch.ones_like(case.q))
        skinny_linear(torch.ones(1, 4), torch.ones(2, 4))
        branch_attention_qkv(**attention.case(1, dtype=torch.float32))
        rms_norm(ones(2, 3), ones(3), 0.1)
        swiglu(ones(2, 4))
        merge_attention_states(ones(2, 3, 4), ones(3, 2), ones(2, 3, 4), ones(3, 2))
        headed(ones(2, 3))
        logged(ones(2, 3), ones(5, 3))
        rotated()
        rotated(kv_out=(*torch.zeros(2, 3, 1, 2), torch.tensor([0, 2])))


def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    assert str(cpu.opened(tmp_path / "absent.so")).startswith("cannot be loaded")
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int fbcpu_abi_version() { return 0; }\n')
    compiler = shutil.which("g++") or shutil.which("clang++")
    subprocess.run([str(compiler), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "other.so")], check=True)
    assert cpu.opened(tmp_path / "other.so") == "built from other sources: install it anew"
