"""What every floor uses: counts checked, extras required, files written whole, text made harmless for a terminal."""

from __future__ import annotations

import errno
import os
import platform
import stat
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from typing import Any

LARGEST = (1 << 63) - 1  # what 64 bits hold
RUN = ("accelerate", "jinja2", "math_verify", "matplotlib", "pyarrow", "rich", "typer", "yaml")  # of the extra [run]
PART = ".part"  # ends the name of a file that is being written
IN_TOKEN = {" ": "␣", "\n": "↵", "\t": "⇥"}
IN_TEXT = {"\n": "\n", "\t": "\t"}


def check_count(
    name: str, count: Any, least: int, remedy: str = "leave it out for the default", bound: str = "{} or more"
) -> int:
    """The count as a plain int, if it is one of `least` or more that 64 bits hold; ValueError with the remedy if not.

    `bound` are the error's words for the smallest count.
    """
    huge = isinstance(count, int) and abs(count) > LARGEST
    if huge or not isinstance(count, Integral) or isinstance(count, bool) or count < least:
        expected = bound.format(least) + ", within 64 bits" * huge
        got = f"an int of {count.bit_length()} bits" if huge else f"{count!r:.80}"
        raise ValueError(f"{name}: expected {expected}, got {got}; {remedy}")
    return int(count)


def require(what: str, *packages: str, extra: str = "run") -> None:
    """ImportError, which names `what` needs them, if packages of an extra are not installed; nothing is imported."""
    if absent := [package for package in packages if find_spec(package) is None]:
        raise ImportError(
            f"{what}: expected the extra [{extra}] to be installed, got no {', '.join(absent)}; "
            f"pip install '.[{extra}]' in the clone"
        )


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, or a folder, a device or a pipe, which may have no end.
    """
    flag = getattr(os, "O_NONBLOCK", 0)  # not to wait for a writer
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | flag)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data


def write_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it.

    Raises:
        OSError: it cannot be written, for example because the disk is full; what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}{PART}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink()
        remedy = "make room" if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "fix that"
        got = f"{path}: expected to write {len(data)} bytes, got: {problem.strerror}"
        raise OSError(problem.errno, f"{got}; {remedy} and do it again, what is finished is kept") from problem
    with suppress(OSError):  # not every file system can sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def escaped(text: str, shown: Mapping[str, str] = {}) -> str:
    """Text without terminal control: characters in `shown` are replaced by it, other unprintable ones escaped."""
    return "".join(
        shown.get(char) or (char if char.isprintable() else char.encode("unicode_escape").decode()) for char in text
    )
