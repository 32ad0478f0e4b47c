"""Processes forked from one that has imported the models' libraries and the stages: they start at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from limits import HANG

IMPORTED = ["warm", "fb_core.apps.cli.main", "fb_core.apps.cli.chat", "fb_core.apps.demo.pairs", "benchmarks.paper.run"]
IMPORTED += ["transformers.models.qwen3.modeling_qwen3", "peft.utils.transformers_weight_conversion"]
IMPORTED += ["pandas", "pyarrow.pandas_compat"]  # which pyarrow imports where pandas is installed


def context() -> ForkServerContext:
    """For processes that are forked from the one that has imported everything."""
    made = get_context("forkserver")
    made.set_forkserver_preload(IMPORTED)
    return made


def launched(count: int) -> list[dict[str, str]]:
    """The environment of each of some processes that shall know each other, as `torchrun` would set it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def start_futurebridge(
    arguments: Sequence[object],
    folder: Path,
    *,
    cwd: Path | None = None,
    program: str = "fb_core.__main__",
    fresh: bool = False,
    **environment: str,
) -> BaseProcess:
    """`futurebridge` or another program in a process of its own; `stdin`, `stdout` and `stderr` are in the folder.

    A fresh process imports its libraries itself.
    """
    given = [str(argument) for argument in arguments]
    made = get_context("spawn") if fresh else context()
    process: BaseProcess = made.Process(target=_command, args=(program, given, folder, cwd or Path.cwd(), environment))
    process.start()
    return process


def futurebridge(
    *arguments: object,
    typed: str | None = None,
    cwd: Path | None = None,
    program: str = "fb_core.__main__",
    fresh: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`futurebridge` with these arguments to its end, as `subprocess.run` would have it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if typed is not None:
            (folder / "stdin").write_text(typed, encoding="utf-8")
        process = start_futurebridge(arguments, folder, cwd=cwd, program=program, fresh=fresh, **environment)
        process.join(HANG)
        process.kill()  # where it hangs
        process.join()
        assert process.exitcode is not None
        out, err = ((folder / stream).read_text(encoding="utf-8") for stream in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def python(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As `python -c code`, where the libraries are imported already; at its end it does not finalise Python."""
    return futurebridge(code, program="warm", cwd=cwd)


def main() -> None:
    exec(sys.argv[1], {"__name__": "__main__"})


def _command(program: str, arguments: list[str], folder: Path, cwd: Path, environment: Mapping[str, str]) -> None:
    typed = folder / "stdin"
    for number, (path, mode) in enumerate(
        ((typed if typed.exists() else os.devnull, "r"), (folder / "stdout", "w"), (folder / "stderr", "w"))
    ):
        with open(path, mode) as file:
            os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["futurebridge", *arguments]
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
    try:
        import_module(program).main()
    except KeyboardInterrupt:  # as Python ends of it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
