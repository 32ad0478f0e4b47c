"""How far work is: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn


class Board:
    """Progress bars, one per name; `columns` stand after each bar and its words, and a transient board disappears."""

    def __init__(self, *columns: ProgressColumn, transient: bool = False) -> None:
        self._terminal = sys.stdout.isatty()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            *columns,
            TextColumn("{task.fields[words]}"),
            console=Console(file=sys.stdout),  # stdout as it is now, even if it is redirected later
            transient=transient,
            speed_estimate_period=1e9,  # steps may take hours
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> Board:
        if self._terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, name: str, done: int, of: int, words: str | None = None) -> None:
        """Move the bar of a name; the words after it stay until others are given."""
        if self._terminal:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=of, completed=done, words="")
            self._bars.update(self._tasks[name], completed=done, total=of)
            if words is not None:
                self._bars.update(self._tasks[name], words=words)

    def say(self, name: str, text: str, *, always: bool = False) -> None:
        """Print a line, but not if the name's last text was the same; on a terminal only with `always`."""
        if self._terminal and always:
            self._bars.console.print(f"{name}: {text}", markup=False)
        elif not self._terminal and self._said.get(name) != text:
            print(f"{name}: {text}", flush=True)
        self._said[name] = text
