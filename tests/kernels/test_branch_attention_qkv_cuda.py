"""The compiled `branch_attention_qkv`, emulated: against attention in float64, and what it may touch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_branch_attention_qkv import changed, naive
from torch import Tensor

from fb_kernels.branch_attention_qkv import cuda as kernels
from fb_kernels.testing import assert_close_to_reference, poison_, poisoned_memory

pytestmark = pytest.mark.usefixtures("cuda_kernels")

EPS, POSITIONS = 1e-6, 50
LOW = (torch.bfloat16, torch.float16)
often = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
rarely = settings(often, max_examples=6)


@dataclass
class Case:
    """A call's arguments."""

    qkv: Tensor  # [N, (Hq + 2 Hkv) E]
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor  # [S, E]
    sin: Tensor
    positions: Tensor  # [N]
    k_cache: Tensor  # [slots, Hkv, E]
    v_cache: Tensor
    held: Tensor  # [1]
    slots: Tensor | None  # [N]
    num_heads: int
    num_kv_heads: int
    window: int | None = None
    scale: float = 0.1

    def call(self) -> Tensor:
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        with poisoned_memory():  # what is not written is NaN
            return kernels.branch_attention_qkv(**arguments, eps=EPS)

    def alike(self, **other: object) -> Case:
        """Caches of its own, and other arguments."""
        return replace(self, **({"k_cache": self.k_cache.clone(), "v_cache": self.v_cache.clone()} | other))


def make(
    rows: int,
    repeat: int = 2,
    kv_heads: int = 2,
    width: int = 64,
    held: int = 70,
    dtype: torch.dtype = torch.bfloat16,
    *,
    spare: int = 40,
    norm: tuple[bool, bool] = (True, True),
    kept: bool = True,
    offset: int = 0,
    seed: int = 0,
    **options: object,
) -> Case:
    """Random contents; slots that are not held are NaN, and a third of the rows is not kept."""
    random = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    total = (repeat + 2) * kv_heads * width
    qkv = poison_(torch.empty(rows, total + 3 * offset, dtype=dtype))[:, offset : offset + total]
    qkv.copy_(randn(rows, total))
    weights = [1 + randn(width) / 4 if wanted else None for wanted in norm]
    angle = torch.rand(POSITIONS, width, generator=random) * 6
    caches = [poison_(torch.empty(held + spare, kv_heads + (offset > 0), width, dtype=dtype)) for _ in range(2)]
    caches = [cache[:, :kv_heads] for cache in caches]
    for cache in caches:
        cache[:held] = randn(held, kv_heads, width)
    slots = held + torch.randperm(spare, generator=random)[:rows].int()
    slots[::3] = -1
    return Case(
        *(qkv, *weights, angle.cos(), angle.sin()),
        torch.randint(0, POSITIONS, (rows,), generator=random, dtype=torch.int32),
        *caches,
        torch.tensor([held], dtype=torch.int32),
        slots if kept else None,
        repeat * kv_heads,
        kv_heads,
        **options,
    )


