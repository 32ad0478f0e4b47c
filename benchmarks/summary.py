"""Result files as a short table: `python -m benchmarks.summary FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.harness import OURS


def against_the_best(result: dict[str, Any]) -> list[str]:
    """Ours with its share of the ceiling and the best peer, a line a case, in Markdown."""
    reached = result.get("ceilings")
    ceilings = (
        ""
        if reached is None
        else (f"; copy {reached['copy_tbps']:.2f} TB/s, bf16 product {reached['bf16_tflops']:.0f} TFLOP/s")
    )
    lines = [
        f"*{result['device']}, torch {result['torch']}, triton {result['triton']}, commit {result['commit'][:10]}, "
        f"{result['date']}{ceilings}*",
        "",
        "| op | shape | ours, us | of the ceiling | best peer | its time / ours |",
        "|---|---|---|---|---|---|",
    ]
    best = roofline.best_peers(result["cases"])
    for case in result["cases"]:
        if case["impl"] != OURS or not case["median_us"]:
            continue
        peer, share = best.get((case["op"], case["shape"])), case["fraction_of_ceiling"]
        theirs = f"{peer['impl']} | {peer['median_us'] / case['median_us']:.2f}x" if peer else "none ran | "
        ceiling = "" if share is None else f"{share:.0%}"
        lines.append(f"| `{case['op']}` | {case['shape']} | {case['median_us']:,.1f} | {ceiling} | {theirs} |")
    return [*lines, ""]


def wrong(result: dict[str, Any]) -> list[str]:
    """What of ours failed its check and was not timed."""
    failed = [case for case in result["cases"] if case["impl"] == OURS and not case["ok"]]
    return [f"WRONG: {case['op']} {case['shape']}, error {case['max_error']}" for case in failed]


def main(arguments: Sequence[str]) -> None:
    """Print the table of every result file in a folder."""
    for path in sorted(Path(arguments[0]).glob("*.json")):
        result = json.loads(path.read_text())
        print("\n".join([path.stem, *against_the_best(result), *wrong(result)]))


if __name__ == "__main__":
    main(sys.argv[1:])
