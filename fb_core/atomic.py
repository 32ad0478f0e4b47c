"""Files that are written whole or not at all, also after a power cut, and read within bounds."""

from __future__ import annotations

import errno
import os
import platform
import stat
from contextlib import suppress
from pathlib import Path

PART = ".part"  # ends the name of a file that is being written


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
