"""`BranchLayout`: what it refuses, what it knows, and how often it is read."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fb_kernels import BranchLayout, branch_attention, layout
from fb_kernels._runtime import backend
from fb_kernels.testing import count_syncs

BRANCHES, PREFIXES = [[3, 1], [], [2]], [(1, 6), (0, 0), (8, 3)]
ROWS = 6


def ids(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def indices(**changes: Any) -> dict[str, Any]:
    """The same layout as tensors."""
    given = {"cu_branch": ids(0, 3, 4, 6), "cu_group": ids(0, 2, 2, 3), "prefix_start": ids(1, 0, 8)}
    return given | {"prefix_len": ids(6, 0, 3)} | changes


def attend(x: Tensor, given: BranchLayout, **options: Any) -> Tensor:
    """One layer of x[T, 4, 8] over a prefix of 12 keys."""
    prefix = torch.linspace(-1, 1, 12 * 16, dtype=x.dtype).view(12, 2, 8)
    return branch_attention(x, x[:, :2], x[:, 2:], prefix, prefix, given, **options)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the tensors that the host has read whole."""
    sizes: list[int] = []
    plain = Tensor.tolist

    def tolist(x: Tensor) -> Any:
        sizes.append(x.numel())
        return plain(x)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return sizes


def test_numbers_and_tensors_make_one_layout() -> None:
    made = BranchLayout.of(BRANCHES, PREFIXES)
    for name, expected in indices().items():
        assert torch.equal(getattr(made, name), expected)
        assert getattr(made, name).dtype == torch.int32
    assert (made.block_table, made.max_branch_len, made.max_prefix_len) == (None, 3, 6)
    x = torch.randn(ROWS, 4, 8)
    assert torch.equal(attend(x, made), attend(x, BranchLayout(**indices())))
    nothing = BranchLayout.of([], [])
    assert attend(x[:0], nothing).shape == (0, 4, 8)
    assert (nothing.max_branch_len, nothing.max_prefix_len) == (0, 0)


def test_pages_as_lists_or_a_tensor() -> None:
    pages = [[2, 0, 1], [], [3, 4]]
    slices = [(1, 6), (0, 0), (2, 3)]
    made = BranchLayout.of(BRANCHES, slices, block_table=pages)
    assert made.block_table is not None
    assert made.block_table.tolist() == [[2, 0, 1], [-1, -1, -1], [3, 4, -1]]
    given = BranchLayout.of(BRANCHES, slices, block_table=made.block_table.long())
    x, prefix = torch.randn(ROWS, 4, 8), torch.randn(5, 3, 2, 8)
    flat = prefix[[2, 0, 1, 3, 4]].flatten(0, 1)
    want = branch_attention(x, None, None, flat, flat, BranchLayout.of(BRANCHES, [(1, 6), (0, 0), (11, 3)]))
    for paged in (made, given):
        assert torch.equal(branch_attention(x, None, None, prefix, prefix, paged), want)
    empty = BranchLayout.of([[2]], [(0, 0)], block_table=[[]])
    assert branch_attention(x[:2], None, None, prefix, prefix, empty).eq(0).all()


def test_on_another_device() -> None:
    made = BranchLayout.of(BRANCHES, PREFIXES, block_table=[[0], [], [0]], device="meta")
    assert {x.device.type for x in made.indices if x is not None} == {"meta"}
    with pytest.raises(ValueError, match=r"^branch_attention: layout: expected a tensor on cpu, got .* on meta; "):
        attend(torch.randn(ROWS, 4, 8), BranchLayout.of(BRANCHES, PREFIXES, device="meta"))


