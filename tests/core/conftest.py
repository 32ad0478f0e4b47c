"""The demo's pair behind a server, for all files that ask one; it starts once."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def server() -> Any:
    from serving import Server

    running = Server()
    yield running
    running.end()


@pytest.fixture(scope="session")
def pair() -> Any:
    from fb_core.apps.demo.pairs import load_pair

    return load_pair("plans")


@pytest.fixture(scope="session")
def problems(pair: Any) -> Any:
    return pair.world.problems(12, 3, "validation")


@pytest.fixture(scope="session")
def expected(pair: Any, problems: Any) -> Any:
    """What the server answers to the problems."""
    from serving import THRESHOLD

    from fb_core import LLMPreference, LowLatencyDecoder, RequestPolicy

    settings = {"max_length": 256, "tokenizer": pair.world.tokenizer}
    decoder = LowLatencyDecoder(pair.slm, pair.llm, LLMPreference(), RequestPolicy(THRESHOLD), **settings)
    return [decoder.generate(list(problem.prompt_ids), 60) for problem in problems]


@pytest.fixture(scope="session")
def forks() -> Any:
    from forked_workers import Forks

    made = Forks()
    yield made
    made.end()


@pytest.fixture
def quick_workers(forks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier's workers are forked, with math-verify imported."""
    monkeypatch.setattr("fb_core.verify.verifier.subprocess", forks)
