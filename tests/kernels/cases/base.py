"""What the tests know of an op: how to call it at any size, what it should say, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from layouts import WHOLE
from torch import Tensor

from fb_kernels import calls
from fb_kernels._runtime import backend, tuning
from fb_kernels.calls import INDICES as INDICES
from fb_kernels.calls import Call as Case
from fb_kernels.calls import Calls
from fb_kernels.calls import listed as listed

Sizes = dict[str, Any]
CONTIGUOUS = ("offset",)
ROWS = ("offset", "rows apart", "aligned")  # whose last dimension has no gaps
WIDTHS = st.sampled_from((1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 129))  # around those of vectors
LOW = (torch.float32, torch.float16, torch.bfloat16)


def gradients(example: Case, upstream: Callable[[Tensor], Tensor] = torch.clone) -> list[Tensor]:
    """The gradients to all arguments that have one, from values laid out by `upstream`."""
    leaves = {name: example.tensors[name].detach().requires_grad_() for name in example.gradients}
    results = example.run(**leaves)
    outputs = [results[place] for place in example.outputs]
    ramps = [torch.linspace(-1, 2 + place, x.numel(), dtype=x.dtype) for place, x in enumerate(outputs)]
    grads = [upstream(ramp.view(x.shape)) for ramp, x in zip(ramps, outputs, strict=True)]
    return list(torch.autograd.grad(outputs, list(leaves.values()), grads))


@dataclass(frozen=True)
class Way:
    """An implementation: what it takes, and launches in which a few elements fill several blocks."""

    dtypes: tuple[torch.dtype, ...] = LOW
    sizes: st.SearchStrategy[Sizes] | None = None  # where it takes less than the op
    typical: Sizes | None = None  # likewise
    layouts: tuple[str, ...] = WHOLE
    apart: tuple[str, ...] = ()  # tensors whose rows may lie apart besides
    kernels: int = 1  # of Triton, in a typical call
    small: Callable[[], AbstractContextManager[Any]] = nullcontext
    also: Sequence[Sizes] = ()  # sizes past a block
    refused: Sequence[Callable[[], Case]] = ()  # left to others, besides float64


@dataclass(frozen=True, repr=False)
class Op:
    """One op, declared once for all of its implementations; the promises are in test_contract.py.

    Attributes:
        name: of the function in fb_kernels.
        make: a call in float64 from sizes, options and a seed.
        sizes: what `make` takes, from empty to odd.
        typical: sizes with six rows or more, for what needs no search.
        tiny: sizes for gradcheck.
        truth: what the call should return, in the dtype of its arguments; it may read the results, where a rounded
            one decides the next.
        scales: of each result, the magnitude at which units in the last place count, from the call and its truth; see
            `assert_close_to_reference`.
        gradient_scales: the same of each gradient, from the upstream ones, with the call in float64.
        wide: floats that stay in float32 when the others are narrower.
        widened: results in float32 where the arguments are narrower.
        rows: tensors whose rows are independent of each other, and in which dimension they lie.
        hostile: tensors of which any element may be NaN or infinite; None for those of `rows`.
        result_rows: the dimension of rows in each result.
        which_strange: NaN and either infinity come where they do in the definition, not just one of the three.
        alone: a row is the same bit by bit if it is the only one.
        wrong: (argument, changes, error) of calls that are refused.
    """

    name: str
    make: Callable[..., Case]
    sizes: st.SearchStrategy[Sizes]
    truth: Callable[[Case, Sequence[Tensor]], list[Tensor]]
    ways: dict[str, Way]
    typical: Sizes = field(default_factory=dict)
    tiny: Sequence[Sizes] = ()
    scales: Callable[[Case, Sequence[Tensor]], Sequence[Tensor | float | None]] | None = None
    gradient_scales: Callable[[Case, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor | float | None]] | None = None
    wide: tuple[str, ...] = ()
    widened: tuple[int, ...] = ()
    rows: dict[str, int] = field(default_factory=dict)
    hostile: tuple[str, ...] | None = None
    result_rows: tuple[int, ...] = (0,)
    which_strange: bool = True
    alone: bool = False
    wrong: Sequence[tuple[str, dict[str, Any], type[Exception]]] = ()

    def way(self, name: str) -> Way:
        """An implementation by its own name, or by its kind where that is declared for all of them."""
        return self.ways.get(name) or self.ways[name.partition(" ")[0]]

    def example(self, **sizes: Any) -> Callable[[], Case]:
        """Makes a call of these sizes in float32."""
        return lambda: self.cast(self.make(**sizes), torch.float32)

    def cast(self, case: Case, dtype: torch.dtype) -> Case:
        """The case with its floats in a dtype."""
        return replace(case, least=dict.fromkeys(self.wide, torch.float32) | case.least).cast(dtype)


def definition(case: Case, _: Sequence[Tensor] = ()) -> list[Tensor]:
    """What it returns, then what it writes, by the op's `calls.py`."""
    return calls.by_name()[case.op][1].definition(case)


def described(folder: str, function: Calls) -> Op:
    """A public function as its `calls.py` has it: at small sizes, by the reference and every kernel of its own."""
    dimensions = function.dimensions()

    def make(**sizes: int) -> Case:
        return function.shaped(**sizes).cast(torch.float64)

    small = make(**dict.fromkeys(dimensions, 2)).cast(torch.bfloat16)
    return Op(
        function.op,
        make,
        st.fixed_dictionaries(dict.fromkeys(dimensions, st.integers(1, 9))),
        definition,
        {"reference": Way((torch.float64, *LOW)), **{kind: Way() for kind in backend.kinds(folder)}},
        typical=dict.fromkeys(dimensions, 6),
        tiny=[dict.fromkeys(dimensions, 3)] if small.gradients else [],
        widened=tuple(place for place, x in enumerate(function.definition(small)) if x.dtype == torch.float32),
    )


def single(case: Case) -> Case:
    """Its floats in float32."""
    return case.with_(**{name: x.float() for name, x in case.floats.items()})


@contextmanager
def launched(**choices: Any) -> Iterator[None]:
    """Fixed launch configurations in place of those of tuning.py."""
    mocks = {name: mock.Mock(return_value=choice) for name, choice in choices.items()}
    with mock.patch.multiple(tuning, **mocks):
        yield


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Float32, the same for a shape and seed."""
    return torch.randn(shape, generator=generator(seed + sum(size * 7**place for place, size in enumerate(shape))))


def normal(seed: int, *shapes: Sequence[int]) -> list[Tensor]:
    """Float64 tensors, one after the other from one source."""
    source = generator(seed)
    return [torch.randn(tuple(shape), generator=source, dtype=torch.float64) for shape in shapes]


def ids(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """An index tensor."""
    return torch.tensor(values, dtype=dtype)


def offsets(sizes: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Where groups of these sizes begin, and where the last one ends."""
    return torch.tensor([0, *sizes]).cumsum(0).to(dtype)


seeds = st.integers(0, 99)
