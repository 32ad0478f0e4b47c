"""Compiled kernels under ThreadSanitizer: blocks that read or write what others write must wait for them.

Blocks of the emulated library run on threads. Launches are recorded in this process and run again in another one, whose
library is instrumented. Races inside a block, and of the machine code, are what `ptx` finds.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import emulation
import pytest
import torch
from cases import OPS
from emulation import SOURCES
from ptx.test_cuda import QUICK, shared_columns
from test_contract import evaluate
from ways import running_small

from fb_kernels._runtime import cuda, shared_library
from fb_kernels.testing import poisoned_memory

SCRATCH = ("workspace", "partials")  # parts and counters, which nobody else reads
FLAGS = ("-std=c++17", "-O1", "-g1", "-Wno-unknown-pragmas", "-DFB_HOST_EMULATION", "-shared", "-fPIC", "-pthread")
TSAN = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")  # the latter as fibers leave in any order
QUICKLY = ("an arrival that orders nothing", "a counter that is not reset", "the last but one merges")
NAMES = [name for name, op in OPS.items() if "cuda" in op.ways]


def build(folder: Path, pattern: str = "*.cu") -> Path:
    """The instrumented library of some of the sources in a folder."""
    target = folder / "library.so"
    files = {str(file) for file in (*folder.glob(pattern), folder / "library.cu")}
    subprocess.run(["g++", *FLAGS, *TSAN, "-x", "c++", *files, "-o", str(target)], check=True, capture_output=True)
    return target


@cache
def runtime() -> str:
    """What must be loaded first in a process that loads an instrumented library."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to instrument kernels")
    asked = ["g++", "-print-file-name=libtsan.so"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_file():
        pytest.skip("no ThreadSanitizer for g++")
    started = subprocess.run([sys.executable, "-I", "-S", "-c", ""], env={"LD_PRELOAD": found}, capture_output=True)
    if started.returncode:
        pytest.skip("ThreadSanitizer does not start here")
    return found


@cache
def library() -> Path:
    """The instrumented library as it is, built once for all processes that test the same sources."""
    runtime()
    files = sorted(SOURCES.glob("*"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"libfb_races_{os.getuid()}_{digest}.so"
    if not target.is_file():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
            partial = shutil.copy(build(Path(folder)), target.with_suffix(f".{os.getpid()}"))
        os.replace(partial, target)
    return target


def launches(name: str, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """What a call launches: an op's arguments, and the memory that they reach before and after."""
    found: list[dict[str, Any]] = []

    def launch(op: str, like: torch.Tensor, **arguments: Any) -> bool:
        loaded, size = emulation.library(), ctypes.c_int64()
        letters = shared_library.fields(getattr(loaded, f"fb_{op}_takes")(ctypes.byref(size)).decode())
        tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors.values()}
        scratch = {x.untyped_storage().data_ptr() for name, x in tensors.items() if name in SCRATCH}
        places = {start: place for place, start in enumerate(storages)}
        values = []
        for name in letters:
            x = arguments.get(name, 0)
            if isinstance(x, torch.Tensor):
                start = x.untyped_storage().data_ptr()
                x = [places[start], x.data_ptr() - start]
            values.append(x or 0)
        before = [bytes(storage).hex() for storage in storages.values()]
        taken = original(op, like, **arguments)
        after = [None if start in scratch else bytes(storage).hex() for start, storage in storages.items()]
        processors = loaded.fb_emulate_multiprocessors(0)
        loaded.fb_emulate_multiprocessors(processors)
        if taken:
            assert [*letters][-1] == "stream"
            found.append(
                {
                    "function": f"fb_{op}",
                    "letters": "".join(letters.values()),
                    "values": values[:-1],
                    "before": before,
                    "after": after,
                    "multiprocessors": processors,
                }
            )
        return taken

    original = cuda.launch
    with running_small(OPS[name], "cuda"), mock.patch.object(cuda, "launch", launch), poisoned_memory():
        call()
    return found


def recorded(name: str) -> list[dict[str, Any]]:
    """Launches of an op in which blocks share work."""
    op, way = OPS[name], OPS[name].way("cuda")
    dtype = torch.bfloat16 if torch.bfloat16 in way.dtypes else way.dtypes[0]
    sizes = [op.typical if way.typical is None else way.typical, *(way.also[place] for place in QUICK.get(name, ()))]
    cases = [op.cast(op.make(**each), dtype) for each in sizes]
    if name == "skinny_linear":
        cases.append(shared_columns(dtype))
    return [launch for case in cases for launch in launches(name, lambda case=case: evaluate(case.fresh()))]


def replayed(library: Path, given: list[dict[str, Any]], folder: Path) -> str:
    """What is wrong when launches run again; empty if nothing is."""
    file = folder / "launches"
    file.write_text("\n".join(map(json.dumps, given)))
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("replay.py")), str(library), str(file)]
    options = {"LD_PRELOAD": runtime(), "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = subprocess.run(command, env=options, capture_output=True, text=True)
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sweep(10)
def test_blocks_wait_for_what_others_write(name: str, tmp_path: Path) -> None:
    given = recorded(name)
    assert given
    assert replayed(library(), given, tmp_path) == ""


RACE, OTHER = "ThreadSanitizer: data race", "AssertionError: another result"
STUCK = "threads wait at a barrier that the others do not reach"
ARRIVES = r"arrives_last\((counter_at\(.*\)), (\w+)\)"
MISTAKES = {  # the op, the file, what stands there once, what is written instead, what may be seen
    "an arrival that orders nothing": ("topk_entropy", "device.cuh", r"atom\.acq_rel\.gpu", "atom.relaxed.gpu", RACE),
    "an arrival that orders a block": ("topk_entropy", "device.cuh", r"atom\.acq_rel\.gpu", "atom.acq_rel.cta", RACE),
    "a counter that is not reset": ("topk_entropy", "device.cuh", r"wraps_at = count - 1", "wraps_at = ~0u", OTHER),
    "the last but one merges": ("topk_entropy", "topk_entropy.cu", ARRIVES, r"arrives_last(\1, \2 - 1)", RACE),
    "every block merges": ("topk_entropy", "topk_entropy.cu", r"if \(!is_last\) return;", "", RACE),
    "a block arrives before its warps": (
        "topk_entropy",
        "topk_entropy.cu",
        r"__syncthreads\(\);(?=\s*if \(thread == 0\) \{\s*is_last)",
        "",
        RACE,
    ),
    "memory that ends before it was read": (
        "skinny_linear",
        "skinny_linear.cu",
        r"if constexpr \(kSplit\) sync_cluster\(\);(?=  // a block's memory)",
        "",
        f"{RACE}|{OTHER}",
    ),
    "a barrier that half of a cluster reaches": (
        "skinny_linear",
        "skinny_linear.cu",
        r"if constexpr \(kSplit\) (?=sync_cluster\(\);  // a block's memory)",
        "if (kSplit && rank == 0) ",
        STUCK,
    ),
    "parts are merged before all are there": (
        "branch_attention",
        "branch_attention.cu",
        ARRIVES,
        r"arrives_last(\1, \2 - 1)",
        RACE,
    ),
}
SHARING = {  # a small call of each op in which blocks share work
    "topk_entropy": lambda: OPS["topk_entropy"].make((2,), 40_001, 64),
    "skinny_linear": lambda: shared_columns(torch.bfloat16),
    "branch_attention": lambda: OPS["branch_attention"].make([([1] * 3, 7, 1000)], (1, 1), 64, spare=0),
}


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICKLY)) for each in MISTAKES]
)
@pytest.mark.sweep(14)
def test_a_mistake_is_seen(mistake: str, tmp_path: Path) -> None:
    name, file, pattern, replacement, seen = MISTAKES[mistake]
    runtime()
    op = OPS[name]
    case = op.cast(SHARING[name](), torch.bfloat16)
    given = launches(name, case.run)
    assert len(given) == 1
    shutil.copytree(SOURCES, tmp_path / "csrc")
    text, count = re.subn(pattern, replacement, (tmp_path / "csrc" / file).read_text())
    assert count == 1
    (tmp_path / "csrc" / file).write_text(text)
    assert re.search(seen, replayed(build(tmp_path / "csrc", f"{name}.cu"), given, tmp_path))
