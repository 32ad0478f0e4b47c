"""A GPU's hardware counters for every kernel, by Nsight Compute: `python -m benchmarks.counters [OP ...]`.

Each op is called at the sizes that `benchmarks.tune` searches. A kernel that reaches neither the memory's nor the
multiprocessors' limit waits for something; that is the next thing to improve.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks import harness
from benchmarks.tune import OPS, forward

COLUMNS = {  # Nsight Compute's names
    "Duration": "us",
    "Compute (SM) Throughput": "SM %",
    "DRAM Throughput": "DRAM %",
    "L2 Cache Throughput": "L2 %",
    "Registers Per Thread": "registers",
    "Achieved Occupancy": "occupancy %",
}
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3}


def call(op: str) -> None:
    """Call an op at every size: once to compile, once to be profiled."""
    for function, floats, trained in OPS[op](op):
        run = forward(function, floats, trained)
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profile(op: str) -> str:
    """Nsight Compute's table of an op's kernels, in CSV."""
    sections = [word for name in ("SpeedOfLight", "LaunchStats", "Occupancy") for word in ("--section", name)]
    command = ["ncu", "--csv", "--page", "details", "--profile-from-start", "off", "--clock-control", "none", *sections]
    command += [sys.executable, "-c", f"from benchmarks.counters import call; call({op!r})"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=harness.ROOT)
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
    return done.stdout


def table(printed: str) -> list[str]:
    """One line per kernel launch, in Markdown."""
    lines = printed.splitlines()
    begin = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines[begin:]):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0], "grid": row["Grid Size"]})
        name = COLUMNS.get(row["Metric Name"])
        if name == "us":
            microseconds = float(row["Metric Value"].replace(",", "")) * MICROSECONDS[row["Metric Unit"]]
            launch[name] = f"{microseconds:.1f}"
        elif name is not None:
            launch[name] = row["Metric Value"]
    heads = ["kernel", "grid", *COLUMNS.values()]
    rows = [" | ".join(launch.get(head, "") for head in heads) for launch in launches.values()]
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {row} |" for row in rows)]


def main(arguments: Sequence[str]) -> None:
    """Print the table of every op."""
    parser = argparse.ArgumentParser(description="hardware counters of every kernel on this GPU")
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"all by default: {', '.join(OPS)}")
    ops = parser.parse_args(arguments).ops or list(OPS)
    if unknown := set(ops) - set(OPS):
        parser.error(f"op: expected some of {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    if harness.DEVICE != "cuda":
        parser.error("expected a CUDA device, got none; counters are read on one")
    if shutil.which("ncu") is None:
        parser.error("expected Nsight Compute's ncu on the path, got none; install it or add its folder to PATH")
    for op in ops:
        print(op, *table(profile(op)), "", sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
