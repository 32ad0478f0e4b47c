"""`branch_attention` on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gpu_checks import (
    DEVICE,
    DTYPES,
    PROMISES,
    Case,
    filled,
    large,
    matches_the_reference,
    randn,
    second_device,
    shifted,
)
from torch import Tensor

from fb_kernels import BranchLayout, branch_attention
from fb_kernels._runtime import backend
from fb_kernels.testing import poison_, poisoned_memory

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Layout:
    """Branch lengths of every group, its slice (start, length) of the prefix, and how both are stored."""

    groups: list[list[int]]
    slices: list[tuple[int, int]]
    heads: tuple[int, int] = (16, 8)
    width: int = 128
    page: int | None = None  # slots of a page, None for one flat buffer
    packed: bool = False  # the prefix is the packed rows themselves
    trained: bool = False  # so it is, and its gradients are theirs
    options: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "small": Layout([[5, 1, 0, 3], [9], [], [1] * 4], [(0, 17), (3, 0), (1, 2), (2, 20)], (4, 2), 64),
    "small-paged": Layout([[5, 1], [3]], [(1, 17), (2, 20)], (4, 1), 64, page=3),
    "small-window": Layout([[9, 1], [12]], [(0, 17), (0, 0)], (2, 2), 64, options={"window": 6, "softcap": 5.0}),
    "small-packed": Layout([[20], [5] * 2, [1] * 3], [(0, 0), (0, 17), (0, 20)], (4, 2), 64, packed=True),
    "small-trained": Layout([[20], [5] * 2, [1] * 3], [(0, 0), (0, 17), (0, 20)], (4, 2), 64, trained=True),
    "scoring": Layout([[128] * 13] * 2, [(0, 1024), (1024, 1999)]),
    "trajectory": Layout([[2048], [128] * 13, [64] * 5], [(0, 0), (0, 1024), (0, 2000)], packed=True),
    "trajectory-trained": Layout([[2048], [128] * 13, [64] * 5], [(0, 0), (0, 1024), (0, 2000)], trained=True),
    "trained-window": Layout(
        [[700], [128] * 3, [9] * 5], [(0, 0), (0, 640), (3, 697)], trained=True, options={"window": 256}
    ),
    "decode": Layout([[1] * 13], [(7, 4096)]),
    "decode-paged": Layout([[1] * 13, [1] * 40, []], [(5, 2777), (0, 1000), (0, 3)], page=16),
    "decode-64": Layout([[1] * 13] * 2, [(0, 2500), (7, 64)], (12, 2), 64),
    "decode-256": Layout([[1] * 20], [(3, 1500)], (8, 1), 256),
    "decode-many": Layout([[1] * 13] * 5, [(0, 1000), (500, 1), (0, 0), (3, 4096), (9, 127)]),
    "paged": Layout([[128] * 4, [1] * 13], [(0, 1000), (5, 777)], page=16),
    "page-of-one": Layout([[1] * 13, [9] * 3], [(0, 300), (2, 100)], page=1),
    "window": Layout([[700], [128] * 3, [1] * 13], [(0, 0), (0, 900), (9, 1000)], options={"window": 256}),
    "softcap": Layout([[128] * 3, [1] * 13], [(0, 900), (9, 1000)], options={"softcap": 20.0, "scale": 0.1}),
    **{
        f"head-{width}": Layout([[65] * 3, [1] * 7], [(0, 300), (11, 513)], heads, width)
        for width, heads in {64: (8, 8), 80: (8, 2), 96: (6, 2), 256: (16, 1)}.items()
    },
}


def make(layout: Layout, dtype: torch.dtype, device: str = DEVICE, *, index: torch.dtype = torch.int32) -> Case:
    lengths = [length for group in layout.groups for length in group]
    rows, (heads, kv_heads) = sum(lengths), layout.heads
    q, k, v = (
        randn(rows, n, layout.width, dtype=dtype, device=device, seed=seed)
        for seed, n in enumerate((heads, kv_heads, kv_heads))
    )
    prefix, table, slots = stored_prefix(layout, dtype, device)
    indices = {
        "cu_branch": offsets(lengths, index, device),
        "cu_group": offsets([len(group) for group in layout.groups], index, device),
        "prefix_start": torch.tensor([start for start, _ in layout.slices], dtype=index, device=device),
        "prefix_len": torch.tensor([length for _, length in layout.slices], dtype=index, device=device),
        "block_table": None if table is None else table.to(index),
    }
    hints = {"max_branch_len": max(lengths), "max_prefix_len": max(length for _, length in layout.slices)}
    branches = BranchLayout(**indices, **hints)

    def op(q: Tensor, k: Tensor, v: Tensor, *prefix: Tensor) -> tuple[Tensor, Tensor]:
        prefix = prefix or ((k, v) if layout.trained else (k.detach(), v.detach()))
        return branch_attention(q, k, v, *prefix, branches, **layout.options, return_lse=True)

    def plain(q: Tensor, k: Tensor, v: Tensor, *prefix: Tensor) -> tuple[Tensor, Tensor]:
        prefix = prefix or ((k, v) if layout.trained else (k.detach(), v.detach()))
        flat = [x if x.ndim == 3 else x.flatten(0, 1) for x in prefix]
        return dense(q, k, v, flat[0], flat[1], layout.groups, slots, **layout.options)

    def gradient_scales(upstream: Sequence[Tensor]) -> list[Tensor]:
        """Bounds of the sums of |terms| of dq, dk and dv: those of ds, dout . v and dout . out, may cancel, and each
        has the rounding of its score."""
        (pull,), (wide, keys, values, *shared) = ([x.double() for x in each] for each in (upstream, (q, k, v, *prefix)))
        longest = [
            max(float(x.nan_to_num().norm(dim=-1).max()) for x in each)
            for each in zip((keys, values), (shared or (keys, values)), strict=True)
        ]
        scale = layout.options.get("scale", layout.width**-0.5)
        shift = 1 + wide.norm(dim=-1, keepdim=True) * longest[0] * scale
        ds = 2 * pull.norm(dim=-1, keepdim=True) * longest[1] * scale * shift  # [T, Hq, 1]
        with backend.override("reference"):
            terms = [ds * op(wide, keys, keys.abs(), *shared[:1], *(x.abs() for x in shared[:1]))[0]]
            for weight in (ds * wide.abs(), pull.abs() * shift):
                leaf = values.clone().requires_grad_()
                terms.append(torch.autograd.grad(op(wide, keys, leaf, *shared)[0], leaf, weight)[0])
        return terms

    shorter = indices["prefix_len"] // 2  # a shorter slice lies within the longer one
    scales = gradient_scales if dtype == torch.float32 else None  # 16-bit results are rounded far more
    return Case(op, plain, (q, k, v, *prefix), 3, 1, [(indices["prefix_len"], shorter)], gradient_scales=scales)


def stored_prefix(
    layout: Layout, dtype: torch.dtype, device: str
) -> tuple[tuple[Tensor, ...], Tensor | None, list[Tensor]]:
    """(the two buffers, block table, rows of the flattened buffers that each group sees); unused slots are NaN."""
    if layout.packed or layout.trained:
        return (), None, [torch.arange(start, start + n, device=device) for start, n in layout.slices]
    reach = [start + n for start, n in layout.slices]
    if layout.page is None:
        slots = [torch.arange(start, start + n) for start, n in layout.slices]
        shape, table = (max(reach) + 2,), None
    else:
        counts = [-(-n // layout.page) for n in reach]
        order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(0))
        pages = list(order[: sum(counts)].split(counts))
        slots = []
        for own, (start, n) in zip(pages, layout.slices, strict=True):
            at = torch.arange(start, start + n)
            slots.append(own[at // layout.page] * layout.page + at % layout.page)
        shape = (len(order), layout.page)
        table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True, padding_value=-1).to(device)
    buffers = []
    used = torch.cat(slots).unique()
    for seed in (3, 4):
        buffer = poison_(torch.empty(*shape, layout.heads[1], layout.width))
        flat = buffer if layout.page is None else buffer.flatten(0, 1)
        flat[used] = randn(len(used), *flat.shape[1:], device="cpu", seed=seed)
        buffers.append(buffer.to(device, dtype))
    return tuple(buffers), table, [x.to(device) for x in slots]


def offsets(sizes: list[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(device, dtype)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    groups: list[list[int]],
    slots: list[Tensor],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in q's dtype, a branch at a time with a softmax over all its keys."""
    repeat, row = q.shape[1] // prefix_k.shape[1], 0
    outs, lses = [q[:0]], [q.new_zeros(q.shape[1], 0, dtype=torch.float32)]
    for lengths, seen in zip(groups, slots, strict=True):
        for length in lengths:
            rows = slice(row, row + length)
            row += length
            keys, values = (
                torch.cat([shared[seen], own[rows]]).repeat_interleave(repeat, 1).transpose(0, 1)
                for shared, own in ((prefix_k, k), (prefix_v, v))
            )  # [Hq, n, E]
            scores = q[rows].transpose(0, 1) @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            apart = torch.arange(length, device=q.device)[:, None] + len(seen)
            apart = apart - torch.arange(len(seen) + length, device=q.device)
            hidden = (apart < 0) if window is None else (apart < 0) | (apart >= window)
            scores = scores.masked_fill(hidden, -torch.inf)
            outs.append((scores.softmax(-1) @ values).transpose(0, 1))
            lses.append(scores.float().logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def writes_every_element(layout: Layout, dtype: torch.dtype, device: str = DEVICE) -> None:
    """Into poisoned memory it writes the same bits."""
    case = make(layout, dtype, device)
    want = case.call()
    with poisoned_memory():
        got = case.call()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_reference(layout: str, dtype: torch.dtype) -> None:
    matches_the_reference(make(LAYOUTS[layout], dtype))


@pytest.mark.parametrize("layout", ["small", "small-paged", "decode", "decode-paged", "trajectory"])
def test_writes_every_element(layout: str) -> None:
    writes_every_element(LAYOUTS[layout], torch.bfloat16)


def test_small_unaligned_tensors_and_long_indices() -> None:
    case = make(LAYOUTS["small"], torch.bfloat16, index=torch.int64)
    case.floats = tuple(shifted(x) for x in case.floats)
    matches_the_reference(case)


@pytest.mark.parametrize("layout", ["decode", "decode-paged", "decode-64", "decode-256", "decode-many"])
def test_branches_of_one_row_take_the_compiled_kernel(layout: str) -> None:
    case = make(LAYOUTS[layout], torch.bfloat16)
    with backend.seen() as ran:
        compiled = case.call()
    kernels = backend.kernels("branch_attention", DEVICE)
    assert ran["branch_attention"] == ("triton" if kernels["cuda"] else "cuda")
    with backend.override("auto,branch_attention=triton"):
        for mine, other in zip(compiled, case.call(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)


def test_wrong_hints_cost_time_only() -> None:
    layout = LAYOUTS["decode-many"]
    q, k, v, *prefix = make(layout, torch.bfloat16).floats
    lengths = [length for group in layout.groups for length in group]
    indices = {
        "cu_branch": offsets(lengths, torch.int32, DEVICE),
        "cu_group": offsets([len(group) for group in layout.groups], torch.int32, DEVICE),
        "prefix_start": torch.tensor([start for start, _ in layout.slices], dtype=torch.int32, device=DEVICE),
        "prefix_len": torch.tensor([n for _, n in layout.slices], dtype=torch.int32, device=DEVICE),
    }
    with backend.override("reference"):
        wide = (x.double() for x in (q, k, v, *prefix))
        want = branch_attention(*wide, BranchLayout(**indices))
    for branch_hint in (None, 0, 1, 900):
        for prefix_hint in (None, 0, 100, 1 << 20):
            hinted = BranchLayout(**indices, max_branch_len=branch_hint, max_prefix_len=prefix_hint)
            got = branch_attention(q, k, v, *prefix, hinted)
            torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)


def bad_layouts_give_nan(rows: int, prefix: Tensor, good: dict[str, list], bad: dict[str, list]) -> None:
    """Where the reference does, and without a stray access."""
    q, k, v = (randn(rows, n, 64, dtype=torch.bfloat16, seed=n) for n in (4, 2, 2))
    for name, values in bad.items():
        given = {key: torch.tensor(value, device=DEVICE) for key, value in (good | {name: values}).items()}
        got = branch_attention(q, k, v, prefix, prefix, BranchLayout(**given))
        torch.cuda.synchronize()  # where a stray access shows
        with backend.override("reference"):
            want = branch_attention(q, k, v, prefix, prefix, BranchLayout(**given))
        assert torch.equal(got.isnan(), want.isnan()), name


def test_small_bad_layouts_give_nan_and_no_stray_access() -> None:
    good = {"cu_branch": [0, 2, 4, 6], "cu_group": [0, 2, 3], "prefix_start": [0, 0], "prefix_len": [5, 4]}
    bad = {"prefix_len": [5, 1 << 30], "prefix_start": [-7, 0], "block_table": [[0, 99], [2, -1]]}
    bad |= {"cu_branch": [0, 2, 1 << 20, 6], "cu_group": [0, 9, 3]}
    pages = randn(5, 4, 2, 64, dtype=torch.bfloat16, seed=9)
    bad_layouts_give_nan(6, pages, good | {"block_table": [[0, 1], [2, 3]]}, bad)


@pytest.mark.parametrize("layout", ["decode", "decode-paged", "scoring", "paged"])
@pytest.mark.parametrize("promise", PROMISES[1:])
def test_promises(promise: Callable[[Case], None], layout: str) -> None:
    promise(make(LAYOUTS[layout], torch.bfloat16))


@pytest.mark.parametrize("layout", ["decode", "decode-paged", "decode-256", "head-256", "trajectory-trained"])
def test_repeats_are_bit_equal(layout: str) -> None:
    PROMISES[0](make(LAYOUTS[layout], torch.bfloat16))


@pytest.mark.parametrize("layout", ["decode-many", "scoring"])
def test_a_group_alone_has_the_same_bits(layout: str) -> None:
    whole = LAYOUTS[layout]
    out, lse = make(whole, torch.bfloat16).call()
    q, k, v, *prefix = make(whole, torch.bfloat16).floats
    first = 0
    for lengths, (start, n) in zip(whole.groups, whole.slices, strict=True):
        rows = slice(first, first + sum(lengths))
        first = rows.stop
        got, got_lse = branch_attention(
            q[rows], k[rows], v[rows], *prefix, BranchLayout.of([lengths], [(start, n)], device=DEVICE), return_lse=True
        )
        assert torch.equal(got, out[rows])
        assert torch.equal(got_lse, lse[:, rows])


def test_another_device() -> None:
    matches_the_reference(make(LAYOUTS["small"], torch.bfloat16, second_device()))


def reads_a_far_prefix(length: int) -> None:
    """By 13 branches of so many rows, past 2^31 elements."""
    keys, n = 2_200_000, 1000
    with large(24):
        prefix_k, prefix_v = filled(keys, 8, 128), filled(keys, 8, 128, seed=1)
        q, k, v = (filled(13 * length, heads, 128, seed=2 + i) for i, heads in enumerate((16, 8, 8)))
        far, near = (BranchLayout.of([[length] * 13], [(start, n)], device=DEVICE) for start in (keys - n, 0))
        got = branch_attention(q, k, v, prefix_k, prefix_v, far)
        ends = prefix_k[-n:].clone(), prefix_v[-n:].clone()
        assert torch.equal(got, branch_attention(q, k, v, *ends, near))


def test_prefix_of_more_than_2_31_elements() -> None:
    reads_a_far_prefix(1)


def test_rows_of_more_than_2_31_elements() -> None:
    rows = 1_100_000
    with large(48):
        q, k, v = (filled(rows, heads, 128, seed=i) for i, heads in enumerate((16, 8, 8)))
        groups = torch.tensor([0, rows - 13, rows], device=DEVICE)
        zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        branches = torch.arange(rows + 1, device=DEVICE)
        # The hint chooses one kernel for both: the one for single rows has no memory for so many.
        whole = BranchLayout(branches, groups, zeros, zeros + 64, max_branch_len=2)
        got = branch_attention(q, k, v, k[:64], v[:64], whole)
        group = torch.tensor([0, 13], device=DEVICE)
        last = BranchLayout(branches[:14], group, zeros[:1], zeros[:1] + 64, max_branch_len=2)
        own = (x[-13:].clone() for x in (q, k, v))
        assert torch.equal(got[-13:], branch_attention(*own, k[:64], v[:64], last))
