"""What every benchmark runs under: all cores, one random model, results on the terminal and, if asked, in files."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import harness, shapes
from benchmarks.harness import Cost, Goal, Implementation, Result, Timing

RESULTS = pytest.StashKey[dict[str, list[Result]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-results", metavar="DIR", type=Path, help="write <bench>.json of every benchmark to DIR")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(harness.cores())  # whatever OMP_NUM_THREADS says
    config.stash[RESULTS] = {}


def pytest_report_header() -> str:
    about = harness.machine()
    if harness.DEVICE == "cuda":
        reached = harness.ceilings()  # before anything else runs
        about["device"] += f" (copy {reached.copy_tbps:.2f} TB/s, bf16 product {reached.bf16_tflops:.0f} TFLOP/s)"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"benchmarks on {about['device']}{load}; torch {about['torch']}, commit {about['commit']}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    directory = config.getoption("--write-results")
    if directory is not None:
        for path in harness.write_results(directory, config.stash[RESULTS]):
            terminalreporter.write_line(f"wrote {path}")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every case compiles its peers anew: torch.compile stops after a few recompilations of one function."""
    yield
    torch.compiler.reset()


@pytest.fixture
def compare(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Callable[..., list[Result]]:
    """`harness.compare` that shows and keeps what it measured; fails where ours fails the check."""

    def run(
        op: str,
        shape: str,
        implementations: Mapping[str, Implementation],
        *,
        rounds: int,
        tolerance: float | tuple[float, ...] = 1e-4,
        goals: Sequence[Goal] = (),
        peaks: Mapping[str, int] = MappingProxyType({}),
        notes: Sequence[str] = (),
        timing: Timing = Timing.COLD,
        cost: Cost | None = None,
        dtype: torch.dtype | None = None,
        skipped: Mapping[str, str] = MappingProxyType({}),
        per: int = 1,
        details: Callable[[str], dict[str, float]] | None = None,
    ) -> list[Result]:
        reasons = dict(skipped)
        results = harness.compare(
            benchmark,
            op,
            shape,
            implementations,
            rounds=rounds,
            tolerance=tolerance,
            peaks=peaks,
            timing=timing,
            cost=cost,
            dtype=dtype,
            skipped=reasons,
            per=per,
            details=details,
        )
        notes = [*(f"{name}: not run: {reason}" for name, reason in reasons.items()), *notes]
        request.config.stash[RESULTS].setdefault(request.path.stem.removeprefix("bench_"), []).extend(results)
        capture = request.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            print("\n" + harness.table(results, goals), *notes, sep="\n", flush=True)
        if not all(row.ok for row in results if row.impl == harness.OURS):
            pytest.fail(f"{op}: ours failed the check and was not timed", pytrace=False)
        return results

    return run


@pytest.fixture(scope="session")
def slm() -> PreTrainedModel:
    """A Qwen3 of random weights: 1.7B in bfloat16 on a GPU; hidden 512, 8 layers, V = 32,000, float32 on a CPU."""
    with torch.random.fork_rng(), torch.device(harness.DEVICE):
        torch.manual_seed(0)
        config = Qwen3Config(**shapes.SLM, tie_word_embeddings=True)
        return AutoModelForCausalLM.from_config(config, dtype=shapes.DTYPE).eval()
