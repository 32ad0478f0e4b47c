"""A visit to a GPU in two commands, of 8 and of 3 minutes: `python3 -m benchmarks.visit [first|second]` (GPU.md).

It runs under a bare Python; $PYTHON names the one that has torch. Parts run one after the other, a part's commands
beside each other, for so many seconds at most. Every part ends by writing $OUT/visit.tar.gz anew; what is in it does
not run again at the same commit. No network is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("PYTHON", sys.executable)
MINUTES = {"first": 8, "second": 3}
GRACE, LEAST = 3, 10  # seconds to say where a command was interrupted; in which something can be measured
SETTINGS = {"TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
ATTENTION = "test_branch_attention[13-1-128 or test_branch_attention[13-4-128"
PEERS = "eager|cuDNN calls|FlashAttention-3"
HEAD = "test_linear_logprob[1664 or test_linear_logprob[8192"
STEPS = "test_decode_step or test_rerank_event"
GROUPS = "test_group[ or test_groups[4-"
TESTS = ("runtime", "branch_attention_gluon", "linear_logprob_gluon", "skinny_linear")
COUNTERS = [f"{unit}__throughput.avg.pct_of_peak_sustained_elapsed" for unit in ("sm", "dram", "lts")]
COUNTERS += ["gpu__time_duration.sum", "launch__registers_per_thread"]
NCU = ("ncu", "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(COUNTERS))
Commands = Mapping[str, Sequence[str]]


class Part(NamedTuple):
    """Commands by name that run beside each other."""

    seconds: int
    commands: Commands
    needs: str = ""  # a command without whose success this part is left out
    devices: str = "devices"  # folder of known devices


def module(name: str, *arguments: object) -> list[str]:
    return [PYTHON, "-m", name, *map(str, arguments)]


def bench(files: str, chosen: str, results: Path, *options: str) -> list[str]:
    given = [*(f"benchmarks/bench_{name}.py" for name in files.split()), "-k", chosen, "--write-results", results]
    given += ["--benchmark-only", "--benchmark-disable-gc", "-p", "no:xdist", "-p", "no:cacheprovider", "-s"]
    return module("pytest", *given, *options)


def first(folder: Path) -> list[Part]:
    """What runs first tells most for its time, or makes the rest faster."""
    results, gluon, ours = folder / "results", folder / "gluon", ("--peers", "ours")
    arch = "sm_" + (said("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")[:4].replace(".", "") or "90")
    ops = sorted(path.parent.name for path in (ROOT / "fb_kernels").glob("*/triton.py"))
    compiled = {f"compile_{op}": module("benchmarks.gpu.aot", op, "--arch", arch, "--quick") for op in ops}
    if not (ROOT / "fb_kernels" / "libfb_kernels.so").exists():
        compiled["library"] = [PYTHON, "-c", "import setup; setup.build_in_place()"]
    asked = {"attention": "branch_attention", "head": "linear_logprob"}
    calls = {
        f"gluon_{name}": module("benchmarks.gpu.tune", "--gluon", op, "--output", folder / f"asked_{name}")
        for name, op in asked.items()
    }
    given = ("-n4", "--tb=short", "-p", "no:cacheprovider")
    tests = {f"test_{name}": module("pytest", f"tests/gpu/test_{name}_gpu.py", *given) for name in TESTS}
    return [
        Part(35, compiled),
        Part(40, {"check": module("fb_kernels.env", "--check")}),
        Part(20, {"floors": bench("neighbours", "10752 or 16384 or test_commit", results)}),
        Part(20, calls),  # of kernels whose parts wait for each other, and which may hang
        Part(45, {"attention": bench("branch_attention", ATTENTION, results, "--peers", PEERS)}),
        Part(
            20,
            {"attention_gluon": bench("branch_attention", ATTENTION, gluon, *ours)},
            "gluon_attention",
            "asked_attention",
        ),
        Part(25, {"head": bench("linear_logprob", HEAD, results, "--peers", "eager")}),
        Part(20, {"head_gluon": bench("linear_logprob", HEAD, gluon, *ours)}, "gluon_head", "asked_head"),
        Part(60, {"decode": bench("decode", STEPS, results, "--peers", "HF eager|one greedy step")}),
        Part(45, {"kernels": bench("decode scorer", f"{STEPS} or {GROUPS}", results, "--kernels", *ours)}),
        Part(25, {"training": bench("training", "test_training_step", results, *ours)}),
        Part(25, {"counters": [*NCU, *module("benchmarks.gpu.counters")]} if shutil.which("ncu") else {}),
        Part(60, {"scorer": bench("scorer", f"{GROUPS} or test_sample", results, "--peers", "repeated")}),
        Part(35, tests),
    ]


def second(folder: Path) -> list[Part]:
    """The forms that won, with other launches; what takes longer."""
    results, search = folder / "results", ("--visit", folder, "--seconds", 10, "--output", folder / "tuned")
    return [
        Part(42, {"attention_launches": module("benchmarks.gpu.tune", "branch_attention", *search)}, devices="tuned"),
        Part(42, {"head_launches": module("benchmarks.gpu.tune", "linear_logprob", *search)}, devices="tuned"),
        Part(30, {"backward": bench("branch_attention", "attention_backward[", results, "--peers", "eager")}),
        Part(65, {"end_to_end": bench("end_to_end", "test_end_to_end[500", results)}),
    ]


def said(*command: str) -> str:
    """The first line that a command prints, or nothing."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.partition("\n")[0]
    return ""


