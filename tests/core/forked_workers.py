"""The verifier's workers, forked from a process that has imported math-verify: each starts at once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any


def serve(place: str) -> None:
    """Fork a worker at every connection: its command and pipes come in, its id and wait status go out."""
    from fb_core.verify.judges import Boxed

    Boxed().compare("\\boxed{x=\\frac{1}{2}}", "0.5")  # imports; `quicken` is left to the worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(64)
        print("ready", flush=True)
        while 0 not in select.select([listening, 0], [], [])[0]:  # until the tests have ended
            connection, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                supervise(connection)
            connection.close()


def supervise(connection: socket.socket) -> None:
    """Fork the worker, tell how it ends, and end."""
    data, pipes, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    arguments, folder = json.loads(data)
    worker = os.fork()
    if worker == 0:
        os.setsid()
        connection.close()
        for target, pipe in enumerate(pipes):
            os.dup2(pipe, target)
            os.close(pipe)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.chdir(folder)
        sys.argv = ["-c", *arguments[1:]]
        try:
            exec(arguments[0], {})
        finally:
            os._exit(0)
    for pipe in pipes:
        os.close(pipe)
    with contextlib.suppress(OSError):
        connection.sendall(f"{worker}\n".encode())
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


class Forks:
    """Stands for `subprocess` in the verifier."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def __init__(self) -> None:
        self.place = os.path.join(tempfile.mkdtemp(), "workers")
        command = [sys.executable, "-c", f"from forked_workers import serve; serve({self.place!r})"]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(command, env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def Popen(self, command: list[str], **_: Any) -> Any:
        """A worker, as `subprocess.Popen` would have started it."""
        return Forked(self.place, command[2:])

    def end(self) -> None:
        self.process.communicate()


class Forked(contextlib.AbstractContextManager["Forked"]):
    """One worker."""

    def __init__(self, place: str, arguments: list[str]) -> None:
        requests, self.stdin = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        self.stdout, replies = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(place)
        with requests, replies:
            data = json.dumps([arguments, os.getcwd()]).encode()
            socket.send_fds(self._connection, [data], [requests.fileno(), replies.fileno()])
            self._said = self._connection.makefile("rb", buffering=0)  # no byte of what `poll` peeks at
            self.pid = int(self._said.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            if self.returncode is None and self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._said.readline() or -9)  # a fork has read it
            self._connection.close()
            self._said.close()
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.wait()
