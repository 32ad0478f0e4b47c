"""The sources of csrc/ built for the host: kernels run on CPU tensors, through the same launchers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from fb_kernels._runtime import cuda

SOURCES = Path(__file__).resolve().parents[2] / "csrc"


@cache
def build() -> Path:
    """The emulated library, compiled once for all processes that test the same sources."""
    files = sorted(SOURCES.glob("*"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"libfb_emulation_{os.getuid()}_{digest}.so"
    if not target.is_file():
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no host compiler for the emulated kernels")
        partial = target.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++17", "-O2", "-pthread", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-DFB_HOST_EMULATION"]
        command = [
            compiler,
            *flags,
            "-shared",
            "-fPIC",
            "-x",
            "c++",
            *map(str, SOURCES.glob("*.cu")),
            "-o",
            str(partial),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(partial, target)
    return target


@cache
def library() -> ctypes.CDLL:
    """The emulated library, opened."""
    found = cuda.opened(build())
    assert isinstance(found, ctypes.CDLL), found
    return found
