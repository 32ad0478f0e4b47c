"""Gluon kernels of Hopper on the CPU: their Python bodies run against stand-ins for the operations they use.

Tiles are tensors. The partitions of a program are threads, of which one runs at a time; at each operation that others
see, the next one is drawn from a seed. What a GPU leaves open is made as bad as it may be:
- an mbarrier has phases and blocks; where nobody can go on, `Deadlock` says who waits where;
- a copy lands at a drawn moment, zero past the tensor's ends; until then its destination is NaN;
- a product is NaN until it is waited for, and until then reads its operands: what overwrites them is a `Hazard`;
- what a thread stores in shared memory reaches a product behind a fence; one that reads it before is a `Hazard`.
"""

from __future__ import annotations

import inspect
import random
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction


class Deadlock(AssertionError):
    """No partition can go on."""


class Hazard(AssertionError):
    """An operation whose result would depend on the moment."""


class Stopped(BaseException):
    """Ends the other partitions of a program that has failed."""


@dataclass(eq=False)
class Barrier:
    """An mbarrier; `phase` is the parity of the one that is not complete."""

    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def change(self, arrivals: int, bytes: int) -> None:
        assert self.count, "a barrier is used before its init"
        self.pending -= arrivals
        self.bytes += bytes
        if self.pending < 0:
            raise Hazard(f"a barrier has more arrivals than its count of {self.count}")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = 1 - self.phase, self.count


@dataclass(eq=False)
class State:
    """Of a buffer's element: how often it was written, and who stores in it without a fence so far."""

    version: int = 0
    storing: set[Partition] = field(default_factory=set)


