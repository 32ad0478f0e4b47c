"""Triton and Gluon kernels, launched on CPU tensors and executed from the PTX that they compile to for sm_90."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import triton
from packaging.version import Version
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from benchmarks.gpu.aot.compiler import _Driver
from fb_kernels._runtime import backend, tuning
from ptx import program
from ptx.machine import Executed, Launch, Machine, TensorMap
from ptx.memory import Memory

FORMATS = {"i1": "<B", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "fp32": "<f"}
# 3.6 has no fence between cp.async and wgmma, which the manual asks for; an H100 was right without.
FENCED_COPIES = Version(triton.__version__) >= Version("3.7")
SWIZZLES = (0, 32, 64, 128)  # bytes of a row, as Triton numbers them


@cache
def parsed(text: str) -> program.Program:
    """The one kernel of a text."""
    (kernel,) = program.parse(text).values()
    return kernel


@contextmanager
def executed(
    seed: int = 0, processors: int = 3, changed: Callable[[str], str] = str, resident: int = 1
) -> Iterator[list[Executed]]:
    """Kernels that ops launch are executed; what they did is listed.

    Args:
        seed: of the order of events.
        processors: of the GPU.
        changed: what to make of a kernel's PTX first.
        resident: blocks at a time.
    """
    done: list[Executed] = []
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver())

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        made = original(self, *args, grid=grid, warmup=True, **kwargs)
        binder = self.device_caches[90][-1]
        bound = binder(*args, **kwargs)[0]
        memory, arguments = Memory(), []
        metas = iter(made.metadata.tensordesc_meta or ())
        for place, (name, type_name) in enumerate(made.src.signature.items()):
            if type_name != "constexpr" and (place,) not in made.src.constants:
                arguments += _marshalled(bound[name], type_name, memory, metas)
        kernel = parsed(changed(made.asm["ptx"]))
        arguments += [bytes(8)] * (len(kernel.params) - len(arguments))  # scratch memory: kernels here need none
        sizes = [*grid, 1, 1][:3] if not callable(grid) else [*grid(bound), 1, 1][:3]
        threads = (kernel.threads or 32 * made.metadata.num_warps, 1, 1)
        launch = Launch(
            kernel,
            (sizes[0], sizes[1], sizes[2]),
            threads,
            arguments,
            made.metadata.shared,
            fenced_copies=FENCED_COPIES,
        )
        if prod(sizes):
            done.append(Machine(launch, memory, seed, resident).run())

    original = JITFunction.run
    absent = backend._absent
    with (
        patch.object(JITFunction, "run", run),
        patch.object(tuning, "_device", lambda: "h200"),
        patch.object(tuning, "_capability", lambda: 90),
        patch.object(tuning, "processors", lambda: processors),
        patch.object(backend, "_absent", lambda kind, device: "" if kind == "triton" else absent(kind, device)),
        backend.override("triton"),
    ):
        try:
            yield done
        finally:
            triton.runtime.driver.set_active(before)


def _marshalled(value: Any, type_name: str, memory: Memory, metas: Iterator[Any]) -> list[bytes | TensorMap]:
    """An argument as the kernel's parameters."""
    if isinstance(value, TensorDescriptor):
        base, meta = value.base, next(metas)
        reach(memory, base)
        width = base.element_size()
        shape, strides = tuple(value.shape), tuple(value.strides)
        box, swizzle = meta["block_size"], SWIZZLES[meta["swizzle"]]
        steps = tuple(width * step for step in strides[-2::-1])
        tensor = TensorMap(base.data_ptr(), shape[::-1], steps, tuple(box[::-1]), width, swizzle)
        sizes = [struct.pack("<i", n) for n in shape] + [struct.pack("<q", n) for n in strides]
        return [tensor, *sizes]
    if isinstance(value, torch.Tensor):
        reach(memory, value)
        return [struct.pack("<Q", value.data_ptr())]
    if value is None:
        return [struct.pack("<Q", 0)]
    return [struct.pack(FORMATS[type_name], value)]


def reach(memory: Memory, x: torch.Tensor) -> None:
    """Let kernels read and write a tensor's memory."""
    storage = x.untyped_storage()
    memory.add(storage.data_ptr(), storage.nbytes())
