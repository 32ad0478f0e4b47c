"""Launch configurations: pure, and a device's measured ones before the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fb_kernels._runtime import devices, tuning


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of measured configurations, read as the user's."""
    monkeypatch.setenv(devices.VARIABLE, str(tmp_path))
    devices.forget()
    yield tmp_path
    devices.forget()


def test_measured_before_default(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"BLOCK": 512, "num_warps": 2}
    other = {"BLOCK": 512, "num_warps": 2, "REPEAT": 3}  # of a version whose kernel took other parameters
    launches = {"swiglu/bfloat16/2048": launch, "swiglu/bfloat16/1024": other}
    (tuned / "h200.json").write_text(json.dumps({"launches": launches}))
    monkeypatch.setattr(tuning, "_device", lambda: "h200")
    assert tuning.swiglu(torch.bfloat16, 6144) == launch
    assert tuning.swiglu(torch.bfloat16, 1000) == {"BLOCK": 1024, "num_warps": 4}
    assert tuning.swiglu(torch.bfloat16, 100) != launch
    assert tuning.swiglu(torch.float16, 6144) != launch
    monkeypatch.setattr(tuning, "_device", lambda: "a100")
    assert tuning.swiglu(torch.bfloat16, 6144) != launch


@pytest.mark.parametrize("width", [0, 1, 7, 8, 2048, 2049, 100_000])
def test_pure_and_within_bounds(width: int) -> None:
    launch = tuning.swiglu(torch.bfloat16, width)
    assert launch == tuning.swiglu(torch.bfloat16, width)
    assert 1 <= launch["BLOCK"] <= 2048
    assert launch["num_warps"] in (1, 2, 4, 8)


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_2(n: int, power: int) -> None:
    assert tuning.next_power_of_2(n) == power
