"""What every test on a GPU begins with: the kernels that it is meant for are there."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import run_their_kernels

from fb_kernels import calls


@pytest.fixture(autouse=True)
def kernels_run(request: pytest.FixtureRequest) -> None:
    """The kernel of the file's op, or those of all ops where it is of none: one that is absent is no pass."""
    op = request.path.stem.removeprefix("test_").removesuffix("_gpu")
    run_their_kernels([op] if op in calls.every() else list(calls.every()), torch.cuda.get_device_capability())
