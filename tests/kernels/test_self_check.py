"""The check of every kernel on the user's device: right ones pass, a wrong one is named and switched off."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import emulation
import pytest
import torch

import fb_kernels
from fb_kernels import calls, rms_norm, self_check, swiglu
from fb_kernels._runtime import backend, cpu, cuda, devices, timing

X = torch.linspace(-3, 3, 24).reshape(2, 12)
CEILING = (1e10, 1e11)
with_library = pytest.mark.skipif(bool(cpu.why_not()), reason="no compiled kernels for the CPU")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of devices, and ceilings that need no measuring."""
    monkeypatch.setenv(devices.VARIABLE, str(tmp_path))
    monkeypatch.setattr(timing, "ceilings", lambda *_: CEILING)
    monkeypatch.setattr(timing, "CALLS", 1)
    devices.forget()
    yield tmp_path
    devices.forget()


def spoiled(monkeypatch: pytest.MonkeyPatch, op: str, kind: str, value: float = 0.5) -> None:
    """One number of the kernel's result is another one."""
    module = import_module(f"fb_kernels.{op}.{kind}")
    right = getattr(module, op)

    def wrong(*arguments: object) -> object:
        out = right(*arguments)
        first = out[0] if isinstance(out, tuple) else out
        if first is not NotImplemented:
            first.view(-1)[-1] += value
        return out

    monkeypatch.setattr(module, op, wrong)


def test_every_op_is_called() -> None:
    stems = {path.parent.name for path in Path(fb_kernels.__file__).parent.glob("*/naive.py")}
    assert calls.every().keys() == stems


@pytest.mark.parametrize("op", calls.every())
def test_a_call_has_every_size(op: str) -> None:
    """And other values: what is timed on a GPU is only as large as its shapes say."""
    small, checked = (calls.checked(op, size) for size in ("small", "checked"))
    assert small
    assert len({call.shape for _, call in checked}) == len(checked)
    assert all(call.op == function.op for function, call in small + checked)


@pytest.mark.parametrize("op", calls.every())
@pytest.mark.sweep(3)
def test_what_is_right_passes(op: str) -> None:
    """The reference and the kernels for the CPU, and Triton's where they are interpreted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "[a-z_]+: expected its")
        found = self_check.check("cpu", [op])
    assert not [row for row in found if row.fault]
    assert {row.kernel for row in found} == {*backend.kernels(op, "cpu"), "reference"}
    ran = [row for row in found if row.right]
    assert {row.kernel for row in ran} >= {*backend.kernels(op, "cpu"), "reference"} - {"cpu", "cuda"}
    assert all(row.microseconds for row in ran)
    assert not (devices.folder() / "cpu.json").exists()


def test_what_takes_a_call_is_seen_where_it_runs() -> None:
    """Of what combines partials the CPU has no kernel."""
    rows = self_check.check("cpu", ["branch_attention", "linear_logprob"])
    found: dict[str, dict] = {row.shape: {} for row in rows}
    for row in rows:
        found[row.shape][row.kernel] = (row.right, row.used)
    there = not cpu.why_not()
    assert found["G=2 K=3 L=1 P=20 E=16"]["cpu"] == (there, there)
    assert found["G=2 K=3 L=3 P=20 E=16"]["cpu"] == (there, there)
    assert found["G=2 K=3 L=3 P=20 E=16"]["reference"] == (True, not there)
    assert found["S=4 N=5 (partials combined)"]["cpu"] == (False, False)
    assert found["S=4 N=5 (partials combined)"]["reference"] == (True, True)


@pytest.mark.parametrize("op", ["commit", "topk_entropy", "candidate_head"])
def test_emulated_kernels_pass(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "library", emulation.library)
    monkeypatch.setattr(cuda, "why_not", lambda device: cuda._why_not(emulation.library(), device))
    found = {row.kernel: row for row in self_check.check("cpu", [op])}
    assert found["cuda"].right, found["cuda"]


@with_library
def test_a_wrong_kernel_is_switched_off_and_the_fallback_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with backend.override("reference"):
        right = swiglu(X)
    with monkeypatch.context() as wrong:
        spoiled(wrong, "swiglu", "cpu")
        with backend.override("auto"):
            assert not torch.equal(swiglu(X), right)
            with pytest.warns(RuntimeWarning, match="^swiglu: expected its cpu kernel to be right") as caught:
                rows = self_check.check("cpu", ["swiglu", "rms_norm"])
            found = {row.kernel: row for row in rows if row.op == "swiglu"}
            assert "error 0.5" in found["cpu"].fault
            assert found["reference"].used
            assert not found["cpu"].used
            assert torch.equal(swiglu(X), right)
            assert backend.chosen("rms_norm", "cpu")[0] == "cpu"
            kind, why = backend.chosen("swiglu", "cpu")
            assert kind == "reference"
            assert why.startswith("switched off, it was wrong on this device: result 0: error 0.5")
        assert "report" in str(caught[0].message)
        written = json.loads((folder / "cpu.json").read_text())
        assert list(written["off"]) == ["swiglu/cpu"]
        assert torch.equal(swiglu(X), right)  # by the short way of small calls
        with backend.override("auto,swiglu=cpu"):  # who asks for it gets it
            assert not torch.equal(swiglu(X), right)
    self_check.check("cpu", ["rms_norm"])  # says nothing of others
    assert backend.chosen("swiglu", "cpu")[0] == "reference"
    self_check.check("cpu", ["swiglu"])
    assert backend.chosen("swiglu", "cpu")[0] == "cpu"
    assert json.loads((folder / "cpu.json").read_text())["off"] == {}


@pytest.mark.usefixtures("triton_kernels")
def test_a_wrong_interpreted_kernel_gives_way_to_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order that CUDA tensors have: Triton's kernel before the others."""
    monkeypatch.setattr(backend, "_TRIED", backend._TRIED | {("auto", "cpu"): ("triton", "cpu")})
    with backend.override("auto"):
        assert backend.chosen("rms_norm", "cpu")[0] == "triton"
        spoiled(monkeypatch, "rms_norm", "triton", torch.nan)
        with pytest.warns(RuntimeWarning, match="rms_norm: expected its triton kernel to be right on the CPU"):
            rows = self_check.check("cpu", ["rms_norm"])
        assert "NaN" in next(row.fault for row in rows if row.kernel == "triton")
        assert backend.chosen("rms_norm", "cpu")[0] == ("reference" if cpu.why_not() else "cpu")
        assert rms_norm(X, X[0], 1e-6)[0].isfinite().all()


