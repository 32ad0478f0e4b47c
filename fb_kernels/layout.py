"""The layout of a packed forward: its branches, their groups, and the prefix that each group sees.

What is derived from a layout (its numbers on the host, the plan of the CPU reference) is computed once for all layers,
forward and backward. An operator gets only tensors, and finds the results by the identity of these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fb_kernels._runtime import checks

T = TypeVar("T")

OP = "BranchLayout"
LARGEST = torch.iinfo(torch.int32).max

Indices = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""cu_branch, cu_group, prefix_start, prefix_len and block_table, as operators take them."""


class Numbers(NamedTuple):
    """A layout as lists."""

    cu_branch: list[int]
    cu_group: list[int]
    prefix_start: list[int]
    prefix_len: list[int]
    block_table: list[list[int]] | None


class Group(NamedTuple):
    """Rows and prefix of a group."""

    first: int  # rows
    last: int
    start: int  # prefix
    length: int
    pages: list[int] | None
    longest: int  # branch


class Plan(NamedTuple):
    """A layout that fits the rows and the prefix of a call."""

    bounds: list[int]  # of the branches
    row_start: Tensor  # [T]: first row of the row's branch
    groups: list[Group]


@dataclass(frozen=True, eq=False)
class _Memory:
    """Cached results of a layout's tensors: name -> (versions of the tensors at that time, value)."""

    indices: Indices
    results: dict[Hashable, tuple[tuple[int, ...], Any]] = field(default_factory=dict)
    fixed: list[dict[Hashable, Any]] = field(default_factory=list)  # name -> value, inside each `unchanged`


_MEMORIES: WeakValueDictionary[tuple[int, ...], _Memory] = WeakValueDictionary()
"""By the ids of the tensors; no other tensor can have these ids while the memory lives."""


