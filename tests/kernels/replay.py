"""`replay.py LIBRARY FILE`: run launches of compiled kernels as they were recorded, in a process without torch.

A line of the file is a launch: its function, arguments, and the memory before it and after. `test_races.py` writes it.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path

STREAMS = (0, 1)  # 1 stands for one that captures: the launch is replayed, with counters of its own
LINE = 64  # bytes to which memory is aligned


def replay(library: ctypes.CDLL, launch: dict) -> None:
    """Run it, alone and in a graph; it is an error if it leaves another result than it left before."""
    memory = [ctypes.create_string_buffer(len(before) // 2 + LINE) for before in launch["before"]]
    starts = [ctypes.addressof(held) // LINE * LINE + LINE for held in memory]
    values = [starts[value[0]] + value[1] if isinstance(value, list) else value for value in launch["values"]]
    library.fb_emulate_multiprocessors(launch["multiprocessors"])

    @ctypes.CFUNCTYPE(None)
    def restore() -> None:
        for start, before in zip(starts, launch["before"], strict=True):
            ctypes.memmove(start, bytes.fromhex(before), len(before) // 2)

    library.fb_emulate_replay(restore)
    for stream in STREAMS:
        restore()
        code = getattr(library, launch["function"])(struct.pack(launch["letters"], *values, stream))
        assert code == 0, f"error {code}"
        for start, after in zip(starts, launch["after"], strict=True):
            assert after is None or ctypes.string_at(start, len(after) // 2).hex() == after, "another result"


if __name__ == "__main__":
    for line in Path(sys.argv[2]).read_text().splitlines():
        replay(ctypes.CDLL(sys.argv[1]), json.loads(line))
