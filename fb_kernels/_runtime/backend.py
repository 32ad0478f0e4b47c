"""Which implementation of an op runs.

Every op is a folder: `__init__.py` defines `fb::<op>`, and the other files are named for what they run: `reference.py`
plain PyTorch on any device, `triton.py` and `cuda.py` kernels for CUDA tensors, `cpu.py` a compiled one for CPU
tensors, each with a function of the op's name. A kernel's function returns NotImplemented for arguments that it was not
made for (float64, an unusual head size), and the next one takes them: on CUDA tensors that of `cuda.py`, then Triton's,
then the reference; on CPU tensors that of `cpu.py`, then the reference.

`FB_KERNELS_BACKEND=auto|reference|triton|cuda|cpu[,op=...]` overrides what runs, for all ops or for those named by
stem. It is an error to ask for a kernel that is absent. A kernel that was found wrong on a device (recorded by
`fb_kernels._runtime.devices`) runs there only if it is asked for.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import PACKAGE, cpu, cuda, devices, precision, tuning

VARIABLE = "FB_KERNELS_BACKEND"
BACKENDS = ("auto", "reference", "triton", "cuda", "cpu")

KERNELS = ("cuda", "triton", "cpu")
INVARIANT = ("skinny_linear", "branch_attention", "branch_attention_qkv", "linear_logprob")  # ops with such a mode
_TRIED = {  # (backend, device): kinds of kernels in the order of preference
    ("auto", "cpu"): ("cpu",),
    ("auto", "cuda"): ("cuda", "triton"),
    ("triton", "cpu"): ("triton",),
    ("triton", "cuda"): ("triton",),
    ("cuda", "cpu"): ("cuda",),
    ("cuda", "cuda"): ("cuda", "triton"),
    ("cpu", "cpu"): ("cpu",),
    ("cpu", "cuda"): (),
}


class NotTakenError(ValueError):
    """A kernel that was asked for does not take these arguments."""


_with: dict[str, set[str]] = {kind: set() for kind in KERNELS}  # stems and operators


def chosen(stem: str, device: str, op: str = "") -> tuple[str, str]:
    """(backend, reason): what runs the op of a folder on "cpu" or "cuda"; its arguments may still send it to another.

    `op` is one of the folder's operators; by default what any of them has counts.
    """
    requested = _overrides.get(stem, _overrides[""])
    if requested == "reference":
        return "reference", f"{VARIABLE} asks for it"
    available = kinds(op or stem)
    if not available:
        return "reference", "it has no kernel"
    candidates = _kinds(requested, available, device)
    if not candidates:
        others = "CUDA" if device == "cpu" else "CPU"
        why = (
            f"kernels are for {others} tensors"
            if requested in ("auto", *available)
            else f"it has no {requested} kernel"
        )
        return "reference", why
    reasons: list[str] = []
    for kind in candidates:
        why = _why_not(kind, stem, device)
        if not why:
            return kind, _reason(kind, requested, stem, reasons)
        reasons.append(f"{kind}: {why}" if len(candidates) > 1 else why)
    return "reference", "; ".join(reasons)


def kinds(op: str) -> list[str]:
    """The kinds of kernels that an operator has, or any operator of a folder."""
    return [kind for kind in KERNELS if op in _with[kind]]


def takes(kind: str, stem: str) -> str:
    """Which calls an op's kernel of a kind takes, in words."""
    return "all but float64" if kind == "triton" else str(_module(kind, stem).TAKES)


def kernels(op: str, device: str) -> dict[str, str]:
    """The kinds of kernels that an operator or a folder has for a device, each with why it cannot be launched, or "".

    On the CPU this includes the kernels for CUDA tensors that can run there, interpreted or emulated.
    """
    own = [kind for kind in kinds(op) if kind != "cpu" or device == "cpu"]
    reasons = {kind: _absent(kind, device) for kind in own}
    return {kind: why for kind, why in reasons.items() if not why or kind in _TRIED["auto", device]}


def _kinds(requested: str, own: Sequence[str], device: str) -> list[str]:
    """The op's kernels to try, in order; only the requested one if one is requested."""
    kinds = [kind for kind in _TRIED[requested, device] if kind in own]
    return [requested] if requested in kinds else kinds


def _reason(kind: str, requested: str, stem: str, absent: list[str]) -> str:
    if requested == kind:
        return f"{VARIABLE} asks for it"
    if requested == "cuda" and stem not in _with["cuda"]:
        return "it has no CUDA kernel"
    return "; ".join(["it has a kernel", *absent])


def _why_not(kind: str, stem: str, device: str) -> str:
    """Why an op's kernel of a kind is not launched on tensors of a device; empty where it is."""
    why = _absent(kind, device)
    if why or _overrides.get(stem, _overrides[""]) == kind:
        return why
    wrong = devices.off("cpu" if device == "cpu" else tuning._device(), kind).get(stem)
    return f"switched off, it was wrong on this device: {wrong}" if wrong else ""


def _absent(kind: str, device: str) -> str:
    """Why kernels of a kind cannot be launched on tensors of a device; empty where they can."""
    if kind == "triton":
        return _why_no_triton(device)
    return cuda.why_not(device) if kind == "cuda" else cpu.why_not()


@cache
def _why_no_triton(device: str) -> str:
    """Why Triton kernels cannot be launched on tensors of a device; empty where they can."""
    try:
        import_module(f"{PACKAGE}.triton")
    except Exception as problem:
        return f"triton cannot be imported: {type(problem).__name__}"
    if device == "cuda" and torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    if device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "the kernels need compute capability 8.0"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "triton runs CPU tensors only under TRITON_INTERPRET=1"
    return _why_no_launcher() if device == "cuda" else ""