@pytest.mark.parametrize(
    ("change", "kind", "argument"),
    [
        ({"branches": [3, 5]}, TypeError, "branches"),
        ({"branches": torch.tensor([[3]])}, TypeError, "branches"),
        ({"branches": [[3, 1], [], [2.0]]}, TypeError, "branches"),
        ({"branches": [[3, True], [], [2]]}, TypeError, "branches"),
        ({"branches": [[3, -1], [], [2]]}, ValueError, "branches"),
        ({"branches": [[2**31 - 1, 1], [], [2]]}, ValueError, "branches"),
        ({"branches": [[10**5000], [], [2]]}, ValueError, "branches"),
        ({"branches": [[3]]}, ValueError, "prefixes"),
        ({"prefixes": [(1, 6), (0, 0)]}, ValueError, "prefixes"),
        ({"prefixes": [(1, 6), (0, 0), (8,)]}, ValueError, "prefixes"),
        ({"prefixes": [(1, 6), (0, 0), (-1, 2)]}, ValueError, "prefixes"),
        ({"prefixes": [(1, 6), (0, 0), ("1", 2)]}, TypeError, "prefixes"),
        ({"block_table": [[0], [0]]}, ValueError, "block_table"),
        ({"block_table": [[0], [0], [-2]]}, ValueError, "block_table"),
        ({"block_table": [[0], [0], 1]}, TypeError, "block_table"),
        ({"block_table": torch.zeros(3, 1)}, TypeError, "block_table"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32, device="meta")}, ValueError, "block_table"),
    ],
)
def test_numbers_that_are_none(change: dict[str, Any], kind: type[Exception], argument: str) -> None:
    given: dict[str, Any] = {"branches": BRANCHES, "prefixes": PREFIXES} | change
    with pytest.raises(kind, match=rf"^BranchLayout: {argument}: expected .*, got .*; .+") as caught:
        BranchLayout.of(**given)
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["max_branch_len", "max_prefix_len"])
@pytest.mark.parametrize("hint", ["7", 1.5, True, -1, 2**63])
def test_hints_that_are_none(name: str, hint: object) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^BranchLayout: {name}: expected an int.*, got .*; .+"):
        BranchLayout(**indices(**{name: hint}))


