from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import fb_kernels
from fb_kernels import cpu, cuda, env


def lines(report: str) -> dict[str, str]:
    return {words[0]: words[1] for words in (line.split(maxsplit=1) for line in report.splitlines()) if len(words) == 2}


def test_report_names_software_devices_and_ops() -> None:
    found = lines(env.report())
    for package in ("torch", "transformers", "peft", "numpy"):
        assert found[package] == metadata.version(package)
    assert found["python"] == sys.version.split()[0]
    for name, kernels in (("fb_kernels", cuda), ("fb_cpu", cpu)):
        library = kernels.library()
        assert found[name] == (library if isinstance(library, str) else f"interface {kernels.ABI_VERSION}")
    assert "thread(s)" in found["cpu"]
    assert found["commit_"].startswith("cpu: reference (kernels are for CUDA tensors), cuda: ")
    why = cpu.why_not()
    expected = f"cpu: reference ({why}), cuda: " if why else "cpu: cpu (it has a kernel), cuda: "
    assert found["skinny_linear"].startswith(expected)
    assert {name for name, _ in env._ops()} <= set(fb_kernels.__all__) & set(found)


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
