"""Blocks and warps of a kernel that is executed from its PTX.

What a GPU leaves open is drawn from a seed, and made as bad as it may be: which warp goes on; when a copy lands (until
then its destination is poison); when a product reads shared memory (at its issue or at its wait; until then its sums
are poison). Registers are given out from the pool that `setmaxnreg` shares.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ptx import tensor_cores as cores
from ptx.arithmetic import LANES, SPECIAL
from ptx.code import APART, PARAMS, Code
from ptx.memory import POISON, Deadlock, Fault, Hazard, Lanes, Mask, Memory, Shared, TensorMap, box
from ptx.program import JUMPS, Instruction, Program, stem
from ptx.races import Clock, Races, World

Dims = tuple[int, int, int]
GENERIC = 1 << 56  # of shared memory, among all addresses
RANK, RANKS = 1 << 40, 256  # of other blocks' shared memory, one more than the block's rank
UNSET = {width: np.full((LANES, width), POISON, "u1").view(f"u{width}")[:, 0] for width in (2, 4, 8)}
UNSET[1] = np.zeros(LANES, bool)
REDUCED = {"add": np.add, "min": np.minimum, "max": np.maximum} | {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
EVERY = np.ones(LANES, bool)


@dataclass
class Barrier:
    """An mbarrier: a phase ends once all have arrived and all expected bytes have landed."""

    count: int
    pending: int
    agent: int  # of its bulk copies
    told: Clock  # by all that have arrived so far
    known: Clock  # told when the last phase ended
    bytes: int = 0
    phase: int = 0
    copies: int = 0
    fenced: bool = False  # whether asynchronous copies see it

    def change(self, arrivals: int, size: int, clock: Clock, text: str) -> None:
        self.pending -= arrivals
        self.bytes += size
        self.told.learn(clock)
        if self.pending < 0:
            raise Hazard(f"more arrivals than the {self.count} that a barrier counts: {text}")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.known.learn(self.told)


@dataclass
class Transfer:
    """A copy on its way to shared memory."""

    address: Lanes  # of bytes
    values: Lanes
    barrier: int
    clock: Clock


@dataclass
class Product:
    """A wgmma that was issued; what it reads from shared memory may be read later."""

    sums: tuple[int, ...]  # registers
    a: list[Lanes] | Lanes  # registers or addresses
    b: Lanes
    kinds: tuple[str, str]
    adds: bool
    text: str
    operands: tuple[Lanes, Lanes] | None = None


@dataclass
class Launch:
    """A kernel with its arguments: numbers as bytes, or tensor maps."""

    program: Program
    grid: Dims
    threads: Dims
    arguments: Sequence[bytes | TensorMap]
    shared: int  # bytes, besides those that the program declares
    cluster: int = 1  # blocks that share memory
    fenced_copies: bool = True  # as in `Races`


@dataclass
class Executed:
    """What one launch did."""

    kernel: str
    instructions: int  # of warps
    opcodes: Counter[str]
    phases: list[dict[int, int]]  # of each block's barriers, by address
    early: set[int]  # where ranges of memory start that were read before the wait for the kernel before


_codes: dict[tuple[int, int], Code] = {}


def code_of(program: Program, dynamic: int) -> Code:
    """The functions of a program, with so many bytes of shared memory besides its variables."""
    key = id(program), dynamic
    if key not in _codes:
        _codes[key] = Code(program, dynamic)  # which keeps the program
    return _codes[key]


def combined(operation: str, old: Lanes, values: Sequence[Lanes]) -> Lanes:
    """What an atomic operation leaves."""
    given = values[0]
    if operation == "inc":
        return np.where(old >= given, 0, old + 1)
    if operation == "cas":
        return np.where(old == given, values[1], old)
    return given if operation == "exch" else REDUCED[operation](old, given)


class Machine:
    """Runs one launch, some blocks of its grid at a time."""

    def __init__(self, launch: Launch, memory: Memory, seed: int = 0, resident: int = 1) -> None:
        self.launch, self.memory, self.resident = launch, memory, resident
        self.random = random.Random(seed)
        self.program, self.code = launch.program, code_of(launch.program, launch.shared)
        for address, size in self.code.variables:
            memory.add(address, size)
        self.params = dict(zip((param.name for param in self.program.params), launch.arguments, strict=True))
        self.constants: dict[tuple[str, int, int], Lanes] = {}
        self.executed = Counter[int]()
        self.early: set[int] = set()
        self.warps = prod(launch.grid) * -(-prod(launch.threads) // LANES)
        self.world = World(self.code.cell)
        opcodes = (i.opcode for block in self.program.blocks for i in block.instructions)
        self.dependent = "griddepcontrol.wait" in opcodes  # may begin before the kernel before has ended

    def run(self) -> Executed:
        """All blocks of the grid."""
        places = itertools.product(*(range(size) for size in reversed(self.launch.grid)))
        grid = [(x, y, z) for z, y, x in places]
        phases = []
        with np.errstate(all="ignore"):
            size = self.launch.cluster
            together = size * max(self.resident // size, 1)
            for first in range(0, len(grid), together):
                clusters = [
                    Cluster(self, grid[at : at + size]) for at in range(first, min(first + together, len(grid)), size)
                ]
                blocks = [block for cluster in clusters for block in cluster.blocks]
                self._finish(blocks)
                for block in blocks:
                    block.check_end()
                    phases.append({address: barrier.phase for address, barrier in block.barriers.items()})
        opcodes = Counter[str]()
        for index, times in self.executed.items():
            for instruction in self.program.blocks[index].instructions:
                opcodes[instruction.opcode] += times
        return Executed(self.program.name, opcodes.total(), opcodes, phases, self.early)

    def _finish(self, blocks: Sequence[Cta]) -> None:
        live = [warp for block in blocks for warp in block.warps]
        while live:
            progress = False
            self.random.shuffle(live)
            for warp in live:
                for _ in range(self.random.randint(1, 40)):
                    if warp.done or not warp.step():
                        break
                    progress = True
                if warp.cta.transfers and self.random.random() < 0.5:
                    warp.cta.land()
            live = [warp for warp in live if not warp.done]
            if not progress and live and not any(block.land() for block in blocks if block.transfers):
                texts = [(each, self.program.blocks[each.at].instructions[0].text) for each in live]
                raise Deadlock("; ".join(f"block {w.cta.place}, warp {w.number}: {text}" for w, text in texts))

    def param(self, name: str, offset: int, dtype: str) -> Lanes:
        """A number of a parameter, in every lane."""
        key = name, offset, dtype
        if key not in self.constants:
            raw = self.params[name]
            assert isinstance(raw, bytes), name
            self.constants[key] = np.full(LANES, np.frombuffer(raw, dtype, 1, offset)[0])
        return self.constants[key]

    def params_at(self, address: Lanes, offset: int, dtype: str, mask: Mask) -> Lanes:
        """A number of parameters by address."""
        out = np.zeros(LANES, dtype)
        for start in set((address if mask is None else address[mask]).tolist()):
            place, at = divmod(start - PARAMS, APART)
            out[address == start] = self.param(self.program.params[place].name, at + offset, dtype)[0]
        return out


class Cluster:
    """Blocks that reach each other's shared memory."""

    def __init__(self, machine: Machine, places: Sequence[Dims]) -> None:
        self.blocks = [Cta(machine, self, rank, place) for rank, place in enumerate(places)]
        self.arrived, self.phase = 0, 0
        self.told, self.known = (self.blocks[0].races.clock() for _ in range(2))  # as a barrier's
        self.told_times, self.known_times = np.zeros((2, machine.warps), "i8")

    def arrive(self, warp: Warp) -> None:
        self.told.learn(warp.clock)
        np.maximum(self.told_times, warp.times, out=self.told_times)
        warp.clock.times[warp.agent] += 1
        warp.times[warp.everywhere] += 1
        self.arrived += 1
        if self.arrived == sum(len(block.warps) for block in self.blocks):
            self.arrived, self.phase = 0, self.phase + 1
            self.known.learn(self.told)
            np.maximum(self.known_times, self.told_times, out=self.known_times)