def test_it_does_not_change() -> None:
    made = BranchLayout.of(BRANCHES, PREFIXES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.cu_branch = ids(0)  # type: ignore[misc]
    assert "_memory" not in repr(made)


def layers(x: Tensor, given: BranchLayout, **options: Any) -> Tensor:
    for _ in range(3):
        x = x + attend(x, given, **options)
    return x


KINDS: dict[str, Callable[[], BranchLayout]] = {
    "branches": lambda: BranchLayout(**indices()),
    "branches of one row": lambda: BranchLayout(**indices(cu_branch=ids(0, 1, 2, 3))),
    "int64": lambda: BranchLayout(**{name: x.long() for name, x in indices().items()}),
}


@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("which", ["reference", "auto"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(5)
def test_a_layout_is_read_once(kind: str, which: str, options: dict[str, Any], reads: list[int]) -> None:
    """Over all layers, forward and backward; also where nobody holds it any more when the backward comes."""
    given = KINDS[kind]()
    x = torch.randn(3 if "one row" in kind else ROWS, 4, 8, requires_grad=True)
    with backend.override(which):
        out = layers(x, given, **options)
        del given
        gc.collect()
        out.sum().backward()
    assert len(reads) <= 4, reads  # each tensor once; none where a kernel takes them as they are
    assert bool(reads) == (which == "reference")


def test_a_layout_of_numbers_is_not_read(reads: list[int]) -> None:
    x = torch.randn(ROWS, 4, 8, requires_grad=True)
    with backend.override("reference"):
        layers(x, BranchLayout.of(BRANCHES, PREFIXES)).sum().backward()
        paged = BranchLayout.of([[2]], [(1, 2)], block_table=[[3]])
        branch_attention(x[:2], None, None, torch.ones(4, 5, 2, 8), torch.ones(4, 5, 2, 8), paged)
    assert not reads


def test_several_layouts_of_the_same_tensors_are_read_once(reads: list[int]) -> None:
    given = indices()
    first, x = BranchLayout(**given), torch.randn(ROWS, 4, 8)
    with backend.override("reference"):
        attend(x, first)
        for _ in range(3):
            attend(x, dataclasses.replace(first, max_branch_len=1))
        attend(x, first)
    assert len(reads) == 4


@pytest.mark.parametrize("which", ["reference", "auto"])
@pytest.mark.parametrize("kind", ["numbers", "tensors", "int64"])
def test_a_tensor_changed_in_place_is_read_again(kind: str, which: str) -> None:
    made = BranchLayout.of([[1, 1], [1]], [(1, 6), (8, 3)])
    if kind != "numbers":
        dtype = torch.int64 if kind == "int64" else torch.int32
        made = BranchLayout(*(x.to(dtype, copy=True) for x in made.indices[:4]))
    x = torch.randn(3, 4, 8)
    with backend.override(which):
        attend(x, made)
        for name, values in (("prefix_len", [2, 1]), ("prefix_start", [0, 5]), ("cu_group", [0, 1, 3])):
            getattr(made, name).copy_(torch.tensor(values))
            alike = BranchLayout(*(x.clone() for x in made.indices[:4]))
            assert torch.equal(attend(x, made), attend(x, alike)), name
        made.cu_branch[1] = 0
        alike = BranchLayout(*(x.clone() for x in made.indices[:4]))
        assert torch.equal(attend(x, made), attend(x, alike))
        made.prefix_len.fill_(99)
        with pytest.raises(ValueError, match=r"^BranchLayout: prefix_len: expected slices that end within 12 keys"):
            attend(x, made)


def test_other_rows_and_prefixes_are_checked_anew() -> None:
    made, x = BranchLayout.of([[2]], [(1, 6)]), torch.randn(3, 4, 8)
    prefix = torch.ones(9, 2, 8)
    branch_attention(x[:2], None, None, prefix, prefix, made)
    with pytest.raises(ValueError, match=r"^BranchLayout: cu_branch: expected offsets .* end with 3, got "):
        branch_attention(x, None, None, prefix, prefix, made)
    with pytest.raises(ValueError, match=r"^BranchLayout: prefix_len: expected slices that end within 6 keys, got "):
        branch_attention(x[:2], None, None, prefix[:6], prefix[:6], made)


def test_tensors_of_inference_mode_are_read_every_time() -> None:
    """Nothing says whether they were changed; those that `of` makes there say it."""
    with torch.inference_mode():
        given, x = indices(), torch.randn(ROWS, 4, 8)
        made = BranchLayout(**given)
        before = attend(x, made)
        given["prefix_len"].copy_(ids(2, 0, 1))
        assert torch.equal(attend(x, made), attend(x, BranchLayout.of(BRANCHES, [(1, 2), (0, 0), (8, 1)])))
        assert not torch.equal(attend(x, made), before)
        assert not any(x.is_inference() for x in BranchLayout.of(BRANCHES, PREFIXES).indices if x is not None)


def test_inside_unchanged_all_follows_once_from_tensors_that_show_no_change() -> None:
    """As in the capture of a graph, where what follows is otherwise computed for every layer."""
    with torch.inference_mode():
        made, counts = BranchLayout(**indices()), []

        def attended() -> None:
            layout.remembered(made.indices, "tables", lambda: counts.append(0))

        attended()
        attended()
        for _ in range(2):
            with made.unchanged():
                attended()
                attended()
        attended()
    assert len(counts) == 5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_know_their_own_values(copied: Callable[[BranchLayout], BranchLayout]) -> None:
    made, x = BranchLayout.of(BRANCHES, PREFIXES), torch.randn(ROWS, 4, 8)
    attend(x, made)
    made.prefix_len.copy_(ids(2, 0, 1))
    again = copied(made)
    assert (again.max_branch_len, again.max_prefix_len) == (3, 6)
    assert torch.equal(attend(x, again), attend(x, made))


def test_nothing_outlives_a_layout_and_its_gradients() -> None:
    gc.collect()
    before = len(layout._MEMORIES)
    made, x = BranchLayout.of(BRANCHES, PREFIXES), torch.randn(ROWS, 4, 8, requires_grad=True)
    offsets = weakref.ref(made.cu_branch)
    out = layers(x, made).sum()
    assert len(layout._MEMORIES) == before + 1
    del made
    out.backward()
    del out
    gc.collect()
    assert offsets() is None
    assert len(layout._MEMORIES) == before


def test_threads_share_a_layout() -> None:
    made, x = BranchLayout.of(BRANCHES, PREFIXES), torch.randn(ROWS, 4, 8)
    with backend.override("reference"):
        want = layers(x, made)
        for _ in range(20):
            shared = BranchLayout(**indices())
            with ThreadPoolExecutor(4) as pool:
                assert all(torch.equal(got, want) for got in pool.map(layers, [x] * 4, [shared] * 4))


def test_it_compiles_where_it_is_made() -> None:
    def run(x: Tensor, first: int) -> Tensor:
        made = BranchLayout.of([[first, ROWS - first]], [(1, 6)])
        return attend(x, made) + attend(x, BranchLayout(**indices(), max_branch_len=first))

    x = torch.randn(ROWS, 4, 8)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for first in (1, 2, 4):
        assert torch.equal(compiled(x, first), run(x, first))


def test_no_sync_is_needed_to_make_one() -> None:
    with count_syncs() as syncs:
        BranchLayout.of(BRANCHES, PREFIXES, block_table=[[1], [], [2, 3]])
        BranchLayout(**indices())
    assert syncs.total == 0


def test_items_see_their_prompts_prefix_and_themselves(generator: torch.Generator) -> None:
    """Against the mask of FlashInfer's multi-item scoring, but for delimiters, which see themselves too."""
    prefixes, places = [4, 0, 2], [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0], []]
    row = torch.cat(
        [torch.cat((torch.full((n,), -1), torch.tensor(own))) for n, own in zip(prefixes, places, strict=True)]
    )
    prompt = torch.arange(3).repeat_interleave(
        torch.tensor([n + len(own) for n, own in zip(prefixes, places, strict=True)])
    )
    at, key = torch.arange(len(row))[:, None], torch.arange(len(row))
    own = (row[:, None] < 0) | (row == -1) | (at < key + row[:, None])
    sees = (prompt[:, None] == prompt) & (key <= at) & own | (key == at)
    q, k, v = torch.randn(3, len(row), 2, 8, generator=generator, dtype=torch.float64)
    out = branch_attention(q, k, v, k, v, BranchLayout.of_items(prefixes, places))
    logits = torch.einsum("qhe,khe->hqk", q, k) / 8**0.5
    dense = torch.einsum("hqk,khe->qhe", logits.masked_fill(~sees, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(out, dense)

    items = row >= 0  # with the prefixes in pages of 2 rows, at the end of a cache of 5
    pages = [k.new_full((5, 2, 2, 8), torch.nan), v.new_full((5, 2, 2, 8), torch.nan)]
    for rows, cache in zip((k, v), pages, strict=True):
        cache[3:].view(4, 2, 8)[:] = rows[:4]
        cache[1] = rows[-2:]
    layout = BranchLayout.of_items(prefixes, places, block_table=[[3, 4], [], [1]])
    paged = branch_attention(q[items], k[items], v[items], *pages, layout)
    torch.testing.assert_close(paged, dense[items])


@pytest.mark.parametrize(
    ("given", "argument"),
    [(([4], [[0, 2]]), "token_pos_in_items"), (([4, 1], [[0]]), "token_pos_in_items"), (([-1], [[]]), "prefix_len")],
)
def test_items_that_are_none(given: tuple[list[int], list[list[int]]], argument: str) -> None:
    with pytest.raises(ValueError, match=f"^BranchLayout: {argument}: expected"):
        BranchLayout.of_items(*given)
