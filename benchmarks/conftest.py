"""Shared by all benchmarks: all cores, one random model, results on the terminal and, if asked for, in files."""

from __future__ import annotations

import json
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import harness, shapes
from benchmarks.harness import Goal, Implementation, Result
from benchmarks.servers.live_server import VLLM, LiveServer, LlamaCpp, Ours, Served, write_gguf
from fb_kernels._runtime import backend, cpu
from fb_kernels._runtime.timing import Timing

RESULTS = pytest.StashKey[dict[str, list[Result | dict[str, str]]]]()
PEERS = {"all": (True, False), "eager": (False,), "compiled": (True,), "ours": ()}  # by whether they are compiled


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-results",
        metavar="DIR",
        type=Path,
        help="write <device>/<bench>.json to DIR after every case; <bench>_compiled.json if only compiled peers run",
    )
    known = "compiled: those that use torch.compile; eager: the others; all; ours: none; or a pattern of their names"
    parser.addoption("--peers", default="all", help=known)
    parser.addoption("--kernels", action="store_true", help="time nothing; write each one's longest-running kernel")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(harness.cores())  # regardless of OMP_NUM_THREADS
    config.stash[RESULTS] = {}


def pytest_report_header() -> str:
    about = harness.machine()
    if harness.DEVICE == "cuda":
        reached = harness.ceilings()  # before anything else runs
        about["device"] += f" (copy {reached.copy_tbps:.2f} TB/s, bf16 product {reached.bf16_tflops:.0f} TFLOP/s)"
    about["device"] += f", load {os.getloadavg()[0]:.1f}"
    no_amx = "; it cannot show bfloat16 by AMX" * (harness.DEVICE == "cpu" and cpu.variant() != "amx")
    return f"benchmarks on {about['device']}{no_amx}; torch {about['torch']}, commit {about['commit']}"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Lets every case compile its peers afresh: torch.compile gives up after a few recompilations of one function."""
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def ran() -> Iterator[Mapping[str, str]]:
    """Which implementation ran our ops in this case."""
    with backend.seen() as implementations:
        yield implementations


def asked(implementations: Mapping[str, Implementation], peers: str) -> dict[str, Implementation]:
    """Ours, and the peers that the command line asks for."""
    kept, named = PEERS.get(peers, ()), "$^" if peers in PEERS else peers
    return {
        name: implementation
        for name, implementation in implementations.items()
        if name == harness.OURS or implementation.compiled in kept or re.search(named, name)
    }


def earlier(directory: Path | None, bench: str) -> list[Result | dict[str, str]]:
    """What the same commit has measured before, as in a run of other cases; all is written together."""
    path = directory / harness.device_name() / f"{bench}.json" if directory is not None else None
    result = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return result["cases"] if result.get("commit") == harness.machine()["commit"] else []


def told(row: Result | dict[str, str]) -> tuple[str, ...]:
    """What tells a row from others of its file."""
    found = row if isinstance(row, dict) else vars(row)
    return tuple(found[name] for name in ("op", "shape", "impl"))


@pytest.fixture
def compare(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest, ran: Mapping[str, str]
) -> Callable[..., list[Result]]:
    """`harness.compare` that also prints and writes its results; fails if ours fails the check."""
    peers, directory = request.config.getoption("--peers"), request.config.getoption("--write-results")

    def write(suffix: str, rows: Sequence[Result | dict[str, str]]) -> None:
        bench = request.path.stem.removeprefix("bench_") + suffix
        files, measured = request.config.stash[RESULTS], {told(row) for row in rows}
        before = files[bench] if bench in files else earlier(directory, bench)
        files[bench] = kept = [*(row for row in before if told(row) not in measured), *rows]
        if directory is not None:
            harness.write_results(directory, {bench: kept})

    def run(
        op: str,
        shape: str,
        implementations: Mapping[str, Implementation],
        *,
        goals: Sequence[Goal] = (),
        notes: Sequence[str] = (),
        timing: Timing = Timing.COLD,
        skipped: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> list[Result]:
        implementations = asked(implementations, peers)
        if peers == "compiled" and len(implementations) == 1:
            pytest.skip("no peer here is compiled")
        if request.config.getoption("--kernels"):
            benchmark.pedantic(lambda: None, rounds=1)  # else pytest-benchmark complains
            write(harness.KERNELS, harness.kernels_of(op, shape, implementations, timing))
            return []
        reasons, options = dict(skipped), {"tolerance": 1e-4, "timing": timing, "ran": ran, **options}
        results = harness.compare(benchmark, op, shape, implementations, skipped=reasons, **options)
        notes = [*(f"{name}: not run: {reason}" for name, reason in reasons.items()), *notes]
        write(harness.COMPILED if peers == "compiled" else "", results)
        capture = request.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            print("\n" + harness.table(results, goals), *notes, sep="\n", flush=True)
        if not all(row.ok for row in results if row.impl == harness.OURS):
            pytest.fail(f"{op}: ours failed the check and was not timed", pytrace=False)
        return results

    return run


@pytest.fixture(scope="session")
def slm() -> PreTrainedModel:
    """A Qwen3 with random weights: 1.7B in bfloat16 on a GPU; hidden 512, 8 layers, V = 32,000, float32 on a CPU."""
    with torch.random.fork_rng(), torch.device(harness.DEVICE):
        torch.manual_seed(0)
        config = Qwen3Config(**shapes.SLM, tie_word_embeddings=True)
        return AutoModelForCausalLM.from_config(config, dtype=shapes.DTYPE).eval()


@pytest.fixture(scope="session", params=shapes.DTYPES, ids=lambda dtype: str(dtype)[6:])
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pretrained model in each dtype, with its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    shapes.write_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=request.param).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Servers of the pretrained model by name, with all cores each, and why others are missing."""
    file, model = tmp_path_factory.mktemp("gguf") / "model.gguf", AutoModelForCausalLM.from_pretrained(pretrained)
    write_gguf(file, model)
    common: dict[str, Any] = {"threads": harness.cores(), "context": shapes.SERVED_TOKENS}
    alone = ("--max-events", "0", "--max-batch", str(max(shapes.SEQUENCES)), "--device", "cpu")
    makers: dict[str, Callable[[], LiveServer]] = {
        shapes.OUR_SERVER: partial(Ours, pretrained, *alone, **common),
        shapes.LLAMA_CPP: partial(LlamaCpp, file, slots=16, exact=model.dtype == torch.float32, **common),
        shapes.VLLM: partial(VLLM, pretrained, eager=False, dtype=str(model.dtype)[6:], **common),
    }
    running, missing = {}, {}
    with ExitStack() as stack:
        for name, make in makers.items():
            try:
                running[name] = stack.enter_context(make())
            except (ImportError, FileNotFoundError) as reason:
                missing[name] = str(reason)
        yield running, missing
