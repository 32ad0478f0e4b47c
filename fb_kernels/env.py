"""`python -m fb_kernels.env`: what is installed, what will run, and why.

With `--check [--device cuda|cpu]` every kernel is compared once with its definition. A table says which are right, how
long they take and which will run. A wrong kernel is switched off on this device, in `<device>.json` of
`fb_kernels._runtime.devices`, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import inspect
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

import torch

import fb_kernels
from fb_kernels._runtime import backend, cpu, cuda, devices
from fb_kernels._runtime.cpu import release_threads as release_threads
from fb_kernels._runtime.precision import batch_invariant as batch_invariant


def report() -> str:
    """A plain table: versions, devices, the compiled libraries, and what runs each op on the CPU and on CUDA.

    Never raises on a machine where something is missing; the table says what and why.
    """
    asked = os.environ.get(backend.VARIABLE, "auto") + ", batch-invariant" * batch_invariant()
    sections = (
        ("software", [("python", platform.python_version()), *((name, _version(name)) for name in _TESTED)]),
        ("triton kernels", [("triton", _triton())]),
        (
            "cuda",
            [("built for", torch.version.cuda or "none: this torch is built without CUDA"), ("driver", _driver())],
        ),
        ("devices", _devices()),
        ("compiled libraries", [("fb_kernels", _state(cuda)), ("fb_cpu", _state(cpu))]),
        ("known devices", [("folder", str(devices.folder()))]),
        (
            f"ops ({backend.VARIABLE}={asked}); other calls run the reference",
            [row for name, stem in _ops() for row in _what_runs(name, stem)],
        ),
    )
    width = max(len(name) for _, rows in sections for name, _ in rows)
    lines = []
    for title, rows in sections:
        lines += [title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows)]
    return "\n".join(lines)


_TESTED = {"torch": "2.13.0", "transformers": "5.17.0", "peft": "0.21.2", "numpy": "2.4.6", "safetensors": "0.8.0"}


def _version(package: str) -> str:
    """The installed version, and the one that was tested if it is another."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
    tested = _TESTED[package]
    return version if version.partition("+")[0] == tested else f"{version} (tested: {tested})"


def _triton() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except Exception as reason:
        return f"absent: {type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else 'no reason given'}"


def _state(kernels: ModuleType) -> str:
    """The state of a compiled library, in words."""
    library = kernels.library()
    if isinstance(library, str):
        return library
    instructions = f", by {cpu.variant()}" if kernels is cpu else ""
    return f"loaded, with version {kernels.ABI_VERSION} of its C interface{instructions}"


def _driver() -> str:
    """The newest CUDA version that the installed driver supports."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")
        code = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "absent: no driver library"
    major, minor = divmod(version.value, 1000)
    return f"supports CUDA {major}.{minor // 10}" if code == 0 else f"absent: the driver answers with error {code}"


def _devices() -> list[tuple[str, str]]:
    rows = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} thread(s)")]
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"sm_{properties.major}{properties.minor}"
            rows.append(
                (f"cuda:{index}", f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB")
            )
    except RuntimeError as reason:
        rows.append(("cuda", f"unusable: {str(reason).splitlines()[0]}"))
    return rows


def _ops() -> list[tuple[str, str]]:
    """(public name, stem) of every op."""
    functions = {name: getattr(fb_kernels, name) for name in fb_kernels.__all__}
    return [(name, f.__module__.rpartition(".")[2]) for name, f in functions.items() if inspect.isfunction(f)]


def _what_runs(op: str, stem: str) -> Iterator[tuple[str, str]]:
    """A row for either device: what runs an op there, for which calls, and why."""
    for title, device in ((op, "cpu"), ("", "cuda")):
        kind, reason = backend.chosen(stem, device, op)
        calls = "" if kind == "reference" else f" kernel for {backend.takes(kind, stem)}"
        why = "" if reason == "it has a kernel" else f" ({reason})"
        yield title, f"{device}: {kind}{calls}{why}"


def main() -> int:
    """The command; returns 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(prog="python -m fb_kernels.env", description="what is installed and what will run")
    parser.add_argument("--check", action="store_true", help="run every kernel once against its definition")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default, help="to check (default: %(default)s)")
    options = parser.parse_args()
    if not options.check:
        print(report())
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device: expected a CUDA device, got none (driver: {_driver()}); give --device cpu")
    from fb_kernels import self_check  # it imports the definitions

    rows = self_check.check(options.device)
    print(self_check.table(rows))
    return int(any(row.fault for row in rows))


if __name__ == "__main__":
    sys.exit(main())
