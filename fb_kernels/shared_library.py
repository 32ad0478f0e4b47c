"""Opens a plain C library of `csrc/` and types its functions; a fault is returned as text, not raised."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "q": ctypes.c_int64, "f": ctypes.c_float}
"""Letters of a signature: p pointer, i int, q int64, f float."""


def kinds(signature: str) -> list[type]:
    """The C types of a signature's letters; spaces only group them."""
    return [KINDS[letter] for letter in signature.replace(" ", "")]


def opened(path: Path, prefix: str, version: int, signatures: Mapping[str, str]) -> ctypes.CDLL | str:
    """The library with `<prefix><name>` typed for every name, or a short reason why it cannot be used."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        return f"cannot be loaded: {problem}"
    names = [f"{prefix}{name}" for name in signatures]
    if not all(hasattr(library, name) for name in (f"{prefix}abi_version", *names)):
        return "built from other sources: install it anew"
    built = getattr(library, f"{prefix}abi_version")()
    if built != version:
        return f"built from other sources, for interface {built} instead of {version}: install it anew"
    for name, signature in zip(names, signatures.values(), strict=True):
        getattr(library, name).argtypes = kinds(signature)
    return library
