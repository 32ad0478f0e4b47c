"""The Triton kernels of `branch_attention` against the definition, interpreted: both kernels, all options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_branch_attention import Case, as_pages, close, dense, make, scattered
from torch import Tensor

from fb_kernels import backend, tuning
from fb_kernels.branch_attention import branch_attention
from fb_kernels.branch_attention import triton_layout as branch_layout
from fb_kernels.layout import BranchLayout
from fb_kernels.testing import assert_close_to_reference, count_syncs, poison_, poisoned_memory

pytestmark = pytest.mark.usefixtures("triton_kernels", "tiny_blocks")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TILE, SPLIT = 1 << 20, 1  # max_branch_len
HEADS = (2, 1)  # an interpreted program costs much
LAUNCH = {"BLOCK_M": 8, "BLOCK_N": 4, "num_warps": 4, "num_stages": 1}


@pytest.fixture(autouse=True, scope="module")
def tiny_blocks() -> Iterator[None]:
    """Blocks so small that a few keys, rows and offsets span several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "branch_attention", lambda *_: LAUNCH)
        patch.setattr(tuning, "branch_attention_split", lambda *_: LAUNCH | {"CHUNK": 8})
        patch.setattr(branch_layout, "OFFSETS", 4)
        yield


def run(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the kernels, whose memory was poisoned before."""
    with poisoned_memory():
        return case.run(**options)


def reference(case: Case, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    tensors = (None if x is None else x.detach().to(dtype) for x in case.tensors)
    with backend.override("reference"):
        return branch_attention(*tensors, BranchLayout(**case.layout), **options, return_lse=True)


def compare(case: Case, **options: Any) -> None:
    """The kernels against the definition and plain PyTorch; lse is float32 whatever q's dtype."""
    got = run(case, **options)
    options = {name: value for name, value in options.items() if not name.startswith("max_")}
    _, *want = case.naive(**options)
    plain = reference(case, case.q.dtype, **options)[0], reference(case, torch.float32, **options)[1]
    for actual, expected, native, scale in zip(got, want, plain, case.magnitudes(**options), strict=True):
        assert_close_to_reference(actual, expected, native, scale=scale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, repeat = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 16)]))
    longest = 1 if repeat == 16 else draw(st.sampled_from([1, 5, 11]))
    groups = draw(st.lists(st.lists(st.integers(0, longest), max_size=3), max_size=3))
    slices = [(draw(st.integers(0, 6)), draw(st.integers(0, 20))) for _ in groups]
    width, dtype = draw(st.sampled_from([1, 8, 16, 20, 64, 80])), draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["flat", "paged", "view", "alone"]))
    seed = draw(st.integers(0, 9))
    case = make(groups, slices, (kv_heads * repeat, kv_heads), width, dtype, kind != "alone", seed)
    if kind == "paged":
        case = as_pages(case, draw(st.sampled_from([1, 3, 16])))
    elif kind == "view" and case.k is not None and case.v is not None:
        rows = case.q.shape[0]
        starts = [draw(st.integers(0, rows)) for _ in groups]
        slices = [(start, draw(st.integers(0, rows - start))) for start in starts]
        case = replace(case, prefix_k=case.k, prefix_v=case.v, slices=slices)
    if draw(st.booleans()):
        case.q, case.k, case.v = (None if x is None else scattered(x) for x in (case.q, case.k, case.v))
        if kind in ("flat", "alone"):
            case.prefix_k, case.prefix_v = scattered(case.prefix_k), scattered(case.prefix_v)
    case.index = draw(st.sampled_from([torch.int32, torch.int64]))
    return case


OPTIONS = {
    "case": cases(),
    "window": st.sampled_from([None, None, 1, 2, 5, 12, 1 << 40]),
    "softcap": st.sampled_from([None, None, 1.5]),
    "scale": st.sampled_from([None, 0.9]),
    "max_branch_len": st.sampled_from([None, TILE, SPLIT]),
    "max_prefix_len": st.sampled_from([None, 0, 9, 1 << 40]),
}


@settings(max_examples=10)
@given(options=st.fixed_dictionaries(OPTIONS))
def test_matches_naive_float64(options: dict[str, Any]) -> None:
    compare(**options)


@pytest.mark.slow
@settings(max_examples=60)
@given(options=st.fixed_dictionaries(OPTIONS))
def test_matches_the_reference_in_many_cases(options: dict[str, Any]) -> None:
    compare(**options)


