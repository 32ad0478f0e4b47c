"""What every test runs under: one thread, no network, kernels interpreted where there is no GPU; a small run."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FB_KERNELS_DEVICES"] = os.devnull  # no file lies in it

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

Once = Callable[[str, Callable[[Path], None]], Path]
COMMANDS = ("collect", "futures", "score", "train", "evaluate")
HAS_CUDA = torch.cuda.is_available()
os.environ.setdefault("TRITON_INTERPRET", "0" if HAS_CUDA else "1")  # read when a kernel's module is imported
torch.set_num_threads(1)
if os.environ["TRITON_INTERPRET"] == "1":
    from interpreted import quicken

    quicken()

settings.register_profile(
    "futurebridge",
    deadline=None,
    max_examples=10,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "many", settings.get_profile("futurebridge"), max_examples=200, derandomize=False, database=None
)
settings.load_profile("futurebridge")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the first test of every file that is not slow")
    parser.addoption("--all", action="store_true", help="every case of every sweep, and all draws")


def in_part(item: pytest.Item, cases: Counter[str]) -> bool:
    """Whether the part of a sweep that always runs has this case: the first of every so many, or none."""
    if (sweep := item.get_closest_marker("sweep")) is None:
        return True
    name = item.nodeid.partition("[")[0]
    place, cases[name] = cases[name], cases[name] + 1
    return bool(sweep.args) and place % sweep.args[0] == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        cases: Counter[str] = Counter()  # of each sweep
        items[:] = [item for item in items if in_part(item, cases)]
    if config.getoption("--quick"):
        fast = [item for item in items if not item.get_closest_marker("slow")]
        items[:] = {item.path: item for item in reversed(fast)}.values()
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # at the end they would leave a worker idle
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for test in {item.obj for item in items if is_hypothesis_test(item.obj)}:  # its cases share what they draw by
        own = test._hypothesis_internal_use_settings
        part = own.max_examples if config.getoption("--all") else math.ceil(own.max_examples / 3)
        draws = settings.default.max_examples if settings.get_current_profile_name() == "many" else part
        test._hypothesis_internal_use_settings = settings(own, max_examples=draws)


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # what draws without a generator of its own draws the same whatever ran before


@pytest.fixture
def generator() -> torch.Generator:
    """A random source that starts the same in every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Once:
    """Makes a named folder once for all of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                folder.mkdir()
                make(folder)
                (folder / "made").touch()
        assert (folder / "made").exists(), f"{name} could not be made"
        return folder

    return made


@pytest.fixture(scope="session")
def undisturbed(once: Once) -> tuple[dict[str, Path], dict[str, float]]:
    """(the run's folder after every command, seconds of each command) of a run that nobody disturbed."""
    from runs import finish, settings

    def make(folder: Path) -> None:
        before, seconds = folder / "start", {}
        before.mkdir()
        for command in COMMANDS:
            after = folder / command
            shutil.copytree(before, after)
            seconds[command] = finish(command, settings(), after)
            before = after
        (folder / "seconds.json").write_text(json.dumps(seconds))

    folder = once("undisturbed", make)
    return {command: folder / command for command in COMMANDS}, json.loads((folder / "seconds.json").read_text())
