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
