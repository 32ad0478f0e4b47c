"""What every test runs under: one thread, no network, kernels interpreted where there is no GPU."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

HAS_CUDA = torch.cuda.is_available()
os.environ.setdefault("TRITON_INTERPRET", "0" if HAS_CUDA else "1")  # read when a kernel's module is imported
torch.set_num_threads(1)

settings.register_profile(
    "futurebridge",
    deadline=None,
    max_examples=25,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("futurebridge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def generator() -> torch.Generator:
    """A random source that starts the same in every test."""
    return torch.Generator().manual_seed(0)
