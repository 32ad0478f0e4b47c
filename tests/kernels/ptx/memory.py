"""Global and shared memory of an executed kernel, and what a GPU would stop at or leave undefined."""

from __future__ import annotations

import ctypes
from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ptx.arithmetic import LANES

Lanes = np.ndarray  # a value of each lane
Mask = Lanes | None  # the lanes that take part; None for all
POISON = 0xFF  # every byte that nobody wrote: NaN as a float of any width, far outside as an address
ALIGNED = 1024  # of shared memory's start, as its swizzled tiles need it


class Fault(AssertionError):
    """An access that a GPU would refuse."""


class Hazard(AssertionError):
    """An operation whose result would depend on the moment."""


class Deadlock(AssertionError):
    """No warp can go on."""


@dataclass(order=True)
class _Range:
    start: int
    end: int = field(compare=False)
    views: dict[int, np.ndarray] = field(compare=False)


class Memory:
    """Memory by address, made of ranges that tensors or variables own."""

    def __init__(self) -> None:
        self.ranges: list[_Range] = []

    def add(self, start: int, size: int) -> None:
        """Let kernels reach memory of this process."""
        if not size or any(each.start <= start and start + size <= each.end for each in self.ranges):
            return
        raw = np.frombuffer((ctypes.c_uint8 * size).from_address(start), "u1")
        views = {width: raw[: size // width * width].view(f"u{width}") for width in (1, 2, 4, 8)}
        insort(self.ranges, _Range(start, start + size, views))

    def parts(self, address: Lanes, mask: Mask, size: int, text: str) -> list[tuple[_Range, Mask]]:
        lanes = address if mask is None else address[mask]
        if not lanes.size:
            return []
        if (lanes & np.uint64(size - 1)).any():
            raise Fault(f"an address that is not a multiple of {size}: {text}")
        place = self._range(int(lanes.min()), text)
        if int(lanes.max()) + size <= place.end:
            return [(place, mask)]
        parts: dict[int, tuple[_Range, Lanes]] = {}
        for lane in np.flatnonzero(np.ones(LANES, bool) if mask is None else mask):
            place = self._range(int(address[lane]), text)
            if int(address[lane]) + size > place.end:
                raise Fault(f"outside memory: {text}, lane {lane}")
            parts.setdefault(place.start, (place, np.zeros(LANES, bool)))[1][lane] = True
        return list(parts.values())

    def _range(self, address: int, text: str) -> _Range:
        place = bisect(self.ranges, address, key=lambda each: each.start) - 1
        if place < 0 or address >= self.ranges[place].end:
            raise Fault(f"outside memory, at {address:#x}: {text}")
        return self.ranges[place]

    def load(self, address: Lanes, mask: Mask, width: int, count: int, text: str) -> Lanes:
        """[count, lanes] of `width` bytes each."""
        out = np.zeros((count, LANES), f"u{width}")
        for place, lanes in self.parts(address, mask, width * count, text):
            index = (address - np.uint64(place.start)) // np.uint64(width)
            if lanes is not None:
                index = np.where(lanes, index, 0)
            found = place.views[width][index.astype("i8") + np.arange(count)[:, None]]
            out = found if lanes is None or lanes is mask else np.where(lanes, found, out)
        return out

    def store(self, address: Lanes, mask: Mask, values: list[Lanes], text: str) -> None:
        """Write values[count][lanes]."""
        width = values[0].itemsize
        for place, lanes in self.parts(address, mask, width * len(values), text):
            index = ((address - np.uint64(place.start)) // np.uint64(width)).astype("i8")
            for offset, value in enumerate(values):
                if lanes is None:
                    place.views[width][index + offset] = value
                else:
                    place.views[width][index[lanes] + offset] = value[lanes]

    def bytes_at(self, address: int, size: int, text: str) -> np.ndarray:
        """A view of some bytes."""
        place = self._range(address, text)
        if address + size > place.end:
            raise Fault(f"outside memory: {text}")
        return place.views[1][address - place.start : address - place.start + size]


class Shared:
    """Shared memory of a block."""

    def __init__(self, size: int) -> None:
        self.start, self.end = ALIGNED, ALIGNED + size
        raw = np.full(-(-self.end // 16) * 16, POISON, "u1")
        self.views = {width: raw.view(f"u{width}") for width in (1, 2, 4, 8)}

    def check(self, address: Lanes, mask: Mask, size: int, text: str) -> Lanes:
        """Addresses as indices, those of idle lanes at the start."""
        address = address.astype("i8")
        if mask is not None:
            address = np.where(mask, address, self.start)
        if (address & (size - 1)).any():
            raise Fault(f"a shared address that is not a multiple of {size}: {text}")
        if address.min() < self.start or address.max() + size > self.end:
            raise Fault(f"outside the block's {self.end - self.start} bytes of shared memory: {text}")
        return address

    def load(self, address: Lanes, mask: Mask, width: int, count: int, text: str) -> Lanes:
        """[count, lanes] of `width` bytes each."""
        index = self.check(address, mask, width * count, text) // width
        return self.views[width][index + np.arange(count)[:, None]]

    def store(self, address: Lanes, mask: Mask, values: list[Lanes], text: str) -> None:
        """Write values[count][lanes]."""
        width = values[0].itemsize
        address = self.check(address, mask, width * len(values), text)
        if mask is not None:
            address = address[mask]
        for offset, value in enumerate(values):
            self.views[width][address // width + offset] = value if mask is None else value[mask]


@dataclass(frozen=True)
class TensorMap:
    """What a bulk copy reads: a tensor, innermost dimension first; bytes apart from the second on."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    width: int  # bytes of an element
    swizzle: int  # bytes of a row of the box, or 0


def box(memory: Memory, tensor: TensorMap, where: Sequence[int], text: str) -> Lanes:
    """The bytes of a tensor's box from a place on; zero outside the tensor."""
    index = [np.arange(size) + start for size, start in zip(tensor.box, where, strict=True)]
    inside = np.ones((), bool)
    offset = np.zeros((), "i8")
    steps = (tensor.width, *tensor.strides)
    for axis, (along, size, step) in enumerate(zip(index, tensor.shape, steps, strict=True)):
        shape = [1] * len(index)
        shape[len(index) - 1 - axis] = len(along)
        inside = inside & ((along >= 0) & (along < size)).reshape(shape)
        offset = offset + (along * step).reshape(shape)
    out = np.zeros((*inside.shape, tensor.width), "u1")
    if inside.any():
        far = int(offset[inside].max()) + tensor.width
        values = memory.bytes_at(tensor.address, far, text)
        out[inside] = values[offset[inside][:, None] + np.arange(tensor.width)]
    return out.reshape(-1)