@pytest.mark.usefixtures("triton_kernels")
def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("fb_kernels.swiglu.triton")
    right = module.swiglu_backward
    monkeypatch.setattr(module, "swiglu_backward", lambda *given: [x * 1.1 for x in right(*given)])
    with pytest.warns(RuntimeWarning, match="swiglu: expected its triton kernel"):
        found = {row.kernel: row for row in self_check.check("cpu", ["swiglu"])}
    assert found["triton"].fault.startswith("result 1: error")


@pytest.mark.usefixtures("triton_kernels")
def test_a_wrong_gradient_of_another_kernel_is_not_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled `candidate_head` has the gradient of Triton's."""
    monkeypatch.setattr(cuda, "library", emulation.library)
    monkeypatch.setattr(cuda, "why_not", lambda device: cuda._why_not(emulation.library(), device))
    monkeypatch.setattr(backend, "_TRIED", backend._TRIED | {("cuda", "cpu"): ("cuda", "triton")})
    module = import_module("fb_kernels.candidate_head.triton")
    right = module.candidate_head_backward
    monkeypatch.setattr(module, "candidate_head_backward", lambda *given: [x * 1.1 for x in right(*given)])
    with pytest.warns(RuntimeWarning, match="candidate_head: expected its triton kernel") as caught:
        found = {row.kernel: row for row in self_check.check("cpu", ["candidate_head"])}
    assert len(caught) == 1
    assert found["triton"].fault
    assert found["cuda"].right


def test_a_kernel_that_raises_is_wrong_and_one_that_does_not_take_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("out of resources\nand more")

    monkeypatch.setattr(backend, "_absent", lambda kind, _: "" if kind == "cpu" else "not here")
    monkeypatch.setattr(import_module("fb_kernels.swiglu.cpu"), "swiglu", raises)
    with pytest.warns(RuntimeWarning):
        row, _, _, _ = self_check.check("cpu", ["swiglu"])  # each kernel at two calls
    assert row.fault == "RuntimeError: out of resources"
    monkeypatch.setattr(import_module("fb_kernels.swiglu.cpu"), "swiglu", lambda *_: NotImplemented)
    row, _, _, _ = self_check.check("cpu", ["swiglu"])
    assert (row.fault, row.right) == ("", False)
    assert row.absent.startswith("swiglu: expected arguments that the cpu kernel takes")


