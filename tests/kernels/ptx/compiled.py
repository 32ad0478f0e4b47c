"""The kernels of csrc/, launched by their own launchers on CPU tensors and executed from the PTX that nvcc makes.

The launchers are built for the host as for emulation, but a launch calls back with the kernel's name and arguments.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulation import SOURCES

from fb_kernels._runtime import backend, cuda
from ptx import program
from ptx.launches import reach
from ptx.machine import Executed, Launch, Machine
from ptx.memory import Memory
from setup import nvcc

EMULATED = re.compile(r"(?s)(int launch_clusters\([^{]*arguments\) \{\n)  return emulation::run\(.*?\}\);\n")
RECORDED = r"""\1  std::tuple<Parameters...> values{static_cast<Parameters>(arguments)...};
  return std::apply(
      [&](auto&... value) {
        const void* const places[] = {&value...};
        const int64_t sizes[] = {static_cast<int64_t>(sizeof(value))...};
        Dl_info info;
        if (!dladdr(reinterpret_cast<const void*>(kernel), &info) || info.dli_sname == nullptr) return 1;
        return fb_launched(info.dli_sname, cluster, grid, block, shared_bytes, sizeof...(Parameters), places, sizes);
      },
      values);
"""
DECLARED = """
#include <dlfcn.h>
#include <tuple>
using Launched = int (*)(const char*, int, int, int, int, int, const void* const*, const int64_t*);
extern "C" inline Launched fb_launched = nullptr;
"""
CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, *[ctypes.c_int] * 5, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64)
)


@cache
def folder() -> Path:
    """A recording library and the PTX of every source, made once for all processes that test the same sources."""
    if nvcc() is None:
        pytest.skip("no nvcc")
    files = sorted(SOURCES.glob("*"))
    made = "".join([RECORDED, DECLARED, *(file.read_text() for file in files)])
    digest = hashlib.sha256(made.encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"fb_ptx_{os.getuid()}_{digest}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory() as temporary:
            work = Path(temporary) / "made"
            shutil.copytree(SOURCES, work)
            header = work / "device.cuh"
            text, count = EMULATED.subn(RECORDED, header.read_text())
            assert count == 1, "the emulated launcher has another form"
            header.write_text(text.replace("namespace fb {", DECLARED + "namespace fb {", 1))
            flags = [
                "-std=c++17",
                "-O1",
                "-pthread",
                "-Wno-unknown-pragmas",
                "-DFB_HOST_EMULATION",
                "-shared",
                "-fPIC",
                "-x",
                "c++",
            ]
            library = [*map(str, work.glob("*.cu")), "-o", str(work / "library.so")]
            subprocess.run(["g++", *flags, "-x", "c++", *library], check=True, capture_output=True, text=True)
            for source in SOURCES.glob("*.cu"):
                command = [str(nvcc()), "-std=c++17", "-O3", "-arch=compute_90a", "-ptx", str(source)]
                subprocess.run([*command, "-o", str(work / f"{source.stem}.ptx")], check=True, capture_output=True)
            shutil.copytree(work, target.with_suffix(f".{os.getpid()}"))
            try:
                os.rename(target.with_suffix(f".{os.getpid()}"), target)
            except OSError:  # another process was first
                shutil.rmtree(target.with_suffix(f".{os.getpid()}"))
    return target


@cache
def demangled(name: str) -> str:
    """A kernel as C++ names it, the same for both compilers."""
    text = subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout.strip()
    return text.replace("emulation::half", "__half").replace("emulation::bfloat16", "__nv_bfloat16")


@cache
def programs() -> dict[str, program.Program]:
    """All kernels by name."""
    found = {}
    for file in folder().glob("*.ptx"):
        for name, kernel in program.parse(file.read_text()).items():
            found[demangled(name)] = kernel
    return found


@contextmanager
def executed(seed: int = 0, resident: int = 3, processors: int = 2) -> Iterator[list[Executed]]:
    """Compiled kernels that ops launch are executed; what they did is listed.

    Args:
        seed: of the order of events.
        resident: blocks at a time.
        processors: of the GPU, which launchers fill.
    """
    done: list[Executed] = []
    problems: list[BaseException] = []
    reached = [Memory()]

    def launched(
        name: bytes, cluster: int, grid: int, block: int, shared: int, count: int, places: Any, sizes: Any
    ) -> int:
        try:
            arguments = [ctypes.string_at(places[n], sizes[n]) for n in range(count)]
            kernel = programs()[demangled(name.decode())]
            launch = Launch(kernel, (grid, 1, 1), (block, 1, 1), arguments, shared, cluster)
            if grid:
                done.append(Machine(launch, reached[0], seed, resident).run())
        except BaseException as problem:
            problems.append(problem)
            return 719
        return 0

    def launch(op: str, like: torch.Tensor, **arguments: Any) -> bool:
        reached[0] = Memory()
        for argument in arguments.values():
            if isinstance(argument, torch.Tensor):
                reach(reached[0], argument)
        try:
            return original(op, like, **arguments)
        except RuntimeError as error:
            raise (problems.pop() if problems else error) from None

    callback, original = CALLBACK(launched), cuda.launch
    library = cuda.opened(folder() / "library.so")
    assert isinstance(library, ctypes.CDLL), library
    ctypes.c_void_p.in_dll(library, "fb_launched").value = ctypes.cast(callback, ctypes.c_void_p).value
    before = library.fb_emulate_multiprocessors(processors)
    with (
        patch.object(cuda, "library", lambda: library),
        patch.object(cuda, "why_not", lambda device: ""),
        patch.object(cuda, "launch", launch),
        backend.override("cuda"),
    ):
        try:
            yield done
        finally:
            library.fb_emulate_multiprocessors(before)
