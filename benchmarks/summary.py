"""This device's result files as a short table, targets last: `python -m benchmarks.summary RESULTS`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, roofline, targets
from benchmarks.harness import OURS


def against_the_best(result: dict[str, Any]) -> list[str]:
    """Ours with its share of the ceiling, and the best peer; one line per case, in Markdown."""
    reached = result.get("ceilings")
    ceilings = (
        ""
        if reached is None
        else (f"; copy {reached['copy_tbps']:.2f} TB/s, bf16 product {reached['bf16_tflops']:.0f} TFLOP/s")
    )
    lines = [
        f"*{result['device']}, torch {result['torch']}, triton {result['triton']}, commit "
        f"{harness.commit_and_changes(result)}, {result['date']}{ceilings}*",
        "",
        "| op | shape | ran | ours, us | of the ceiling | best peer | its time / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    best = roofline.best_peers(result["cases"])
    for case in result["cases"]:
        if case["impl"] != OURS or not case["median_us"]:
            continue
        peer, share = best.get((case["op"], case["shape"])), case["fraction_of_ceiling"]
        theirs = "none ran | "
        if peer:
            kernel = f", `{peer['kernel']}`" if peer.get("kernel") else ""
            theirs = f"{peer['impl']}{kernel} | {peer['median_us'] / case['median_us']:.2f}x"
        ceiling = "" if share is None else f"{share:.0%}"
        ran, ours = case.get("backend", ""), f"{case['median_us']:,.1f}"
        if case.get("host_us"):
            ours += f" (host {case['host_us']:,.0f})"
        lines.append(f"| `{case['op']}` | {case['shape']} | {ran} | {ours} | {ceiling} | {theirs} |")
    return [*lines, ""]


def cost_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The cost of whole problems by method, in Markdown, with the columns of the published table."""
    shapes = dict.fromkeys(case["shape"] for case in cases if case["op"] == "end_to_end" and case.get("details"))
    lines = []
    for shape in shapes:
        rows = {case["impl"]: case for case in cases if case["op"] == "end_to_end" and case["shape"] == shape}
        greedy = rows["greedy"]["median_us"]
        lines += [f"| {shape} | calls | mean pool | appended | against greedy | peak GB |", "|---|---|---|---|---|---|"]
        for impl, row in rows.items():
            if not row["median_us"] or not greedy:
                continue
            counted = row["details"]
            pool = f"{counted['mean pool']:.1f}" if counted["calls"] else ""
            peak = "" if row["peak_bytes"] is None else f"{(counted['resident bytes'] + row['peak_bytes']) / 1e9:.1f}"
            lines.append(
                f"| {'FutureBridge' if impl == OURS else impl} | {counted['calls']} | {pool} | {counted['appended']} "
                f"| {row['median_us'] / greedy:.2f}x | {peak} |"
            )
        lines.append("")
    return lines


def wrong(result: dict[str, Any]) -> list[str]:
    """Our results that failed their check and were not timed."""
    failed = [case for case in result["cases"] if case["impl"] == OURS and not case["ok"]]
    return [f"WRONG: {case['op']} {case['shape']}, error {case['max_error']}" for case in failed]


def main(arguments: Sequence[str]) -> None:
    """Print the tables of this device's result files and, for a GPU, the targets."""
    device = harness.device_name()
    results = harness.read_results(Path(arguments[0]) / device)
    for name, result in results.items():
        print("\n".join([name, *against_the_best(result), *cost_table(result["cases"]), *wrong(result)]))
    if any("ceilings" in result for result in results.values()):
        print("\n".join(targets.table(results, device)))


if __name__ == "__main__":
    main(sys.argv[1:])
