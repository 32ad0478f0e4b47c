"""How each implementation of an op is made to run on this machine."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path

import arm64
import emulation
import gluon_emulation
import pytest
import torch
from cases.base import Op

from fb_kernels._runtime import backend, cpu, cuda, precision, tuning

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=fast", "-shared", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Werror")
FLAGS += ("-Wno-psabi",)  # of emulated tiles, which are made of vectors that the processor may not have
# Of the CPU, bits; then with dot products of bfloat16, with emulated tiles, and in the batch-invariant mode.
VECTORS = {"128": 128, "256": 256, "512": 512, "dots": 513, "tiles": 514, "invariant": 513}
READING = ("branch_attention", "branch_attention_qkv", "commit", "qk_norm_rope")  # ops whose reference does on the CPU
NARROWED = """
#include <cstdlib>
#include <cstring>
static bool allowed(const char* name) {
  const int widest = std::atoi(std::getenv("WIDEST_HERE"));
  if (std::strstr(name, "amx")) return widest == 514;
  return widest >= (std::strstr(name, "avx512bf16") ? 513 : std::strstr(name, "avx512") ? 512 : 256);
}
static bool emulated(const char* name) { return std::strstr(name, "amx"); }
#define __builtin_cpu_supports(name) ((emulated(name) || __builtin_cpu_supports(name)) && allowed(name))
#define EMULATED_TILES
#include "cpu.cpp"
"""  # the library, which takes no wider vectors than it is told when it is loaded


@cache
def narrowed(widest: str) -> ctypes.CDLL:
    """The library of the sources as they are with some of VECTORS, compiled once for all and all processes."""
    files = [SOURCES / name for name in ("cpu.cpp", "cpu_kernels.h", "interface.h", "tiles.h")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    digest.update(NARROWED.encode())
    target = Path(tempfile.gettempdir()) / f"libfb_cpu_{os.getuid()}_{digest.hexdigest()[:16]}.so"
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            compiler = shutil.which("g++") or shutil.which("clang++")
            if compiler is None:
                pytest.skip("no C++ compiler")
            unfinished = target.with_suffix(".unfinished")
            command = [compiler, *FLAGS, f"-I{SOURCES}", "-x", "c++", "-", "-o", str(unfinished)]
            subprocess.run(command, input=NARROWED, check=True, capture_output=True, text=True)
            os.replace(unfinished, target)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WIDEST_HERE", str(VECTORS[widest]))
        found = cpu.opened(Path(shutil.copy(target, folder)))  # a file of its own is loaded anew
    assert isinstance(found, ctypes.CDLL), found
    return found


def names(op: Op) -> list[str]:
    """The implementations of an op, the CPU's once for each kind of vectors."""
    narrow = "cpu" in op.ways and torch.bfloat16 in op.ways["cpu"].dtypes
    absent = [() if narrow else ("dots", "tiles"), () if op.name in backend.INVARIANT else ("invariant",)]
    widths = [f"cpu {each}" for each in VECTORS if each not in chain(*absent)] if "cpu" in op.ways else []
    return [name for name in op.ways if name != "cpu"] + widths


def with_dtypes(op: Op) -> list[tuple[str, torch.dtype]]:
    """The implementations, each with every dtype that it takes."""
    return [(name, dtype) for name in names(op) for dtype in op.way(name).dtypes]


def device_of(way: str) -> torch.device:
    """Where the arguments of an implementation lie: on a GPU where kernels run on one."""
    kind = way.partition(" ")[0]
    on_gpu = kind == "cuda" or (kind == "triton" and os.environ["TRITON_INTERPRET"] != "1")
    return torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")


@contextmanager
def running(way: str) -> Iterator[None]:
    """Ops run one implementation, and refuse arguments that it was not made for.

    After a space it says which: the CPU's by its vectors, Triton's by what a function of tuning.py chooses.
    """
    kind, _, which = way.partition(" ")
    chosen = "reference" if kind == "device" else kind
    with pytest.MonkeyPatch.context() as patch, backend.override(chosen), ExitStack() as stack:
        if kind == "device":  # the reference as it runs where the host reads no tensor
            for name in READING:
                patch.setattr(import_module(f"fb_kernels.{name}.reference"), "_host_reads", lambda _: False)
        if kind == "cpu":
            library = stack.enter_context(arm64.library()) if which == "arm64" else narrowed(which)
            patch.setattr(cpu, "library", lambda: library)
        patch.setattr(precision, "INVARIANT", which == "invariant")
        if way == "triton invariant" and os.environ["TRITON_INTERPRET"] == "1":
            stack.enter_context(import_module("interpreter").sums_in_order())
        if kind == "triton" and "=" in which:
            name, _, choice = which.partition("=")
            patch.setattr(tuning, name, lambda *_: choice)
        if kind == "cuda" and not torch.cuda.is_available():
            patch.setattr(cuda, "library", emulation.library)
            patch.setattr(cuda, "why_not", lambda device: cuda._why_not(emulation.library(), device))
        op, _, form = which.partition("_form=")
        with gluon_emulation.emulated(f"fb_kernels.{op}.gluon") if form == "gluon" else nullcontext():
            yield


@contextmanager
def running_small(op: Op, way: str) -> Iterator[None]:
    """The same in launches in which a few elements fill several blocks."""
    with running(way), op.way(way).small():
        yield
