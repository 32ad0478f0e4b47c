"""Which ops are compiled ahead of time, and in which calls: those of their `calls.py`, or of a file here.

A file here has the calls of an op whose launches come in several forms, or whose products are predicted tile by tile.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import benchmarks.gpu.aot
import fb_kernels
from benchmarks.gpu.aot.compiler import Case, Cost
from fb_kernels import calls
from fb_kernels._runtime import precision
from fb_kernels._runtime.backend import flat
from fb_kernels._runtime.op import Op
from fb_kernels.calls import Call, Calls

OWN = {module.name for module in pkgutil.iter_modules(benchmarks.gpu.aot.__path__)}
OWN -= {"calls", "compiler", "executed", "measured", "__main__"}


def ops() -> list[str]:
    """All ops that are compiled."""
    folders = [path.parent.name for path in Path(fb_kernels.__file__).parent.glob("*/triton.py")]
    own = {op for op in folders if op in calls.every() and any(map(compiled, calls.every()[op]))}
    return sorted(OWN | own)


def cases(op: str) -> Iterable[Case]:
    """The launches of an op."""
    if op in OWN:
        return import_module(f"benchmarks.gpu.aot.{op}").cases()
    return [case(op, call) for function in calls.every()[op] for call in compiled(function)]


def compiled(function: Calls) -> list[Call]:
    """The calls of a public function, without numbers."""
    with torch.device("meta"):
        return list(function.compiled() if function.compiled else [function.shaped().cast(torch.bfloat16)])


def case(op: str, call: Call) -> Case:
    """A call and, where it has one, its gradient, as Triton runs them; a linear layer as in batch-invariant mode."""

    def launch() -> None:
        with mock.patch.object(Op, "__call__", by_triton), mock.patch.object(precision, "INVARIANT", True):
            leaves = {name: call.tensors[name].detach().requires_grad_() for name in call.gradients}
            results = call.run(**leaves)
            if leaves:
                carriers = [results[place] for place in call.outputs]
                torch.autograd.grad(carriers, list(leaves.values()), [torch.empty_like(x) for x in carriers])

    return Case(op, call.shape, launch, {name: Cost(moved) for name, moved in call.launches.items()})


def by_triton(op: Op, *arguments: Any) -> Any:
    """What an operator's launcher returns for tensors without numbers, with the operator's gradient."""
    launcher, arguments = getattr(import_module(f"fb_kernels.{op.stem}.triton"), op.name), tuple(flat(arguments))
    if op._function is None or not torch.is_grad_enabled():
        return op._packed(launcher)(*arguments)
    forward = staticmethod(lambda *given: op._packed(launcher)(*given))  # `apply` would add the launcher's own defaults
    function: type[torch.autograd.Function] = type(op.name, (op._function,), {"forward": forward})
    return function.apply(*arguments)