def plain(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(out[N, Hq, E], k[N, Hkv, E], v) with torch's operations in qkv's dtype."""
    kv_heads, width, dtype = case.num_kv_heads, case.cos.shape[1], case.qkv.dtype
    cos, sin = (table[case.positions.long()].to(dtype)[:, None] for table in (case.cos, case.sin))
    *both, v = case.qkv.unflatten(1, (-1, width)).split([case.num_heads, kv_heads, kv_heads], 1)
    for index, weight in enumerate((case.q_weight, case.k_weight)):
        x = both[index]
        if weight is not None:
            x = torch.nn.functional.rms_norm(x, (width,), weight, EPS)
        first, second = x.chunk(2, -1)
        both[index] = x * cos + torch.cat([-second, first], -1) * sin
    q, k = both
    held = int(case.held)
    begin = 0 if case.window is None else max(0, held - case.window + 1)
    outs = []
    for row in range(len(q)):
        keys, values = (
            torch.cat([cache[begin:held], own[row][None]])
            .repeat_interleave(case.num_heads // kv_heads, 1)
            .transpose(0, 1)
            for cache, own in ((case.k_cache, k), (case.v_cache, v))
        )
        scores = (keys @ q[row][..., None])[..., 0] * case.scale
        outs.append((scores.softmax(-1)[:, None] @ values)[:, 0])
    return torch.stack(outs), k, v


def check(case: Case, bad: tuple[int, ...] = ()) -> None:
    """Output and caches against float64; bad rows are NaN and not kept."""
    before = [cache.clone() for cache in (case.k_cache, case.v_cache)]
    right = replace(case, positions=case.positions.clamp(0, POSITIONS - 1))
    truth, native = naive(changed(vars(right) | {"eps": EPS}, Tensor.double)), plain(right)
    out = case.call()
    sound = torch.tensor([row for row in range(len(out)) if row not in bad], dtype=torch.long)
    assert out[list(bad)].isnan().all()
    assert_close_to_reference(out[sound], truth[0][sound], native[0][sound])
    written = [row for row in sound.tolist() if case.slots is not None and case.slots[row] >= 0]
    at = [] if case.slots is None else case.slots[written].long()
    assert_close_to_reference(case.k_cache[at], truth[1][written], native[1][written])
    assert torch.equal(case.v_cache[at], native[2][written])
    for cache, old in zip((case.k_cache, case.v_cache), before, strict=True):
        old[at] = cache[at]
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


@often
@given(
    sizes=st.sampled_from([(1, 1), (1, 2), (2, 16), (3, 3), (5, 7), (9, 2), (13, 2), (33, 1), (32, 3)]),
    kv_heads=st.integers(1, 3),
    width=st.sampled_from([64, 64, 128]),
    held=st.sampled_from([0, 1, 63, 64, 65, 128, 200, 330]),
    spare=st.sampled_from([33, 90]),
    dtype=st.sampled_from(LOW),
    norm=st.tuples(st.booleans(), st.booleans()),
    kept=st.booleans(),
    offset=st.sampled_from([0, 8]),
    window=st.sampled_from([None, None, 1, 2, 63, 64, 65, 129, 1000, 2**32 + 5]),
    seed=st.integers(0, 999),
)
def test_as_in_float64(sizes: tuple[int, int], **options: object) -> None:
    check(make(min(sizes[0], 32), sizes[1], **options))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 256, 2200), (17, 4, 1, 256, 30), (32, 16, 1, 64, 67)])
def test_the_largest_sizes(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check(make(*sizes, dtype))


def test_no_slot_at_all() -> None:
    check(make(2, held=0, spare=0, kept=False))


@rarely
@given(wrong=st.sampled_from([-1, POSITIONS, 1 << 30, -(1 << 31)]), rows=st.integers(1, 6), row=st.integers(0, 5))
def test_a_position_outside_the_tables(wrong: int, rows: int, row: int) -> None:
    case = make(rows)
    case.positions[row % rows] = wrong
    check(case, bad=(row % rows,))


@rarely
@given(wrong=st.sampled_from([0, 69, 110, (1 << 31) - 1]), rows=st.integers(1, 6), row=st.integers(0, 5))
def test_a_slot_that_is_held_or_outside(wrong: int, rows: int, row: int) -> None:
    case = make(rows)
    assert case.slots is not None
    case.slots[row % rows] = wrong
    check(case, bad=(row % rows,))


@pytest.mark.parametrize("wrong", [-1, 111, (1 << 31) - 1, -(1 << 31)])
def test_held_outside_the_cache(wrong: int) -> None:
    case = make(3)
    same = case.alike()
    case.held.fill_(wrong)
    assert case.call().isnan().all()
    assert torch.equal(case.k_cache.view(torch.int16), same.k_cache.view(torch.int16))
    assert torch.equal(case.v_cache.view(torch.int16), same.v_cache.view(torch.int16))


@rarely
@given(
    rows=st.integers(1, 20),
    repeat=st.sampled_from([1, 2, 3]),
    held=st.sampled_from([0, 65, 200]),
    dtype=st.sampled_from(LOW),
)
def test_a_row_has_the_same_bits_in_any_company(rows: int, repeat: int, held: int, dtype: torch.dtype) -> None:
    case = make(rows, repeat, 1, held=held, dtype=dtype)
    again, among, alone = case.alike(), case.alike(qkv=case.qkv.clone()), rows // 2
    out = case.call()
    assert torch.equal(again.call(), out)
    assert torch.equal(again.k_cache.view(torch.int16), case.k_cache.view(torch.int16))
    among.qkv[torch.arange(rows) != alone] = (
        torch.tensor([torch.nan, 3e4, -1.0, 0.0]).repeat(case.qkv.shape[1] // 4).to(dtype)
    )
    assert torch.equal(among.call()[alone], out[alone])
    one = slice(alone, alone + 1)
    assert case.slots is not None
    single = again.alike(qkv=case.qkv[one], positions=case.positions[one].clone(), slots=case.slots[one].clone())
    assert torch.equal(single.call()[0], out[alone])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_where_it_is_seen(value: float) -> None:
    case = make(3, window=20)
    want = case.alike().call()
    case.v_cache[50] = value  # the first 51 lie before the window
    case.k_cache[:50] = value
    assert torch.equal(case.alike().call(), want)
    case.v_cache[51] = value
    got = case.alike().call()
    assert (got.isnan() if value != value else got == value).all()


def test_what_is_for_another_implementation() -> None:
    case = make(2)
    assert case.slots is not None
    shifted = torch.cat([case.qkv.new_zeros(1), case.qkv.flatten()])[1:].view_as(case.qkv)
    others = [
        {"qkv": case.qkv.float(), "k_cache": case.k_cache.float(), "v_cache": case.v_cache.float()},
        {"q_weight": torch.ones(64)},
        {"k_cache": case.k_cache.half()},
        {"v_cache": case.v_cache.transpose(0, 1).contiguous().transpose(0, 1)},
        {"v_cache": torch.cat([case.v_cache] * 2, 1)[:, :2]},
        {"cos": case.cos.double()},
        {"sin": case.sin.T.contiguous().T},
        {"cos": case.cos[:0], "sin": case.sin[:0]},
        {"positions": case.positions.long()},
        {"held": case.held.long()},
        {"slots": case.slots.long()},
        {"slots": torch.stack([case.slots] * 2, 1)[:, 0]},
        {"qkv": shifted},
        {"qkv": case.qkv.T.contiguous().T},
    ]
    assert case.alike().call() is not NotImplemented
    for other in others:
        assert case.alike(**other).call() is NotImplemented, other.keys()
    assert make(33).call() is NotImplemented
    assert make(2, width=96).call() is NotImplemented
    assert make(1, repeat=17).call() is NotImplemented
