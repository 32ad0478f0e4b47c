"""Opens a plain C library of `csrc/`, whose functions say what they take; a fault is returned as text, not raised."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

LETTERS = {"int": "i", "int64_t": "q", "double": "d"}  # of `struct`; a pointer is P


def fields(text: str) -> dict[str, str]:
    """{name: letter} of the fields of a C struct, in order."""
    letters = {}
    for declaration in filter(None, map(str.strip, text.split(";"))):
        kind, names = declaration.removeprefix("const ").split(maxsplit=1)
        for name in names.split(","):
            letters[re.findall(r"\w+", name)[-1]] = "P" if "*" in kind + name else LETTERS[kind]
    return letters


def opened(path: Path, prefix: str, version: int, names: Iterable[str]) -> ctypes.CDLL | str:
    """The library, or a short reason why it cannot be used.

    Each `<prefix><name>` takes the fields of its struct by name: numbers, and addresses of which 0 is none.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        return f"cannot be loaded: {problem}"
    functions = [f"{prefix}{name}" for name in names]
    if not all(hasattr(library, name) for name in (f"{prefix}abi_version", *functions)):
        return "built from other sources: install it anew"
    built = getattr(library, f"{prefix}abi_version")()
    if built != version:
        return f"built from other sources, for interface {built} instead of {version}: install it anew"
    for name in functions:
        takes, size = getattr(library, f"{name}_takes"), ctypes.c_int64()
        takes.restype = ctypes.c_char_p
        letters = fields(takes(ctypes.byref(size)).decode())
        packed = struct.Struct("".join(letters.values()) + "0q")
        if packed.size != size.value:
            return f"{name} takes {size.value} bytes instead of {packed.size}: install it anew"
        setattr(library, name, _by_name(getattr(library, name), packed, tuple(letters)))
    return library


def _by_name(function: Any, packed: struct.Struct, names: tuple[str, ...]) -> Callable[..., int]:
    """A function that is called in every op: no more is checked than that no name is missing."""
    function.restype = ctypes.c_int64
    pack, in_order = packed.pack, itemgetter(*names)

    def call(**arguments: float) -> int:
        return function(pack(*in_order(arguments)))

    return call