@dataclass(frozen=True, eq=False)
class BranchLayout:
    """B branches in G groups: which rows each branch has, and which keys of the prefix its group sees.

    Rows are sorted by group, and a group's branches follow one another: group g has the branches from cu_group[g] up to
    cu_group[g + 1] (exclusive), branch b the rows from cu_branch[b] up to cu_branch[b + 1] (exclusive). A whole
    trajectory is a group of one branch with prefix_len 0. All layers of a forward share one layout; `BranchLayout.of`
    makes it from plain numbers.

    Args:
        cu_branch: [B + 1] int32 or int64, from 0 to the number of rows T.
        cu_group: [G + 1] likewise, from 0 to B.
        prefix_start: [G] likewise: first key of the group's slice, in the buffer or in the group's concatenated pages.
        prefix_len: [G] likewise: number of keys; an empty slice may start anywhere.
        block_table: [G, n] likewise, the pages of each group in order; entries outside the slice are not read (pad with
            -1). None if the prefix is one buffer.
        max_branch_len: hint, rows of the longest branch; a wrong one only costs time.
        max_prefix_len: hint, keys of the longest slice; a wrong one only costs time.

    Types, shapes and devices are checked here, values by the op: on the CPU once per layout, and again if a tensor was
    changed in place; on a device they are never read. What follows from them is kept until a tensor's version changes.
    A replayed graph or a kernel launched by other means changes values without it: then call
    `torch.autograd.graph.increment_version` on the tensor, or launch the op in the graph too.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or device.
    """

    cu_branch: Tensor
    cu_group: Tensor
    prefix_start: Tensor
    prefix_len: Tensor
    block_table: Tensor | None = None
    max_branch_len: int | None = None
    max_prefix_len: int | None = None
    _memory: _Memory | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        checks.is_tensor(OP, "cu_branch", self.cu_branch)
        checks.offsets(OP, "cu_branch", self.cu_branch, like=self.cu_branch)
        checks.offsets(OP, "cu_group", self.cu_group, like=self.cu_branch)
        groups = self.cu_group.shape[0] - 1
        for name, value in (("prefix_start", self.prefix_start), ("prefix_len", self.prefix_len)):
            checks.index(OP, name, value, like=self.cu_branch)
            checks.shape(OP, name, value, (groups,), "[G] of cu_group[G + 1]", "give one value to each group")
        if self.block_table is not None:
            checks.index(OP, "block_table", self.block_table, like=self.cu_branch)
            checks.shape(OP, "block_table", self.block_table, (groups, None), "[G, n]", "give one row to each group")
        for name, bound in (("max_branch_len", self.max_branch_len), ("max_prefix_len", self.max_prefix_len)):
            if bound is not None:
                checks.integer(OP, name, bound, "pass None for no bound", 0)
        if not torch.compiler.is_compiling():
            memory = _MEMORIES.setdefault(tuple(map(id, self.indices)), _Memory(self.indices))
            object.__setattr__(self, "_memory", memory)

    @classmethod
    def of(
        cls,
        branches: Sequence[Sequence[int]],
        prefixes: Sequence[tuple[int, int]],
        *,
        block_table: Sequence[Sequence[int]] | Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> BranchLayout:
        """Make a layout from plain numbers, which are checked here; the CPU reads no tensor of such a layout.

        Args:
            branches: for each group the number of rows of each branch, such as `[[3, 5], [4]]`.
            prefixes: for each group (start, length) of its slice.
            block_table: for each group its pages, any number of them; or a tensor [G, n].
            device: where the rows are; None for torch's default.

        Returns:
            The layout, with int32 tensors and both hints.

        Raises:
            TypeError: a number that is not an int.
            ValueError: a number out of range, or arguments with different numbers of groups.
        """
        lengths = _integers("branches", branches)
        slices = _integers("prefixes", prefixes)
        if len(prefixes) != len(branches) or any(len(prefix) != 2 for prefix in prefixes):
            expected = f"(start, length) of each of {len(branches)} groups"
            raise checks.error(OP, "prefixes", expected, f"{len(prefixes)} entries", "pass (0, 0) for no prefix")
        rows, groups = [0, *accumulate(lengths)], [0, *accumulate(map(len, branches))]
        if rows[-1] > LARGEST:
            raise checks.error(OP, "branches", f"{LARGEST} rows at most", rows[-1], "split them into several calls")
        starts, sizes, pages = slices[::2], slices[1::2], None

        def tensor(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        with torch.inference_mode(False):  # an inference tensor has no version that would show a change
            if block_table is None or isinstance(block_table, Tensor):
                table = block_table
            else:
                _integers("block_table", block_table, least=-1)
                width = max([0, *map(len, block_table)])
                pages = [[*row, *[-1] * (width - len(row))] for row in block_table]
                table = tensor(pages).view(len(pages), width)
            indices = tensor(rows), tensor(groups), tensor(starts), tensor(sizes), table
            layout = cls(*indices, max([0, *lengths]), max([0, *sizes]))
        if layout._memory is not None and (table is None) == (pages is None):
            remembered(indices, "numbers", lambda: Numbers(rows, groups, starts, sizes, pages))
        return layout

    @classmethod
    def of_items(
        cls,
        prefix_len: Sequence[int],
        token_pos_in_items: Sequence[Sequence[int]],
        *,
        block_table: Sequence[Sequence[int]] | Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> BranchLayout:
        """Make the layout of multi-item scoring for the rows of whole prompts: pass `k` and `v` in both places.

        With a `block_table` the prefixes lie in pages, and the rows are those of the items alone.

        The rows of a prompt are its prefix, then items between delimiters. An item sees the prefix and itself, not the
        delimiters and the other items. The arguments are those that FlashInfer's `plan` takes for its mask, unpadded;
        a delimiter, which no score reads, sees the prefix as there, and here also itself.

        Args:
            prefix_len: rows of each prompt's prefix.
            token_pos_in_items: for each prompt the place of each further row in its item, from 1; 0 for a delimiter.
                Items of 3 and 2 tokens are `[0, 1, 2, 3, 0, 1, 2, 0]`.
            block_table: for each prompt the pages of its prefix; None if its rows are here.
            device: where the rows are; None for torch's default.

        Raises:
            TypeError: a number that is not an int.
            ValueError: a place that does not follow the one before, or arguments for different numbers of prompts.
        """
        branches, prefixes, row, here = list[list[int]](), list[tuple[int, int]](), 0, block_table is None
        if len(prefix_len) != len(token_pos_in_items):
            expected = f"the rows of {len(prefix_len)} prompts"
            raise checks.error(
                OP, "token_pos_in_items", expected, len(token_pos_in_items), "give each prompt its items"
            )
        for length, places in zip(_integers("prefix_len", [prefix_len]), token_pos_in_items, strict=True):
            items, before = list[int](), 0
            for place in _integers("token_pos_in_items", [places]):
                if place not in (0, before + 1):
                    remedy = "count the rows of an item from 1, behind a delimiter's 0"
                    raise checks.error(OP, "token_pos_in_items", f"0 or {before + 1} after {before}", place, remedy)
                if place > 1:
                    items[-1] += 1
                else:
                    items.append(1)
                before = place
            branches += [[length], items] if here else [items]
            prefixes += [(0, 0), (row, length)] if here else [(0, length)]
            row += length + sum(items)
        return cls.of(branches, prefixes, block_table=block_table, device=device)

    def __reduce__(self) -> tuple[Any, ...]:
        return BranchLayout, (*self.indices, self.max_branch_len, self.max_prefix_len)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A promise that nobody changes the tensors inside: results are computed once, also in a graph's capture."""
        if self._memory is None:
            yield
            return
        self._memory.fixed.append({})
        try:
            yield
        finally:
            self._memory.fixed.pop()

    @property
    def indices(self) -> Indices:
        """The tensors in the order in which operators take them."""
        return self.cu_branch, self.cu_group, self.prefix_start, self.prefix_len, self.block_table


def memory_of(indices: Indices) -> _Memory | None:
    """The memory of a layout of these tensors; it lives as long as the layout."""
    return _MEMORIES.get(tuple(map(id, indices)))


def remembered(indices: Indices, name: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns for the tensors; it is called once per layout, and again if a tensor was changed.

    On a device it is called once per stream; during graph capture every time, so that replays see the tensors' values
    at that time. Inside `BranchLayout.unchanged` it is called once.
    """
    memory = memory_of(indices)
    if memory is not None and memory.fixed:
        fixed = memory.fixed[-1]
        if name not in fixed:
            fixed[name] = make()
        return fixed[name]
    if indices[0].is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return make()
        name = name, torch.cuda.current_stream(indices[0].device).cuda_stream
    tensors = [x for x in indices if x is not None]
    if memory is None or any(x.is_inference() for x in tensors):  # those have no version to show a change
        return make()
    versions = tuple(x._version for x in tensors)
    entry = memory.results.get(name)
    if entry is None or entry[0] != versions:
        entry = memory.results[name] = (versions, make())
    return entry[1]


def plan(indices: Indices, rows: int, prefix: Tensor) -> Plan:
    """The plan of a layout for `rows` rows over a prefix, all on the CPU.

    Raises:
        ValueError: the layout does not fit them.
    """
    pages, size = prefix.shape[:2] if indices[4] is not None else (None, prefix.shape[0])
    return remembered(indices, ("plan", rows, pages, size), lambda: _plan(_numbers(indices), rows, pages, size))


def _numbers(indices: Indices) -> Numbers:
    def read() -> Numbers:
        branch, group, start, length, table = indices
        pages = None if table is None else table.tolist()
        return Numbers(branch.tolist(), group.tolist(), start.tolist(), length.tolist(), pages)

    return remembered(indices, "numbers", read)


def _plan(numbers: Numbers, rows: int, pages: int | None, size: int) -> Plan:
    bounds, of_groups, starts, lengths, table = numbers
    checks.offset_values(OP, "cu_branch", bounds, rows)
    checks.offset_values(OP, "cu_group", of_groups, len(bounds) - 1)
    capacity = size if table is None or not table else size * len(table[0])
    groups = []
    for g, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for name, value in (("prefix_start", start), ("prefix_len", length)):
            if value < 0:
                raise checks.error(OP, name, "0 or more", f"{value} in group {g}", "count from the slice's first key")
        if length and start + length > capacity:
            got = f"{start} + {length} in group {g}"
            raise checks.error(OP, "prefix_len", f"slices that end within {capacity} keys", got, "shorten the slice")
        entries = None
        if table is not None and pages is not None:
            entries = table[g][start // size : (start + length - 1) // size + 1] if length else []
            if any(not 0 <= page < pages for page in entries):
                expected = f"pages from 0 below {pages} wherever the slice lies"
                raise checks.error(OP, "block_table", expected, f"{entries} in group {g}", "pad only after the slice")
            start = start % size if length else 0
        branches = bounds[of_groups[g] : of_groups[g + 1] + 1]
        longest = max((b - a for a, b in pairwise(branches)), default=0)
        groups.append(Group(branches[0], branches[-1], start, length, entries, longest))
    begins = torch.tensor(bounds)
    return Plan(bounds, begins[:-1].repeat_interleave(begins.diff()), groups)


def _integers(name: str, lists: Sequence[Sequence[int]], least: int = 0) -> list[int]:
    """The integers of all lists, concatenated and checked."""
    for entry in (lists, *lists) if isinstance(lists, list | tuple) else (lists,):
        if not isinstance(entry, list | tuple):
            got = type(entry).__name__
            raise checks.error(OP, name, "a list of ints for each group", got, "write [[3, 5], [4]]", TypeError)
    values = list(chain.from_iterable(lists))
    for value in values:
        if type(value) is not int or not least <= value <= LARGEST:
            checks.integer(OP, name, value, "pass plain numbers", least, LARGEST)
    return values
