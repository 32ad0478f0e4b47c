"""The sources of csrc/ compiled for the device, where nvcc is."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import nvcc


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
@pytest.mark.parametrize("source", sorted(nvcc.CSRC.glob("*.cu")), ids=lambda path: path.stem)
def test_no_kernel_spills(source, tmp_path):
    rows = list(nvcc.compiled(source, tmp_path))
    assert {row.arch for row in rows} == ({"sm_80", "sm_90a"} if source.stem != "library" else set())
    assert [row for row in rows if row.fault] == []


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
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


def test_the_main_loop_is_the_longest_inner_one_that_multiplies():
    texts = ["MOV R1, R2", "IADD R1, R1, R2", "HMMA.16816.F32 R4, R8, R2, R4", "NOP", "@P0 BRA 0x20", "@P1 BRA 0x10"]
    texts += ["LDG R1, [R2]", "FADD R1, R1, R1", "FADD R2, R1, R1", "STG [R2], R1", "@P0 BRA 0x60", "EXIT", "BRA 0x10"]
    lines = [(16 * place, text) for place, text in enumerate(texts)]
    assert nvcc.main_loop(lines) == 2
    assert nvcc.main_loop(lines[6:]) == 5
    assert nvcc.main_loop(lines[11:]) == 0
    assert nvcc.counted(lines) == len(lines) - 1
