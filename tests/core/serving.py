"""`futurebridge serve` as a process of its own, and the same service in a test's process."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from limits import HANG
from warm import start_futurebridge

from fb_core.apps.serve.service import Service
from fb_core.apps.settings.pair import ServeSettings
from fb_core.decode.engine import Engine

MODEL, THRESHOLD = "demo:plans", 0.6


def options(**settings: Any) -> list[str]:
    """The command's options for settings."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Server:
    """The process: the demo's pair, or another small model with the options that it needs."""

    def __init__(self, *more: str, slm: Any = None, fresh: bool = False, **settings: Any) -> None:
        own = {} if slm else {"llm": MODEL, "threshold": THRESHOLD, "max_length": 256}
        given = options(slm=slm or MODEL, **own | settings)
        self._folder = tempfile.TemporaryDirectory()
        command, folder = ["serve", "--port", "0", *given, *more], Path(self._folder.name)
        self.process = start_futurebridge(command, folder, fresh=fresh, **os.environ)
        self._fresh = fresh
        atexit.register(self.process.kill)  # before multiprocessing would wait for it
        until(lambda: self._said("stdout") or not self.process.is_alive())
        found = re.search(r"at (http://\S+)/v1", self._said("stdout"))
        assert found, self._said("stderr")
        self.url = found[1]

    def client(self, kind: Any = openai.OpenAI, **options: Any) -> Any:
        return kind(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def end(self, how: int = signal.SIGTERM) -> tuple[int | None, list[dict[str, Any]]]:
        """Its exit status and what it logged."""
        os.kill(self.process.pid, how)
        self.process.join(60)
        logged = self._said("stderr")
        self._folder.cleanup()
        assert not self._fresh or "Loading weights" not in logged  # a progress bar is for a terminal
        lines = [json.loads(line) for line in logged.splitlines() if line.startswith("{")]
        return self.process.exitcode, lines

    def _said(self, stream: str) -> str:
        path = Path(self._folder.name) / stream
        return path.read_text(encoding="utf-8") if path.exists() else ""


def service_of(engine: Engine, tokenizer: Any, **settings: Any) -> Service:
    """A service over an engine, under the demo's name."""
    return Service(engine, tokenizer, ServeSettings(**{"slm": MODEL, "llm": MODEL, "max_length": 256} | settings))


def until(condition: Callable[[], Any]) -> None:
    """Wait for it."""
    stop = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.01)
