"""The compiled `branch_attention_qkv` on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import DEVICE, Case, filled, large, randn, same, usual
from torch import Tensor

from fb_kernels._runtime import cuda
from fb_kernels.branch_attention_qkv import cuda as kernels
from fb_kernels.branch_attention_qkv.naive import branch_attention_qkv as naive
from fb_kernels.testing import poison_

pytestmark = pytest.mark.gpu

EPS, POSITIONS = 1e-6, 512
LOW = (torch.bfloat16, torch.float16)


class Size(NamedTuple):
    """Of a call; the cache has room for the rows and 100 slots that nobody uses."""

    rows: int
    held: int
    heads: int = 16
    kv_heads: int = 8
    width: int = 128
    window: int | None = None
    norm: bool = True


SIZES = {
    "small": Size(3, 70, 4, 2, 64),
    "small-window": Size(2, 70, 3, 1, 64, 20, False),
    "window": Size(5, 3000, window=512),
    "rows": Size(32, 1000),
    "narrow": Size(7, 1000, 32, 8, 64, norm=False),
    "wide": Size(9, 1000, 8, 1, 256),
    "many-heads": Size(32, 500, 16, 1),
    **{f"{rows}x{held}": Size(rows, held) for rows in (1, 16) for held in (0, 1, 63, 64, 65, 512, 2048, 4097, 8192)},
}


@pytest.fixture(autouse=True)
def compiled() -> None:
    reason = cuda.why_not("cuda")
    if reason:
        pytest.skip(reason)


class Indices(NamedTuple):
    """Index tensors of a call."""

    positions: Tensor
    held: Tensor
    slots: Tensor

    @classmethod
    def of(cls, size: Size, device: str) -> Indices:
        positions = torch.arange(size.rows, dtype=torch.int32, device=device) * 7 % POSITIONS
        held = torch.tensor([size.held], dtype=torch.int32, device=device)
        slots = size.held + 2 * torch.arange(size.rows, dtype=torch.int32, device=device).flip(0)
        return cls(positions, held, slots)


@lru_cache
def tables(width: int, device: str) -> tuple[Tensor, Tensor]:
    """(cos, sin), made once: nothing is copied inside a capture."""
    angle = torch.outer(torch.arange(float(POSITIONS)), 1e4 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
    return angle.cos().to(device), angle.sin().to(device)


def attend(
    size: Size,
    indices: Indices,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *weights: Tensor,
    block_table: Tensor | None = None,
) -> Tensor:
    q_weight, k_weight = weights or (None, None)
    with torch.cuda.device(qkv.device) if qkv.is_cuda else nullcontext():
        return kernels.branch_attention_qkv(
            *(qkv, q_weight, k_weight, *tables(size.width, str(qkv.device)), indices.positions, k_cache, v_cache),
            *(indices.held, indices.slots, block_table, size.heads, size.kv_heads, EPS, size.window, size.width**-0.5),
        )


def defined(size: Size, indices: Indices, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, *weights: Tensor) -> Tensor:
    """The definition."""
    q_weight, k_weight = weights or (None, None)
    return naive(
        *(qkv, q_weight, k_weight, *tables(size.width, str(qkv.device)), indices.positions, k_cache, v_cache),
        *(indices.held, indices.slots),
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        eps=EPS,
        window=size.window,
    )


def make(size: Size, dtype: torch.dtype, device: str = DEVICE) -> Case:
    """Outputs are the attention, and what the caches then hold in the rows' slots."""
    rows, held, heads, kv_heads, width, window, norm = size
    indices = Indices.of(size, device)
    cos, sin = tables(width, str(indices.held.device))

    def plain(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        *both, v = qkv.unflatten(-1, (-1, width)).split([heads, kv_heads, kv_heads], 1)
        place = indices.positions.long()
        for index, x in enumerate(both):
            normed = F.rms_norm(x, (width,), weights[index], EPS) if weights else x
            first, second = normed.chunk(2, -1)
            turned = torch.cat([-second, first], -1)
            both[index] = normed * cos[place][:, None].to(x.dtype) + turned * sin[place][:, None].to(x.dtype)
        q, k = both[0].unflatten(1, (kv_heads, -1)), both[1]
        begin = 0 if window is None else max(0, held - window + 1)
        keys, values = k_cache[begin:held], v_cache[begin:held]
        own = (q * k[:, :, None]).sum(-1, keepdim=True)
        scores = torch.cat([torch.einsum("nhre,khe->nhrk", q, keys), own], -1) * width**-0.5
        p = scores.softmax(-1)
        out = torch.einsum("nhrk,khe->nhre", p[..., :-1], values) + p[..., -1:] * v[:, :, None]
        return out.flatten(1, 2), k, v

    def op(*floats: Tensor) -> tuple[Tensor, ...]:
        out = (defined if floats[0].dtype == torch.float64 else attend)(size, indices, *floats)
        return out, *(cache.index_select(0, indices.slots) for cache in floats[1:3])

    caches = [poison_(torch.empty(held + 2 * rows + 100, kv_heads, width, dtype=dtype, device=device)) for _ in "kv"]
    for seed, cache in enumerate(caches):
        cache[:held] = randn(held, kv_heads, width, dtype=dtype, device=device, seed=seed)
    qkv = randn(rows, (heads + 2 * kv_heads) * width, dtype=dtype, device=device, seed=2)
    weights = [1 + randn(width, dtype=dtype, device=device, seed=seed) / 8 for seed in (3, 4)] if norm else []
    return Case(op, plain, (qkv, *caches, *weights), changes=[(indices.held, indices.held // 2)])


def touches_its_slots_only(size: Size, dtype: torch.dtype, device: str = DEVICE) -> None:
    case, indices = make(size, dtype, device), Indices.of(size, device)
    indices.slots[::2] = -1
    before = [cache.clone() for cache in case.floats[1:3]]
    attend(size, indices, *case.floats)
    written = indices.slots >= 0
    kept = indices.slots[written].long()
    v = case.floats[0].unflatten(-1, (-1, size.width))[:, -size.kv_heads :]
    assert torch.equal(case.floats[2][kept], v[written])
    for cache, old in zip(case.floats[1:3], before, strict=True):
        assert not cache[kept].isnan().any()
        old[kept] = cache[kept]
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


def bad_rows_are_nan(size: Size, dtype: torch.dtype, device: str = DEVICE) -> None:
    case = make(size, dtype, device)
    for name, wrong in (
        ("positions", -1),
        ("positions", 1 << 30),
        ("slots", 0),
        ("slots", 1 << 30),
        ("held", -1),
        ("held", 1 << 30),
    ):
        indices = Indices.of(size, device)
        good = attend(size, indices, *case.floats)
        before = [cache.clone() for cache in case.floats[1:3]]
        getattr(indices, name)[0] = wrong
        got = attend(size, indices, *case.floats)
        assert got[0].isnan().all(), name
        assert got.isnan().all() if name == "held" else torch.equal(got[1:], good[1:]), name
        assert all(same(cache, old) for cache, old in zip(case.floats[1:3], before, strict=True)), name


def a_row_alone_has_the_same_bits(size: Size, dtype: torch.dtype, device: str = DEVICE) -> None:
    case, indices = make(size, dtype, device), Indices.of(size, device)
    qkv, *others = case.floats
    out = attend(size, indices, *case.floats)
    for row in range(size.rows):
        one = slice(row, row + 1)
        single = indices._replace(positions=indices.positions[one], slots=indices.slots[one])
        assert torch.equal(attend(size, single, qkv[one], *others)[0], out[row])


def pages_are_flat_caches(size: Size, dtype: torch.dtype, device: str = DEVICE, page: int = 64) -> None:
    """Sequences of other lengths, in shuffled pages: each has the bits that it has alone over a flat cache."""
    lengths = [size.held, size.held // 2, 0, size.held]
    indices = [Indices.of(size._replace(held=held), device) for held in lengths]
    columns = -(-(size.held + 2 * size.rows) // page)
    source = torch.Generator().manual_seed(0)
    table = torch.randperm(columns * len(lengths), generator=source).view(-1, columns).to(device)
    shape = (columns * len(lengths), page, size.kv_heads, size.width)
    pools = [randn(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1)]
    for g, held in enumerate(lengths):  # what is not held is never seen
        for pool in pools:
            pool[table[g, held // page], held % page :] = torch.nan
            pool[table[g, held // page + 1 :]] = torch.nan
    heads = size.heads + 2 * size.kv_heads
    qkv = randn(len(lengths) * size.rows, heads * size.width, dtype=dtype, device=device, seed=2)
    flat, rows = [[pool[each].flatten(0, 1) for pool in pools] for each in table], qkv.split(size.rows)
    slots = [table[g][of.slots.long() // page] * page + of.slots % page for g, of in enumerate(indices)]
    several = Indices(
        torch.cat([of.positions for of in indices]), torch.cat([of.held for of in indices]), torch.cat(slots).int()
    )
    got = attend(size, several, qkv, *pools, block_table=table.int())
    for g, of in enumerate(indices):
        assert torch.equal(attend(size, of, rows[g], *flat[g]), got[g * size.rows : (g + 1) * size.rows])
        assert all(same(pool[table[g]].flatten(0, 1), own) for pool, own in zip(pools, flat[g], strict=True))


test_matches_the_reference, test_promises, test_another_device = usual(make, SIZES, "1x2048", "16x2048", dtypes=LOW)


@pytest.mark.parametrize(
    "check",
    [touches_its_slots_only, bad_rows_are_nan, a_row_alone_has_the_same_bits, pages_are_flat_caches],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("size", ["small", "16x2048", "wide"])
def test_rows(size: str, check: Callable[[Size, torch.dtype], None]) -> None:
    check(SIZES[size], torch.bfloat16)


def test_a_cache_of_more_than_2_31_elements() -> None:
    slots, held, heads = 1_060_000, 1_056_000, 16
    with large(24):
        k_cache, v_cache = filled(slots, heads, 128), filled(slots, heads, 128, seed=1)
        size = Size(1, held, heads, heads, window=700)
        qkv = filled(1, 3 * heads * 128, seed=2)
        far = Indices.of(size, DEVICE)
        got = attend(size, far, qkv, k_cache, v_cache)
        end = slice(held - 704, held + 64)  # a multiple of 64 keys before
        assert (held - 704) % 64 == 0
        near = far._replace(held=far.held - (held - 704), slots=far.slots - (held - 704))
        assert torch.equal(attend(size, near, qkv, k_cache[end].clone(), v_cache[end].clone()), got)
        assert torch.equal(v_cache[held], qkv[0, -heads * 128 :].view(heads, 128))