def _why_no_launcher() -> str:
    """What Triton lacks to compile the C in which it calls the driver; empty where it has a compiler and Python.h."""
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang"])):
        got = f"CC={compiler}, which is not found" if compiler else "none"
        return f"triton needs a C compiler, got {got}: install gcc or set CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does on Debian
    include = sysconfig.get_paths(scheme=scheme)["include"]
    folders = (os.environ.get(name, "").split(os.pathsep) for name in ("CPATH", "C_INCLUDE_PATH"))  # of the compiler
    if any(Path(folder, "Python.h").is_file() for folder in (include, *chain(*folders)) if folder):
        return ""
    return f"triton needs Python.h, got none in {include}: install python{sysconfig.get_python_version()}-dev"


@contextmanager
def override(spec: str) -> Iterator[None]:
    """Run ops under another value of FB_KERNELS_BACKEND inside the context."""
    global _overrides
    before = _overrides
    _overrides = _parse(spec)
    try:
        yield
    finally:
        _overrides = before


def _parse(spec: str) -> dict[str, str]:
    """{stem: backend}; the one for all other ops is under ""."""
    backends = {"": "auto"}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        stem, _, backend = part.rpartition("=")
        exists = not stem or (stem.isidentifier() and (Path(__file__).parents[1] / stem / "reference.py").is_file())
        if backend not in BACKENDS or not exists:
            raise ValueError(
                f"{VARIABLE}: expected auto, reference, triton, cuda or cpu, then op=backend pairs, got {part!r}; "
                "write for example auto,branch_attention=reference"
            )
        backends[stem] = backend
    return backends


AUTOMATIC = _parse("")
_overrides = _parse(os.environ.get(VARIABLE, "")) if os.environ.get(VARIABLE) else AUTOMATIC


def implementation(name: str, stem: str, reference: Callable, own: list[str], device: str) -> Callable:
    """What runs the operator `name` on tensors of a device: a kernel of its own kinds, or the reference."""
    for kind in own:
        _with[kind] |= {stem, name}
    if not own:
        return reference
    quick = getattr(_module("cpu", stem), name) if "cpu" in own and device == "cpu" else None

    def run(*arguments: Any) -> Any:
        if device == "cpu" and _overrides is AUTOMATIC:  # every call of a small model's step comes here
            out = quick(*arguments) if quick and stem not in devices.off("cpu", "cpu") else NotImplemented
            if _seen is not None:
                _seen[name] = "reference" if out is NotImplemented else "cpu"
            return reference(*arguments) if out is NotImplemented else out
        first, why = chosen(stem, device)
        requested = _overrides.get(stem, _overrides[""])
        kinds = _kinds(requested, own, device) if requested != "reference" else []
        if first == "reference" and requested in own and device == ("cpu" if requested == "cpu" else "cuda"):
            raise ValueError(
                f"{name}: expected {requested} kernels, as {VARIABLE} asks, got none ({why}); install what is missing "
                f"or set {VARIABLE}=auto"
            )
        for kind in kinds:
            if kind != first and _why_not(kind, stem, device):
                if kind == kinds[0] and device == "cuda" and requested == "auto":
                    _warn_once(name, kind, first, why)
                continue
            with _on_device_of(arguments, device):
                out = getattr(_module(kind, stem), name)(*arguments)
            if out is not NotImplemented:
                if _seen is not None:
                    _seen[name] = kind
                return out
        if requested == first and first in own:
            raise NotTakenError(
                f"{name}: expected arguments that the {requested} kernel takes, got others (dtype, sizes or mode); "
                f"set {VARIABLE}=auto or {VARIABLE}=auto,{stem}=reference"
            )
        if device == "cuda" and precision.batch_invariant() and stem in INVARIANT:
            _warn_once(name, "batch-invariant", "reference", why if first == "reference" else "the arguments")
        if _seen is not None:
            _seen[name] = "reference"
        return reference(*arguments)

    run.__name__ = name
    return run


@contextmanager
def seen() -> Iterator[dict[str, str]]:
    """{operator: what ran it last} for the calls inside the context; for a captured graph, the calls of the capture."""
    global _seen
    before, _seen = _seen, {}
    try:
        yield _seen
    finally:
        _seen = before


_seen: dict[str, str] | None = None


def _warn_once(name: str, expected: str, got: str, reason: str) -> None:
    """Say, the first time in a process, that CUDA tensors miss the kernel that they should have, for this reason."""
    if (got, reason) in _warned:
        return
    _warned.add((got, reason))
    warnings.warn(
        f"{name}: expected its {expected} kernel for CUDA tensors, got {got} ({reason}); it is slower: see "
        "`python -m fb_kernels.env`, and pip install '.[gpu]' in the clone for triton",
        RuntimeWarning,
    )


_warned: set[tuple[str, str]] = set()


@cache
def _module(kind: str, stem: str) -> Any:
    return import_module(f"{PACKAGE}.{stem}.{kind}")


def flat(arguments: tuple) -> Iterator[Any]:
    """The arguments in a row: those of a tuple in its place."""
    for argument in arguments:
        yield from flat(argument) if isinstance(argument, tuple) else (argument,)


def _on_device_of(arguments: tuple, device: str) -> Any:
    """Triton launches on the current device: make it that of the arguments."""
    if device == "cpu":
        return nullcontext()
    index = next(argument.device.index for argument in flat(arguments) if isinstance(argument, Tensor))
    return nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)
