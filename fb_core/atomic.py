"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import errno
import os
import platform
from contextlib import suppress
from pathlib import Path

PART = ".part"  # ends the name of a file that is being written


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
