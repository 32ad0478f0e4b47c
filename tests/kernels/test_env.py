from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import fb_kernels
from fb_kernels import env
from fb_kernels._runtime import backend, cpu, cuda


@pytest.fixture(scope="module", autouse=True)
def opened() -> None:
    env.report()  # the libraries, before a test hides what opens them


def lines(report: str) -> dict[str, str]:
    return {words[0]: words[1] for words in (line.split(maxsplit=1) for line in report.splitlines()) if len(words) == 2}


def test_report_names_software_devices_and_ops() -> None:
    found = lines(env.report())
    for package in ("torch", "transformers", "peft", "numpy"):
        assert found[package].split()[0] == metadata.version(package)
    assert found["python"] == sys.version.split()[0]
    for name, kernels in (("fb_kernels", cuda), ("fb_cpu", cpu)):
        library, by = kernels.library(), f", by {cpu.variant()}" if kernels is cpu else ""
        loaded = f"loaded, with version {kernels.ABI_VERSION} of its C interface{by}"
        assert found[name] == (library if isinstance(library, str) else loaded)
    assert "thread(s)" in found["cpu"]
    assert found["commit_"] == "cpu: reference (kernels are for CUDA tensors)"
    assert (
        found["linear_logprob_partials"] == "cpu: reference (kernels are for CUDA tensors)"
    )  # the folder's cpu.py has none
    why = cpu.why_not()
    here = "cpu kernel for float32 and bfloat16, up to 96 rows; any number of bfloat16 with AVX2, or batch-invariant"
    assert found["skinny_linear"] == (f"cpu: reference ({why})" if why else f"cpu: {here}")
    assert {name for name, _ in env._ops()} <= set(fb_kernels.__all__) & set(found)


def test_the_tested_version_stands_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    pinned = (root / "constraints.txt").read_text() + (root / "constraints" / "common.txt").read_text()
    assert {f"{name}=={version}" for name, version in env._TESTED.items()} <= set(pinned.splitlines())
    monkeypatch.setitem(env._TESTED, "peft", "0.1")
    assert lines(env.report())["peft"] == f"{metadata.version('peft')} (tested: 0.1)"


def test_every_kernel_says_which_calls_it_takes() -> None:
    takes = [backend.takes(kind, stem) for name, stem in env._ops() for kind in backend.kinds(name)]
    assert len(takes) > 20
    assert all(takes)


def test_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fb_kernels.env"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("software\n")
    assert not done.stderr


def test_a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise metadata.PackageNotFoundError

    def no_library(*_: object) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = lines(env.report())
    assert found["triton"].startswith("absent: ModuleNotFoundError: ")
    assert found["peft"] == "absent"
    assert found["driver"] == "absent: no driver library"
    assert "built for" in env.report()
    assert "none: this torch is built without CUDA" in env.report()


def test_a_broken_driver_and_a_broken_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def cuDriverGetVersion(self, _: object) -> int:
            return 999

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA unknown error\nmore")

    monkeypatch.setattr(ctypes, "CDLL", lambda *_: Library())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(env.importlib, "import_module", broken)
    found = lines(env.report())
    assert found["driver"] == "absent: the driver answers with error 999"
    assert found["cuda"] == "unusable: CUDA unknown error"
    assert found["triton"] == "absent: RuntimeError: CUDA unknown error"


def test_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def cuDriverGetVersion(self, version: object) -> int:
            version._obj.value = 12080
            return 0

    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 141 * 2**30

    monkeypatch.setattr(ctypes, "CDLL", lambda *_: Library())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    found = lines(env.report())
    assert found["cuda:0"] == "NVIDIA H200, sm_90, 141 GiB"
    assert found["driver"] == "supports CUDA 12.8"
