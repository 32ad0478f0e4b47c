"""The library for CPUs on arm64: cross-compiled, and run by an emulator over memory that it shares with the tests."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import mmap
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fb_kernels._runtime import cpu, shared_library

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
BASE, SIZE = 1 << 36, 1 << 28  # of the shared memory: its address there, bytes
LINE = 64  # bytes to which a storage is aligned there
CALLER = r"""
#include <cstdio>
#include <fcntl.h>
#include <sys/mman.h>

#include "cpu.cpp"

#define CASE(name) if (!std::strcmp(called, #name)) result = name(*reinterpret_cast<name##_fields*>(at));
int main(int, char** arguments) {
  void* base = reinterpret_cast<void*>(BASE);
  const int file = open(arguments[1], O_RDWR);
  if (mmap(base, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != base) return 1;
  char called[64];
  for (int64_t offset; std::scanf("%63s %ld", called, &offset) == 2; std::fflush(stdout)) {
    char* at = static_cast<char*>(base) + offset;
    int64_t result = -1;
    CASES
    std::printf("%ld\n", result);
  }
}
"""


@cache
def process() -> tuple[subprocess.Popen[str], mmap.mmap]:
    """The emulated program, which runs the function that a line names on the struct at an offset; and the memory."""
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"needs {COMPILER} and {EMULATOR}")
    cases = " ".join(f"CASE(fbcpu_{name})" for name in cpu.FUNCTIONS)
    text = CALLER.replace("CASES", cases).replace("BASE", str(BASE)).replace("SIZE", str(SIZE))
    files = [SOURCES / name for name in ("cpu.cpp", "cpu_kernels.h", "interface.h", "tiles.h")]
    digest = hashlib.sha256(b"".join([text.encode(), *(file.read_bytes() for file in files)])).hexdigest()[:16]
    program = Path(tempfile.gettempdir()) / f"fb_arm64_{digest}"
    with program.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.is_file():
            command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=fast", "-static", f"-I{SOURCES}", "-x", "c++", "-"]
            command += ["-o", str(program.with_suffix(".new"))]
            subprocess.run(command, input=text, check=True, capture_output=True, text=True)
            program.with_suffix(".new").replace(program)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(SIZE)
        memory = mmap.mmap(file.fileno(), SIZE)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        found = subprocess.Popen([EMULATOR, str(program), file.name], text=True, bufsize=1, **pipes)
        atexit.register(found.kill)
        assert answer(found, "none 0") == -1  # the file is mapped from here on
    return found, memory


def answer(program: subprocess.Popen[str], line: str) -> int:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(line + "\n")
    return int(program.stdout.readline())


@contextmanager
def library() -> Iterator[SimpleNamespace]:
    """What stands for the library: every function copies the storages whose addresses it gets there and back."""
    program, memory = process()
    seen: dict[int, torch.UntypedStorage] = {}
    plain = torch.Tensor.data_ptr

    def noticed(x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage
        return plain(x)

    def call(name: str, letters: dict[str, str], **arguments: float) -> int:
        places, end = {}, 4096  # the struct lies before them
        for first, storage in seen.items():
            places[first], end = end, -(-(end + storage.nbytes()) // LINE) * LINE
        assert end <= SIZE

        def there(address: int) -> int:
            first = next(at for at, storage in seen.items() if at <= address <= at + storage.nbytes())
            return BASE + places[first] + address - first

        values = [there(arguments[n]) if x == "P" and arguments[n] else arguments[n] for n, x in letters.items()]
        packed = struct.pack("".join(letters.values()) + "0q", *values)
        memory[: len(packed)] = packed
        for first, offset in places.items():
            memory[offset : offset + seen[first].nbytes()] = ctypes.string_at(first, seen[first].nbytes())
        result = answer(program, f"{name} 0")
        for first, offset in places.items():
            ctypes.memmove(first, memory[offset : offset + seen[first].nbytes()], seen[first].nbytes())
        seen.clear()
        return result

    here = cpu.library()
    assert isinstance(here, ctypes.CDLL)
    functions: dict[str, Callable[..., int]] = {}
    for name in (f"fbcpu_{name}" for name in cpu.FUNCTIONS):
        letters = shared_library.fields(getattr(here, f"{name}_takes")(ctypes.byref(ctypes.c_int64())).decode())
        functions[name] = partial(call, name, letters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", noticed)
        yield SimpleNamespace(**functions, fbcpu_variant=lambda: b"plain")
