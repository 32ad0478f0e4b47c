"""Every public op, declared in a file of its own, with some calls of it that are always the same."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module

from cases.base import Case, Op

_MODULES = [import_module(f"cases.{module.name}") for module in pkgutil.iter_modules(__path__)]
OPS: dict[str, Op] = {op.name: op for module in _MODULES for op in vars(module).values() if isinstance(op, Op)}
_EXAMPLES: dict[str, Callable[[], Case]] = {
    name: make for module in _MODULES for name, make in getattr(module, "EXAMPLES", {}).items()
}
NAMES = tuple(_EXAMPLES)


def case(name: str) -> Case:
    """The call of a name, with tensors of its own."""
    return _EXAMPLES[name]()
