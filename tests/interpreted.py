"""Triton's interpreter without what it repeats: it wraps the whole language anew at each call of a device function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

TYPES: dict[str, Any] = {}  # NumPy's, by Triton's name of an element


def quicken() -> None:
    """Wrap the language once a launch, and look up NumPy's types; results are the same."""
    wrap, type_of = interpreter._patch_lang, interpreter._get_np_dtype

    def wrap_all(_: object) -> Any:
        return wrap(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # as kernels and the library see it

    def found(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in TYPES:
            TYPES[name] = type_of(kind)
        return TYPES[name]

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return self.rewrite()(*arguments, **named)
        except Exception as problem:
            raise interpreter.InterpreterError(repr(problem)) from problem

    interpreter._patch_lang, interpreter._get_np_dtype = wrap_all, found
    interpreter.InterpretedFunction.__call__ = call
