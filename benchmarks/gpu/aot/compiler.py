"""Compile what a launcher would launch: meta tensors in, machine code and its resources out, no GPU needed.

This must run in a separate process without TRITON_INTERPRET, since kernels are bound when their module is imported.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp
from triton.runtime.jit import JITFunction, MockTensor

from benchmarks.gpu import sass
from benchmarks.gpu.sass import MachineCode
from fb_kernels._runtime import tuning

VARIANTS = ("aligned", "unaligned", "ones")
FRONT_END = "sm_90"  # the only one for which "ones" is compiled: faults of constant arguments show on any architecture


PRODUCTS = 4096  # dense bf16 FLOPs per cycle of a Hopper multiprocessor
ISSUED = 4  # instructions issued per cycle, one per warp
REACHED = 0.8  # share of that rate that a large cuBLAS product reaches


@dataclass(frozen=True)
class Architecture:
    """A GPU to compile for; `tbps` and `tflops` are the rates that copies and bf16 products reach, not peaks."""

    name: str
    gpu: str  # the device whose tuned configurations are compiled
    processors: int
    shared_block: int  # maximum bytes of a block
    shared_processor: int  # bytes per multiprocessor
    tbps: float
    tflops: float

    @property
    def capability(self) -> int:
        return int(self.name.removeprefix("sm_"))


ARCHITECTURES = (
    Architecture("sm_80", "a100", 108, 166_912, 167_936, 1.7, 250.0),
    Architecture("sm_90", "h200", 132, 232_448, 233_472, 4.3, 790.0),
    Architecture("sm_100", "b200", 148, 232_448, 233_472, 7.0, 1500.0),
)


@dataclass(frozen=True)
class Cost:
    """The least that one launch of a kernel must move and compute."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Tile:
    """The work of one program of a kernel with matrix products, which depends on the launch."""

    turns: float  # iterations of the main loop
    flops: float  # per iteration
    units: float  # keys, or logits of a thread; instructions are counted per unit
    # whether the loop's other instructions are issued while products run; those after the loop never are
    overlaps: bool
    target: float | None = None  # the fraction of the reached rate of products that the kernel should reach
    own: float = 0.0  # products that are needed beside those of the main loop, in its iterations
    # makes a small call in the same launch configuration, with so many turns, and returns how many programs' work it
    # is; None if none is known
    run: Callable[[int], int] | None = None


@dataclass(frozen=True)
class Case:
    """One call of a launcher on meta tensors, at a shape that matters."""

    op: str  # stem of the op
    shape: str  # the shape in words, such as "N=1664 V=151936 bf16"
    call: Callable[[], object]  # calls functions of `fb_kernels.<op>.triton` with meta tensors
    costs: Mapping[str, Cost]  # kernel name -> its cost; a kernel without one gets no prediction
    matmul: tuple[str, ...] = ()  # the kernels that must use the tensor cores' HGMMA on sm_90
    exact: tuple[str, ...] = ()  # the kernels that must not contain TF32 products
    # kernel name -> function from its launch's keyword arguments to its tile
    tiles: Mapping[str, Callable[[Mapping[str, Any]], Tile]] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """One kernel, one configuration, one architecture, one variant."""

    op: str
    shape: str
    kernel: str
    arch: str
    variant: str
    warps: int
    stages: int
    grid: int
    registers: int
    stack: int
    spills: int  # local loads and stores in the machine code
    shared: int
    hgmma: int
    tf32: int
    instructions: int  # of the machine code
    loop: tuple[int, int, int, int]  # instructions, HGMMA, ARRIVE and waits in the main loop
    epilogue: int  # instructions after the last product
    per_unit: float | None  # instructions per key, or per logit of a thread
    predicted_us: float | None
    of_rate: float | None  # share of the reached rate of products, predicted from the instructions
    target: float | None
    faults: tuple[str, ...]


class _Driver:
    """Stands in for a CUDA driver; a device's index is its compute capability."""

    def __init__(self) -> None:
        self.capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty_to_cpp(ty)


class _Unaligned(MockTensor):
    def data_ptr(self) -> int:
        return 8


@dataclass(frozen=True)
class Launch:
    """A kernel as a case launches it on an architecture."""

    case: Case
    arch: Architecture
    kernel: JITFunction
    args: tuple
    grid: tuple[int, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def tile(self) -> Tile | None:
        """Its tile, if it has one on this architecture."""
        known = self.case.tiles.get(self.name) if self.arch.name == "sm_90" else None
        return known(self.kwargs) if known else None

    def given(self) -> set[tuple[str, object]]:
        """What the machine code depends on: constants and options, types of tensors, which arguments are None."""
        passed = dict(zip(self.kernel.arg_names, self.args, strict=False)) | dict(self.kwargs)
        at_run_time = {parameter.name for parameter in self.kernel.params if not parameter.is_constexpr}
        return {
            (name, value.dtype if isinstance(value, torch.Tensor) else value)
            for name, value in passed.items()
            if isinstance(value, torch.Tensor) or value is None or name not in at_run_time
        }


def launches(case: Case, arch: Architecture) -> list[Launch]:
    """The launches of a case, recorded instead of run."""
    recorded: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorded.append(Launch(case, arch, self, args, grid, kwargs))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(tuning, "_device", lambda: arch.gpu),
        patch.object(tuning, "_capability", lambda: arch.capability),
    ):
        case.call()
    if not recorded:
        raise ValueError(f"{case.op} {case.shape}: expected a kernel launch, got none")
    return recorded


def every_variant(recorded: Iterable[Launch]) -> Iterator[tuple[Launch, str]]:
    """Each launch with each variant that is compiled for its architecture."""
    for launch in recorded:
        for variant in VARIANTS if launch.arch.name == FRONT_END else VARIANTS[:2]:
            yield launch, variant


