"""The pretrained model of tests/real, behind vLLM too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.servers.live_server import VLLM, VLLM_COMMAND
from tests.real.conftest import folder, gguf_file, large, small, tokenizer  # noqa: F401

KEY = "sk-0123456789"


@pytest.fixture(scope="session")
def vllm(folder: Path) -> Iterator[VLLM]:  # noqa: F811
    """The server; a test that kills it starts it again."""
    if not VLLM_COMMAND.is_file():
        pytest.skip(f"needs vLLM at {VLLM_COMMAND}; make test-servers installs it")
    with VLLM(folder, KEY) as live:
        yield live