def test_an_absent_kernel_is_named_and_stays_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.write(folder, "cpu", {}, off={"swiglu/cpu": "as before"})
    monkeypatch.setattr(backend, "_absent", lambda *_: "not built")
    found = self_check.check("cpu", ["swiglu"])
    assert [(row.kernel, row.absent) for row in found] == [("cpu", "not built"), ("reference", "")] * 2
    assert devices.off("cpu", "cpu") == {"swiglu": "as before"}
    shown = self_check.table(found)
    assert "swiglu, cpu, N=5 F=40: not run: not built" in shown


def test_a_process_of_its_own_gives_the_same_rows() -> None:
    alone = self_check.apart("joint_pool", "cpu", 1)
    assert alone == [row for row in self_check.rows("joint_pool", "cpu") if not row.fault]
    assert [(row.kernel, row.fault) for row in alone] == [("reference", "")]


RIGHT = [self_check.Row("swiglu", size, "triton") for size in ("small", "large")]


def ends(op: str, device: str, without: Sequence[str]) -> Iterator[self_check.Row]:
    """Of two kernels the first ends the process at its second call."""
    if "cuda" not in without:
        yield self_check.Row("swiglu", "small", "cuda")
        yield self_check.Row("swiglu", "large", "cuda", fault="it ended its process")
        os._exit(11)
    yield from RIGHT


def hangs(op: str, device: str, without: Sequence[str]) -> Iterator[self_check.Row]:
    if "cuda" not in without:
        yield self_check.Row("swiglu", "large", "cuda", fault="it ended its process")
        time.sleep(1000)
    yield from RIGHT


def ruins(op: str, device: str, without: Sequence[str]) -> Iterator[self_check.Row]:
    if "cuda" not in without:
        yield self_check.Row("swiglu", "large", "cuda", fault="RuntimeError: illegal access")
        self_check._ruined = lambda _: True
        yield self_check.Row("swiglu", "large", "cuda", fault="RuntimeError: illegal access")
        yield self_check.Row("swiglu", "large", "triton", fault="RuntimeError: illegal access")
    yield from RIGHT


@pytest.mark.parametrize(
    ("does", "fault"),
    [(ends, "it ended its process"), (hangs, "no answer in 3 s"), (ruins, "RuntimeError: illegal access")],
)
def test_what_ends_its_process_or_hangs_is_at_fault_alone(
    does: object, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = multiprocessing.get_context("fork")  # knows what was patched
    monkeypatch.setattr(self_check, "get_context", lambda _: forked)
    monkeypatch.setattr(self_check, "rows", does)
    found = {(row.shape, row.kernel): row.fault for row in self_check.apart("swiglu", "cpu", 1, limit=3.0)}
    assert found.pop(("small", "cuda"), "") == ""
    assert found == {("large", "cuda"): fault, ("small", "triton"): "", ("large", "triton"): ""}


def hangs_between(op: str, device: str, without: Sequence[str]) -> Iterator[self_check.Row]:
    yield from RIGHT
    time.sleep(1000)


def test_no_kernel_is_at_fault_for_what_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(self_check, "get_context", lambda _: forked)
    monkeypatch.setattr(self_check, "rows", hangs_between)
    *right, last = self_check.apart("swiglu", "cpu", 1, limit=3.0)
    assert right == RIGHT
    assert (last.kernel, last.fault) == ("reference", "")
    assert "between two kernels" in last.absent


def test_a_process_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(self_check, "get_context", lambda _: forked)
    monkeypatch.setattr(self_check, "rows", lambda *_: os._exit(1))
    assert [row.absent for row in self_check.apart("swiglu", "cpu", 1)] == ["its process did not start"]


def test_the_table_says_what_is_right_how_fast_and_used() -> None:
    rows = [
        self_check.Row("swiglu", "N=1", "triton", microseconds=1234.56, share=0.5, used=True),
        self_check.Row("swiglu", "N=1", "cuda", fault="result 0: error 3"),
    ]
    assert self_check.table(rows).splitlines() == [
        "op      size  kernel  right  microseconds  of the ceiling  used",
        "swiglu  N=1   triton  yes    1,234.6       50%             yes",
        "swiglu  N=1   cuda    no",
        "swiglu, cuda, N=1: wrong: result 0: error 3",
    ]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_command(folder: Path) -> None:
    command = [sys.executable, "-m", "fb_kernels.env", "--check"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    ops = {line.split()[0] for line in done.stdout.splitlines()[1:] if " yes " in line}
    assert ops == set(calls.every())
    refused = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True, env=environment)
    assert refused.returncode == 2
    assert "--device: expected a CUDA device, got none" in refused.stderr
