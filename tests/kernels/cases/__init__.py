"""Every public op, declared in a file of its own or by its `calls.py`, with some calls that are always the same."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module

from cases.base import Case, Op, described
from fb_kernels import calls

_MODULES = [import_module(f"cases.{module.name}") for module in pkgutil.iter_modules(__path__)]
OPS: dict[str, Op] = {op.name: op for module in _MODULES for op in vars(module).values() if isinstance(op, Op)}
_EXAMPLES: dict[str, Callable[[], Case]] = {
    name: make for module in _MODULES for name, make in getattr(module, "EXAMPLES", {}).items()
}
for _name, (_folder, _function) in calls.by_name().items():
    if _name not in OPS:
        OPS[_name] = described(_folder, _function)
    _EXAMPLES.setdefault(_name, lambda function=_function: next(iter(function.at("small"))))
NAMES = tuple(_EXAMPLES)


def case(name: str) -> Case:
    """The call of a name, with tensors of its own."""
    return _EXAMPLES[name]()
