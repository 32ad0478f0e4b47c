"""What every test runs under: one thread, no network, kernels interpreted where there is no GPU."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FB_KERNELS_DEVICES"] = os.devnull  # no file lies in it

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

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
settings.register_profile(
    "many", settings.get_profile("futurebridge"), max_examples=200, derandomize=False, database=None
)
settings.load_profile("futurebridge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if settings.get_current_profile_name() == "many" and is_hypothesis_test(item.obj):
            own = item.obj._hypothesis_internal_use_settings
            item.obj._hypothesis_internal_use_settings = settings(own, max_examples=settings.default.max_examples)


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # what draws without a generator of its own draws the same whatever ran before


@pytest.fixture
def generator() -> torch.Generator:
    """A random source that starts the same in every test."""
    return torch.Generator().manual_seed(0)