def representative(recorded: Iterable[Launch]) -> Iterator[tuple[Launch, str]]:
    """A kernel's first launch in every variant; later ones, aligned, only with a constant or type not yet seen."""
    met: dict[tuple[str, str], set[tuple[str, object]]] = {}
    for launch in recorded:
        before = met.get((launch.arch.name, launch.name))
        if before is None:
            yield from every_variant([launch])
        elif not launch.given() <= before:
            yield launch, "aligned"
        met[launch.arch.name, launch.name] = launch.given() | (before or set())


def compiled(launch: Launch, variant: str) -> Compiled:
    """Compile a launch."""
    driver = _Driver()
    driver.capability = launch.arch.capability
    triton.runtime.driver.set_active(driver)
    kernel, kwargs = launch.kernel, launch.kwargs
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    values = [
        value if parameter.is_constexpr else _mock(value, variant)
        for parameter, value in zip(kernel.params, launch.args, strict=False)
    ]
    options = {
        name: value if name in constants or name not in kernel.arg_names else _mock(value, variant)
        for name, value in kwargs.items()
    }
    made = kernel.run(*values, grid=launch.grid, warmup=True, **options)
    return _describe(launch, variant, made)


def _mock(value: Any, variant: str) -> Any:
    if isinstance(value, torch.Tensor):
        return (_Unaligned if variant == "unaligned" else MockTensor)(value.dtype)
    if isinstance(value, int) and not isinstance(value, bool):
        if variant == "unaligned" and value % 16 == 0:
            return value + 1 if value else 3
        return 1 if variant == "ones" else value
    return value


def _describe(launch: Launch, variant: str, made: Any) -> Compiled:
    case, arch, name, grid = launch.case, launch.arch, launch.name, math.prod(launch.grid)
    ptx, metadata = made.asm["ptx"], made.metadata
    registers, stack, code = _resources(made.asm["cubin"])
    hgmma = ptx.count("wgmma.mma_async.")  # each becomes one HGMMA
    tf32 = ptx.count(".tf32")
    faults = []
    half = any(word in ptx for word in ("bf16", "f16x2", ".f16"))
    if half and (stack or code.local) and not code.loops:
        faults.append(f"spills: {stack} bytes of stack, {code.local} local accesses")
    for loop in code.loops if half else ():
        if loop.local:
            faults.append(f"a loop with HGMMA spills: {loop.local} local accesses")
        if loop.serialised:
            faults.append(f"a loop waits for each of its {loop.hgmma} HGMMA")
    if metadata.shared > arch.shared_block:
        faults.append(f"shared memory {metadata.shared} above {arch.shared_block}")
    if not _fit(metadata.num_warps, registers):
        faults.append(f"{metadata.num_warps} warps of {registers} registers a thread fit no multiprocessor")
    if name in case.matmul and arch.name == "sm_90" and variant == "aligned" and not hgmma:
        faults.append("no HGMMA")
    if name in case.exact and tf32:
        faults.append("TF32 product")
    tile = launch.tile if code.main else None
    per_unit, rate = _from_instructions(tile, code, metadata.num_warps) if tile else (None, None)
    predicted = _predict(launch, metadata.num_warps, registers, metadata.shared, 1.0 if rate is None else rate)
    main = code.main
    return Compiled(
        case.op, case.shape, name, arch.name, variant, metadata.num_warps, metadata.num_stages, grid, registers, stack,
        code.local, metadata.shared, hgmma, tf32, code.instructions,
        (main.instructions, main.hgmma, main.arrive, main.wait) if main else (0, 0, 0, 0), code.epilogue if main else 0,
        per_unit, predicted, rate, tile.target if tile else None, tuple(faults),
    )  # fmt: skip


def _from_instructions(tile: Tile, code: MachineCode, warps: int) -> tuple[float, float]:
    """(instructions per unit, fraction of the reached rate of products), with one program per multiprocessor."""
    assert code.main is not None
    inside, after = tile.turns * code.main.instructions, code.epilogue if tile.overlaps else 0
    products = tile.turns * tile.flops / PRODUCTS / REACHED
    return (inside + after) / tile.units, products / (products + (after if tile.overlaps else inside) * warps / ISSUED)


def _predict(launch: Launch, warps: int, registers: int, shared: int, of_rate: float) -> float | None:
    """Microseconds from bytes and FLOPs at the assumed rates; idle multiprocessors of the last wave cost time too."""
    cost, arch, grid = launch.case.costs.get(launch.name), launch.arch, math.prod(launch.grid)
    if cost is None:
        return None
    resident = min(2048 // (32 * warps), _fit(warps, registers), 32, arch.shared_processor // (shared + 1024))
    slots = max(resident, 1) * arch.processors
    filled = grid / slots
    efficiency = filled / math.ceil(filled) if filled > 1 else min(1.0, grid / arch.processors)
    return max(cost.bytes / arch.tbps / 1e6, cost.flops / arch.tflops / of_rate / 1e6) / efficiency


def _fit(warps: int, registers: int) -> int:
    """How many programs fit a multiprocessor's registers."""
    return 65_536 // (32 * warps * -(-registers // 8) * 8)


@cache  # shapes share machine code
def _resources(cubin: bytes) -> tuple[int, int, MachineCode]:
    """(registers per thread, bytes of stack, machine code)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage = _cuobjdump("--dump-resource-usage", file)
        registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
        (code,) = sass.functions(_cuobjdump("--dump-sass", file)).values()
        return registers, stack, MachineCode.of(code)


def _cuobjdump(option: str, file: Path) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
