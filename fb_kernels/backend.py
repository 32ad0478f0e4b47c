"""How an op is attached to torch.library, and which implementation of it runs.

Every op has one definition (`fb::<op>`), a fake for tracing and a reference that runs on any device. A Triton
implementation is the function of the op's name in `fb_kernels/triton/<stem>.py`, a compiled one that in
`fb_kernels/cuda.py`, for CPU tensors that in `fb_kernels/cpu.py`. Each returns NotImplemented for arguments that it was
not made for (float64, an unusual head size), and the next one takes those: on CUDA tensors compiled, then Triton, then
the reference; on CPU tensors compiled, then the reference.

`FB_KERNELS_BACKEND=auto|reference|triton|cuda|cpu[,op=...]` overrides what runs, for all ops or for those named by
stem.

Under the transforms of torch.func the operators go by way of a `torch.autograd.Function`: grad, vjp, jacrev and vmap
work (vmap as a loop); forward mode and ops that write to an argument are refused.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fb_kernels import cpu, cuda

LIBRARY = torch.library.Library("fb", "DEF")
VARIABLE = "FB_KERNELS_BACKEND"
BACKENDS = ("auto", "reference", "triton", "cuda", "cpu")

KERNELS = ("cuda", "triton", "cpu")
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

_with: dict[str, set[str]] = {kind: set() for kind in KERNELS}  # stems


def define(
    name: str,
    signature: str,
    *,
    reference: Callable,
    fake: Callable,
    triton: bool = False,
    compiled: bool = False,
    cpu: bool = False,
) -> Callable:
    """Define `fb::<name><signature>`, attach its implementations and its fake, and return what calls it.

    Args:
        name: the operator's name.
        signature: its arguments and results in the schema language.
        reference: the plain PyTorch definition, in `fb_kernels/reference/<stem>.py`.
        fake: shapes and dtypes of the results.
        triton: whether `fb_kernels/triton/<stem>.py` has a function `name`.
        compiled: whether `fb_kernels/cuda.py` has one.
        cpu: whether `fb_kernels/cpu.py` has one.
    """
    stem = reference.__module__.rpartition(".")[2]
    own = [kind for kind, has in (("cuda", compiled), ("triton", triton), ("cpu", cpu)) if has]
    for kind in own:
        _with[kind].add(stem)
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("cpu", "cuda"):
        LIBRARY.impl(name, _without_autocast(_dispatch(name, stem, reference, own, device), device), device.upper())
    torch.library.register_fake(f"fb::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.fb, name).default

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or not _transformed():
            return op(*arguments)
        if op._schema.is_mutable:
            raise NotImplementedError(
                f"{name}: expected a call outside torch.func and forward-mode differentiation, since it writes to an "
                "argument, got one inside; loop over the calls"
            )
        return _functions[name].apply(*arguments) if name in _functions else op(*arguments)

    return call


def differentiate(name: str, *, setup_context: Callable, backward: Callable) -> None:
    """Attach the gradient of `fb::<name>`; where it is an op, `fb::<name>_backward`, that one has none."""
    torch.library.register_autograd(f"fb::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    _functions[name] = _function(name, name, setup_context, backward)
    if hasattr(torch.ops.fb, f"{name}_backward"):

        def refuse(*_: Any) -> None:
            raise NotImplementedError(f"{name}: only first derivatives exist; call it without create_graph=True")

        torch.library.register_autograd(f"fb::{name}_backward", refuse, lib=LIBRARY)
        _functions[f"{name}_backward"] = _function(name, f"{name}_backward", lambda *_: None, refuse)


_functions: dict[str, type[torch.autograd.Function]] = {}  # by operator


def _transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is under way, which the operators know not."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def _function(op: str, name: str, setup: Callable, gradient: Callable) -> type[torch.autograd.Function]:
    """The operator `name` of `op` with its gradient, for the transforms of torch.func; none forward."""

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return getattr(torch.ops.fb, name).default(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(
                f"{op}: expected differentiation in reverse, got forward mode; use torch.func.grad, vjp or jacrev"
            )

    return Transformed


def chosen(stem: str, device: str) -> tuple[str, str]:
    """(backend, reason): what runs the op `stem` on a device; its arguments may still send it to another."""
    wanted = _overrides.get(stem, _overrides[""])
    if wanted == "reference":
        return "reference", f"{VARIABLE} asks for it"
    own = [kind for kind in KERNELS if stem in _with[kind]]
    if not own:
        return "reference", "it has no kernel"
    kinds = [kind for kind in _TRIED[wanted, device] if kind in own]
    if not kinds:
        others = "CUDA" if device == "cpu" else "CPU"
        why = f"kernels are for {others} tensors" if wanted in ("auto", *own) else f"it has no {wanted} kernel"
        return "reference", why
    absent: list[str] = []
    for kind in kinds:
        why = _why_not(kind, device)
        if not why:
            return kind, _reason(kind, wanted, stem, absent)
        absent.append(f"{kind}: {why}" if len(kinds) > 1 else why)
    return "reference", "; ".join(absent)


def _reason(kind: str, wanted: str, stem: str, absent: list[str]) -> str:
    if wanted == kind:
        return f"{VARIABLE} asks for it"
    if wanted == "cuda" and stem not in _with["cuda"]:
        return "it has no CUDA kernel"
    return "; ".join(["it has a kernel", *absent])


def _why_not(kind: str, device: str) -> str:
    """Why kernels of a kind cannot be launched on tensors of a device; empty where they can."""
    if kind == "triton":
        return _why_no_triton(device)
    return cuda.why_not(device) if kind == "cuda" else cpu.why_not()


@cache
def _why_no_triton(device: str) -> str:
    """Why Triton kernels cannot be launched on tensors of a device; empty where they can."""
    try:
        import_module("fb_kernels.triton")
    except Exception as problem:
        return f"triton cannot be imported: {type(problem).__name__}"
    if device == "cuda" and torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    if device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "the kernels need compute capability 8.0"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "triton runs CPU tensors only under TRITON_INTERPRET=1"
    return ""


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
    found = {"": "auto"}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        stem, _, backend = part.rpartition("=")
        known = not stem or (stem.isidentifier() and (Path(__file__).parent / "reference" / f"{stem}.py").is_file())
        if backend not in BACKENDS or not known:
            raise ValueError(
                f"{VARIABLE}: expected auto, reference, triton, cuda or cpu, then op=backend pairs, got {part!r}; "
                "write for example auto,branch_attention=reference"
            )
        found[stem] = backend
    return found


AUTOMATIC = _parse("")
_overrides = _parse(os.environ.get(VARIABLE, "")) if os.environ.get(VARIABLE) else AUTOMATIC


def _dispatch(name: str, stem: str, reference: Callable, own: list[str], device: str) -> Callable:
    """The callable that runs the chosen implementation."""
    if not own:
        return reference
    quick = getattr(cpu, name) if "cpu" in own else None

    def run(*arguments: Any) -> Any:
        if device == "cpu" and _overrides is AUTOMATIC:  # every call of a small model's step comes here
            out = quick(*arguments) if quick else NotImplemented
            return reference(*arguments) if out is NotImplemented else out
        first, reason = chosen(stem, device)
        wanted = _overrides.get(stem, _overrides[""])
        if first == "reference":
            if device == "cuda" and wanted != "reference" and set(own) & set(_TRIED[wanted, device]):
                _warn_once(name, reason)
            return reference(*arguments)
        tried = _TRIED[wanted, device]
        for kind in tried[tried.index(first) :]:
            if kind not in own or (kind != first and _why_not(kind, device)):
                continue
            with _on_device_of(arguments, device):
                out = getattr(_module(kind, stem), name)(*arguments)
            if out is not NotImplemented:
                return out
        if wanted == first and first in own:
            raise ValueError(
                f"{name}: expected arguments that the {wanted} kernel takes, got others (dtype or sizes); "
                f"set {VARIABLE}=auto or {VARIABLE}=auto,{stem}=reference"
            )
        return reference(*arguments)

    run.__name__ = name
    return run


def _warn_once(name: str, reason: str) -> None:
    """Say, the first time in a process, that no kernel can be launched on its CUDA tensors."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{name}: expected a kernel that can be launched on CUDA tensors, got none ({reason}); plain PyTorch runs "
            "instead, pip install 'futurebridge[gpu]' or see `python -m fb_kernels.env`",
            RuntimeWarning,
        )


_warned = False


@cache
def _module(kind: str, stem: str) -> Any:
    return {"cuda": cuda, "cpu": cpu}.get(kind) or import_module(f"fb_kernels.triton.{stem}")


def _on_device_of(arguments: tuple, device: str) -> Any:
    """Triton launches on the current device: make it that of the arguments."""
    if device == "cpu":
        return nullcontext()
    index = next(argument.device.index for argument in arguments if isinstance(argument, Tensor))
    return nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)


def _without_autocast(run: Callable, device: str) -> Callable:
    """The implementation with its own precision: autocast would silently lower the products inside."""

    def plain(*arguments: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return run(*arguments)
        with torch.autocast(device, enabled=False):
            return run(*arguments)

    plain.__name__ = run.__name__
    return plain