def perform(commands: Commands, seconds: float, folder: Path, devices: str) -> dict[str, str]:
    """Run commands beside each other, their output in <name>.txt; returns how each ended."""
    environment, running = os.environ | SETTINGS | {"FB_KERNELS_DEVICES": str(folder / devices)}, {}
    guard = ["timeout", "--signal=INT", f"--kill-after={GRACE}", str(seconds - GRACE)]
    try:
        for name, command in commands.items():
            with (folder / f"{name}.txt").open("wb") as log:
                running[name] = subprocess.Popen(
                    [*guard, *command], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
        codes = {name: process.wait() for name, process in running.items()}
    finally:  # also those that a command has started
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    late = f"ended at its {seconds:.0f} s"
    return {
        name: late if code in (124, 137, -9) else f"failed, {code}" if code else "ok" for name, code in codes.items()
    }


def visit(
    parts: Sequence[Part],
    limit: float,
    folder: Path,
    tar: Path,
    *,
    chosen: Collection[str] = (),
    perform: Callable[[Commands, float, Path, str], dict[str, str]] = perform,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run what has not run at this commit, or else the chosen commands; returns whether all went well."""
    began, record, commit, fine = clock(), folder / "visit.json", said("git", "rev-parse", "HEAD"), True
    if tar.exists() and not record.exists():
        shutil.unpack_archive(tar, folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads(record.read_text()) if record.exists() else {}
    for part in parts:
        left = chosen or [name for name in part.commands if known.get(name, {}).get("commit") != commit]
        commands = {name: command for name, command in part.commands.items() if name in left}
        start, ready = clock(), not part.needs or known.get(part.needs, {}).get("ended") == "ok"
        seconds = min(part.seconds, limit - (start - began))
        ended = dict.fromkeys(commands, "not begun, time is over" if ready else f"left out, {part.needs} is not ok")
        if commands and ready and seconds >= LEAST:
            ended = perform(commands, seconds, folder, part.devices)
            for name, how in ended.items():
                known[name] = {"ended": how, "seconds": round(clock() - start, 1), "commit": commit}
                known[name]["command"] = " ".join(commands[name])
            record.write_text(json.dumps(known, indent=1) + "\n")
            pack(folder, tar)
        for name, how in ended.items():
            print(f"{name}: {how}, {clock() - start:.0f} s", flush=True)
            if how != "ok" and (log := folder / f"{name}.txt").exists():
                print(*log.read_text(errors="replace").splitlines()[-20:], sep="\n", flush=True)
        fine = fine and set(ended.values()) <= {"ok"}
    return fine


def pack(folder: Path, tar: Path) -> None:
    """Replace the tar as a whole."""
    tar.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tar.parent) as beside:
        os.replace(shutil.make_archive(f"{beside}/visit", "gztar", folder.parent, folder.name), tar)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="measure on a GPU; what is measured is in $OUT/visit.tar.gz")
    parser.add_argument("which", nargs="?", choices=MINUTES, default="first")
    parser.add_argument("--parts", default="", help="only these commands, once more: names with commas between")
    options = parser.parse_args(arguments)
    folder, tar = ROOT / "build" / "visit", ROOT / os.environ.get("OUT", "build") / "visit.tar.gz"
    parts = {"first": first, "second": second}[options.which](folder)
    chosen, names = [*filter(None, options.parts.split(","))], [name for part in parts for name in part.commands]
    if unknown := set(chosen) - set(names):
        parser.error(f"--parts: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as site:
        if wheels := sorted((ROOT / "build" / "wheels").glob("*.whl")):  # for this visit alone
            given = ("install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", site, *wheels)
            if subprocess.run(module("pip", *given)).returncode == 0:
                os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        fine = visit(parts, 60 * MINUTES[options.which], folder, tar, chosen=chosen)
    print(f"{tar}: {'all' if fine else 'not all'} went well")
    return not fine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
