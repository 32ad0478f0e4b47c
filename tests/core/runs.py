"""Small runs on the demo's pair, in processes of their own that can be killed at chosen moments."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from limits import HANG
from warm import context

from fb_core.apps.settings.run import RunSettings

SMALL = {
    "models": {"slm": "demo:plans", "llm": "demo:plans"},
    "problems": {
        "train": "demo:plans",
        "held_out": [],
        "limit": 48,
        "validation": 12,
        "prompt": "{problem}",
        "per_shard": 6,
    },
    "collect": {"max_new_tokens": 45, "quantile": 0.9, "slm_k": 3},
    "futures": {"max_new_tokens": 45, "llm_k": 3},
    "score": {"horizon": 8},
    "rollouts": {"train": 0.5},
    "train": {
        "horizons": [8],
        "seeds": [0, 1],
        "epochs": 2,
        "rank": 4,
        "groups_per_step": 16,
        "microbatches": 2,
        "checkpoint_steps": 1,
        "learning_rate": 0.002,
    },
    "evaluate": {"benchmarks": ["demo:plans"], "limit": 9, "max_new_tokens": 45, "per_shard": 3},
    "verify": {"workers": 1},
}
TIMES = ("cost", "seconds", "made_by", "sha256")  # what may differ between two runs


def settings(**changes: Any) -> RunSettings:
    """`SMALL` with whole sections or parts of them changed."""
    values = {name: {**SMALL.get(name, {}), **changes.get(name, {})} for name in (*SMALL, *changes)}
    return RunSettings.model_validate(values)


def work(command: str, values: str, run: str, dies: int | None, seed: int, started: Any = None) -> None:
    """One command in this process, which dies inside its write number `dies`."""
    import torch

    from fb_core.apps.pipeline.commands import run_command

    torch.set_num_threads(1)
    if dies is not None:
        _die_in_write(dies, random.Random(seed))
    if started is not None:
        started.set()
    run_command(command, RunSettings.model_validate_json(values), Path(run), show=lambda text: None)  # type: ignore[arg-type]


def _die_in_write(number: int, random: random.Random) -> None:
    """SIGKILL to this very process inside a write: half the bytes there, or all but the name, or just the name."""
    from fb_core import _util

    sync, replace, left = os.fsync, os.replace, [number]
    moment = random.choice(["half", "unnamed", "named"])

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fsync(file: int) -> None:
        size = os.fstat(file).st_size
        if not os.get_blocking(file) or os.path.isdir(f"/proc/self/fd/{file}"):
            return sync(file)
        left[0] -= 1
        if left[0] == 0 and moment == "half":
            os.ftruncate(file, random.randrange(size + 1))
            end()
        return sync(file)

    def rename(source: Any, target: Any) -> None:
        if left[0] == 0 and moment == "unnamed":
            end()
        replace(source, target)
        if left[0] == 0:
            end()

    _util.os = type("os", (), {**vars(os), "fsync": staticmethod(fsync), "replace": staticmethod(rename)})  # type: ignore[attr-defined]


def start(command: str, chosen: RunSettings, run: Path, *, dies: int | None = None, seed: int = 0) -> Any:
    """A process that is at work on a command."""
    made = context()
    started = made.Event()
    process = made.Process(target=work, args=(command, chosen.model_dump_json(), str(run), dies, seed, started))
    process.start()
    assert started.wait(HANG)
    return process


def finish(command: str, chosen: RunSettings, run: Path) -> float:
    """Seconds that a command took in a process of its own."""
    process, began = start(command, chosen, run), time.monotonic()
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - began


def contents(run: Path) -> dict[str, str]:
    """Hash of every file of a run, wall times and versions left out."""
    hashes = {}
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.name != ".lock":
            data = path.read_bytes()
            if path.suffix in (".json", ".jsonl"):
                rows = (
                    [json.loads(line) for line in data.splitlines()] if path.suffix == ".jsonl" else [json.loads(data)]
                )
                for row in rows:
                    for name in TIMES:
                        row.pop(name, None)
                    if "evaluation" in path.parts:  # its rows hold wall times
                        row.pop("digest", None)
                        row.pop("files", None)
                data = json.dumps(rows, sort_keys=True).encode()
            hashes[str(path.relative_to(run))] = hashlib.sha256(data).hexdigest()
    return hashes


def receipts(run: Path) -> dict[str, int]:
    """When each finished shard was written."""
    return {
        str(path.relative_to(run)): path.stat().st_mtime_ns
        for path in run.rglob("*.json")
        if path.name != "manifest.json" and b'"files"' in path.read_bytes()
    }


def linked(run: Path, folder: Path, *stages: str) -> Path:
    """A folder for a run of other settings over some finished stages of another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        (folder / stage).symlink_to(run / stage, target_is_directory=True)
    return folder


def children_of(process: int) -> set[int]:
    """The processes that one has started."""
    children = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            children.add(int(path.parent.name))
    return children


def ended(process: int) -> bool:
    """Whether a process is gone, or dead and not yet asked after."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
