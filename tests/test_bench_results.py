"""Result files, and what is compared: a case is on disk when measured; compiled peers have a file of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from limits import HANG
from torch import Tensor

from benchmarks import bench_decode, conftest, diff, harness
from benchmarks.harness import Implementation, named, read_results
from fb_kernels._runtime import timing

ROOT = Path(__file__).resolve().parent.parent
BENCH = """
import os

import torch
from benchmarks.harness import Implementation
from fb_kernels import swiglu

X = torch.linspace(-1, 1, 16).view(2, 8)


def test_first(compare):
    def made(**options):
        return Implementation(lambda: swiglu(X), swiglu(X), **options)

    compare("swiglu", "N=2", {"fb": made(), "eager": made(), "compiled": made(compiled=True)}, rounds=2)


def test_ends(compare):
    os._exit(3)
"""


def bench(folder: Path, *options: str) -> int:
    (folder / "bench_toy.py").write_text(BENCH)
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.conftest", "-o", "python_files=bench_*.py", "-s"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--write-results", str(folder / "out"), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "bench_toy.py"], cwd=folder, env=environment, capture_output=True, timeout=HANG)
    return done.returncode


@pytest.mark.slow
@pytest.mark.sweep
def test_what_was_measured_outlives_its_process(tmp_path: Path) -> None:
    assert bench(tmp_path, "--peers", "eager") == 3
    assert bench(tmp_path, "--peers", "compiled") == 3
    files = {path.name: json.loads(path.read_text())["cases"] for path in next((tmp_path / "out").iterdir()).iterdir()}
    found = {name: [case["impl"] for case in cases] for name, cases in files.items()}
    assert found == {"toy.json": ["fb", "eager"], "toy_compiled.json": ["fb", "compiled"]}
    ours, peer = files["toy.json"]
    assert ours["backend"] in ("cpu", "reference")
    assert peer["backend"] == ""
    read = read_results(next((tmp_path / "out").iterdir()))["toy"]["cases"]
    assert [case["impl"] for case in read] == ["fb", "eager", "compiled"]


def test_compiled_peers_are_read_beside_the_others(tmp_path: Path) -> None:
    def write(name: str, *impls: str) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"cases": [{"impl": impl} for impl in impls]}))

    write("head", "fb", "eager", "floor")
    write("head_compiled", "fb", "compiled", "floor")
    write("decode_compiled", "fb", "compiled")
    found = {name: [case["impl"] for case in result["cases"]] for name, result in read_results(tmp_path).items()}
    assert found == {"decode": ["fb", "compiled"], "head": ["fb", "eager", "floor", "compiled"]}


def test_a_run_of_other_cases_adds_to_the_file_of_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = harness.Result("swiglu", "N=2", "fb", "float32", 1.0, 1.0, 1.0, 0.0, True)
    harness.write_results(tmp_path, {"toy": [first]})
    (before,) = conftest.earlier(tmp_path, "toy")
    assert conftest.told(before) == conftest.told(first) == ("swiglu", "N=2", "fb")
    assert conftest.earlier(tmp_path, "other") == conftest.earlier(None, "toy") == []
    monkeypatch.setattr(harness, "_commit", lambda: "another")
    assert conftest.earlier(tmp_path, "toy") == []


def test_peers_are_chosen_by_kind_or_by_name() -> None:
    kinds = {"fb": False, "repeated cache": False, "torch.compile": True}
    made = {name: Implementation(list, torch.ones(1), compiled=kind) for name, kind in kinds.items()}
    asked = {peers: [*conftest.asked(made, peers)][1:] for peers in ("all", "eager", "compiled", "ours", "peated|x")}
    assert asked["all"] == ["repeated cache", "torch.compile"]
    assert (asked["eager"], asked["compiled"]) == (["repeated cache"], ["torch.compile"])
    assert (asked["ours"], asked["peated|x"]) == ([], ["repeated cache"])


@pytest.mark.parametrize("host", [2e-6, 580e-6, 4e-3, 1.0])
def test_the_hosts_work_is_not_the_gpus(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    """A call of 20 us on a GPU, launched when the host has worked for it, behind flushes of 360 us."""
    now, busy = 0.0, 0.0  # the host's clock; until when the GPU has work

    def launch(seconds: float, before: float = 5e-6) -> None:
        nonlocal now, busy
        now += before
        busy = max(busy, now) + seconds

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None:
            self.at = max(busy, now)

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

        def synchronize(self) -> None:
            nonlocal now
            now = max(busy, now)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: Event(True).synchronize())
    monkeypatch.setattr(timing, "_flusher", lambda: SimpleNamespace(zero_=lambda: launch(360e-6)))
    monkeypatch.setattr(timing, "_flush_seconds", timing._flush_seconds.__wrapped__)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    timed = timing.timer(lambda: launch(20e-6, before=host), "cuda")
    assert timed.host == pytest.approx(host)
    seen = timed.seconds()
    assert seen == pytest.approx(20e-6) if host < timing.HIDDEN else seen > 0.9 * host


def test_the_kernels_that_take_most_of_a_call_are_named_with_their_shares() -> None:
    assert named({"copy": 5.0, "product": 60.0, "norm": 31.0, "sum": 4.0}) == "product 60%, norm 31%"
    assert named({"alone": 2.0}) == "alone"


@pytest.mark.skipif(harness.DEVICE == "cuda", reason="names the GPU")
@pytest.mark.parametrize(("last", "folder"), [("avx2", "cpu-avx2"), ("avx512_bf16", "cpu"), ("amx_bf16", "cpu-amx")])
def test_no_kind_of_cpu_overwrites_anothers_results(last: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]
    monkeypatch.setattr(harness, "_instructions", lambda: known[: known.index(last) + 1])
    assert harness.device_name() == folder


# --- tokens are compared up to the first near tie ---------------------------------------------------------------------


class Model:
    """Says the same logits of its last positions, whatever it is given."""

    device = "cpu"

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, ids: Tensor, logits_to_keep: int) -> SimpleNamespace:
        assert ids.shape == (1, 2 + logits_to_keep - 1)  # the last token's own logits are not needed
        return SimpleNamespace(logits=self.logits[None, :logits_to_keep])


def test_tokens_are_settled_up_to_the_first_near_tie() -> None:
    truth = torch.tensor([[3.0, 0.0, 1.0], [0.0, 2.0, 1.0], [0.0, 1.0, 1.15], [5.0, 0.0, 0.0]])
    ids, new = torch.tensor([7, 8]), torch.tensor([0, 1, 2, 0])

    def settled(error: float, count: int = 4) -> int:
        rounded = truth + error * torch.tensor([1.0, -1.0, 1.0])
        return bench_decode.settled(Model(rounded), Model(truth), ids, new[:count])  # type: ignore[arg-type]

    assert settled(0.0) == settled(0.05) == 4
    assert settled(0.1) == 2  # either of the two may be off by that
    assert settled(0.6) == 1
    assert settled(2.0) == 0
    assert settled(0.1, count=2) == 2


def result_of(median, *, device="a CPU, 2 threads", **more):
    rows = [("fb", median), ("eager", 100.0), ("absent", None)]
    cases = [{"op": "swiglu", "shape": "N=2", "impl": impl, "median_us": time} for impl, time in rows]
    return {"device": device, "isa": ["avx2"], "cases": cases, **more}


@pytest.mark.parametrize(
    ("after", "said", "lost"),
    [
        (result_of(50.0), "+0.0%  2.00x -> 2.00x  eager  swiglu: N=2", False),
        (result_of(55.0), "-9.1%  2.00x -> 1.82x", False),
        (result_of(60.0), "LOST  -16.7%  2.00x -> 1.67x", True),
        (result_of(None), "ops: 1 of 1 committed ratios were not measured", False),
        (result_of(60.0, device="another, 2 threads"), "ops: no committed file of another, 2 threads", False),
        (
            result_of(60.0, isa=["avx2", "amx_bf16"]),
            "ops: no committed file of a CPU, 2 threads, avx2, amx_bf16",
            False,
        ),
    ],
)
def test_a_lost_tenth_is_red_on_the_same_kind_of_machine(tmp_path, capsys, after, said, lost):
    for name, result in (("before", result_of(50.0)), ("after", after)):
        folder = tmp_path / name / harness.device_name()
        folder.mkdir(parents=True)
        (folder / "ops.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit) if lost else nullcontext():
        diff.main(tmp_path / "after", tmp_path / "before")
    assert said in capsys.readouterr().out