@pytest.mark.parametrize("longest", [TILE, SPLIT])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_error_within_twice_plain_pytorch(dtype: torch.dtype, softcap: float | None, longest: int) -> None:
    groups = [[19], [3, 7, 1, 1, 3]] if longest == TILE else [[1], [1] * 4]
    case = make(groups, [(0, 0), (2, 35)], (2, 1), 64, dtype)
    out, lse = run(case, softcap=softcap, max_branch_len=longest)
    _, exact, exact_lse = case.naive(softcap=softcap)
    _, plain, plain_lse = dense(case, dtype, softcap)
    assert_close_to_reference(out, exact, plain)
    assert_close_to_reference(lse, exact_lse, plain_lse)


@pytest.mark.parametrize("longest", [TILE, SPLIT])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}])
def test_what_a_row_does_not_see_does_not_reach_it(options: dict[str, Any], longest: int) -> None:
    groups, slices = [[4, 1, 3], [2]], [(1, 9), (11, 3)]
    clean = make(groups, slices, HEADS, dtype=torch.float32)
    want, want_lse = run(clean, **options, max_branch_len=longest)
    for strange in (math.nan, -math.inf):
        dirty = make(groups, slices, HEADS, dtype=torch.float32)
        assert dirty.k is not None
        assert dirty.v is not None
        dirty.q[3] = dirty.k[3] = math.nan  # the last row of the first branch
        dirty.v[3:5, :, 2] = strange  # and a branch of one row
        dirty.prefix_k[11:14], dirty.prefix_v[11:14] = math.nan, math.inf  # the second group's prefix
        out, lse = run(dirty, **options, max_branch_len=longest)
        unseen = [0, 1, 2, 5, 6, 7]
        assert torch.equal(out[unseen], want[unseen])
        assert torch.equal(lse[:, unseen], want_lse[:, unseen])
        assert out[3].isnan().all()
        close(out[4, :, 2], torch.full((2,), strange))
        assert torch.equal(out[4, :, 3:], want[4, :, 3:])
        assert out[[8, 9]].isnan().all()


