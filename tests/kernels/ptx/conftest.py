"""Tests of compiled kernels need a process in which Triton compiles: tests/kernels/test_ptx.py starts one."""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ["TRITON_INTERPRET"] == "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A table of what was executed."""
    passed = terminalreporter.stats.get("passed", [])
    rows = [(report.nodeid.rpartition("::")[2], report.duration, dict(report.user_properties)) for report in passed]
    for name, seconds, properties in rows:
        for kernel, (launches, instructions) in properties.get("executed", {}).items():
            text = f"{name}: {kernel}, {launches} launches, {instructions} instructions of warps, {seconds:.1f} s"
            terminalreporter.write_line(text)


@pytest.fixture
def executed_kernels(record_property: Any) -> Any:
    """Takes what launches did, for the table."""
    sums: dict[str, tuple[int, int]] = {}

    def add(done: Any) -> None:
        for each in done:
            launches, instructions = sums.get(each.kernel, (0, 0))
            sums[each.kernel] = launches + 1, instructions + each.instructions
        record_property("executed", dict(sums))

    return add
