"""Kernels on the CPU: Triton's interpreter, made strict, and a fixture that makes ops take it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import emulation
import pytest
import torch

from fb_kernels._runtime import backend, cuda

if os.environ["TRITON_INTERPRET"] == "1":
    import interpreter

    interpreter.refuse_bfloat16()


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """Every op that has a Triton kernel runs it, and refuses arguments that it was not made for."""
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("kernels run on a GPU here: see tests/gpu")
    with backend.override("triton"):
        yield


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every op that has a compiled kernel runs it, emulated on the host, and refuses arguments not made for it."""

    if not torch.cuda.is_available():
        monkeypatch.setattr(cuda, "library", emulation.library)
        monkeypatch.setattr(cuda, "why_not", lambda device: cuda._why_not(emulation.library(), device))
    with backend.override("cuda"):
        yield
