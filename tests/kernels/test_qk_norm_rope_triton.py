"""The Triton kernels of `qk_norm_rope` against the float64 definition, interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import count_kernels
from test_qk_norm_rope import HEADS, HKV, HQ, E, S, caches, inputs, relaid
from torch import Tensor

from fb_kernels import backend, tuning
from fb_kernels.qk_norm_rope import qk_norm_rope
from fb_kernels.qk_norm_rope import triton as kernels
from fb_kernels.qk_norm_rope.naive import qk_norm_rope as naive
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, poison_

pytestmark = pytest.mark.usefixtures("triton_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs whose heads are of two kinds, and several rows a program."""

    def launch(dtype: torch.dtype, *sizes: int) -> dict[str, int]:
        return {"HEADS": 2, "HALF": tuning.next_power_of_2(sizes[-1] // 2), "num_warps": 1}

    monkeypatch.setattr(tuning, "qk_norm_rope", launch)
    monkeypatch.setattr(tuning, "qk_norm_rope_backward", lambda *sizes: launch(*sizes) | {"ROWS": 3})


def compare(values: list[Tensor | None], layout: str = "plain", **options: float) -> None:
    """Results and gradients of qkv and the weights against float64 and plain PyTorch in the same dtype."""
    results = []
    for change, function in ((Tensor.clone, qk_norm_rope), (Tensor.double, naive), (Tensor.clone, naive)):
        leaves = [
            None if v is None else relaid(change(v), layout).detach().requires_grad_() if i < 3 else relaid(v, layout)
            for i, v in enumerate(values[:5])
        ]
        if change is Tensor.double:
            leaves[3:] = [table.double() for table in leaves[3:]]
        outputs = function(*leaves, values[5], **options)
        grads = [torch.randn(out.shape, generator=torch.Generator().manual_seed(3)) for out in outputs]
        grads = [grad.to(values[0].dtype).to(out.dtype) for grad, out in zip(grads, outputs, strict=True)]
        torch.autograd.backward(outputs, grads)
        results.append([*outputs, *(leaf.grad for leaf in leaves[:3] if leaf is not None)])
    for mine, truth, native in zip(*results, strict=True):
        assert mine.dtype == values[0].dtype
        if truth.numel():
            assert_close_to_reference(mine, truth, native)
        else:
            assert mine.shape == truth.shape


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=15)
@given(
    rows=st.integers(0, 5),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    half=st.integers(0, 5),
    normed=st.tuples(st.booleans(), st.booleans()),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    index=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_matches_the_reference(
    rows: int, heads: tuple, half: int, normed: tuple, layout: str, index: torch.dtype, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, (heads[0] + 2 * heads[1]) * 2 * half, generator=generator).to(dtype)
    weights = [torch.randn(2 * half, generator=generator).to(dtype) if use else None for use in normed]
    cos, sin = torch.randn(2, 6, 2 * half, generator=generator).to(dtype)  # unequal halves
    positions = torch.randint(0, 6, (rows,), generator=generator).to(index)
    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "eps": 1e-3}
    compare([qkv, *weights, cos, sin, positions], layout, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_configuration(dtype: torch.dtype) -> None:
    compare(inputs(20, dtype, dim=64), **HEADS)


@pytest.mark.usefixtures("small_blocks")
def test_float32_tables_serve_low_precision() -> None:
    values = inputs(dtype=torch.bfloat16)
    values[3:5] = inputs()[3:5]
    mine = qk_norm_rope(*values, **HEADS)
    truth = naive(*(value.double() if value.is_floating_point() else value for value in values), **HEADS)
    for ours, expected in zip(mine, truth, strict=True):
        assert torch.equal(ours, expected.bfloat16())


@pytest.mark.usefixtures("small_blocks")
def test_hostile_rows_and_unused_positions_stay_alone() -> None:
    values = inputs()
    hostile = [value.clone() for value in values]
    hostile[0][1], hostile[0][2, 0], hostile[0][2, -1] = torch.nan, torch.inf, torch.inf
    for row in set(range(S)) - set(values[5].tolist()):
        poison_(hostile[3][row])
        poison_(hostile[4][row])
    results = []
    for some in (values, hostile):
        some[0].requires_grad_()
        outputs = qk_norm_rope(*some, **HEADS)
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        results.append([*outputs, some[0].grad])
    for clean, other in zip(*results, strict=True):
        assert torch.equal(other[[0, 3, 4]], clean[[0, 3, 4]])
    assert all(other[1].isnan().all() for other in results[1][:3])
    assert torch.equal(results[1][2][2].isinf().nonzero(), torch.tensor([[HKV - 1, E - 1]]))
    assert torch.equal(results[1][3][:, -HKV * E :], torch.ones(5, HKV * E))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["plain", "paged", "heads", "columns"])
@pytest.mark.parametrize(
    ("rows", "size", "index"), [(4, 6, torch.int32), (5, 2, torch.int64), (3, 0, torch.int32), (0, 3, torch.int64)]
)
def test_cache_write(rows: int, size: int, index: torch.dtype, layout: str) -> None:
    slots = (torch.randperm(max(size, rows), generator=torch.Generator().manual_seed(size)) - 2)[:rows].to(index)
    slots = torch.where(slots < size, slots, -1)
    values = inputs(rows, torch.bfloat16)
    k_cache, v_cache = caches(size, torch.bfloat16)
    if layout == "paged":  # k and v side by side in one buffer
        k_cache, v_cache = poison_(torch.empty(size, 2, HKV, E, dtype=torch.bfloat16)).unbind(1)
    elif layout != "plain":
        order = (1, 0, 2) if layout == "heads" else (2, 0, 1)
        back = (1, 0, 2) if layout == "heads" else (1, 2, 0)
        k_cache, v_cache = (cache.permute(order).contiguous().permute(back) for cache in (k_cache, v_cache))
    plain = qk_norm_rope(*values, **HEADS)
    outputs = qk_norm_rope(*values, **HEADS, kv_out=(k_cache, v_cache, slots))
    assert all(map(torch.equal, outputs, plain))
    for cache, written in ((k_cache, plain[1]), (v_cache, plain[2])):
        for slot in range(size):
            if slot in slots:
                assert torch.equal(cache[slot], written[slots.tolist().index(slot)])
            else:
                assert cache[slot].isnan().all()


@pytest.mark.usefixtures("small_blocks")
def test_out_of_range_where_the_host_does_not_look() -> None:
    values = inputs()
    clean = qk_norm_rope(*values, **HEADS)
    values[5] = values[5].clone()
    values[5][1], values[5][3] = -1, S
    for slots in ([6, 2, 7, -1, 100], [-1] * 5, [7] * 5):
        cache = caches()
        q, k, v = qk_norm_rope(*values, **HEADS, kv_out=(*cache, torch.tensor(slots)))
        assert torch.equal(v, clean[2])
        for mine, expected in ((q, clean[0]), (k, clean[1])):
            assert torch.equal(mine[[0, 2, 4]], expected[[0, 2, 4]])
            assert mine[[1, 3]].isnan().all()
        for slot in range(7):
            expected = v[slots.index(slot)] if slot in slots else torch.full((HKV, E), torch.nan)
            torch.testing.assert_close(cache[1][slot], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("small_blocks")
def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    values = inputs(7)
    clean = qk_norm_rope(*values, **HEADS)
    arguments = *clean, *values, HQ, HKV, 1e-6
    every = torch.ops.fb.qk_norm_rope_backward(*arguments, [True] * 3)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poison_(new_empty(*args, **options)))
    assert all(map(torch.equal, qk_norm_rope(*values, **HEADS), clean))
    assert all(map(torch.equal, torch.ops.fb.qk_norm_rope_backward(*arguments, [True] * 3), every))
    for index in range(3):
        alone = torch.ops.fb.qk_norm_rope_backward(*arguments, [i == index for i in range(3)])
        for i in range(3):
            assert torch.equal(alone[i], every[i]) if i == index else alone[i].shape == (0,)


def test_repeats_are_bit_equal_with_one_kernel_and_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    values, kv_out = inputs(dtype=torch.bfloat16), (*caches(dtype=torch.bfloat16), torch.arange(5))
    first = qk_norm_rope(*values, **HEADS)
    names = count_kernels(monkeypatch, kernels)
    with count_launches() as launches, count_syncs() as syncs:
        again = qk_norm_rope(*values, **HEADS, kv_out=kv_out)
    assert all(map(torch.equal, first, again))
    assert (launches.total, syncs.total, names) == (1, 0, ["_qk_norm_rope_fwd_kernel"])


def test_opcheck() -> None:
    values = inputs(3, torch.bfloat16)
    for value in values[:3]:
        value.requires_grad_()
    torch.library.opcheck(torch.ops.fb.qk_norm_rope.default, (*values, HQ, HKV, 1e-6))
    cache = torch.zeros(2, 7, HKV, E).unbind(0)
    arguments = (*inputs(3), *cache, torch.tensor([0, -1, 3]), HQ, HKV, 1e-6)
    torch.library.opcheck(torch.ops.fb.qk_norm_rope_out.default, arguments)


def test_float64_is_the_references() -> None:
    values = inputs(dtype=torch.float64)
    with pytest.raises(ValueError, match="qk_norm_rope: expected arguments that the triton kernel takes"):
        qk_norm_rope(*values, **HEADS)
    with backend.override("triton,qk_norm_rope=auto"):
        torch.testing.assert_close(qk_norm_rope(*values, **HEADS), naive(*values, **HEADS))
