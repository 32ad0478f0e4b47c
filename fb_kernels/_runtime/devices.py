"""Files about a device: the launches measured on it, and the kernels that were wrong on it.

The package may have a file of a device, `fb_kernels/tuned/<device>.json`, and so may the user, whose entries take
precedence: `<device>.json` in the folder that FB_KERNELS_DEVICES names, else in ~/.cache/futurebridge.
`benchmarks.gpu.tune` writes the launches, `python -m fb_kernels.env --check` the kernels that are switched off:

    {"launches": {"swiglu/bfloat16/2048": {"BLOCK": 1024, "num_warps": 4}}, "off": {"swiglu/triton": "error 0.3"}}
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fb_kernels._runtime import PACKAGE

Launches = Mapping[str, dict[str, int]]

VARIABLE = "FB_KERNELS_DEVICES"


def file_name(device: str) -> str:
    """The name of a device's files and folders: its first word with a digit, "h200" of "NVIDIA H200", or nothing."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return next((word for word in words if any(map(str.isdigit, word))), "-".join(words))


def folder() -> Path:
    """The folder of the user's files."""
    return Path(os.environ.get(VARIABLE) or os.path.expanduser("~/.cache/futurebridge"))


@cache
def launches(device: str) -> Launches:
    """{op/dtype/bucket: launch} measured on a device."""
    return {key: value for content in _contents(device) for key, value in content["launches"].items()}


@cache
def off(device: str, kind: str) -> Mapping[str, str]:
    """{op: why} of the kernels of a kind that were wrong on a device."""
    reasons = {key: why for content in _contents(device) for key, why in content["off"].items()}
    return {key.removesuffix(f"/{kind}"): why for key, why in reasons.items() if key.endswith(f"/{kind}")}


def forget() -> None:
    """Read the files again when they are next needed."""
    launches.cache_clear()
    off.cache_clear()


def write(
    directory: Path,
    device: str,
    about: Mapping[str, Any],
    *,
    launches: Launches | None = None,
    off: Mapping[str, str] | None = None,
) -> Path:
    """Replace all launches, or all that is switched off, in `<directory>/<device>.json`; None keeps what it has.

    `off` is {op/kind: why}; `about` are further entries, about the machine that measured. The directory is made if it
    is missing.

    Raises:
        ValueError: an existing file with other contents than these.
    """
    path = directory / f"{device}.json"
    before = _parsed(path.read_text(encoding="utf-8"), path) if path.exists() else {"launches": {}, "off": {}}
    parts = {
        "launches": before["launches"] if launches is None else launches,
        "off": before["off"] if off is None else off,
    }
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    content = {**about, **{name: dict(sorted(part.items())) for name, part in parts.items()}}
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    forget()
    return path


def _contents(device: str) -> list[dict[str, Any]]:
    """The package's file and the user's, those that exist."""
    own, users = (where / f"{device}.json" for where in (resources.files(f"{PACKAGE}.tuned"), folder()))
    contents = [_parsed(own.read_text(encoding="utf-8"), own)] if own.is_file() else []
    try:
        return [*contents, _parsed(users.read_text(encoding="utf-8"), users)] if users.is_file() else contents
    except (OSError, ValueError) as problem:
        warnings.warn(f"{problem}; until then nothing of it is used ({users})", RuntimeWarning)
        return contents


def _parsed(text: str, file: object) -> dict[str, Any]:
    """The "launches" and "off" of a file's text."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        raise _unreadable(file, "JSON", str(problem)) from problem
    if not isinstance(content, dict):
        raise _unreadable(file, "an object", type(content).__name__)
    parts = {name: content.get(name, {}) for name in ("launches", "off")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise _unreadable(file, f"an object as {name}", type(part).__name__)
    for key, launch in parts["launches"].items():
        if not (isinstance(launch, dict) and launch and all(type(value) is int for value in launch.values())):
            raise _unreadable(file, f"an object of whole numbers as launch {key}", json.dumps(launch))
    for key, why in parts["off"].items():
        if not (re.fullmatch(r"\w+/\w+", key) and isinstance(why, str)):
            raise _unreadable(file, "op/kernel and a reason as what is off", json.dumps({key: why}))
    return parts


def _unreadable(file: object, expected: str, got: str) -> ValueError:
    return ValueError(f"{file}: expected {expected}, got {got}; delete the file and write it anew")
