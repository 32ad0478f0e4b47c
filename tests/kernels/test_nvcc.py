"""The sources of csrc/ compiled for the device, where nvcc is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import triton

import setup
from benchmarks.gpu import nvcc, sass


def test_the_compiler_is_found_where_it_may_lie(tmp_path, monkeypatch):
    """In the order in which it is looked for; each place is emptied in turn."""
    places = [tmp_path / name / "bin" / "nvcc" for name in ("home", "path", "usual")] + [tmp_path / "last" / "nvcc"]
    for compiler in places:
        compiler.parent.mkdir(parents=True)
        compiler.touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))
    monkeypatch.setattr(setup, "USUAL", str(tmp_path / "usual"))
    monkeypatch.setenv("PATH", str(tmp_path / "last"))
    for compiler in places:
        assert setup.nvcc() == str(compiler)
        compiler.unlink()
    assert setup.nvcc() is None
    monkeypatch.setenv("FB_BUILD_CUDA", "force")
    with pytest.raises(SystemExit, match=r"FB_BUILD_CUDA=force: expected nvcc in \$CUDA_HOME, .* got none; install it"):
        setup.libraries()


@pytest.fixture
def build_in_place(tmp_path):
    """Calls `setup.build_in_place` as a Python without setuptools does; returns what a compiler of a version wrote."""
    shutil.copy(Path(setup.__file__), tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "cpu.cpp").touch()
    compiler = tmp_path / "cxx"
    code = 'import sys; sys.modules["setuptools"] = None; import setup; setup.build_in_place()'
    chosen = {"CXX": str(compiler), "FB_BUILD_CUDA": "skip", "FB_BUILD_CPU": "force", "PYTHONPATH": ""}

    def build(version: int) -> str:
        says = f'[ "$1" = --version ] && echo {version} && exit\n'
        compiler.write_text(f'#!/bin/sh\n{says}echo >> calls\nfor last; do :; done\necho "{version} $@" > "$last"\n')
        compiler.chmod(0o755)
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | chosen, check=True)
        return (tmp_path / "fb_kernels" / "libfb_cpu.so").read_text()

    return build


def test_a_python_with_an_old_setuptools_or_none_builds_in_place(build_in_place):
    """Ubuntu 24.04 ships setuptools 68, which refuses pyproject.toml, and lacks it in a virtual environment."""
    assert "csrc/cpu.cpp" in build_in_place(1)


def test_what_was_compiled_is_compiled_again_only_by_another_compiler_or_from_other_sources(build_in_place, tmp_path):
    calls = tmp_path / "calls"
    for version, source, expected in [(1, "", 1), (1, "", 1), (2, "", 2), (1, "", 2), (1, "int x;", 3)]:
        (tmp_path / "csrc" / "cpu.cpp").write_text(source)
        assert build_in_place(version).startswith(f"{version} -std"), "the library of this compiler"
        assert len(calls.read_text().splitlines()) == expected


def stacks(library):
    """(kernel, bytes of its stack, of which spills are a part) for each architecture of a compiled file."""
    tool = triton.knobs.nvidia.cuobjdump.path
    done = subprocess.run([tool, "--dump-resource-usage", library], capture_output=True, text=True, check=True)
    return [(name, int(size)) for name, size in re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", done.stdout)]


@pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is not here")
def test_no_kernel_of_the_library_spills():
    found = stacks(nvcc.CSRC.parent / "fb_kernels" / "libfb_kernels.so")
    sources = [source.stem for source in nvcc.CSRC.glob("*.cu") if source.stem != "library"]
    assert [source for source in sources if not any(source in name for name, _ in found)] == []
    assert set(Counter(name for name, _ in found).values()) == {len(nvcc.ARCHITECTURES)}
    assert [(name, size) for name, size in found if size] == []


@pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is not here")
def test_a_spill_is_a_fault(tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x) {\n'
        "  float held[64];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) held[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) x[i * 1024 + (threadIdx.x ^ 1)] = held[63 - i];\n"
        "}\n"
    )
    rows = list(nvcc.compiled(source, tmp_path))
    assert [row.kernel for row in rows] == ["spills", "spills"]
    assert all(row.fault for row in rows)
    assert [size > 0 for _, size in stacks(tmp_path / "spills.o")] == [True, True]


def test_the_main_loop_is_the_longest_inner_one_that_multiplies():
    texts = ["MOV R1, R2", "IADD R1, R1, R2", "HMMA.16816.F32 R4, R8, R2, R4", "NOP", "@P0 BRA 0x20", "@P1 BRA 0x10"]
    texts += ["LDG R1, [R2]", "FADD R1, R1, R1", "FADD R2, R1, R1", "STG [R2], R1", "@P0 BRA 0x60", "EXIT", "BRA 0x10"]
    lines = [(16 * place, text) for place, text in enumerate(texts)]
    assert nvcc.main_loop(lines) == 2
    assert nvcc.main_loop(lines[6:]) == 5
    assert nvcc.main_loop(lines[11:]) == 0
    assert sass.counted(lines) == len(lines) - 1
