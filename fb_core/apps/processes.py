"""Worker processes on this machine."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context, parent_process

FORKS = "forkserver" in get_all_start_methods()


def import_ahead(module: str) -> None:
    """Begin to import a module where `processes` will fork from, while this process goes on."""
    if FORKS:
        from multiprocessing import forkserver

        get_context("forkserver").set_forkserver_preload([module])
        forkserver.ensure_running()


def processes(workers: int | None, module: str) -> ProcessPoolExecutor:
    """A pool of one-threaded processes that end with this one; forked, if possible, from one that has this module."""
    context = get_context("forkserver" if FORKS else "spawn")
    context.set_forkserver_preload([module])
    return ProcessPoolExecutor(workers, context, begin)


def begin() -> None:
    """Set up a worker process: one thread, and it exits when its parent process does."""
    import torch

    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
