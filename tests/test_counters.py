"""Tables of hardware counters from what Nsight Compute prints."""

from __future__ import annotations

import pytest

from benchmarks import counters

PRINTED = """==PROF== Connected to process 7 (/usr/bin/python3)
==PROF== Profiling "_swiglu_fwd_kernel": 0%....50%....100% - 9 passes
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","_swiglu_fwd_kernel(long)","(128, 1, 1)","(64, 1, 1)","Speed","Duration","us","3.25"
"0","7","_swiglu_fwd_kernel(long)","(128, 1, 1)","(64, 1, 1)","Speed","DRAM Throughput","%","61.20"
"0","7","_swiglu_fwd_kernel(long)","(128, 1, 1)","(64, 1, 1)","Speed","SM Frequency","Ghz","1.70"
"0","7","_swiglu_fwd_kernel(long)","(128, 1, 1)","(64, 1, 1)","Launch","Registers Per Thread","register/thread","32"
"1","7","topk","(128, 1, 1)","(1, 1, 1)","Speed","Duration","ns","1,250"
"""


def test_a_line_a_launch_with_times_in_microseconds() -> None:
    assert counters.table(PRINTED)[2:] == [
        "| _swiglu_fwd_kernel | (64, 1, 1) | 3.2 |  | 61.20 |  | 32 |  |",
        "| topk | (1, 1, 1) | 1.2 |  |  |  |  |  |",
    ]
    assert len(counters.table("==WARNING== No kernels were profiled.\n")) == 2


def test_an_unknown_op_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        counters.main(["swiglue"])
    assert "got swiglue" in capsys.readouterr().err


@pytest.mark.skipif(counters.harness.DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        counters.main([])
    assert "expected a CUDA device" in capsys.readouterr().err
