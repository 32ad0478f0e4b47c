"""Four routes through the house: the files of fb_core that a call executes are those that CONTRIBUTING.md names."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

import fb_core
from fb_core import (
    CollaborativeDecoder,
    CompatibilityScorer,
    FutureBridgeSelector,
    RequestPolicy,
    TokenReranker,
    TrainingGroup,
    TrainingTrajectory,
    train_reranker,
)
from fb_core.apps.demo.pairs import DemoPair, load_pair
from fb_core.apps.serve.run import Server, listen, load_server
from fb_core.apps.settings.pair import ServeSettings

ROOT = Path(fb_core.__file__).parent
PAGE = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


def named(heading: str) -> list[str]:
    """The files that the page lists under a heading, in its order."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `(\S+\.py)`", section, re.M)


@contextmanager
def executed() -> Iterator[list[str]]:
    """The files whose functions run, in the order of their first call, in threads that start within too."""
    files: dict[str, None] = {}

    def note(frame: object, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(f"{ROOT}/") and code.co_name != "<module>":
            files[code.co_filename.removeprefix(f"{ROOT}/")] = None

    order: list[str] = []
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield order
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        order += files


@pytest.fixture(scope="module")
def pair() -> DemoPair:
    return load_pair("plans")


def score(pair: DemoPair) -> Callable[[], object]:
    scorer = CompatibilityScorer(pair.slm)
    return lambda: scorer.score(torch.tensor([1, 2, 3]), torch.tensor([3, 4, 5]), torch.tensor([6, 7]))


def decode(pair: DemoPair) -> Callable[[], object]:
    selector = FutureBridgeSelector(TokenReranker.from_base(pair.slm).eval())
    decoder = CollaborativeDecoder(pair.slm, pair.llm, selector, RequestPolicy(-1.0), tokenizer=pair.world.tokenizer)
    return lambda: decoder.generate(torch.tensor([1, 2, 3]), 2)


def train(pair: DemoPair) -> Callable[[], object]:
    group = TrainingGroup(1, torch.tensor([3, 4, 5]), torch.tensor([0.2, 0.3, 0.5]))
    examples = [TrainingTrajectory(torch.tensor([1, 2, 3]), [group])]
    return lambda: train_reranker(TokenReranker.from_base(pair.slm), examples)


@pytest.mark.parametrize(
    ("heading", "make", "most"),
    [("A group is scored", score, 6), ("An event is decoded", decode, 15), ("A reranker is trained", train, 12)],
)
def test_a_call_runs_the_files_that_the_page_names(
    heading: str, make: Callable[[DemoPair], Callable[[], object]], most: int, pair: DemoPair
) -> None:
    call = make(pair)
    call()  # what the first call alone does, such as packing weights
    with executed() as order:
        call()
    assert order == named(heading)
    assert len(order) <= most


def test_a_request_runs_the_files_that_the_page_names() -> None:
    listening, url = listen("127.0.0.1", 0)
    settings = ServeSettings(slm="demo:plans", llm="demo:plans", threshold=99.0, max_length=64, kv_memory=1 << 24)
    body = {"model": settings.name, "prompt": "29*9+7", "max_tokens": 4}
    app = load_server(settings, loopback=True)
    server = Server(app, 5)
    with executed() as order:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        finally:
            server.should_exit = True
            thread.join()
            app.service.engine.close()
    assert answer.json()["choices"][0]["text"]
    assert set(order) - {"apps/serve/run.py"} == set(named("A request is served"))  # it starts and ends the server
    assert len(named("A request is served")) <= 19