def learn(warps: Sequence[Warp]) -> None:
    """All know what any of them does."""
    for warp in warps:
        warps[0].clock.learn(warp.clock)
    times = np.maximum.reduce([warp.times for warp in warps])
    for warp in warps:
        warp.clock.learn(warps[0].clock)
        warp.clock.times[warp.agent] += 1
        warp.times = times.copy()
        warp.times[warp.everywhere] += 1


class Cta:
    """A block of threads."""

    def __init__(self, machine: Machine, cluster: Cluster, rank: int, place: Dims) -> None:
        self.machine, self.cluster, self.rank, self.place = machine, cluster, rank, place
        self.shared = Shared(machine.code.shared)
        self.barriers: dict[int, Barrier] = {}
        self.transfers: list[Transfer] = []
        self.named: dict[int, list[Warp]] = {}
        self.votes: dict[int, int] = {}
        threads = prod(machine.launch.threads)
        instructions = (i for each in machine.program.blocks for i in each.instructions)
        initialised = sum(i.opcode.startswith("mbarrier.init") for i in instructions)
        assert not (initialised and machine.launch.cluster > 1), "barriers of copies within a cluster"
        warps = -(-threads // LANES)
        self.races = Races(
            warps * machine.launch.cluster,
            self.shared.end,
            initialised,
            machine.code.cell,
            machine.launch.fenced_copies,
        )
        self.warps = [Warp(self, number) for number in range(warps)]
        self.free_registers = 0  # besides those that warps hold

    def new_barrier(self, address: Lanes, count: Lanes, mask: Mask, text: str) -> None:
        for lane in np.flatnonzero(EVERY if mask is None else mask):
            at = int(address[lane])
            self.shared.check(np.full(LANES, at), None, 8, text)
            number, agent = int(count[lane]), 3 * self.races.warps + len(self.barriers)
            self.barriers[at] = Barrier(number, number, agent, self.races.clock(), self.races.clock())

    def barrier(self, address: int, text: str) -> Barrier:
        if address not in self.barriers:
            raise Fault(f"no barrier was initialised at {address - 1024}: {text}")
        return self.barriers[address]

    def land(self) -> bool:
        """A copy that was drawn arrives."""
        transfer = self.transfers.pop(self.machine.random.randrange(len(self.transfers)))
        self.shared.views[1][transfer.address] = transfer.values
        self.barrier(transfer.barrier, "a copy").change(0, -len(transfer.values), transfer.clock, "a copy")
        return True

    def check_end(self) -> None:
        """Nothing is left over."""
        for address, barrier in self.barriers.items():
            if barrier.bytes:
                raise Hazard(f"{barrier.bytes} bytes are still expected by the barrier at {address - 1024}")
        groups = [self.warps[at : at + 4] for at in range(0, len(self.warps), 4)]
        for group in groups:
            if len({warp.issued for warp in group}) > 1:
                raise Hazard("not all warps of a warpgroup issued the same products")


class Warp:
    """32 lanes that go on together, or in groups after a branch."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta, self.machine, self.number = cta, cta.machine, number
        shape = cta.machine.launch.threads
        thread = number * LANES + np.arange(LANES)
        self.thread = {
            "x": (thread % shape[0]).astype("u4"),
            "y": (thread // shape[0] % shape[1]).astype("u4"),
            "z": (thread // (shape[0] * shape[1])).astype("u4"),
        }
        live = thread < prod(shape)
        code = self.machine.code
        self.registers = [UNSET[code.program.widths[stem(name)]] for name in code.numbers]
        self.at, self.mask = 0, None if live.all() else live
        self.apart: dict[int, Lanes] = {}  # other lanes, by where they are
        self.done = False
        self.blocked: tuple[Any, ...] | None = None
        self.held = self.machine.program.registers or 0  # of a thread
        self.issued = 0  # products
        self.products: list[Product] = []
        self.groups: list[list[Product]] = []
        self.sums: dict[tuple[int, ...], Lanes] = {}
        self.copies: list[tuple[Lanes, Lanes]] = []
        self.copy_groups: list[list[tuple[Lanes, Lanes]]] = []
        self.copy_time = self.product_time = 1  # of the group that is filled
        self.clock, self.races = cta.races.clock(), cta.races
        self.agent = cta.rank * (self.races.warps // self.machine.launch.cluster) + number
        self.clock.times[self.agent] = 1
        self.cluster_phase = 0
        blocks = self.machine.launch.grid
        linear = cta.place[0] + blocks[0] * (cta.place[1] + blocks[1] * cta.place[2])
        self.everywhere = linear * -(-prod(shape) // LANES) + number  # among all warps of the grid
        self.times = np.zeros(self.machine.warps, "i8")
        self.times[self.everywhere] = 1
        self.early = self.machine.dependent

    def step(self) -> bool:
        """Run one block of the program; False if the warp has to wait."""
        block = self.machine.program.blocks[self.at]
        if block.waits:
            if not self._passes(block.instructions[0]):
                return False
            self.machine.executed[self.at] += 1
            self.at += 1
            return True
        self.machine.executed[self.at] += 1
        taken = self.machine.code.function(self.at, self.mask is not None)(self, self.registers, self.mask)
        last = block.instructions[-1]
        if last.name not in JUMPS:
            self._go({self.at + 1: self.mask})
        elif last.name == "brx":
            self._go({self._table(last): self.mask})
        else:
            active = EVERY if self.mask is None else self.mask
            if taken is None:
                taken = active
            stay = active & ~taken
            if last.name == "bra":
                target = self.machine.program.labels[last.operands[-1]]
                if not stay.any():
                    self._go({target: self.mask})
                elif not taken.any():
                    self._go({self.at + 1: self.mask})
                elif target == self.at + 1:
                    self._go({target: self.mask})
                else:
                    self._go({target: taken, self.at + 1: stay})
            else:
                self._go({self.at + 1: stay} if stay.any() else {})
        return True

    def _table(self, jump: Instruction) -> int:
        index = self.registers[self.machine.code.number(jump.operands[0])]
        values = set(index[EVERY if self.mask is None else self.mask].tolist())
        assert len(values) == 1, "lanes that jump apart"
        return self.machine.program.labels[self.machine.program.tables[jump.operands[1]][values.pop()]]

    def _go(self, groups: Mapping[int, Any]) -> None:
        """Where the lanes go on. Of those apart, the ones furthest behind are first; some operations wait for all."""
        if not self.apart and len(groups) < 2:
            for self.at, self.mask in groups.items():
                return
            self.done = True
            return
        for at, mask in groups.items():
            self.apart[at] = self.apart[at] | mask if at in self.apart else mask
        blocks = self.machine.program.blocks
        for at in sorted(self.apart):
            if len(self.apart) == 1 or not blocks[at].together:
                mask = self.apart.pop(at)
                self.at, self.mask = at, None if mask.all() else mask
                return
        raise Hazard("lanes that do not meet: " + "; ".join(blocks[at].instructions[0].text for at in self.apart))

    def special(self, name: str) -> Lanes:
        """A special register."""
        match = SPECIAL.fullmatch("%" + name)
        assert match, name
        kind, axis = match[1], (match[2] or ".x")[1]
        place = "xyz".index(axis)
        if kind == "tid":
            return self.thread[axis]
        if kind == "laneid":
            return np.arange(LANES, dtype="u4")
        values = {
            "ntid": self.machine.launch.threads[place],
            "ctaid": self.cta.place[place],
            "nctaid": self.machine.launch.grid[place],
            "warpid": self.number,
            "cluster_ctarank": self.cta.rank,
            "cluster_nctarank": self.machine.launch.cluster,
        }
        return np.full(LANES, values[kind], "u4")

    # Where a warp may have to wait.

    def _passes(self, i: Instruction) -> bool:
        """Whether the warp can go past an instruction at which it may have to wait."""
        code = self.machine.code
        if i.opcode.startswith("mbarrier.try_wait"):
            address, parity = self._uniform(i.operands[1]), self._uniform(i.operands[2])
            barrier = self.cta.barrier(address, i.text)
            if barrier.phase & 1 == parity:  # the phase of this parity is not over
                return False
            self.clock.learn(barrier.known)
            self.registers[code.number(i.operands[0])] = EVERY
            return True
        if i.name == "setmaxnreg":
            return self._resize(int(i.operands[0]), i.text)
        if i.name in ("bar", "barrier"):
            return self._meet(i)
        self.early = False  # griddepcontrol.wait: the kernel before is over
        return True

    def _uniform(self, operand: str) -> int:
        value = self.machine.code.operand(operand, "u32")(self, self.registers)
        live = set(value.tolist() if self.mask is None else value[self.mask].tolist())
        assert len(live) == 1, f"lanes that wait apart: {operand}"
        return live.pop()

    def _resize(self, count: int, text: str) -> bool:
        if count % 8 or not 24 <= count <= 256:
            raise Fault(text)
        more = count - self.held
        if (".inc" in text and more < 0) or (".dec" in text and more > 0):
            raise Fault(f"a thread has {self.held} registers: {text}")
        if more > self.cta.free_registers // LANES:
            return False
        self.cta.free_registers -= more * LANES
        self.held = count
        return True

    def _meet(self, i: Instruction) -> bool:
        if i.opcode.startswith("barrier.cluster"):
            return self._meet_cluster("arrive" in i.parts)
        code = self.machine.code
        red = "red" in i.parts
        operands = i.operands[1:] if red else i.operands
        number = self._uniform(operands[0])
        counts = [each for each in operands[1:] if not (red and each is operands[-1])]
        threads = self._uniform(counts[0]) if counts else LANES * len(self.cta.warps)
        if threads % LANES:
            raise Fault(i.text)
        waiting = self.cta.named.setdefault(number, [])
        if self.blocked is None:
            if red:
                votes = self.registers[code.number(operands[-1].lstrip("!"))] ^ operands[-1].startswith("!")
                votes = votes if self.mask is None else votes & self.mask
                self.cta.votes[number] = self.cta.votes.get(number, 0) + int(votes.sum())
            waiting.append(self)
            self.blocked = ("bar", number)
            if len(waiting) * LANES > threads:
                raise Hazard(f"more threads than a barrier counts: {i.text}")
            if len(waiting) * LANES < threads:
                return False
            total = self.cta.votes.pop(number, 0)
            learn(waiting)
            for warp in waiting:
                warp.blocked = ("passed", total)
            waiting.clear()
        if self.blocked[0] != "passed":
            return False
        if red:
            assert "popc" in i.parts, i.text
            self.registers[code.number(i.operands[0])] = np.full(LANES, self.blocked[1], "u4")
        self.blocked = None
        return True

    def _meet_cluster(self, arrives: bool) -> bool:
        cluster = self.cta.cluster
        if arrives:
            self.cluster_phase = cluster.phase
            cluster.arrive(self)
        elif cluster.phase > self.cluster_phase:
            self.clock.learn(cluster.known)
            self.times = np.maximum(self.times, cluster.known_times)
        else:
            return False
        return True

    # Across lanes.

    def shuffle(self, mode: str, x: Lanes, by: Lanes, clamp: Lanes, mask: Mask) -> tuple[Lanes, Lanes]:
        lane = np.arange(LANES)
        by, segment, last = by.astype("i8") & 31, clamp.astype("i8") >> 8 & 31, clamp.astype("i8") & 31
        low, high = lane & segment, (lane & segment) | (last & ~segment)
        source = {"idx": low | (by & ~segment), "up": lane - by, "down": lane + by, "bfly": lane ^ by}[mode]
        inside = source >= high if mode == "up" else source <= high
        source = np.where(inside, source, lane) & 31
        if mask is not None and not mask[source][mask].all():
            raise Hazard("a shuffle reads a lane that takes no part")
        return x[source], inside

    def elect(self, mask: Mask) -> tuple[Lanes, Lanes]:
        first = 0 if mask is None else int(np.argmax(mask))
        return np.full(LANES, first, "u4"), np.arange(LANES) == first

    def reduce(self, operation: str, x: Lanes, mask: Mask) -> Lanes:
        lanes = x if mask is None else x[mask]
        return np.full(LANES, REDUCED[operation].reduce(lanes, dtype=x.dtype), x.dtype)

    def ballot(self, x: Lanes, mask: Mask) -> Lanes:
        lanes = np.flatnonzero(x if mask is None else x & mask)
        return np.full(LANES, sum(1 << int(lane) for lane in lanes), "u4")

    # Memory.

    def load(self, space: str, address: Lanes, mask: Mask, width: int, count: int, text: str) -> Lanes:
        space, address, cta = self._resolved(space, address, mask)
        if space == "shared":
            if cta.warps and all(warp.done for warp in cta.warps):
                raise Hazard(f"shared memory of a block that has ended: {text}")
            self._reads(cta, address, mask, width * count, text)
            return cta.shared.load(address, mask, width, count, text)
        self._global(address, mask, width * count, text)
        return self.machine.memory.load(address, mask, width, count, text)

    def store(self, space: str, address: Lanes, mask: Mask, values: list[Lanes], text: str) -> None:
        if mask is not None and not mask.any():
            return
        space, address, cta = self._resolved(space, address, mask)
        if space == "shared":
            self._writes(cta, address, mask, np.stack(values, 1), text)
            cta.shared.store(address, mask, values, text)
        else:
            if self.early:
                raise Hazard(f"a write before the wait for the kernel before: {text}")
            self._global(address, mask, values[0].itemsize * len(values), text, np.stack(values, 1))
            self.machine.memory.store(address, mask, values, text)

    def _resolved(self, space: str, address: Lanes, mask: Mask) -> tuple[str, Lanes, Cta]:
        """(space, addresses in it, the block whose shared memory it is)."""
        if space != "generic":
            return space, address, self.cta
        first = int(address[0 if mask is None else np.argmax(mask)])
        if first < GENERIC:
            return "global", address, self.cta
        rank = first // RANK % RANKS
        return "shared", address % np.uint64(RANK), self.cta.cluster.blocks[rank - 1] if rank else self.cta

    def _reads(self, cta: Cta, address: Lanes, mask: Mask, size: int, text: str) -> None:
        address = cta.shared.check(address, mask, size, text)
        cells = cta.races.cells(address if mask is None else address[mask], size)
        cta.races.read(cells, self.clock, self.agent, self.clock.times[self.agent], text)

    def _writes(self, cta: Cta, address: Lanes, mask: Mask, values: Lanes, text: str) -> None:
        """values[lane, n]."""
        size = values.itemsize * values.shape[1]
        address = cta.shared.check(address, mask, size, text)
        if mask is not None:
            address, values = address[mask], values[mask]
        cells = cta.races.cells(address, size)
        view = cta.shared.views[cta.races.cell]

        def same() -> Lanes:
            return view[cells] == np.ascontiguousarray(values).view(view.dtype).ravel()

        cta.races.write(cells, self.clock, self.agent, self.clock.times[self.agent], text, same)

    def _global(self, address: Lanes, mask: Mask, size: int, text: str, values: np.ndarray | None = None) -> None:
        """Note an access of each lane to so many bytes; values[lane, n] for a write."""
        world = self.machine.world
        for place, lanes in self.machine.memory.parts(address, mask, size, text):
            if self.early:
                self.machine.early.add(place.start)
            active = EVERY if lanes is None else lanes
            first = (address[active] - np.uint64(place.start)).astype("i8")
            offsets = (first[:, None] + np.arange(0, size, world.cell)).ravel()
            same = None
            if values is not None:
                view = place.views[world.cell]
                given = np.ascontiguousarray(values[active]).view(view.dtype).ravel()
                same = partial(_same, view, given)
            world.access(place.start, place.end - place.start, offsets, self.times, self.everywhere, text, same)

    def generic(self, address: Lanes) -> Lanes:
        return address + np.uint64(GENERIC)

    def in_shared(self, address: Lanes) -> Lanes:
        return address % np.uint64(RANK)

    def map_shared(self, address: Lanes, rank: Lanes) -> Lanes:
        """The same place in the shared memory of another block of the cluster."""
        return address % np.uint64(RANK) + np.uint64(GENERIC) + (rank.astype("u8") + np.uint64(1)) * np.uint64(RANK)

    def atomic(
        self, space: str, operation: str, address: Lanes, values: list[Lanes], dtype: str, mask: Mask, text: str
    ) -> Lanes:
        """One lane after the other; two atomics are no race."""
        space, address, cta = self._resolved(space, address, mask)
        memory = cta.shared if space == "shared" else self.machine.memory
        if self.early and space != "shared":
            raise Hazard(f"a write before the wait for the kernel before: {text}")
        passes = ".acq_rel" in text or ".acquire" in text or ".release" in text
        out = np.zeros(LANES, dtype)
        for lane in np.flatnonzero(EVERY if mask is None else mask):
            alone = np.arange(LANES) == lane
            old = memory.load(address, alone, np.dtype(dtype).itemsize, 1, text)[0].view(dtype)
            new = combined(operation, old, values).astype(dtype)
            memory.store(address, alone, [new.view(f"u{new.itemsize}")], text)
            out[lane] = old[lane]
            if passes:
                self.times = np.maximum(self.times, self.machine.world.released.get(int(address[lane]), 0))
                self.machine.world.released[int(address[lane])] = self.times.copy()
        self.times[self.everywhere] += passes
        return out

    def fence(self) -> None:
        """What this warp knows to be written to shared memory, copies and products will see."""
        self.clock.fence()
        for barrier in self.cta.barriers.values():
            barrier.fenced = True

    # Copies.

    def arrive(self, address: Lanes, number: Mask, expects: bool, mask: Mask, text: str) -> None:
        for lane in np.flatnonzero(EVERY if mask is None else mask):
            barrier = self.cta.barrier(int(address[lane]), text)
            if expects:
                barrier.bytes += int(number[lane])
            barrier.change(1 if expects or number is None else int(number[lane]), 0, self.clock, text)
        self.clock.times[self.agent] += 1

    def bulk_copy(self, to: Lanes, source: Lanes, where: list[Lanes], barrier: Lanes, mask: Mask, text: str) -> None:
        for lane in np.flatnonzero(EVERY if mask is None else mask):
            param, at = divmod(int(source[lane]) - PARAMS, APART)
            tensor = self.machine.launch.arguments[param]
            if at or not isinstance(tensor, TensorMap):
                raise Fault(f"no tensor map: {text}")
            values = box(self.machine.memory, tensor, [int(x[lane]) for x in where], text)
            rows = np.arange(len(values))
            start = int(to[lane])
            if start % 128:
                raise Fault(f"a destination that is not a multiple of 128: {text}")
            address = start + rows
            if tensor.swizzle:
                address = address ^ ((address >> 7 & (tensor.swizzle // 16 - 1)) << 4)
            self.cta.shared.check(np.resize(address[[0, -1]], LANES), None, 1, text)
            self.cta.shared.views[1][address] = POISON
            landing = self.cta.barrier(int(barrier[lane]), text)
            if not landing.fenced:
                raise Hazard(f"a barrier that copies may not see yet: {text}")
            landing.copies += 1
            cells = np.arange(start, start + len(values), self.races.cell) // self.races.cell
            self.races.write(cells, self.clock, landing.agent, landing.copies, text)
            clock = self.races.clock()
            clock.times[landing.agent] = landing.copies
            self.cta.transfers.append(Transfer(address, values, int(barrier[lane]), clock))

    def copy(self, to: Lanes, source: Lanes, size: int, read: Mask, mask: Mask, text: str) -> None:
        """cp.async: `read` bytes, then zeros."""
        active = EVERY if mask is None else mask
        if not active.any():
            return
        to = self.cta.shared.check(to, mask, size, text)
        whole = active if read is None else active & (read > 0)
        assert read is None or not (active & (read > 0) & (read < size)).any(), text
        width = min(size, 8)
        if whole.any():
            self._global(source, whole, size, text)
        values = self.machine.memory.load(source, whole, width, size // width, text)
        values = np.where(whole, values, 0).astype(values.dtype).T[active]
        address = to[active][:, None] + np.arange(size)
        self.races.write(self.races.cells(to[active], size), self.clock, self._agent(1), self.copy_time, text)
        self.cta.shared.views[1][address] = POISON
        self.copies.append((address, np.ascontiguousarray(values).view("u1")))

    def _agent(self, kind: int) -> int:
        """Of this warp's copies (1) or products (2) under way."""
        return kind * self.races.warps + self.agent

    def commit_copies(self) -> None:
        self.copy_groups.append(self.copies)
        self.copies = []
        self.copy_time += 1

    def land_copies(self, but: int) -> None:
        while len(self.copy_groups) > but:
            self.clock.times[self._agent(1)] += 1
            for address, values in self.copy_groups.pop(0):
                self.cta.shared.views[1][address] = values

    # Tensor cores.

    def load_matrices(self, address: Lanes, count: int, transposed: bool, text: str) -> list[Lanes]:
        lanes = np.arange(LANES) < 8 * count
        at = self.cta.shared.check(address, lanes, 16, text)[: 8 * count]
        self._reads(self.cta, address, lanes, 16, text)
        return cores.matrices(self.cta.shared.views[2][at[:, None] // 2 + np.arange(8)], transposed)

    def store_matrices(self, address: Lanes, registers: list[Lanes], transposed: bool, text: str) -> None:
        count = len(registers)
        at = self.cta.shared.check(address, np.arange(LANES) < 8 * count, 16, text)[: 8 * count]
        rows = cores.rows_of(registers, transposed)
        self._writes(self.cta, address, np.arange(LANES) < 8 * count, np.resize(rows, (LANES, 8)), text)
        self.cta.shared.views[2][at[:, None] // 2 + np.arange(8)] = rows

    def multiply(self, a: list[Lanes], b: list[Lanes], c: list[Lanes], *kinds: str) -> list[Lanes]:
        """mma.sync."""
        out = cores.sums_of(c) + cores.operand_a(a, kinds[0]) @ cores.operand_b(b, kinds[1]).T
        return cores.registers_of(out)

    def issue_product(
        self,
        sums: tuple[int, ...],
        a: Any,
        b: Lanes,
        adds: Lanes,
        columns: int,
        transposed: list[bool],
        kinds: tuple[str, str],
        text: str,
    ) -> None:
        registers = self.registers
        if sums not in self.sums:
            self.sums[sums] = cores.sums_of([registers[n] for n in sums])
            for n in sums:
                registers[n] = UNSET[4]
        if isinstance(a, Lanes):
            a = cores.addresses(int(a[0]), 16, 16 * (self.number % 4), transposed[0])
        product = Product(sums, a, cores.addresses(int(b[0]), columns, 0, transposed[1]), kinds, bool(adds[0]), text)
        for place in (product.a, product.b):
            if isinstance(place, Lanes):
                if place.min() < self.cta.shared.start or place.max() + 2 > self.cta.shared.end:
                    raise Fault(f"outside shared memory: {text}")
                cells = self.races.cells(place.ravel(), 2)
                self.races.read(cells, self.clock, self._agent(2), self.product_time, text, proxy=True)
        if self.machine.random.random() < 0.5:
            product.operands = self._operands(product)
        self.products.append(product)
        self.issued += 1

    def _operands(self, product: Product) -> tuple[Lanes, Lanes]:
        tiles = []
        for place, kind in ((product.a, product.kinds[0]), (product.b, product.kinds[1])):
            if isinstance(place, list):
                tiles.append(cores.operand_a(place, kind))
                continue
            tiles.append(cores.floats(self.cta.shared.views[2][place >> 1], kind))
        return tiles[0], tiles[1]

    def commit_products(self) -> None:
        self.groups.append(self.products)
        self.products = []
        self.product_time += 1

    def finish_products(self, but: int) -> None:
        while len(self.groups) > but:
            self.clock.times[self._agent(2)] += 1
            for product in self.groups.pop(0):
                a, b = product.operands or self._operands(product)
                before = self.sums[product.sums] if product.adds else np.float32(0)
                self.sums[product.sums] = before + a @ b.T
        pending = {product.sums for group in [*self.groups, self.products] for product in group}
        for sums in [each for each in self.sums if each not in pending]:
            for n, value in zip(sums, cores.registers_of(self.sums.pop(sums)), strict=True):
                self.registers[n] = value


def _same(view: np.ndarray, given: np.ndarray, cells: np.ndarray) -> np.ndarray:
    return view[cells] == given
