"""Whether accesses to shared memory are ordered, whatever the order in which warps went on.

Every warp has a clock of what it knows of every agent: warps, their copies and products under way, and the bulk copies
of each barrier. Barriers pass clocks on. What touches memory that another agent wrote or read has to know of that; and
what reads by the asynchronous proxy, of a fence after the write. A warp counts as one: what its lanes do to each other
is not seen, nor are atomics.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx.memory import Hazard

BITS = 22  # of a time; the agent is above


class Clock:
    """What an agent knows: the latest time of every other that it is ordered after, and of writes that were fenced."""

    def __init__(self, agents: int) -> None:
        self.times, self.fenced = np.zeros((2, agents), "i4")

    def learn(self, other: Clock) -> None:
        np.maximum(self.times, other.times, out=self.times)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def fence(self) -> None:
        np.maximum(self.fenced, self.times, out=self.fenced)


class Races:
    """The last write and the last reads of every cell of a block's shared memory.

    Args:
        warps: whose shared memory it is.
        size: bytes.
        barriers: of bulk copies.
        cell: bytes.
        fenced_copies: whether a fence has to follow a copy of a warp (cp.async) that the asynchronous proxy reads.
    """

    def __init__(self, warps: int, size: int, barriers: int, cell: int, fenced_copies: bool = True) -> None:
        self.fencing = warps * (1 + fenced_copies)  # agents below write by the other proxy
        self.warps, self.agents, self.cell = warps, 3 * warps + barriers, cell
        self.writer = np.zeros(-(-size // cell), "i4")
        self.readers = np.zeros((self.agents, -(-size // cell)), "i4")
        self.reading = np.zeros(self.agents, bool)  # those that ever read

    def clock(self) -> Clock:
        return Clock(self.agents)

    def cells(self, address: np.ndarray, width: int) -> np.ndarray:
        """Of accesses to `width` bytes each."""
        return (address[..., None] // self.cell + np.arange(width // self.cell)).reshape(-1)

    def _unknown(self, cells: np.ndarray, clock: Clock) -> np.ndarray:
        """Whose last write the agent does not know of."""
        last = self.writer[cells]
        return last & ((1 << BITS) - 1) > clock.times[last >> BITS]

    def _raced(self, cells: np.ndarray, text: str) -> Hazard:
        return Hazard(f"a race with a write of {self._named(int(self.writer[cells[0]]) >> BITS)}: {text}")

    def read(self, cells: np.ndarray, clock: Clock, agent: int, time: int, text: str, proxy: bool = False) -> None:
        """`proxy`: by the asynchronous proxy."""
        unknown = self._unknown(cells, clock)
        if unknown.any():
            raise self._raced(cells[unknown], text)
        if proxy:
            last = self.writer[cells]
            unfenced = (last & ((1 << BITS) - 1) > clock.fenced[last >> BITS]) & (last >> BITS < self.fencing)
            if unfenced.any():
                writer = self._named(int(last[unfenced][0]) >> BITS)
                raise Hazard(f"no fence between a write of {writer} and a read by the asynchronous proxy: {text}")
        self.readers[agent, cells] = time
        self.reading[agent] = True

    def write(
        self,
        cells: np.ndarray,
        clock: Clock,
        agent: int,
        time: int,
        text: str,
        same: Callable[[], np.ndarray] | None = None,
    ) -> None:
        """`same`: which cells hold already what is written."""
        unknown = self._unknown(cells, clock)
        if unknown.any():
            if same is None or (unknown & ~same()).any():
                raise self._raced(cells[unknown], text)
            cells = cells[~unknown]
        for reader in np.flatnonzero(self.reading):
            if (self.readers[reader, cells] > clock.times[reader]).any():
                raise Hazard(f"a race with a read of {self._named(int(reader))}: {text}")
        self.writer[cells] = agent << BITS | time

    def _named(self, agent: int) -> str:
        kind, number = divmod(agent, self.warps)
        if kind > 2:
            return "a bulk copy"
        return f"{('', 'a copy of ', 'a product of ')[kind]}warp {number}"


class World:
    """The same for global memory and all warps of a grid, whatever blocks run at a time; atomics pass clocks on.

    Of the reads of a cell only the last one counts.
    """

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.cells: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # (last writes, last reads), by a range's start
        self.released: dict[int, np.ndarray] = {}  # times by an atomic's address

    def access(
        self,
        start: int,
        size: int,
        offsets: np.ndarray,
        times: np.ndarray,
        agent: int,
        text: str,
        same: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """A warp's access to bytes of a range; `same` for a write: which cells hold already what is written."""
        if start not in self.cells:
            writes, reads = np.zeros((2, -(-size // self.cell)), "i8")
            self.cells[start] = writes, reads
        writes, reads = self.cells[start]
        cells = offsets // self.cell
        unknown = writes[cells] & 0xFFFFFFFF > times[writes[cells] >> 32]
        if same is not None:
            unknown |= reads[cells] & 0xFFFFFFFF > times[reads[cells] >> 32]
        if unknown.any() and (same is None or (unknown & ~same(cells)).any()):
            raise Hazard(f"a race with another warp in global memory: {text}")
        (reads if same is None else writes)[cells] = agent << 32 | int(times[agent])
