"""Launch configurations: a pure function of dtype and shape bucket, never searched at run time.

Each op has one function here. It returns the keyword arguments of its kernel's launch (block sizes, `num_warps`,
`num_stages`): the ones measured on this device, from `tuned/<device>.json`, or else the defaults written down here.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import torch

Launch = dict[str, int]


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is n or more, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def swiglu(dtype: torch.dtype, width: int) -> Launch:
    """For `width` columns of the result."""
    block = min(next_power_of_2(width), 2048)
    return _tuned("swiglu", dtype, (block,), {"BLOCK": block, "num_warps": 4 if block <= 1024 else 8})


def _tuned(op: str, dtype: torch.dtype, bucket: tuple[int | str, ...], default: Launch) -> Launch:
    """The measured configuration of a bucket on the current device, else the default."""
    name = f"{op}/{str(dtype).removeprefix('torch.')}/{'x'.join(map(str, bucket))}"
    return _measured(_device()).get(name, default)


@cache
def _device() -> str:
    """Name of the current GPU, lower case; empty without one."""
    return torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""


@cache
def _measured(device: str) -> dict[str, Launch]:
    """{op/dtype/bucket: launch} from the file whose name is part of the device's; empty where none is."""
    for file in sorted(resources.files("fb_kernels.tuned").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json") and file.name.removesuffix(".json") in device:
            return json.loads(file.read_text(encoding="utf-8"))["launches"]
    return {}