@dataclass(eq=False)
class Memory:
    """A buffer, or an element of one, in shared memory."""

    values: Tensor
    program: Program
    state: State = field(default_factory=State)
    elements: dict[int, Memory] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def index(self, place: int) -> Memory:
        assert 0 <= place < len(self.values)
        return self.elements.setdefault(int(place), Memory(self.values[place], self.program))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return self._view(self.values.permute(order))

    def reshape(self, shape: list[int]) -> Memory:
        return self._view(self.values.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Pieces:
        assert dtype == self.dtype
        assert torch.Size(shape).numel() == self.values.numel()
        return Pieces(self, *shape)

    def _view(self, values: Tensor) -> Memory:
        return Memory(values, self.program, self.state)

    def load(self, layout: object) -> Tensor:
        self.program.pause()
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.write(values)
        self.state.storing.add(self.program.partition)
        self.program.partition.stored.append(self.state)
        self.program.pause()

    def write(self, values: Tensor | float) -> None:
        self.values[...] = values
        self.state.version += 1


@dataclass(eq=False)
class Pieces:
    """A buffer [elements, rows, ..., columns] as it lies in memory: of each element columns by columns."""

    whole: Memory
    count: int
    rows: int
    columns: int

    def index(self, place: int) -> Memory:
        assert 0 <= place < self.count
        element, piece = divmod(int(place), self.count // len(self.whole.values))
        memory = self.whole.index(element)
        tile = memory.values.flatten(1)
        panel, first = divmod(piece * self.rows, len(tile))
        columns = slice(panel * self.columns, (panel + 1) * self.columns)
        return memory._view(tile[first : first + self.rows, columns])


@dataclass(eq=False)
class Barriers:
    """An array of mbarriers."""

    elements: list[Barrier]

    def index(self, place: int) -> Barrier:
        assert 0 <= place < len(self.elements)
        return self.elements[place]


@dataclass(eq=False)
class Copy:
    """A tile on its way to shared memory."""

    values: Tensor
    barrier: Barrier
    target: Memory

    def land(self) -> None:
        self.target.write(self.values)
        self.barrier.change(0, -self.values.nbytes)


@dataclass(eq=False)
class Product:
    """An accumulator after one product; `sources` are its operands in shared memory and what they were."""

    result: Tensor
    sources: list[tuple[State, int]]
    landed: bool = False

    def land(self) -> None:
        if any(state.version != version for state, version in self.sources):
            raise Hazard("an operand was overwritten before its product was waited for")
        self.landed = True


@dataclass(eq=False)
class Partition:
    """One thread of a program."""

    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    waits: str = ""
    finished: bool = False
    products: list[Product] = field(default_factory=list)
    stored: list[State] = field(default_factory=list)


class Program:
    """One program of a launch."""

    def __init__(self, number: int, programs: int, source: random.Random) -> None:
        self.number, self.programs, self.source = number, programs, source
        self.copies: list[Copy] = []
        self.partitions: list[Partition] = []
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.mine = threading.local()

    @property
    def partition(self) -> Partition:
        return self.mine.partition

    def specialize(self, functions: list[tuple[Callable, tuple]], *_: object) -> None:
        """Run each function in a partition of its own, to the end."""
        names = [f"{function.__name__}[{place}]" for place, (function, _) in enumerate(functions)]
        self.partitions = [Partition(name) for name in names]
        threads = [
            threading.Thread(target=self._run, args=(partition, *each), daemon=True)
            for partition, each in zip(self.partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._next()
        self.over.wait()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        if self.copies or any(partition.products for partition in self.partitions):
            raise Hazard("a copy or a product is under way at the end of the program")

    @torch.no_grad()  # a thread's own
    def _run(self, partition: Partition, function: Callable, arguments: tuple) -> None:
        self.mine.partition = partition
        partition.turn.acquire()
        try:
            if self.failure is None:
                function(*arguments)
        except Stopped:
            pass
        except BaseException as reason:
            self.failure = self.failure or reason
        partition.finished = True
        self._next()

    def pause(self, ready: Callable[[], bool] = lambda: True, waits: str = "") -> None:
        """Let others go on; come back once `ready`."""
        partition = self.partition
        partition.ready, partition.waits = ready, waits
        self._next()
        partition.turn.acquire()
        if self.failure is not None:
            raise Stopped

    def _next(self) -> None:
        """Give the turn away; copies may land first."""
        left = [partition for partition in self.partitions if not partition.finished]
        while left and self.failure is None:
            able = [partition for partition in left if partition.ready()]
            drawn = self.source.choice([*able, *self.copies]) if able or self.copies else None
            if isinstance(drawn, Partition):
                drawn.turn.release()
                return
            if drawn is None:
                waiting = ", ".join(f"{partition.name} for {partition.waits}" for partition in left)
                self.failure = Deadlock(f"program {self.number} waits: {waiting}")
            else:
                self.copies.remove(drawn)
                try:
                    drawn.land()
                except BaseException as reason:  # a thread that dies here would leave the others asleep
                    self.failure = reason
        for partition in left:
            partition.turn.release()
        if not left:
            self.over.set()


class Pointer:
    """A tensor's first element, or tiles of places behind it."""

    def __init__(self, tensor: Tensor, place: Tensor | int = 0) -> None:
        self.tensor, self.place = tensor, place

    def __add__(self, distance: Tensor | int) -> Pointer:
        return Pointer(self.tensor, self.place + distance)

    def places(self, mask: Tensor) -> Tensor:
        place, mask = torch.broadcast_tensors(torch.as_tensor(self.place, dtype=torch.int64), mask)
        if (mask & ((place < 0) | (place >= self.tensor.numel()))).any():
            raise Hazard(f"an access outside of {tuple(self.tensor.shape)}")
        return place.where(mask, 0)


class Descriptor:
    """What a kernel sees of a tensor that is copied in tiles."""

    def __init__(self, descriptor: Any) -> None:
        size = [descriptor.shape, descriptor.strides]
        self.tensor: Tensor = descriptor.base.as_strided(*size) if descriptor.base.numel() else descriptor.base
        self.block, self.layout, self.dtype = descriptor.block_shape, descriptor.layout, descriptor.base.dtype
        nbytes = self.dtype.itemsize * torch.Size(self.block).numel()
        self.block_type = SimpleNamespace(nbytes=nbytes, shape=self.block)

    def tile(self, first: list[int]) -> Tensor:
        """The tile from there on, zero where the tensor has ended."""
        tile = torch.zeros(self.block, dtype=self.dtype)
        slices = [slice(start, start + size) for start, size in zip(first, self.block, strict=True)]
        held = self.tensor[tuple(slices)]
        tile[tuple(slice(size) for size in held.shape)] = held
        return tile


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    mask = torch.tensor(True) if mask is None else mask
    values = pointer.tensor.view(-1)[pointer.places(mask)]
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    mask = torch.tensor(True) if mask is None else mask
    place, mask, value = torch.broadcast_tensors(pointer.places(mask), mask, value)
    pointer.tensor.view(-1)[place[mask]] = value[mask].to(pointer.tensor.dtype)


def _where(condition: Any, one: Any, other: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), one, other)


def _max(x: Tensor, axis: int) -> Tensor:
    """As the hardware's: NaN only where all are."""
    return (
        x.amax(axis)
        if not x.is_floating_point()
        else x.where(~x.isnan(), -torch.inf).amax(axis).where(~x.isnan().all(axis), torch.nan)
    )


def _extreme(scalar: Callable, tensors: Callable) -> Callable:
    def chosen(one: Any, other: Any) -> Any:
        if not isinstance(one, Tensor) and not isinstance(other, Tensor):
            return scalar(one, other)
        one, other = (x if isinstance(x, Tensor) else torch.tensor(x) for x in (one, other))
        return tensors(one, other)

    return chosen


def _reduce_or(x: Tensor, axis: int) -> int:
    assert x.ndim == 1
    assert axis == 0
    found = 0
    for value in x.tolist():
        found |= value
    return found


class Language:
    """`gl` of one program, with what the kernels use of it; functions of `tl` that they share have the same names."""

    float32, int32, int64 = torch.float32, torch.int32, torch.int64
    NVMMADistributedLayout = NVMMASharedLayout = SliceLayout = staticmethod(lambda *_, **__: None)
    BlockedLayout = SwizzledSharedLayout = DotOperandLayout = NVMMADistributedLayout
    load, store, where = staticmethod(_load), staticmethod(_store), staticmethod(_where)
    abs, exp2, log2 = staticmethod(torch.abs), staticmethod(torch.exp2), staticmethod(torch.log2)
    zeros_like = staticmethod(torch.zeros_like)
    maximum, minimum = staticmethod(_extreme(max, torch.fmax)), staticmethod(_extreme(min, torch.fmin))
    max, sum = staticmethod(_max), staticmethod(torch.sum)
    reduce_or, static_range = staticmethod(_reduce_or), staticmethod(range)

    def __init__(self, program: Program) -> None:
        self.program = program
        self.warp_specialize = program.specialize

    def program_id(self, axis: int) -> int:
        assert axis == 0
        return self.program.number

    def num_programs(self, axis: int) -> int:
        assert axis == 0
        return self.program.programs

    @staticmethod
    def num_warps() -> int:
        return 4

    @staticmethod
    def convert_layout(x: Tensor, layout: object) -> Tensor:
        return x

    @staticmethod
    def cast(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) else x

    @staticmethod
    def arange(start: int, end: int, layout: object) -> Tensor:
        return torch.arange(start, end, dtype=torch.int32)

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype, layout: object) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    def allocate_shared_memory(
        self, dtype: torch.dtype, shape: list[int], layout: object
    ) -> Memory | Barriers | Barrier:
        if layout is not Barrier:
            poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
            return Memory(torch.full(shape, poison, dtype=dtype), self.program)
        return Barrier() if len(shape) == 1 else Barriers([Barrier() for _ in range(shape[0])])


class Barrierwork:
    """`mbarrier` of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @staticmethod
    def MBarrierLayout() -> type[Barrier]:
        return Barrier

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def expect(self, barrier: Barrier, bytes: int) -> None:
        barrier.change(1, bytes)
        self.program.pause()

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.change(count, 0)
            self.program.pause()

    def wait(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        if pred:
            assert barrier.count, "a barrier is used before its init"
            line = sys._getframe(1).f_lineno
            self.program.pause(lambda: barrier.phase != phase, f"phase {phase} at line {line}")


class Copies:
    """`tma` of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def async_copy_global_to_shared(
        self, descriptor: Descriptor, first: list[int], barrier: Barrier, target: Memory
    ) -> None:
        assert list(target.values.shape) == list(descriptor.block)
        if target.state.storing:
            raise Hazard("a copy overwrites what was stored without a fence")
        target.write(torch.nan)
        self.program.copies.append(Copy(descriptor.tile(first), barrier, target))
        self.program.pause()


def _mma(program: Program) -> Callable:
    def warpgroup_mma(
        a: Memory | Tensor, b: Memory, accumulator: Tensor, *, use_acc: bool = True, is_async: bool = False
    ) -> Tensor:
        read = [x for x in (a, b) if isinstance(x, Memory)]
        if any(x.state.storing for x in read):
            raise Hazard("a product reads what was stored without a fence")
        product = (a.values if isinstance(a, Memory) else a).double() @ b.values.double()
        before = getattr(accumulator, "product", None)
        start = accumulator if before is None else before.result
        assert start.dtype == torch.float32
        assert start.shape == product.shape
        result = (start.double() + product if use_acc else product).float()
        made = Product(result, [(x.state, x.state.version) for x in read])
        if not is_async:
            return result
        program.partition.products.append(made)
        under_way = torch.full_like(result, torch.nan)
        under_way.product = made  # type: ignore[attr-defined]
        program.pause()
        return under_way

    return warpgroup_mma


def _mma_wait(program: Program) -> Callable:
    def warpgroup_mma_wait(outstanding: int, deps: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        products = program.partition.products
        while len(products) > outstanding:
            products.pop(0).land()
        made = [getattr(x, "product", None) for x in deps]
        results = tuple(
            x if each is None or not each.landed else each.result for x, each in zip(deps, made, strict=True)
        )
        return results[0] if len(results) == 1 else results

    return warpgroup_mma_wait


def _fence(program: Program) -> Callable:
    def fence_async_shared() -> None:
        if program.partitions:  # none is left behind when they begin
            for state in program.partition.stored:
                state.storing.discard(program.partition)
            program.partition.stored.clear()

    return fence_async_shared


Changes = Mapping[str, tuple[str, str]]


class Emulated:
    """Launches a kernel of a module, its programs in a drawn order, as `kernel[grid](...)` does."""

    def __init__(self, kernel: JITFunction, module: ModuleType, seed: int, changes: Changes) -> None:
        self.kernel, self.module, self.source, self.changes = kernel, module, random.Random(seed), changes
        self.fn = kernel.fn

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **options: Any) -> None:
            given = [_given(value) for value in arguments]
            for number in self.source.sample(range(grid[0]), grid[0]):
                program = Program(number, grid[0], self.source)
                self.functions(program)[self.kernel.fn.__name__](*given, **options)

        return launch

    def functions(self, program: Program) -> dict[str, Any]:
        """The module's names, in which operations are those of a program."""
        language = Language(program)
        names = dict(vars(self.module)) | {
            "gl": language,
            "tma": Copies(program),
            "mbarrier": Barrierwork(program),
            "warpgroup_mma": _mma(program),
            "warpgroup_mma_wait": _mma_wait(program),
            "fence_async_shared": _fence(program),
        }
        for name, value in vars(self.module).items():
            value = value.kernel if isinstance(value, Emulated) else value
            if isinstance(value, tl.constexpr):
                names[name] = value.value
            elif isinstance(value, JITFunction) and name in self.changes:
                names[name] = _changed(value.fn, *self.changes[name], names)
            elif isinstance(value, JITFunction):
                own = value.fn.__module__ == self.module.__name__
                room = names if own else value.fn.__globals__ | {"tl": language}
                names[name] = FunctionType(value.fn.__code__, room, name)
        return names


def _given(value: Any) -> Any:
    if isinstance(value, Tensor):
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return Pointer(value if value.is_contiguous() else value.as_strided((1 + reach,), (1,)))
    return Descriptor(value) if hasattr(value, "block_shape") else value


def _changed(function: FunctionType, old: str, new: str, names: dict[str, Any]) -> Callable:
    """The function with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {function.__name__}"
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), names, made)
    return made[function.__name__]


@contextmanager
def emulated(name: str, seed: int = 0, changes: Changes | None = None) -> Iterator[None]:
    """A module's kernels run on the CPU; `changes` replace pieces of its functions: {function: (old, new)}."""
    module = import_module(name)
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    stand_ins = {name: Emulated(kernel, module, seed, changes or {}) for name, kernel in kernels.items()}
    with mock.patch.multiple(module, **stand_ins):
        yield