@pytest.mark.parametrize("paged", [False, True])
def test_a_strange_prefix_value_reaches_the_window_alone(paged: bool) -> None:
    clean = make([[6]], [(1, 9)], HEADS, dtype=torch.float32)
    dirty = replace(clean, prefix_v=clean.prefix_v.clone())
    dirty.prefix_v[1 + 7] = math.inf  # at position 7; row i sees from position 9 + i + 1 - 5
    want, got = (run(as_pages(case, 2) if paged else case, window=5)[0] for case in (clean, dirty))
    assert got[:3].isinf().all()
    assert torch.equal(got[3:], want[3:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("where", "softcap"),
    [(where, None) for where in ("q", "k", "v", "prefix_k", "prefix_v")] + [(x, 2.0) for x in ("q", "k", "prefix_k")],
)
def test_strange_values_that_are_seen_count_as_in_a_dense_softmax(
    where: str, value: float, softcap: float | None
) -> None:
    for longest in (TILE, SPLIT):
        case = make([[1, 3], [1]], [(0, 5), (2, 4)], HEADS, dtype=torch.float32)
        getattr(case, where)[3, 0, 2] = value
        compare(case, softcap=softcap, max_branch_len=longest)


@pytest.mark.parametrize("longest", [TILE, SPLIT])
def test_a_large_soft_cap_of_small_scores_does_not_cancel(longest: int) -> None:
    compare(make([[2]], [(0, 9)], HEADS, dtype=torch.float32), softcap=1000.0, max_branch_len=longest)


def test_all_scores_infinitely_low_is_empty() -> None:
    for longest in (TILE, SPLIT):
        case = make([[2]], [(0, 13)], (1, 1), 1, torch.float32)
        assert case.k is not None
        case.q[:], case.prefix_k[:], case.k[:] = 1.0, -math.inf, -math.inf
        out, lse = run(case, max_branch_len=longest)
        assert not out.any()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("longest", [TILE, SPLIT])
def test_empty_sizes(longest: int) -> None:
    for groups, slices in (
        ([], []),
        ([[]], [(0, 3)]),
        ([[0, 0], []], [(0, 3), (1, 0)]),
        ([[1, 0]], [(0, 0)]),
        ([[2], [0], [1]], [(3, 0), (0, 2), (0, 0)]),
    ):
        for own in (True, False):
            for window in (None, 2):
                case = make(groups, slices, HEADS, dtype=torch.float32, own=own)
                compare(case, window=window, max_branch_len=longest)
    nothing = make([[2]], [(0, 0)], own=False, dtype=torch.float32)
    nothing.prefix_k = nothing.prefix_v = torch.zeros(0, 2, 8)
    compare(nothing, max_branch_len=longest)
    for shape, table in (((0, 4, 2, 8), [[-1]]), ((3, 0, 2, 8), [[-1]]), ((3, 4, 2, 8), [[]])):
        nothing.prefix_k = nothing.prefix_v = torch.zeros(shape)
        nothing.table = table
        compare(nothing, max_branch_len=longest)


@pytest.mark.parametrize("options", [{}, {"window": 7}])
def test_a_row_has_the_same_bits_in_every_batch(options: dict[str, int]) -> None:
    """A tile holds 4 rows here, so branches lie differently in tiles and beside other branches."""
    groups, slices = [[9], [3, 1, 0, 6, 2], [1] * 3, [5]], [(0, 0), (3, 17), (10, 20), (0, 13)]
    together = make(groups, slices, HEADS, dtype=torch.float32)
    out, lse = run(together, **options, max_branch_len=TILE)
    first = 0
    for group, piece in zip(groups, slices, strict=True):
        for length in group:
            rows = slice(first, first + length)
            first = rows.stop
            alone = (x[rows] for x in together.leaves)
            got, got_lse = run(Case(*alone, together.prefix_k, together.prefix_v, [[length]], [piece]), **options,
                               max_branch_len=TILE)  # fmt: skip
            assert torch.equal(got, out[rows])
            assert torch.equal(got_lse, lse[:, rows])


@pytest.mark.parametrize("options", [{}, {"window": 7}])
def test_split_rows_have_the_same_bits_in_every_batch(options: dict[str, int]) -> None:
    groups, slices = [[1], [1] * 5, [1, 1]], [(0, 0), (10, 20), (0, 13)]
    together = make(groups, slices, HEADS, dtype=torch.float32)
    out, lse = run(together, **options)
    for row, piece in ((0, slices[0]), (1, slices[1]), (5, slices[1]), (7, slices[2])):
        alone = (x[row : row + 1] for x in together.leaves)
        got, got_lse = run(Case(*alone, together.prefix_k, together.prefix_v, [[1]], [piece]), **options)
        assert torch.equal(got[0], out[row])
        assert torch.equal(got_lse[:, 0], lse[:, row])


def test_wrong_hints_and_page_sizes_agree() -> None:
    case = make([[2, 1], [1, 1]], [(1, 30), (4, 9)], (2, 1), dtype=torch.float32)
    paged = as_pages(case, 3)
    for longest, prefix, other in ((0, 0, case), (1, 10, paged), (1, 1 << 40, case), (TILE, 0, paged)):
        compare(other, max_branch_len=longest, max_prefix_len=prefix)


def test_repeats_are_bit_equal_without_a_sync_and_inputs_unchanged() -> None:
    case = as_pages(make([[2, 1], [1]], [(1, 6), (8, 9)], HEADS, dtype=torch.bfloat16), 2)
    before = [x.clone() for x in case.tensors if x is not None]
    for longest in (SPLIT, TILE):
        with count_syncs() as syncs:
            runs = [case.run(max_branch_len=longest) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        assert syncs.total == 0
    after = [x for x in case.tensors if x is not None]
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("name", "bad", "poisoned"),
    [
        ("cu_branch", [1, 3, 4, 6], range(6)),
        ("cu_branch", [0, 4, 3, 6], range(6)),
        ("cu_branch", [0, 3, 4, 1 << 40], range(6)),
        ("cu_branch", [0], range(6)),
        ("cu_group", [0, 1, 2], range(6)),
        ("cu_group", [0, -5, 3], range(6)),
        ("prefix_start", [-1, 8], range(4)),
        ("prefix_start", [1, 1 << 50], [4, 5]),
        ("prefix_len", [6, -3], [4, 5]),
        ("prefix_len", [6, (1 << 63) - 1], [4, 5]),
        ("block_table", [[0, -1, 2, 3], [-7, 99, 3, 9]], range(4)),
        ("block_table", [[0, 1, -1, -1], [0, 0, 4, 0]], [4, 5]),
    ],
)
@pytest.mark.parametrize("longest", [TILE, SPLIT])
def test_bad_layouts_are_nan(name: str, bad: list, poisoned: range | list[int], longest: int) -> None:
    case = make([[3, 1], [2]], [(1, 6), (8, 3)], HEADS, dtype=torch.float32)
    if name == "block_table":
        pages = [torch.full((4, 4, 1, 8), 0.5) for _ in range(2)]
        case = Case(case.q, case.k, case.v, *pages, case.groups, [(1, 6), (8, 3)], [[0, 1, 2, -1], [-1, -1, 3, -1]])
    layout = BranchLayout(**case.layout | {name: torch.tensor(bad)}, max_branch_len=longest)
    out, lse = branch_attention(*case.tensors, layout, return_lse=True)
    wrong = torch.zeros(6, dtype=torch.bool)
    wrong[list(poisoned)] = True
    for result in (out, lse.T):
        assert result[wrong].isnan().all()
        assert result[~wrong].isfinite().all()


@pytest.mark.parametrize("longest", [TILE, SPLIT])
def test_offsets_are_searched_once_a_layout(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search, launched = branch_layout._branch_attention_layout_kernel, []

    class Spy:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launched.append(grid)
            return search[grid]

    monkeypatch.setattr(branch_layout, "_branch_attention_layout_kernel", Spy())
    case = make([[1, 1], [1]], [(1, 6), (8, 3)], HEADS, dtype=torch.float32)
    layout = BranchLayout(**case.layout, max_branch_len=longest)
    first, second = (branch_attention(*case.tensors, layout) for _ in range(2))
    assert torch.equal(first, second)
    assert len(launched) == 1
    for name, values in (("cu_group", [0, 1, 3]), ("cu_branch", [0, 0, 1, 3])):
        getattr(layout, name).copy_(torch.tensor(values))
        alike = BranchLayout(**{n: getattr(layout, n).clone() for n in list(case.layout)[:4]}, max_branch_len=longest)
        assert torch.equal(*(branch_attention(*case.tensors, each) for each in (layout, alike)))
    assert len(launched) == 5


@pytest.mark.parametrize("longest", [TILE, SPLIT])
def test_strided_indices(longest: int) -> None:
    case = make([[1, 1], [1]], [(1, 6), (8, 3)], HEADS, dtype=torch.float32)
    layout = dict(case.layout)
    for name in ("cu_branch", "cu_group", "prefix_start", "prefix_len"):
        layout[name] = torch.stack([layout[name], poison_(layout[name].clone())], 1)[:, 0]
    want = case.run(max_branch_len=longest)[0]
    got = branch_attention(*case.tensors, BranchLayout(**layout, max_branch_len=longest))
    assert torch.equal(got, want)


def test_the_launch_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that no row of a small batch fills takes the kernel that it takes in a large one."""
    forms = []
    monkeypatch.setattr(tuning, "branch_attention", lambda *given: forms.append(given) or LAUNCH)
    for length in (2, 40):
        run(make([[2]], [(0, length)], HEADS, dtype=torch.bfloat16), window=9, max_branch_len=TILE)
    assert forms[0] == forms[1]


def test_rows_of_no_group_are_nan() -> None:
    case = make([[2]], [(0, 3)], dtype=torch.float32)
    empty = torch.zeros(0, dtype=torch.int32)
    layout = case.layout | {"cu_group": torch.tensor([0]), "prefix_start": empty, "prefix_len": empty}
    for longest in (TILE, SPLIT):
        assert branch_attention(*case.tensors, BranchLayout(**layout, max_branch_len=longest)).isnan().all()


def test_large_float16_values_are_finite() -> None:
    for longest in (TILE, SPLIT):
        case = make([[2, 1]], [(0, 40)], HEADS, dtype=torch.float16)
        assert case.v is not None
        case.prefix_v.fill_(60000.0)
        case.v.fill_(60000.0)
        assert case.run(max_branch_len=longest)[0].isfinite().all()


def test_too_large_a_workspace_takes_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from fb_kernels.branch_attention import triton as kernels

    case = make([[1, 1, 1]], [(0, 40)], HEADS, dtype=torch.float32)
    tiles, split = run(case, max_branch_len=TILE)[0], run(case)[0]
    assert not torch.equal(split, tiles)
    compare(case)
    monkeypatch.setattr(kernels, "WORKSPACE", 0)
    assert torch.equal(run(case)[0], tiles)


def test_other_arguments_are_the_references() -> None:
    for width, dtype in ((8, torch.float64), (257, torch.float32)):
        case = make([[2]], [(0, 3)], width=width, dtype=dtype)
        with pytest.raises(ValueError, match="branch_attention: expected arguments that the triton kernel takes"):
            case.run()
        with backend.override("triton,branch_attention=auto"):
            assert torch.equal(case.run()[0], reference(case, dtype)[0])


@pytest.mark.parametrize("longest", [TILE, SPLIT])
def test_opcheck(longest: int) -> None:
    case = make([[1, 1], [1]], [(1, 6), (8, 3)], HEADS, dtype=torch.float32)
    arguments = (*(x.nan_to_num(0.0) for x in case.tensors if x is not None), *case.layout.values())
    numbers = (longest, 7, None, 0.3, None)
    torch.library.opcheck(torch.ops.fb.branch_attention.default, (*arguments, *numbers))
